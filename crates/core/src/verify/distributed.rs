//! `run.dist`: one card of many, as truth/ledger/measure.py runs it.

use serde_json::{Value, json};

use super::keys::{self, put};
use crate::plan::parallel::{DeepSpeedFile, Engine, Mesh};

/// The `parallel` section of the plan; nothing where there is one card.
pub(super) fn parallel(dist: &Value) -> Result<Value, String> {
    if dist.is_null() {
        return Ok(Value::Null);
    }
    let number = |key: &str| dist[key].as_u64();
    let world = number("world").ok_or("run.dist.world is missing")?;
    let [tp, cp, pp, replicas] = ["tp", "cp", "pp", "replicate"].map(|axis| number(axis).unwrap_or(1).max(1));
    let mut mesh =
        Mesh { dp_replicate: replicas, dp_shard: world / replicas / (tp * cp * pp), tp, cp, pp, ..Mesh::default() };
    let mut options = json!({});
    let engine = match dist["engine"].as_str() {
        Some("ddp") => {
            mesh = Mesh::replicated(world);
            keys::read(keys::DDP, dist, &mut options);
            json!({"ddp": options})
        }
        Some("fsdp1") => {
            options = json!({"mixed_precision": mixed(&dist["mp"], "bf16"), "wrap": "longest-stack"});
            keys::read(keys::FSDP1, dist, &mut options);
            json!({"fsdp1": options})
        }
        Some("tp") if tp == world => {
            keys::read(keys::TENSOR, dist, &mut options);
            json!({"tp": options})
        }
        Some(engine @ ("fsdp2" | "tp" | "mesh")) => {
            options = json!({
                "mixed_precision": mixed(&dist["mp"], "fp32"), "wrap": "longest-stack", "reshard_root": true,
            });
            if engine == "mesh" {
                // The one card that was looked at.
                put(&mut options, "rank", json!({}));
            }
            keys::read(keys::FSDP2, dist, &mut options);
            json!({"fsdp2": options})
        }
        Some("deepspeed") => zero(dist)?,
        _ => return Err(format!("engine {} is not known", dist["engine"])),
    };
    Ok(json!({"mesh": mesh, "engine": engine, "no_sync": dist["no_sync"] == true}))
}

/// `mp`: true, or the types by name.
fn mixed(types: &Value, reduce: &str) -> Value {
    let named = |key: &str, usual: &str| types[key].as_str().unwrap_or(usual).to_owned();
    match types {
        Value::Bool(true) | Value::Object(_) => {
            json!({"parameters": named("param", "bf16"), "reduce": named("reduce", reduce)})
        }
        _ => Value::Null,
    }
}

fn zero(dist: &Value) -> Result<Value, String> {
    let section = |value: &Value| if value.is_object() { value.clone() } else { json!({}) };
    let (mut file, mut zero) = (section(&dist["config"]), section(&dist["zero_config"]));
    zero["stage"] = dist["zero"].clone();
    file["zero_optimization"] = zero;
    let file = DeepSpeedFile::read(&file, None).map_err(|error| error.to_string())?;
    serde_json::to_value(Engine::Deepspeed(file.engine)).map_err(|error| error.to_string())
}

/// The group a row is scored in.
pub(super) fn group(dist: &Value) -> &'static str {
    match (dist["engine"].as_str(), dist["zero"].as_u64()) {
        (Some("ddp"), _) => "ddp",
        (Some("fsdp1"), _) => "fsdp1",
        (Some("fsdp2"), _) => "fsdp2",
        (Some("mesh"), _) if dist["pp"].as_u64().is_some_and(|pp| pp > 1) => "fsdp2-pp",
        (Some("mesh"), _) => "fsdp2-cp",
        (Some("tp"), _) if dist["tp"] == dist["world"] => "tp",
        (Some("tp"), _) => "fsdp2-tp",
        (_, Some(0)) => "zero-0",
        (_, Some(1)) => "zero-1",
        (_, Some(2)) => "zero-2",
        _ => "zero-3",
    }
}
