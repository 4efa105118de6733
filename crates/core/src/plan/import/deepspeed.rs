//! DeepSpeed's own configuration as a plan of its own (DeepSpeed 0.19; its keys are read by
//! `plan::parallel::DeepSpeedFile`).

use serde_json::{Value, json};

use super::table::{Format, Row, Sense};
use super::{Beside, Imported};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "DeepSpeed",
    version: "0.19",
    source: "DeepSpeed, runtime/config.py and runtime/zero/config.py; transformers, integrations/deepspeed.py",
    keys: &[KEYS],
};

/// For the documents' sake: `DeepSpeedFile` reads them.
const KEYS: &[Row] = &[
    Row("zero_optimization.* data_types.grad_accum_dtype", Sense::Read("parallel.engine.deepspeed")),
    Row("train_micro_batch_size_per_gpu", Sense::Whole("batch.batch_size")),
    Row("gradient_accumulation_steps", Sense::Whole("gradient_accumulation")),
    Row("gradient_clipping bf16.* fp16.*", Sense::Read("clip, weights")),
    Row("optimizer.*", Sense::Read("optimizer")),
    Row("activation_checkpointing.*", Sense::Said("it acts on Megatron's checkpoints only")),
    Row("autotuning.*", Sense::Said("the sizes that are given stand")),
    Row(
        "data_efficiency.* curriculum_learning.* progressive_layer_drop.*",
        Sense::Said("every token runs through every layer, which is more"),
    ),
    Row("torch_autocast.*", Sense::Said("what bf16 and fp16 say stands")),
    Row("compression_training.*", Sense::Refused("another task: leave it out, unless all of it is off")),
];

/// What stands in the place of optimizers that compress what cards tell each other (runtime/fp16/onebit/*.py).
fn compressed(kind: &str) -> Option<&'static str> {
    Some(match kind.to_lowercase().as_str() {
        "onebitadam" => {
            "Adam is simulated, which it is up to freeze_step; from there it keeps 4 bytes more of each parameter and 4 over \
             the cards"
        }
        "zerooneadam" => {
            "Adam is simulated; it keeps 8 bytes more of each parameter and 4 over the cards once it compresses"
        }
        "onebitlamb" => {
            "LAMB is simulated, which it is up to freeze_step; from there it keeps 8 bytes more of each parameter and 4 over \
             the cards"
        }
        "lamb" => "bitsandbytes' LAMB of 32 bits is simulated, with states as large",
        _ => return None,
    })
}

pub(super) fn read(value: &Value, _: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut document = value.clone();
    let mut read = Imported { format: FORMAT.title, ..Imported::default() };
    // Both may be `auto` in one file, which waits for a Trainer: bf16 is what its scripts choose.
    let auto = |key: &str| value.get(key).and_then(|part| part.get("enabled")).is_some_and(|on| on == "auto");
    if auto("bf16") && auto("fp16") {
        document["fp16"]["enabled"] = json!(false);
        read.notes.push("bf16 and fp16 are auto: bf16 is taken".into());
    }
    if let Some(kind) = value.pointer("/optimizer/type").and_then(Value::as_str) {
        // FusedAdam, or torch's by `torch_adam` (runtime/engine.py).
        let known = match kind.to_lowercase().as_str() {
            "adamw" | "adam" | "fusedadam" => Some("adamw"),
            "adagrad" => Some("adagrad"),
            "sgd" => Some("sgd"),
            "lion" | "fusedlion" => Some("lion"),
            "muon" => Some("muon"),
            "lamb" | "onebitlamb" => Some("lamb"),
            "onebitadam" | "zerooneadam" => Some("adamw"),
            _ => None,
        };
        if let Some(instead) = compressed(kind) {
            read.unsimulated.push(format!("optimizer.type: {kind}: {instead}"));
        }
        match known {
            Some(name) => read.changes.push(("optimizer.kind".into(), json!(name))),
            None => {
                let fault = Fault::unsupported("", format!("optimizer.type: {kind}"));
                return Err(vec![fault.or("`vramcast list optimizers` names what is simulated")]);
            }
        }
    }
    read.deepspeed = Some(document);
    Ok(read)
}
