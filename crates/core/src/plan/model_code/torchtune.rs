//! torchtune's builder arguments out of a Hugging Face config, and its names for what LoRA adapts.

use serde_json::{Value, json};

use super::super::stack::{Package, Stack};
use super::super::{AdapterPlan, Fault, LoraPlan, PlanError, Targets, TrainPlan};

/// The arguments of torchtune's model builders (torchtune/models/llama3_1/_component_builders.py and its neighbours).
pub(super) fn config(hf: &Value, stack: &Stack) -> Result<Value, PlanError> {
    let number = |key: &str| hf[key].as_u64();
    let kind = hf["model_type"].as_str().unwrap_or_default();
    if !matches!(kind, "llama" | "mistral" | "qwen2") {
        return Err(Fault::unsupported("model_code", format!("model type {kind} in torchtune's model code"))
            .or("known are llama, mistral and qwen2")
            .into());
    }
    // `Llama3ScaledRoPE` is made once for all layers; other builders copied a layer before 0.6.
    let scaled = ["rope_scaling", "rope_parameters"].iter().any(|key| hf[*key]["rope_type"] == "llama3");
    Ok(json!({
        "model_type": "torchtune",
        "vocab_size": number("vocab_size"),
        "num_layers": number("num_hidden_layers"),
        "num_heads": number("num_attention_heads"),
        "num_kv_heads": number("num_key_value_heads").or(number("num_attention_heads")),
        "head_dim": number("head_dim"),
        "embed_dim": number("hidden_size"),
        "intermediate_dim": number("intermediate_size"),
        "max_seq_len": number("max_position_embeddings"),
        "copied_layers": stack.version(Package::Torchtune).release() < [0, 6] && !scaled,
        "halves": kind == "qwen2",
        "qkv_bias": kind == "qwen2",
        "tied": hf["tie_word_embeddings"] == true,
    }))
}

/// The plan with torchtune's module names: `lora_attn_modules` are queries and values where nothing is said.
pub(super) fn renamed(plan: &TrainPlan) -> Result<TrainPlan, PlanError> {
    let Some(AdapterPlan::Lora(lora)) = &plan.adapter else { return Ok(plan.clone()) };
    let words = super::targets(lora, &["query", "value"], &["query", "key", "value", "projection", "mlp"])?;
    let mut names: Vec<String> = Vec::new();
    for word in words {
        names.extend(
            match word {
                "query" => &["q_proj"][..],
                "key" => &["k_proj"],
                "value" => &["v_proj"],
                "projection" => &["output_proj"],
                "mlp" => &["w1", "w2", "w3"],
                _ => &["output"],
            }
            .iter()
            .map(|name| (*name).to_owned()),
        );
    }
    let targets = Targets::Names(names);
    let dtype = Some(lora.dtype.unwrap_or(plan.weights));
    let mut plan =
        TrainPlan { adapter: Some(AdapterPlan::Lora(LoraPlan { targets, dtype, ..lora.clone() })), ..plan.clone() };
    if let Some(quantization) = &mut plan.quantization {
        quantization.skip = None;
        quantization.prepare = false;
        quantization.torchao = true;
    }
    Ok(plan)
}
