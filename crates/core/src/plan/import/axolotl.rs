//! axolotl's YAML (axolotl 0.19, utils/schemas).

use serde_json::Value;

use super::keys::Reader;
use super::trainer::{attention, optimizer, reentrant};
use super::{Imported, Object, finish, situation};
use crate::plan::PlanError;

pub(super) fn read(object: &Object) -> Result<Imported, PlanError> {
    let mut reader = Reader::new(object);
    let model = reader.text("base_model").map(str::to_owned);
    reader.number_to("micro_batch_size", "batch.batch_size")?;
    reader.number_to("gradient_accumulation_steps", "gradient_accumulation")?;
    reader.number_to("sequence_len", "batch.seq_len")?;
    packing(&mut reader);
    let method = reader.text("adapter");
    let (four, eight) = (reader.is_on("load_in_4bit"), reader.is_on("load_in_8bit"));
    let adapter = match method {
        None => false,
        Some("lora" | "qlora") => true,
        Some(other) => {
            let hint = "use lora or qlora".into();
            return Err(PlanError::Unsupported { what: format!("adapter: {other}"), hint });
        }
    };
    if four || eight {
        reader.set("quantization.scheme", if eight { "int8" } else { "nf4" });
    }
    if adapter {
        lora(&mut reader)?;
    }
    precision(&mut reader);
    match reader.get("gradient_checkpointing") {
        Some(Value::Bool(on)) => reader.set("checkpointing", if *on { "full" } else { "off" }),
        Some(Value::String(how)) if how == "offload" || how == "unsloth" => {
            reader.set("checkpointing", "full");
            reader.set("checkpoints.offload", true);
        }
        Some(other) => {
            let hint = "use true, false or offload".into();
            return Err(PlanError::Unsupported { what: format!("gradient_checkpointing: {other}"), hint });
        }
        None => {}
    }
    reentrant(&mut reader);
    if let Some(name) = reader.text("optimizer") {
        optimizer(&mut reader, "optimizer", name)?;
    }
    if let Some(norm) = reader.get("max_grad_norm").and_then(Value::as_f64) {
        reader.set("clip", norm > 0.0);
    }
    attention(&mut reader, "attn_implementation")?;
    if reader.is_on("flash_attention") {
        reader.set("attention", "flash2");
    }
    reader.refuse("xformers_attention", "use sdpa or flash_attention_2")?;
    if reader.is_on("sdp_attention") {
        reader.set("attention", "sdpa");
    }
    if reader.is_on("eager_attention") {
        reader.set("attention", "eager");
    }
    losses(&mut reader)?;
    let hint = "give the engine by vramcast's own flags and leave the key out";
    for key in ["deepspeed", "fsdp", "fsdp_config", "tensor_parallel_size", "context_parallel_size", "dp_shard_size"] {
        reader.refuse(key, hint)?;
    }
    for key in ["rl", "reward_model", "process_reward_model", "torch_compile", "tiled_mlp", "unfrozen_parameters"] {
        reader.refuse(key, "leave it out: it is not simulated")?;
    }
    for key in ["activation_offloading", "layer_offloading", "selective_checkpointing", "gptq", "relora", "fp8"] {
        reader.refuse(key, "leave it out: it is not simulated")?;
    }
    Ok(finish(reader, "axolotl", model, situation(adapter, four || eight)))
}

/// Packed batches are one row of `micro_batch_size * sequence_len` tokens with positions for each sample.
fn packing(reader: &mut Reader<'_>) {
    if reader.is_on("sample_packing") {
        reader.set("batch.mask", false);
        reader.notes.push("sample_packing: the batch is simulated as full rows without a mask".into());
    }
    reader.get("pad_to_sequence_len");
}

fn lora(reader: &mut Reader<'_>) -> Result<(), PlanError> {
    reader.number_to("lora_r", "adapter.rank")?;
    if let Some(dropout) = reader.get("lora_dropout") {
        reader.set("adapter.dropout", dropout.clone());
    }
    reader.targets_to("lora_target_modules", "adapter.targets");
    if reader.is_on("lora_target_linear") {
        reader.set("adapter.targets", "all-linear");
    }
    if let Some(saved) =
        reader.get("lora_modules_to_save").filter(|list| list.as_array().is_some_and(|l| !l.is_empty()))
    {
        reader.set("adapter.modules_to_save", saved.clone());
    }
    if let Some(list) = reader.get("lora_target_parameters") {
        reader.set("adapter.target_parameters", list.clone());
    }
    if let Some(layers) = reader.get("peft_layers_to_transform") {
        reader.set("adapter.layers_to_transform", layers.clone());
    }
    if reader.is_on("peft_use_dora") {
        reader.set("adapter.dora", true);
    }
    if reader.get("peft_autocast_adapter_dtype").is_some_and(|value| *value == false) {
        reader.set("adapter.dtype", Value::Null);
        reader.notes.push("peft_autocast_adapter_dtype: false is read as the type of the weights".into());
    }
    for key in ["lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"] {
        if reader.is_on(key) {
            reader.notes.push(format!("{key}: axolotl's fused LoRA kernels are not simulated; PEFT's keep more"));
        }
    }
    Ok(())
}

fn precision(reader: &mut Reader<'_>) {
    let (bf16, fp16) = (reader.get("bf16"), reader.is_on("fp16"));
    let (pure_bf16, pure_fp16) = (reader.is_on("bfloat16"), reader.is_on("float16"));
    match bf16 {
        _ if pure_bf16 || pure_fp16 => {
            reader.set("weights", if pure_bf16 { "bf16" } else { "fp16" });
            reader.set("autocast", Value::Null);
        }
        _ if fp16 => {
            reader.set("weights", "fp16");
            reader.set("autocast", "fp16");
        }
        Some(Value::Bool(false)) => {
            reader.set("weights", "fp32");
            reader.set("autocast", Value::Null);
        }
        Some(Value::String(how)) if how == "full" => reader.set("autocast", Value::Null),
        _ => {}
    }
}

fn losses(reader: &mut Reader<'_>) -> Result<(), PlanError> {
    let mut liger = false;
    for key in ["liger_fused_linear_cross_entropy", "liger_rms_norm", "liger_glu_activation", "liger_rope"] {
        liger |= reader.is_on(key);
    }
    reader.get("liger_layer_norm");
    let plugins = reader.get("plugins").and_then(Value::as_array);
    let has =
        |name: &str| plugins.is_some_and(|list| list.iter().any(|p| p.as_str().is_some_and(|p| p.contains(name))));
    if has("CutCrossEntropy") && reader.get("cut_cross_entropy").is_none_or(|value| *value != false) {
        reader.set("loss.kind", "cut-cross-entropy");
    }
    if liger || has("LigerPlugin") {
        reader.set("kernels", "liger");
        reader.set("loss.kind", "standard");
    }
    reader.refuse("chunked_cross_entropy", "leave it out: it is not simulated")
}
