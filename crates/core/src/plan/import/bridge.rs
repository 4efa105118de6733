//! Megatron-Bridge's recipes, functions that return a `ConfigContainer`, and YAML over them (megatron.bridge of August 2026:
//! recipes/common.py, training/config.py, training/mixed_precision.py): Megatron-LM's arguments in groups.

use serde_json::{Map, Value, json};

use super::reader::Reader;
use super::table::{Format, Row, Sense, is_off, shown};
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
    ("model.virtual_pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    ("model.pipeline_model_parallel_layout", "pipeline_model_parallel_layout"),
    ("model.num_layers_in_first_pipeline_stage", "num_layers_in_first_pipeline_stage"),
    ("model.num_layers_in_last_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    ("model.account_for_embedding_in_pipeline_split", "account_for_embedding_in_pipeline_split"),
    ("model.account_for_loss_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    ("model.cross_entropy_loss_fusion", "cross_entropy_loss_fusion"),
    ("model.cross_entropy_fusion_impl", "cross_entropy_fusion_impl"),
    ("model.cp_comm_type", "cp_comm_type"),
    ("model.moe_token_dispatcher_type", "moe_token_dispatcher_type"),
    ("model.moe_flex_dispatcher_backend", "moe_flex_dispatcher_backend"),
    ("model.moe_router_dtype", "moe_router_dtype"),
    ("model.moe_shared_expert_overlap", "moe_shared_expert_overlap"),
    ("optimizer.use_precision_aware_optimizer", "use_precision_aware_optimizer"),
    ("optimizer.exp_avg_dtype", "exp_avg_dtype"),
    ("optimizer.exp_avg_sq_dtype", "exp_avg_sq_dtype"),
    ("optimizer.optimizer_cpu_offload", "optimizer_cpu_offload"),
    ("optimizer.optimizer_offload_fraction", "optimizer_offload_fraction"),
    ("ddp.use_megatron_fsdp", "use_megatron_fsdp"),
    ("ddp.data_parallel_sharding_strategy", "data_parallel_sharding_strategy"),
    ("ddp.use_distributed_optimizer", "use_distributed_optimizer"),
    ("ddp.overlap_grad_reduce", "overlap_grad_reduce"),
];

const KEYS: &[Row] = &[
    Row("model tokenizer.tokenizer_model", Sense::Read("the model")),
    Row(
        "train.micro_batch_size train.global_batch_size model.seq_length dataset.seq_length \
         model.tensor_model_parallel_size model.pipeline_model_parallel_size model.context_parallel_size \
         model.expert_model_parallel_size model.expert_tensor_parallel_size model.sequence_parallel model.recompute_* \
         model.mtp_num_layers ddp.use_distributed_optimizer ddp.overlap_grad_reduce \
         model.virtual_pipeline_model_parallel_size model.pipeline_model_parallel_layout model.num_layers_in_* \
         model.account_for_* model.cross_entropy_loss_fusion model.cross_entropy_fusion_impl model.cp_comm_type \
         model.moe_token_dispatcher_type model.moe_flex_dispatcher_backend model.moe_router_dtype \
         model.moe_shared_expert_overlap optimizer.use_precision_aware_optimizer optimizer.exp_avg_dtype \
         optimizer.exp_avg_sq_dtype optimizer.optimizer_cpu_offload optimizer.optimizer_offload_fraction \
         ddp.use_megatron_fsdp ddp.data_parallel_sharding_strategy",
        Sense::Read("as Megatron-LM's arguments of these names"),
    ),
    Row(
        "mixed_precision mixed_precision.bf16 mixed_precision.fp16 mixed_precision.fp8 mixed_precision.fp8_recipe \
         mixed_precision.fp8_param mixed_precision.fp8_param_gather mixed_precision.grad_reduce_in_fp32 \
         mixed_precision.num_layers_at_start_in_bf16 mixed_precision.num_layers_at_end_in_bf16 \
         mixed_precision.first_last_layers_bf16",
        Sense::Read("weights, parallel.engine.megatron.fp8, parallel.engine.megatron.main_gradients"),
    ),
    Row(
        "mixed_precision.fp4 mixed_precision.fp32 mixed_precision.fp8_dot_product_attention \
         mixed_precision.fp8_multi_head_attention",
        Sense::Refused("use bf16, fp16 or fp8 for products of weights"),
    ),
    Row("mixed_precision.*", Sense::Harmless("scales of losses and of fp8")),
    Row("ddp.grad_reduce_in_fp32", Sense::Said("mixed_precision's own is laid over it")),
    Row("peft peft.*", Sense::Read("parallel.engine.megatron.lora")),
    Row("model.fine_grained_activation_offloading", Sense::Refused("leave it out: it is not simulated")),
    Row("model.freeze_*", Sense::Said("which of its parts are trained is not simulated: all are")),
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
        ("cross_entropy_loss_fusion", json!(true)),
        ("cross_entropy_fusion_impl", json!("te")),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect();
    for (key, argument) in ARGUMENTS {
        if let Some(found) = reader.get(key) {
            flat.insert((*argument).to_owned(), found.clone());
        }
    }
    precision(&mut reader, &mut flat);
    adapter(&mut reader);
    let model =
        reader.get("model").and_then(named).or_else(|| reader.text("tokenizer.tokenizer_model").map(str::to_owned));
    let mut read = reader.finish(None, model)?;
    let megatron = megatron::read(&Value::Object(flat), &Beside { without: &[], name: megatron::BRIDGE, ..*beside })?;
    read.changes.extend(megatron.changes);
    read.notes.extend(megatron.notes);
    read.unsimulated.extend(megatron.unsimulated);
    Ok(read)
}

/// `LoRA(dim=…, target_modules=[…])` (peft/lora.py); its `DoRA` and canonical kin are refused.
fn adapter(reader: &mut Reader<'_>) {
    const TARGETS: [&str; 4] = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"];
    let Some(peft) = reader.part("peft").filter(|peft| !is_off(peft)) else { return };
    let name = python::called(peft).or_else(|| peft.as_str()).unwrap_or("LoRA");
    if !["lora", "default_peft_config"].contains(&name.to_lowercase().as_str()) {
        return reader.refuse("peft", name, "use LoRA");
    }
    if peft["0"].as_str().is_some_and(|kind| kind != "lora") {
        return reader.refuse("peft", peft["0"].as_str().unwrap_or_default(), "use LoRA");
    }
    reader.set("parallel.engine.megatron.lora.dim", peft["dim"].as_u64().unwrap_or(32));
    if let Some(names) = peft["target_modules"].as_array() {
        let known = |name: &&Value| name.as_str().is_some_and(|name| TARGETS.contains(&name));
        let ours: Vec<&Value> = names.iter().filter(known).collect();
        if ours.len() < names.len() {
            reader.say("peft.target_modules", "adapters of other linears than attention's and the MLP's are left out");
        }
        reader.set("parallel.engine.megatron.lora.targets", json!(ours));
    }
}

/// A recipe of training/mixed_precision.py by its name, and fields of its class over it.
fn precision(reader: &mut Reader<'_>, flat: &mut Map<String, Value>) {
    let value = reader.get("mixed_precision").cloned().unwrap_or_default();
    let name =
        value.as_str().or_else(|| value["0"].as_str()).or_else(|| python::called(&value)).unwrap_or("bf16_mixed");
    let name = name.replace('-', "_");
    for key in ["fp4", "fp32", "fp8_dot_product_attention", "fp8_multi_head_attention"] {
        if let Some(on) = value.get(key).filter(|on| !is_off(on)) {
            reader.refuse(
                &format!("mixed_precision.{key}"),
                &shown(on),
                "use bf16, fp16, or fp8 for products of weights",
            );
        }
    }
    let half = name.starts_with("fp16") || reader.is_on("mixed_precision.fp16");
    // Layers at both ends that stay in bf16.
    let (recipe, gather, ends) = match name.trim_start_matches("bf16_").trim_start_matches("fp16_") {
        "mixed" | "MixedPrecisionConfig" => (None, false, 0),
        "with_fp8_delayed_scaling_mixed" | "with_fp8_mixed" => (Some("delayed"), true, 0),
        "with_mxfp8_mixed" => (Some("mxfp8"), true, 0),
        "with_fp8_current_scaling_mixed" => (Some("tensorwise"), true, 1),
        "with_fp8_subchannel_scaling_mixed" => (Some("blockwise"), false, 0),
        "nemotron_h_bf16_with_fp8_current_scaling_mixed" => (Some("tensorwise"), true, 2),
        "nanov2_bf16_with_fp8_current_scaling_mixed" => (Some("blockwise"), true, 2),
        _ => return reader.refuse("mixed_precision", &name, "use bf16_mixed, fp16_mixed or one of fp8"),
    };
    let said = reader.get("mixed_precision.fp8").is_some_and(|form| !is_off(form));
    let recipe = match reader.text("mixed_precision.fp8_recipe").filter(|_| said || recipe.is_some()) {
        None if said => recipe.or(Some("tensorwise")),
        other => other.or(recipe),
    };
    if let Some(recipe) = recipe {
        let gather = ["fp8_param_gather", "fp8_param"]
            .iter()
            .find_map(|key| reader.switch(&format!("mixed_precision.{key}")))
            .unwrap_or(gather);
        flat.insert("fp8_format".into(), json!("hybrid"));
        flat.insert("fp8_recipe".into(), json!(recipe));
        flat.insert("fp8_param_gather".into(), json!(gather));
        let kept = reader.switch("mixed_precision.first_last_layers_bf16").unwrap_or(ends > 0);
        flat.insert("first_last_layers_bf16".into(), json!(kept));
        for key in ["num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"] {
            let layers = reader.number(&format!("mixed_precision.{key}")).unwrap_or(ends);
            flat.insert(key.into(), json!(layers));
        }
    }
    if half {
        flat.insert("fp16".into(), json!(true));
    } else if reader.switch("mixed_precision.grad_reduce_in_fp32") == Some(false) {
        flat.insert("grad_reduce_in_bf16".into(), json!(true));
    }
}

/// `AutoBridge.from_hf_pretrained("ORG/NAME").to_megatron_provider()`.
fn named(model: &Value) -> Option<String> {
    let first = model.get("self").and_then(|bridge| bridge.get("0")).or_else(|| model.get("0"))?;
    first.as_str().filter(|_| python::called(model).is_some()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn precisions_are_read_or_refused() {
        const AT: &str = "parallel.engine.megatron";
        let of = |precision: Value| {
            let file = json!({"model": {"tensor_model_parallel_size": 2}, "train": {"micro_batch_size": 1}, "mixed_precision": precision});
            read(&file, &Beside::default())
        };
        for (precision, place, value) in [
            (json!("bf16_mixed"), "fp8.recipe", Value::Null),
            (json!("bf16_with_fp8_current_scaling_mixed"), "fp8.recipe", json!("tensorwise")),
            (json!("bf16_with_fp8_current_scaling_mixed"), "fp8.layers_at_start_in_bf16", json!(1)),
            (json!("bf16_with_fp8_delayed_scaling_mixed"), "fp8.recipe", json!("delayed")),
            (json!("bf16-with-mxfp8-mixed"), "fp8.param_gather", json!(true)),
            (json!({"bf16": true, "grad_reduce_in_fp32": false}), "main_gradients", json!("bf16")),
            (json!({"bf16": true}), "main_gradients", Value::Null),
            (json!({"bf16": true, "fp8": "hybrid"}), "fp8.recipe", json!("tensorwise")),
        ] {
            let read = of(precision.clone()).unwrap();
            let place = format!("{AT}.{place}");
            let found = read.changes.iter().rev().find(|(known, _)| *known == place).map(|(_, value)| value.clone());
            assert_eq!(found.unwrap_or_default(), value, "{precision}: {place}");
        }
        for precision in [json!("bf16_with_nvfp4_mixed"), json!({"bf16": true, "fp4": "e2m1"})] {
            assert!(of(precision.clone()).unwrap_err()[0].to_string().contains("fp4"), "{precision}");
        }
    }
}
