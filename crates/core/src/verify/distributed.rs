//! The parts of ledger rows that speak of several cards.

use serde_json::Value;

use super::ledger::dtype;
use crate::dtype::DType;
use crate::plan::Parallel;
use crate::plan::parallel::{Ddp, DeepSpeed, Engine, Fsdp1, Fsdp2, Mesh, MixedPrecision, Strategy, Wrap, ZeroConfig};

/// `run.dist` as measure.py runs it.
pub(super) fn parallel(run: &Value) -> Result<Option<Parallel>, String> {
    let dist = &run["dist"];
    if dist.is_null() {
        return Ok(None);
    }
    let world = dist["world"].as_u64().ok_or("run.dist.world is missing")?;
    let weights = dtype(&run["weights"]).unwrap_or(DType::BF16);
    let mixed = |reduce| (dist["mp"] == true).then_some(MixedPrecision { parameters: DType::BF16, reduce });
    let wrap = Wrap::LongestStack;
    let engine = match dist["engine"].as_str() {
        Some("ddp") => Engine::Ddp(Ddp {
            gradient_as_bucket_view: dist["bucket_view"] == true,
            static_graph: dist["static_graph"] == true,
            ..Ddp::default()
        }),
        Some("fsdp1") => {
            let strategy = match dist["strategy"].as_str() {
                Some("grad_op") => Strategy::GradOp,
                Some("no") => Strategy::No,
                _ => Strategy::Full,
            };
            Engine::Fsdp1(Fsdp1 { strategy, mixed_precision: mixed(DType::BF16), wrap })
        }
        Some("fsdp2") => {
            let reshard = dist["reshard"] != false;
            Engine::Fsdp2(Fsdp2 {
                reshard_after_forward: reshard,
                reshard_root: reshard,
                mixed_precision: mixed(DType::F32),
                wrap,
            })
        }
        Some("deepspeed") => Engine::Deepspeed(zero(dist, weights)?),
        _ => return Err(format!("engine {} is not known", dist["engine"])),
    };
    // Only DDP's rows have a real communicator; the others' process group is torch's fake one.
    let (mesh, communicators) = match engine {
        Engine::Ddp(_) => (Mesh::replicated(world), 1),
        _ => (Mesh::sharded(world), 0),
    };
    Ok(Some(Parallel { mesh, engine, communicators }))
}

fn zero(dist: &Value, weights: DType) -> Result<DeepSpeed, String> {
    if weights != DType::BF16 {
        return Err("deepspeed rows have bf16 weights".into());
    }
    let mut config = match &dist["zero_config"] {
        Value::Null => Value::Object(Default::default()),
        config => config.clone(),
    };
    config["stage"] = dist["zero"].clone();
    let zero: ZeroConfig = serde_json::from_value(config).map_err(|e| format!("zero_config: {e}"))?;
    Ok(DeepSpeed { zero })
}

/// The group a row is scored in.
pub(super) fn group(run: &Value) -> &'static str {
    match (run["dist"]["engine"].as_str(), run["dist"]["zero"].as_u64()) {
        (Some("ddp"), _) => "ddp",
        (Some("fsdp1"), _) => "fsdp1",
        (Some("fsdp2"), _) => "fsdp2",
        (_, Some(0)) => "zero-0",
        (_, Some(1)) => "zero-1",
        (_, Some(2)) => "zero-2",
        _ => "zero-3",
    }
}
