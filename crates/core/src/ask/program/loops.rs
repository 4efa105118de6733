//! Programs with a training loop of their own around accelerate's `Accelerator`: what they hand to it, as a Trainer's
//! arguments (accelerate 1.15, accelerator.py; torch's `DataLoader` and optimizers).

use serde_json::{Value, json};

use super::model::OPTIMIZERS;
use super::{Call, all, argument, find, is_model, name, unknown};
use crate::plan::{Fault, import};
use crate::source::python::{self, CALL, Program};

/// The calls of a Trainer that would run the same loop, its arguments last; nothing where there is no such loop around a model
/// that is known.
pub(super) fn calls(program: &Program) -> Option<[Call; 2]> {
    let accelerator = find(program, |name| name == "Accelerator")?;
    all(program, is_model).first()?;
    let optimizer = program.calls.iter().find(|call| {
        let known = OPTIMIZERS.iter().any(|(class, _)| *class == name(call));
        known && argument(call, &["params", "0"]).is_some()
    })?;
    let mut arguments = json!({CALL: "TrainingArguments"});
    let loader = |call: &&Call| name(call) == "DataLoader";
    let shuffled = |call: &&Call| call.get("shuffle").is_some_and(|is| *is != false);
    let loaders = || program.calls.iter().filter(loader);
    let rows = loaders().find(shuffled).or_else(|| loaders().next())?;
    // torch's own is 1.
    arguments["per_device_train_batch_size"] = argument(rows, &["batch_size", "1"]).cloned().unwrap_or(json!(1));
    if let Some(steps) = argument(accelerator, &["gradient_accumulation_steps"]) {
        arguments["gradient_accumulation_steps"] = steps.clone();
    }
    match argument(accelerator, &["mixed_precision"]) {
        Some(Value::String(kind)) if kind != "no" => arguments[kind.as_str()] = json!(true),
        Some(open) if python::words(open).is_some() => arguments["bf16"] = open.clone(),
        _ => {}
    }
    // A length that only another file's functions are handed.
    let length = |name: &&str| program.defaults.get(*name).filter(|size| size.is_u64());
    if let Some(name) =
        ["sequence_length", "seq_length", "seq_len", "block_size"].iter().find(|name| length(name).is_some())
        && !program.calls.iter().any(|call| call.contains_key("max_length"))
    {
        arguments["max_seq_len"] = length(name).cloned().unwrap_or_default();
    }
    let clips = find(program, |name| name == "clip_grad_norm_" || name == "clip_grad_value_").is_some();
    arguments["max_grad_norm"] = json!(if clips { 1.0 } else { 0.0 });
    let trainer = json!({CALL: "Trainer", "optimizer": optimizer});
    Some([trainer.as_object()?.clone(), arguments.as_object()?.clone()])
}

/// Over which cards the program itself spreads its model (`ParallelismConfig`, plugins), as accelerate's file says it; what
/// the launcher says comes above.
pub(super) fn mesh(program: &Program) -> Result<Option<Value>, Vec<Fault>> {
    const AXES: [&str; 4] = ["dp_replicate_size", "dp_shard_size", "tp_size", "cp_size"];
    let Some(accelerator) = find(program, |name| name == "Accelerator") else { return Ok(None) };
    for key in ["deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin"] {
        if let Some(given) = argument(accelerator, &[key]) {
            return Err(unknown(key, given).into_iter().collect());
        }
    }
    // How a checkpoint is written is no matter of the step.
    let spreads = |call: &&Call| super::keywords(call).any(|(key, _)| !key.ends_with("state_dict_config"));
    let plugin = argument(accelerator, &["fsdp_plugin"]).and_then(Value::as_object).filter(spreads);
    let given = argument(accelerator, &["parallelism_config"]);
    let Some(config) = given.and_then(Value::as_object).filter(|config| name(config) == "ParallelismConfig") else {
        let open = given.or(plugin.map(|_| &Value::Null)).map(|given| python::words(given).unwrap_or("a plugin"));
        return open.map_or(Ok(None), |words| Err(vec![import::unread("parallelism_config, fsdp_plugin", words)]));
    };
    let mut file = json!({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "mixed_precision": "bf16"});
    let (mut axes, mut cards) = (json!({}), 1u64);
    for (key, value) in super::keywords(config) {
        let size = value.as_u64().filter(|_| AXES.contains(&key.as_str()));
        match size {
            Some(size) => {
                axes[format!("parallelism_config_{key}")] = json!(size);
                cards = cards.saturating_mul(size.max(1));
            }
            None if value.is_null() || *value == 1 => {}
            None => return Err(vec![import::unread(key, python::words(value).unwrap_or("another axis"))]),
        }
    }
    if cards == 1 {
        return Ok(None);
    }
    (file["parallelism_config"], file["num_processes"]) = (axes, json!(cards));
    Ok(Some(file))
}
