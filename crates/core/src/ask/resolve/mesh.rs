//! Cards into axes: data parallel takes what the others leave.

use serde_json::{Value, json};

use super::Draft;
use crate::ask::runner::Runner;
use crate::ask::tree;
use crate::plan::Fault;

/// Keys of a request that say how many cards there are; a plan has axes.
const COUNTS: [&str; 4] = ["gpus", "nodes", "dp", "hybrid"];

/// Settles `parallel.mesh`, and takes the counts out of the tree.
pub(super) fn settle(draft: &mut Draft<'_>) {
    let runner = draft.request.runner;
    let stated = &draft.request.stated;
    let number = |key: &str| tree::get(stated, &format!("parallel.{key}")).and_then(Value::as_u64);
    let axis = |name: &str| number(&format!("mesh.{name}"));
    let [gpus, nodes, dp] = ["gpus", "nodes", "dp"].map(number);
    let split =
        ["tp", "sp", "cp", "pp"].map(axis).iter().fold(1u64, |product, size| product.saturating_mul(size.unwrap_or(1)));
    let (replicate, shard) = (axis("dp_replicate"), axis("dp_shard"));
    let hybrid = tree::get(stated, "parallel.hybrid").and_then(Value::as_bool);
    let engine_said = tree::get(stated, "parallel.engine").is_some();
    for key in COUNTS {
        tree::take(&mut draft.tree, &format!("parallel.{key}"));
    }
    if runner == Runner::OneCard {
        draft.faults.when(nodes.is_some_and(|nodes| nodes > 1), || missing("parallel.nodes"));
        draft.tree["parallel"] = Value::Null;
        return;
    }
    let world = match gpus {
        Some(gpus) => gpus.saturating_mul(nodes.unwrap_or(1)),
        None if shard.is_some() || replicate.is_some() || dp.is_some() || split > 1 => {
            split.saturating_mul(shard.or(dp).unwrap_or(1)).saturating_mul(replicate.unwrap_or(1))
        }
        None if nodes.is_some() => return draft.faults.add(missing("parallel.nodes")),
        None if engine_said => return draft.faults.add(missing("parallel.engine")),
        None => 1,
    };
    for (path, value) in [("parallel.gpus", gpus), ("parallel.nodes", nodes), ("parallel.dp", dp)] {
        if value == Some(0) {
            return draft.faults.add(Fault::value(path, 0, "at least 1").or_drop(path));
        }
    }
    let left = |others: u64| (world / others.max(1)).max(1);
    let why = "what is left of the cards";
    if runner == Runner::Ddp {
        let copies = match (dp, replicate) {
            (Some(dp), replicate) => dp.saturating_mul(replicate.unwrap_or(1)),
            (None, Some(replicate)) => replicate,
            (None, None) => left(split),
        };
        if shard.is_none() || shard == Some(1) {
            tree::set(&mut draft.tree, "parallel.mesh.dp_replicate", json!(copies));
            draft.derived.push(("parallel.mesh.dp_replicate".into(), why.into()));
        }
    } else if shard.is_none() {
        let share = dp.unwrap_or_else(|| left(split.saturating_mul(replicate.unwrap_or(1))));
        tree::set(&mut draft.tree, "parallel.mesh.dp_shard", json!(share));
        draft.derived.push(("parallel.mesh.dp_shard".into(), why.into()));
    }
    if let Some(hybrid) = hybrid.filter(|hybrid| *hybrid != replicate.is_some_and(|copies| copies > 1)) {
        let what = if hybrid { "replicates, and there is one copy" } else { "does not replicate" };
        let fault =
            Fault::new("parallel.engine.fsdp1.strategy", format!("this {{parallel.engine.fsdp1.strategy}} {what}"));
        draft.faults.add(fault.or("hybrid strategies, and only they, take copies ({parallel.mesh.dp_replicate})"));
    }
    if gpus.is_some() {
        check_world(draft, world);
    }
}

/// Whether the axes multiply out to the cards that there are.
fn check_world(draft: &mut Draft<'_>, world: u64) {
    let size =
        |axis: &str| tree::get(&draft.tree, &format!("parallel.mesh.{axis}")).and_then(Value::as_u64).unwrap_or(1);
    let axes = ["dp_replicate", "dp_shard", "tp", "sp", "cp", "pp"];
    let product = axes.iter().fold(1u64, |product, axis| product.saturating_mul(size(axis)));
    if product == world {
        return;
    }
    let used: Vec<String> =
        axes.iter().filter(|axis| size(axis) > 1).map(|axis| format!("{axis} {}", size(axis))).collect();
    let said = if used.is_empty() { "one GPU".to_owned() } else { used.join(" x ") };
    let rest = (product / size("dp_shard").max(1)).max(1);
    let below = (world / rest).max(1);
    let fault = Fault::new("parallel.gpus", format!("{said} is {product} GPUs, not {world}"));
    draft.faults.add(match world % rest {
        0 if world >= rest => fault.or_set("parallel.dp", below),
        _ => fault.or(format!("the nearest worlds are {} and {}", below * rest, (below + 1) * rest)),
    });
}

fn missing(path: &str) -> Fault {
    Fault::new(path, format!("{{{path}}} spreads a run over cards, and how many there are is not said"))
        .or_set("parallel.gpus", 8)
}
