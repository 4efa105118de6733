//! LLaMA-Factory's YAML (llamafactory 0.9.5, hparams), with the keys of `TrainingArguments` beside its own.

use serde_json::Value;

use super::keys::Reader;
use super::trainer::{arguments, attention};
use super::{Imported, Object, finish, situation};
use crate::plan::PlanError;

pub(super) fn read(object: &Object) -> Result<Imported, PlanError> {
    let mut reader = Reader::new(object);
    let unsupported = |key: &str, value: &str, hint: &str| {
        Err(PlanError::Unsupported { what: format!("{key}: {value}"), hint: hint.into() })
    };
    match reader.text("stage") {
        None | Some("sft" | "pt") => {}
        Some(other) => return unsupported("stage", other, "only sft and pt are simulated"),
    }
    let model = reader.text("model_name_or_path").map(str::to_owned);
    arguments(&mut reader)?;
    reader.number_to("cutoff_len", "batch.seq_len")?;
    let adapter = match reader.text("finetuning_type") {
        None | Some("lora") => true,
        Some("full") => false,
        Some(other) => return unsupported("finetuning_type", other, "use lora or full"),
    };
    if adapter {
        reader.number_to("lora_rank", "adapter.rank")?;
        if let Some(dropout) = reader.get("lora_dropout") {
            reader.set("adapter.dropout", dropout.clone());
        }
        reader.targets_to("lora_target", "adapter.targets");
        if let Some(saved) = reader.text("additional_target") {
            let names: Vec<Value> = saved.split(',').map(|name| name.trim().into()).collect();
            reader.set("adapter.modules_to_save", names);
        }
        if reader.is_on("use_dora") {
            reader.set("adapter.dora", true);
        }
    }
    vision(&mut reader, adapter)?;
    let quantised = quantisation(&mut reader)?;
    if reader.is_on("pure_bf16") {
        reader.set("weights", "bf16");
        reader.set("autocast", Value::Null);
        if adapter {
            reader.set("adapter.dtype", "bf16");
        }
    }
    if reader.is_on("disable_gradient_checkpointing") {
        reader.set("checkpointing", "off");
    }
    if let Some(reentrant) = reader.get("use_reentrant_gc").and_then(Value::as_bool) {
        reader.set("checkpoints.reentrant", reentrant);
    }
    if reader.is_on("use_unsloth_gc") {
        reader.set("checkpoints.offload", true);
    }
    if reader.is_on("enable_liger_kernel") {
        reader.set("kernels", "liger");
    }
    if reader.is_on("packing") || reader.is_on("neat_packing") {
        reader.notes.push("packing: rows are taken to be full".into());
    }
    attention(&mut reader, "flash_attn")?;
    for key in ["use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "fp8", "use_llama_pro"] {
        reader.refuse(key, "leave it out: it is not simulated here; --optimizer knows some of them")?;
    }
    for key in ["use_unsloth", "use_kt", "shift_attn", "mixture_of_depths", "upcast_layernorm", "upcast_lmhead_output"]
    {
        reader.refuse(key, "leave it out: it is not simulated")?;
    }
    Ok(finish(reader, "llama-factory", model, situation(adapter, quantised)))
}

/// What reads images: its tower and the projector behind it are not trained unless the file says so (hparams,
/// finetuning_args.py), and adapters stay out of them.
fn vision(reader: &mut Reader<'_>, adapter: bool) -> Result<(), PlanError> {
    let unsaid = |value: Option<&Value>, usual: bool| value.and_then(Value::as_bool).unwrap_or(usual);
    let tower = unsaid(reader.get("freeze_vision_tower"), true);
    let projector = unsaid(reader.get("freeze_multi_modal_projector"), true);
    reader.refuse("freeze_language_model", "leave it out: it is not simulated")?;
    match (tower, projector) {
        (true, true) if adapter => reader.set("adapter.exclude", OUTSIDE_TEXT),
        (true, true) => reader.set("frozen", vec!["vision-if-any", "projector-if-any"]),
        (false, false) => {}
        (tower, projector) => {
            let what = format!("freeze_vision_tower: {tower} with freeze_multi_modal_projector: {projector}");
            return Err(PlanError::Unsupported { what, hint: "freeze both or none".into() });
        }
    }
    for key in [
        "image_max_pixels",
        "image_min_pixels",
        "image_do_pan_and_scan",
        "crop_to_patches",
        "video_max_pixels",
        "video_min_pixels",
        "video_fps",
        "video_maxlen",
    ] {
        reader.refuse(key, "a batch's images are not in the file: leave it out and give them by {batch.images}")?;
    }
    Ok(())
}

/// Modules of what reads images, as a pattern of PEFT.
const OUTSIDE_TEXT: &str =
    r".*(^|\.)(visual|vision_tower|vision_model|vision_encoder|multi_modal_projector|mm_projector|connector)\..*";

fn quantisation(reader: &mut Reader<'_>) -> Result<bool, PlanError> {
    let Some(bits) = reader.number("quantization_bit")? else { return Ok(false) };
    let (method, kind) = (reader.text("quantization_method"), reader.text("quantization_type"));
    let double = reader.get("double_quantization").and_then(Value::as_bool);
    let scheme = match (method.unwrap_or("bnb"), bits) {
        ("bnb" | "bitsandbytes", 4) => kind.unwrap_or("nf4"),
        ("bnb" | "bitsandbytes", 8) => "int8",
        (method, bits) => {
            let what = format!("quantization_method: {method} with {bits} bits");
            return Err(PlanError::Unsupported { what, hint: "use bnb with 4 or 8 bits".into() });
        }
    };
    reader.set("quantization.scheme", scheme);
    if bits == 8 {
        reader.set("quantization.double", false);
    } else if let Some(double) = double {
        reader.set("quantization.double", double);
    }
    Ok(true)
}
