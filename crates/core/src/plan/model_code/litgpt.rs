//! LitGPT's config out of a Hugging Face one, as its `litgpt/config.py` lists them.

use serde_json::{Value, json};

use super::super::{Fault, LoraPlan, PlanError};

/// Words of LitGPT's LoRA switches; `lora_query` and `lora_value` are its defaults.
const DEFAULT: [&str; 2] = ["query", "value"];
const ALL: [&str; 5] = ["query", "key", "value", "projection", "mlp"];

/// LitGPT's config of a model.
pub(super) fn config(hf: &Value, lora: Option<&LoraPlan>, weight_first: bool) -> Result<Value, PlanError> {
    let number = |keys: &[&str]| keys.iter().find_map(|key| hf[*key].as_u64());
    let kind = hf["model_type"].as_str().unwrap_or_default();
    let hidden = number(&["hidden_size", "n_embd"]);
    let heads = number(&["num_attention_heads", "n_head", "num_heads"]);
    let mut own = json!({
        "model_type": "litgpt",
        "n_layer": number(&["num_hidden_layers", "n_layer"]),
        "n_head": heads,
        "n_embd": hidden,
        "n_query_groups": number(&["num_key_value_heads"]).or(heads),
        "padded_vocab_size": number(&["vocab_size"]),
        "intermediate_size": number(&["intermediate_size", "n_inner", "ffn_hidden_size"]),
        "norm_weight_first": weight_first,
    });
    if let Some(size) = number(&["head_dim"]) {
        own["head_size"] = size.into();
    }
    let llama = json!({"rotary_percentage": 1.0, "parallel_residual": false, "bias": false,
        "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP"});
    let gemma = json!({"scale_embeddings": true, "mlp_class_name": "GemmaMLP", "norm_unit_offset": true});
    let rotary = |default: f64| {
        let nested = hf["rope_parameters"]["partial_rotary_factor"].as_f64();
        hf["partial_rotary_factor"].as_f64().or(hf["rotary_pct"].as_f64()).or(nested).unwrap_or(default)
    };
    let parts: Vec<Value> = match kind {
        "llama" | "mistral" | "phi3" => vec![llama],
        "gemma" => vec![llama, gemma],
        "gemma2" => {
            let caps = json!({"post_attention_norm": true, "attention_logit_softcapping": 50.0,
                "sliding_window_size": number(&["sliding_window"]).unwrap_or(4096)});
            vec![llama, gemma, caps]
        }
        "gpt_neox" => vec![json!({"rotary_percentage": rotary(0.25),
            "parallel_residual": hf["use_parallel_residual"].as_bool().unwrap_or(true)})],
        "stablelm" => vec![json!({"rotary_percentage": rotary(0.25), "parallel_residual": false, "bias": false,
            "mlp_class_name": "LLaMAMLP"})],
        "phi" => vec![json!({"rotary_percentage": rotary(0.5), "shared_attention_norm": true, "lm_head_bias": true})],
        "falcon" => {
            let wide = hf["new_decoder_architecture"] == true;
            let groups = match (wide, hf["multi_query"].as_bool().unwrap_or(true)) {
                (true, _) => number(&["num_kv_heads"]).or(heads),
                (false, true) => Some(1),
                (false, false) => heads,
            };
            vec![
                json!({"rotary_percentage": 1.0, "bias": false, "shared_attention_norm": !wide, "n_query_groups": groups,
                "intermediate_size": number(&["ffn_hidden_size"]).or(hidden.map(|size| 4 * size))}),
            ]
        }
        _ => {
            return Err(Fault::unsupported("model_code", format!("model type {kind} in LitGPT's model code"))
                .or("known are falcon, gemma, gemma2, gpt_neox, llama, mistral, phi, phi3 and stablelm")
                .into());
        }
    };
    for part in parts {
        for (key, value) in part.as_object().into_iter().flatten() {
            own[key] = value.clone();
        }
    }
    if let Some(lora) = lora {
        own["lora_r"] = lora.rank.into();
        own["lora_dropout"] = lora.dropout.into();
        for word in super::targets(lora, &DEFAULT, &ALL)? {
            own[format!("lora_{word}")] = true.into();
        }
    }
    Ok(own)
}
