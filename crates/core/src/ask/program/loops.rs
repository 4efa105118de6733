//! Programs with a training loop of their own around accelerate's `Accelerator`: what they hand to it, as a Trainer's
//! arguments (accelerate 1.15, accelerator.py; torch's `DataLoader` and optimizers).

use serde_json::{Value, json};

use super::model::OPTIMIZERS;
use super::{Call, all, argument, find, is_model, name};
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
    for key in ["fsdp_plugin", "deepspeed_plugin", "parallelism_config", "megatron_lm_plugin"] {
        let given = argument(accelerator, &[key]);
        if let Some(given) = given.filter(|given| !given.as_object().is_some_and(|call| call.len() == 1)) {
            arguments[key] = python::unknown(python::words(given).unwrap_or(key).to_owned());
        }
    }
    let clips = find(program, |name| name == "clip_grad_norm_" || name == "clip_grad_value_").is_some();
    arguments["max_grad_norm"] = json!(if clips { 1.0 } else { 0.0 });
    let trainer = json!({CALL: "Trainer", "optimizer": optimizer});
    Some([trainer.as_object()?.clone(), arguments.as_object()?.clone()])
}
