//! Who runs it: the engine follows from what is said.

use serde_json::{Value, json};

use super::read::{self, Given};
use super::request::says_nothing;
use super::runner::{Runner, Scope};
use super::{table, tree};
use crate::plan::{Fault, Framework};

/// Who spreads a training run, from what is said.
pub(super) fn trainer(stated: &Value, names: &[(String, Given)], framework: Option<&str>) -> Result<Runner, Fault> {
    let given = |name: &str| {
        let row = table::called(name, Runner::OneCard)?;
        let found = names.iter().rev().find(|(known, given)| row.is_called(known) && !says_nothing(given));
        found.map(|(_, given)| given)
    };
    if let Some(engine) = given("engine") {
        let text = match engine {
            Given::Text(text) => text.clone(),
            Given::Value(value) => value.as_str().unwrap_or_default().to_owned(),
            Given::Bare => String::new(),
        };
        let row = table::called("engine", Runner::OneCard);
        let read = row.map_or(Ok(json!({})), |row| read::read(row, &Given::Text(text)))?;
        return Ok(engine_of(&read).unwrap_or(Runner::OneCard));
    }
    if let Some(engine) = engine_of(stated) {
        return Ok(engine);
    }
    let number = |name: &str, path: &str| {
        let said = match given(name) {
            Some(Given::Text(text)) => text.parse().ok(),
            Some(Given::Value(value)) => value.as_u64().or_else(|| value.as_str()?.parse().ok()),
            _ => None,
        };
        said.or_else(|| tree::get(stated, path).and_then(Value::as_u64))
    };
    let names_any = |scope: Scope| {
        names.iter().filter(|(_, given)| !says_nothing(given)).any(|(name, _)| {
            let only = |row: &&super::Setting| {
                row.is_called(name) && row.scope.meets(scope) && !row.scope.meets(Scope::TRAIN.without(scope))
            };
            table::all().any(|row| only(&row))
        })
    };
    let cards =
        number("gpus", "parallel.gpus").map(|gpus| gpus.saturating_mul(number("nodes", "parallel.nodes").unwrap_or(1)));
    let (tp, dp) = (number("tp", "parallel.mesh.tp"), number("dp", "parallel.dp"));
    let axes = ["pp", "cp", "ep"].map(|axis| number(axis, &format!("parallel.mesh.{axis}")).unwrap_or(1));
    let others: u64 = axes.iter().fold(dp.unwrap_or(1), |product: u64, axis| product.saturating_mul(*axis));
    let copies = number("dp-replicate", "parallel.mesh.dp_replicate").is_some_and(|copies| copies > 1);
    let many = cards.is_some_and(|cards| cards != 1) || tp.is_some_and(|tp| tp > 1) || others > 1 || copies;
    let sharded = tree::get(stated, "parallel.mesh.dp_shard");
    // What a framework starts on several cards when nothing is said.
    let usual = framework.and_then(|name| Framework::find(name).ok()?.engine).and_then(|name| Runner::find(&name));
    Ok(match tp.filter(|tp| *tp > 1) {
        _ if names_any(Scope::ZERO) => Runner::Deepspeed,
        _ if !many && tree::get(stated, "parallel").is_none_or(Value::is_null) => Runner::OneCard,
        Some(tp) if cards.unwrap_or(tp.saturating_mul(others)) == tp && !names_any(Scope::FSDP) && !copies => {
            Runner::Tp
        }
        // Copies of a model over so many cards, and nothing said about sharing them.
        None if cards.is_none() && dp.is_some() && axes == [1; 3] && !names_any(Scope::FSDP) => Runner::Ddp,
        None if axes == [1; 3] && !names_any(Scope::FSDP) && sharded.is_none() => usual.unwrap_or(Runner::Fsdp2),
        _ => Runner::Fsdp2,
    })
}

/// The engine that a tree names.
pub(crate) fn engine_of(tree: &Value) -> Option<Runner> {
    let engine = tree::get(tree, "parallel.engine")?.as_object()?;
    let (name, options) = engine.iter().find(|(name, _)| *name != "*")?;
    let within = |key: &str| options.get(key).is_some_and(Value::is_object);
    match name.as_str() {
        "megatron" if within("deepspeed") => Some(Runner::MegatronDeepspeed),
        "megatron" if within("fsdp") => Some(Runner::MegatronFsdp),
        other => Runner::find(other),
    }
}

/// Who generates or serves, from what is said.
pub(super) fn server(stated: &Value, names: &[(String, Given)]) -> Result<Runner, Fault> {
    let said = names.iter().rev().find(|(name, _)| name == "engine" || name == "engines").map(|(_, given)| given);
    // A name that is none is said in the words of the table, which says it again.
    if let Some((row, given)) = table::called("engine", Runner::Transformers).zip(said) {
        read::read(row, given)?;
    }
    let name = match said {
        Some(Given::Text(text)) => Some(text.clone()),
        Some(Given::Value(value)) => value.as_str().map(str::to_owned),
        _ => stated.get("engine").and_then(Value::as_str).map(str::to_owned),
    };
    let Some(name) = name else { return Ok(Runner::Transformers) };
    Runner::find(&name).filter(|runner| !runner.trains()).ok_or_else(|| {
        let known: Vec<&str> = Scope::INFER.runners().map(Runner::name).collect();
        Fault::value("engine", name, format!("one of {}", known.join(", ")))
    })
}
