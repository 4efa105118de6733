//! Arguments of transformers' `Trainer` and of TRL's scripts (transformers 5.17 training_args.py; trl 1.16
//! trainer/{sft,model}_config.py).

use serde_json::Value;

use super::keys::Reader;
use super::{Imported, Object, finish, situation};
use crate::plan::PlanError;

/// Keys only TRL has.
const TRL: [&str; 8] = [
    "max_length",
    "max_seq_length",
    "use_peft",
    "packing",
    "padding_free",
    "loss_type",
    "lora_r",
    "dataset_text_field",
];

pub(super) fn read(object: &Object) -> Result<Imported, PlanError> {
    let mut reader = Reader::new(object);
    let trl = TRL.iter().any(|key| object.contains_key(*key));
    let model = reader.text("model_name_or_path").map(str::to_owned);
    arguments(&mut reader)?;
    // A file may say them, and a program that hands over its model and its arguments knows them.
    dtype(&mut reader, "dtype");
    dtype(&mut reader, "torch_dtype");
    attention(&mut reader, "attn_implementation")?;
    if !trl {
        return Ok(finish(reader, "hf-trainer", model, situation(false, false)));
    }
    for key in ["max_seq_length", "max_length"] {
        reader.number_to(key, "batch.seq_len")?;
    }
    let quantised = quantisation(&mut reader);
    let adapter = reader.is_on("use_peft") || quantised;
    if adapter {
        reader.number_to("lora_r", "adapter.rank")?;
        if let Some(dropout) = reader.get("lora_dropout") {
            reader.set("adapter.dropout", dropout.clone());
        }
        reader.targets_to("lora_target_modules", "adapter.targets");
        if let Some(saved) = reader.get("lora_modules_to_save") {
            reader.set("adapter.modules_to_save", saved.clone());
        }
        if reader.is_on("use_dora") {
            reader.set("adapter.dora", true);
        }
    }
    if reader.is_on("packing") || reader.is_on("padding_free") {
        reader.set("batch.mask", false);
        reader.notes.push("packing: the batch is simulated as full rows without a mask".into());
    }
    // Others were refused with their trainer.
    reader.text("loss_type");
    reader.refuse("activation_offloading", "leave it out")?;
    Ok(finish(reader, "trl", model, situation(adapter, quantised)))
}

/// The keys that LLaMA-Factory shares.
pub(super) fn arguments(reader: &mut Reader<'_>) -> Result<(), PlanError> {
    reader.number_to("per_device_train_batch_size", "batch.batch_size")?;
    reader.number_to("gradient_accumulation_steps", "gradient_accumulation")?;
    let (bf16, fp16) = (reader.get("bf16"), reader.is_on("fp16"));
    match bf16 {
        _ if fp16 => reader.set("autocast", "fp16"),
        Some(Value::Bool(true)) => reader.set("autocast", "bf16"),
        Some(Value::Bool(false)) => reader.set("autocast", Value::Null),
        _ => {}
    }
    if let Some(on) = reader.get("gradient_checkpointing").and_then(Value::as_bool) {
        reader.set("checkpointing", if on { "full" } else { "off" });
    }
    reentrant(reader);
    let projects = match reader.text("optim") {
        Some(name) => {
            optimizer(reader, "optim", name)?;
            name.starts_with("galore") || name.starts_with("apollo")
        }
        None => false,
    };
    if let Some(norm) = reader.get("max_grad_norm").and_then(Value::as_f64) {
        reader.set("clip", norm > 0.0);
    }
    if reader.is_on("use_liger_kernel") {
        reader.set("kernels", "liger");
        reader.set("loss.kind", "standard");
    }
    let hint = "give the engine by vramcast's own flags and leave the key out";
    for key in ["deepspeed", "fsdp"] {
        reader.refuse(key, hint)?;
    }
    for key in ["torch_compile", "neftune_noise_alpha", "label_smoothing_factor"] {
        reader.refuse(key, "leave it out")?;
    }
    if !projects {
        for key in ["optim_target_modules", "optim_args"] {
            reader.refuse(key, "only GaLore's and APOLLO's are read")?;
        }
    }
    Ok(())
}

/// `gradient_checkpointing_kwargs`.
pub(super) fn reentrant(reader: &mut Reader<'_>) {
    if let Some(reentrant) = reader.get("gradient_checkpointing_kwargs").and_then(|k| k.get("use_reentrant")) {
        reader.set("checkpoints.reentrant", reentrant.clone());
    }
}

/// `load_in_4bit` and its companions; whether there is any quantisation.
pub(super) fn quantisation(reader: &mut Reader<'_>) -> bool {
    let (four, eight) = (reader.is_on("load_in_4bit"), reader.is_on("load_in_8bit"));
    let (kind, nested) = (reader.text("bnb_4bit_quant_type"), reader.get("use_bnb_nested_quant"));
    if eight {
        reader.set("quantization.scheme", "int8");
    } else if four {
        reader.set("quantization.scheme", kind.unwrap_or("nf4"));
        if let Some(nested) = nested {
            reader.set("quantization.double", *nested == true);
        }
    }
    four || eight
}

/// The type a model is loaded in.
pub(super) fn dtype(reader: &mut Reader<'_>, key: &'static str) {
    match reader.text(key) {
        Some("bfloat16" | "bf16") => reader.set("weights", "bf16"),
        Some("float16" | "fp16" | "half") => reader.set("weights", "fp16"),
        Some("float32" | "fp32" | "float") => reader.set("weights", "fp32"),
        _ => {}
    }
}

/// How attention is computed.
pub(super) fn attention(reader: &mut Reader<'_>, key: &'static str) -> Result<(), PlanError> {
    let Some(name) = reader.text(key) else { return Ok(()) };
    match name {
        "sdpa" | "auto" | "disabled" => reader.set("attention", "sdpa"),
        "eager" => reader.set("attention", "eager"),
        "fa2" | "flash_attention_2" => reader.set("attention", "flash2"),
        "fa3" | "flash_attention_3" => reader.set("attention", "flash3"),
        "flash_attention_torch" => reader.set("attention", "sdpa"),
        other => {
            let hint = "use sdpa, eager, flash_attention_2 or flash_attention_3".into();
            return Err(PlanError::Unsupported { what: format!("{key}: {other}"), hint });
        }
    }
    Ok(())
}

/// Names of optimizers as transformers spells them: which one, and how it steps.
pub(crate) fn trainer_optimizer(name: &str) -> Option<(&str, &'static str)> {
    Some(match name {
        "adamw_torch" | "adamw_hf" => ("adamw", "foreach"),
        "adamw_torch_fused" => ("adamw", "fused"),
        "adamw_8bit" | "adamw_bnb_8bit" => ("adamw8bit", "foreach"),
        "paged_adamw" | "paged_adamw_32bit" => ("paged-adamw32", "foreach"),
        "paged_adamw_8bit" => ("paged-adamw8bit", "foreach"),
        "lion_32bit" | "lion" => ("lion", "foreach"),
        "lion_8bit" => ("lion8bit", "foreach"),
        "paged_lion" | "paged_lion_32bit" => ("paged-lion32", "foreach"),
        "paged_lion_8bit" => ("paged-lion8bit", "foreach"),
        "ademamix_8bit" => ("ademamix8bit", "foreach"),
        "paged_ademamix_32bit" => ("paged-ademamix32", "foreach"),
        "paged_ademamix_8bit" => ("paged-ademamix8bit", "foreach"),
        "adamw_anyprecision" => ("adamw-anyprecision", "foreach"),
        "galore_adamw" | "galore_adamw_layerwise" => ("galore-adamw", "foreach"),
        "apollo_adamw" | "apollo_adamw_layerwise" => ("apollo-adamw", "foreach"),
        "adafactor" | "ademamix" | "sgd" | "adagrad" | "rmsprop" | "muon" => (name, "foreach"),
        _ => return None,
    })
}

/// `optim_target_modules` and `optim_args` of GaLore and APOLLO (transformers, trainer.py).
fn low_rank(reader: &mut Reader<'_>, name: &str) -> Result<(), PlanError> {
    let targets: Vec<&str> = match reader.get("optim_target_modules") {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let names = |part: &str| targets.iter().any(|target| target.contains(part));
    // What is simulated: every matrix but embeddings and the head.
    if !(names("all-linear") || names("attn") && names("mlp")) {
        let what = match targets.as_slice() {
            [] => format!("optim: {name} without optim_target_modules"),
            _ => format!("optim: {name} with optim_target_modules {}", targets.join(", ")),
        };
        return Err(PlanError::Unsupported { what, hint: "use all-linear, or attn and mlp".into() });
    }
    // transformers' own defaults.
    let mut rank = if name.starts_with("galore") { 128 } else { 1 };
    for pair in reader.text("optim_args").unwrap_or_default().split(',') {
        match pair.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
            Some(("rank", value)) => {
                rank = value.parse().map_err(|_| PlanError::BadValue {
                    key: "optim_args".into(),
                    value: pair.into(),
                    expected: "a whole number as its rank".into(),
                })?;
            }
            Some(("update_proj_gap" | "scale" | "proj_type" | "proj" | "scale_type", _)) | None => {}
            Some((other, _)) => {
                return Err(PlanError::Unsupported {
                    what: format!("optim_args: {other}"),
                    hint: "leave it out".into(),
                });
            }
        }
    }
    reader.set("optimizer.rank", rank);
    if name.ends_with("layerwise") {
        reader.set("optimizer_in_backward", true);
    }
    Ok(())
}

pub(super) fn optimizer(reader: &mut Reader<'_>, key: &str, name: &str) -> Result<(), PlanError> {
    let Some((kind, implementation)) = trainer_optimizer(name) else {
        let hint = "`vramcast list optimizers` names what is simulated".into();
        return Err(PlanError::Unsupported { what: format!("{key}: {name}"), hint });
    };
    reader.set("optimizer.kind", kind);
    reader.set("optimizer.implementation", implementation);
    match kind {
        "galore-adamw" | "apollo-adamw" => low_rank(reader, name),
        _ => Ok(()),
    }
}
