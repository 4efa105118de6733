//! Megatron-SWIFT's arguments, of `megatron sft` and of its files (ms-swift 4, swift/megatron/arguments): Megatron-LM's, with a
//! model and data as ms-swift names them.

use serde_json::{Map, Value, json};

use super::reader::Reader;
use super::table::{Format, Row, Sense, is_off};
use super::{Beside, Imported, megatron, ms_swift, trainer};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "Megatron-SWIFT",
    version: "4",
    source: "ms-swift, swift/megatron/arguments/*.py; Megatron-LM, megatron/training/arguments.py",
    keys: &[KEYS, megatron::keys::KEYS, ms_swift::KEYS, trainer::KEYS],
};

const KEYS: &[Row] = &[
    Row("model mcore_model load", Sense::Read("the model")),
    Row("max_length", Sense::Read("batch.seq_len")),
    Row("tuner_type train_type lora_rank target_modules", Sense::Read("parallel.engine.megatron.lora")),
    Row("torch_dtype", Sense::Read("weights")),
    Row("packing padding_free", Sense::Read("batch.mask")),
    Row("vit_gradient_checkpointing freeze_vit freeze_aligner", Sense::Said("only the model of text is simulated")),
    Row("ENV ENV.*", Sense::Said("the environment of the line holds")),
    Row(
        "lora_dropout modules_to_save use_dora",
        Sense::Said("adapters are simulated as Megatron-Bridge's: rank and targets"),
    ),
    Row(
        "mcore_adapter* mcore_ref_* load_safetensors save_safetensors max_epochs num_train_epochs merge_lora \
         lazy_tokenize sequence_parallel_size warmup_* router_* linear_decoupled_in_proj",
        Sense::Harmless("where the model comes from, what is saved, the course of training"),
    ),
];

/// Whether a file of ms-swift is Megatron's.
pub(super) fn is_marked(file: &Value) -> bool {
    let has = |key: &str| file.get(key).is_some();
    has("micro_batch_size") && has("global_batch_size")
        || ["tensor", "pipeline", "expert"].iter().any(|axis| has(&format!("{axis}_model_parallel_size")))
}

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&FORMAT, value, beside);
    // Megatron's own checkpoint, by its name: `Qwen3-8B-mcore`.
    let stored = ["mcore_model", "load"].iter().find_map(|key| reader.text(key));
    let stored = stored.map(|path| path.trim_end_matches('/').trim_end_matches("-mcore").to_owned());
    let model = reader.text("model").map(str::to_owned).or(stored);
    // Its own defaults (megatron_args.py).
    let mut flat: Map<String, Value> = [
        ("micro_batch_size", json!(1)),
        ("global_batch_size", json!(16)),
        ("use_distributed_optimizer", json!(true)),
        ("recompute_granularity", json!("selective")),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect();
    let own = |key: &str| KEYS.iter().any(|row| row.keys().any(|known| known == key));
    for (key, given) in value.as_object().into_iter().flatten() {
        let known = Format { keys: &[megatron::keys::KEYS], ..FORMAT };
        if known.sense(key).is_some() && !own(key) && !beside.without.iter().any(|left| left == key) {
            reader.get(key);
            flat.insert(key.clone(), given.clone());
        }
    }
    let half = reader.text("torch_dtype").is_some_and(|name| name.ends_with("float16") && !name.contains("bf"));
    flat.insert(if half { "fp16" } else { "bf16" }.into(), json!(true));
    reader.number_to("max_length", "batch.seq_len");
    if reader.is_on("packing") || reader.is_on("padding_free") {
        reader.notes.push("packing: the batch is simulated as full rows without a mask".into());
    }
    let kind = reader.text("tuner_type").or_else(|| reader.text("train_type"));
    match kind {
        None | Some("full") => {}
        Some("lora") => {
            let rank = reader.number("lora_rank").unwrap_or(8);
            reader.set("parallel.engine.megatron.lora", json!({"dim": rank}));
            let named = reader.get("target_modules").filter(|names| !is_off(names) && **names != "all-linear");
            if named.is_some() {
                reader.say("target_modules", "all four linears of a layer have adapters in the simulation");
            }
        }
        Some(other) => reader.refuse("tuner_type", other, "use lora or full"),
    }
    let beside = Beside { without: &[], name: megatron::BRIDGE, ..*beside };
    let megatron = megatron::read(&Value::Object(flat), &beside);
    let mut faults = Vec::new();
    let mut read = reader.finish(None, model).map_err(|mut found| faults.append(&mut found)).ok();
    match (megatron, &mut read) {
        (Err(mut found), _) => faults.append(&mut found),
        (Ok(megatron), Some(read)) => {
            let own = std::mem::take(&mut read.changes);
            read.changes = megatron.changes.into_iter().chain(own).collect();
            read.notes.extend(megatron.notes);
            read.unsimulated.extend(megatron.unsimulated);
        }
        (Ok(_), None) => {}
    }
    match read {
        Some(read) if faults.is_empty() => Ok(read),
        _ => Err(faults),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_defaults_are_laid_under_megatrons_arguments() {
        let file = json!({"model": "a/b", "tuner_type": "lora", "lora_rank": 16, "max_length": 2048, "tensor_model_parallel_size": 2,
            "micro_batch_size": 2, "dataset": ["x"], "save_safetensors": true, "recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": 1});
        let beside = Beside { cards: Some(4), ..Beside::default() };
        let read = ms_swift::read(&file, &beside).unwrap();
        let at =
            |place: &str| read.changes.iter().rev().find(|(known, _)| known == place).map(|(_, value)| value.clone());
        assert_eq!(at("gradient_accumulation"), Some(json!(4)));
        assert_eq!(at("batch.seq_len"), Some(json!(2048)));
        assert_eq!(at("parallel.engine.megatron.lora"), Some(json!({"dim": 16})));
        assert_eq!(at("parallel.engine.megatron.recompute"), Some(json!({"uniform": 1})));
        let wrong =
            json!({"tuner_type": "lora", "global_batch_size": 8, "micro_batch_size": 1, "datast": "x", "fp4": "e2m1"});
        let said = ms_swift::read(&wrong, &beside).unwrap_err().iter().map(ToString::to_string).collect::<String>();
        assert!(said.contains("datast") && said.contains("fp4"), "{said}");
    }
}
