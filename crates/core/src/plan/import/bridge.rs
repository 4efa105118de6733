//! Megatron-Bridge's recipes, functions that return a `ConfigContainer`, and YAML over them (megatron.bridge of August 2026:
//! recipes/common.py, training/config.py): Megatron-LM's arguments in groups.

use serde_json::{Map, Value, json};

use super::reader::Reader;
use super::table::{Format, Row, Sense, is_off};
use super::{Beside, Imported, megatron};
use crate::plan::Fault;
use crate::source::python;

pub(super) const FORMAT: Format = Format {
    title: "Megatron-Bridge",
    version: "0.4",
    source: "megatron.bridge, recipes/*/*.py, recipes/common.py and training/config.py",
    keys: &[KEYS],
};

/// Keys that are arguments of Megatron-LM, and what they are called there.
const ARGUMENTS: &[(&str, &str)] = &[
    ("train.micro_batch_size", "micro_batch_size"),
    ("train.global_batch_size", "global_batch_size"),
    ("model.seq_length", "seq_length"),
    ("dataset.seq_length", "seq_length"),
    ("model.tensor_model_parallel_size", "tensor_model_parallel_size"),
    ("model.pipeline_model_parallel_size", "pipeline_model_parallel_size"),
    ("model.context_parallel_size", "context_parallel_size"),
    ("model.expert_model_parallel_size", "expert_model_parallel_size"),
    ("model.expert_tensor_parallel_size", "expert_tensor_parallel_size"),
    ("model.sequence_parallel", "sequence_parallel"),
    ("model.recompute_granularity", "recompute_granularity"),
    ("model.recompute_method", "recompute_method"),
    ("model.recompute_num_layers", "recompute_num_layers"),
    ("model.recompute_modules", "recompute_modules"),
    ("model.mtp_num_layers", "mtp_num_layers"),
    ("ddp.use_distributed_optimizer", "use_distributed_optimizer"),
    ("ddp.overlap_grad_reduce", "overlap_grad_reduce"),
];

const KEYS: &[Row] = &[
    Row("model tokenizer.tokenizer_model", Sense::Read("the model")),
    Row(
        "train.micro_batch_size train.global_batch_size model.seq_length dataset.seq_length \
         model.tensor_model_parallel_size model.pipeline_model_parallel_size model.context_parallel_size \
         model.expert_model_parallel_size model.expert_tensor_parallel_size model.sequence_parallel model.recompute_* \
         model.mtp_num_layers ddp.use_distributed_optimizer ddp.overlap_grad_reduce",
        Sense::Read("as Megatron-LM's arguments of these names"),
    ),
    Row("mixed_precision mixed_precision.*", Sense::Read("weights, parallel.engine.megatron.fp8")),
    Row("peft peft.*", Sense::Refused("adapters under Megatron are not simulated")),
    Row(
        "ddp.use_megatron_fsdp model.fine_grained_activation_offloading",
        Sense::Refused("say it by flags beside --engine megatron"),
    ),
    Row(
        "model.virtual_pipeline_model_parallel_size model.pipeline_model_parallel_layout model.num_layers_in_* \
         model.account_for_*",
        Sense::Said("stages are cut evenly, one a card"),
    ),
    Row("model.freeze_*", Sense::Said("which of its parts are trained is not simulated: all are")),
    Row(
        "optimizer.use_precision_aware_optimizer optimizer.optimizer_cpu_offload",
        Sense::Said("states are simulated in fp32 on the card"),
    ),
    Row(
        "model.num_layers model.hidden_size model.kv_channels model.vocab_size model.config*",
        Sense::Said("the model is taken as it is published"),
    ),
    Row(
        "model.* train.* validation.* optimizer* scheduler* ddp.* dataset* logger* tokenizer* checkpoint* rng* dist* \
         comm_overlap* env_vars* profiling* ft* rerun* straggler* nvrx* inprocess* tensor_inspect*",
        Sense::Harmless("which data, what is saved, the course of training"),
    ),
];

pub(super) fn is_marked(file: &super::Object) -> bool {
    let has = |part: &str, key: &str| file.get(part).is_some_and(|part| part.get(key).is_some());
    has("model", "tensor_model_parallel_size") || has("train", "micro_batch_size") && file.contains_key("ddp")
}

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&FORMAT, value, beside);
    // recipes/common.py.
    let mut flat: Map<String, Value> = [
        ("micro_batch_size", json!(2)),
        ("seq_length", json!(4096)),
        ("use_distributed_optimizer", json!(true)),
        ("overlap_grad_reduce", json!(true)),
        ("bf16", json!(true)),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect();
    for (key, argument) in ARGUMENTS {
        if let Some(found) = reader.get(key) {
            flat.insert((*argument).to_owned(), found.clone());
        }
    }
    let precision = reader.get("mixed_precision").cloned().unwrap_or_default();
    let precision = precision.as_str().or_else(|| precision["0"].as_str()).unwrap_or("bf16_mixed").to_owned();
    if precision.contains("fp8") {
        flat.insert("fp8_format".into(), json!("hybrid"));
        flat.insert("fp8_recipe".into(), json!(if precision.contains("mx") { "mxfp8" } else { "delayed" }));
    } else if precision.contains("fp16") && !precision.contains("bf16") {
        flat.insert("fp16".into(), json!(true));
    }
    if reader.get("peft").is_some_and(|peft| !is_off(peft)) {
        reader.refuse("peft", "an adapter", "adapters under Megatron are not simulated; `--lora` runs PEFT's");
    }
    let model =
        reader.get("model").and_then(named).or_else(|| reader.text("tokenizer.tokenizer_model").map(str::to_owned));
    let mut read = reader.finish(None, model)?;
    let megatron = megatron::read(&Value::Object(flat), &Beside { without: &[], ..*beside })?;
    read.changes.extend(megatron.changes);
    read.notes.extend(megatron.notes);
    read.unsimulated.extend(megatron.unsimulated);
    Ok(read)
}

/// `AutoBridge.from_hf_pretrained("ORG/NAME").to_megatron_provider()`.
fn named(model: &Value) -> Option<String> {
    let first = model.get("self").and_then(|bridge| bridge.get("0")).or_else(|| model.get("0"))?;
    first.as_str().filter(|_| python::called(model).is_some()).map(str::to_owned)
}
