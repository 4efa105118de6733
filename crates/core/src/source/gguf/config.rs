//! The config of transformers that a GGUF file's metadata stand for (llama.cpp's converter, read backwards).

use serde_json::{Map, Value as Json, json};

use super::{Header, Value, architecture, states};

/// Keys of metadata under the architecture's name, and those of a config. A later row of the same key adds a second one.
const KEYS: &[(&str, &str)] = &[
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
    ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    ("rope.freq_base", "rope_theta"),
    ("expert_count", "num_experts"),
    ("expert_count", "num_local_experts"),
    ("expert_count", "n_routed_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("expert_shared_count", "n_shared_experts"),
    ("expert_group_count", "n_group"),
    ("expert_group_used_count", "topk_group"),
    ("expert_weights_scale", "routed_scaling_factor"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("attention.kv_lora_rank", "kv_lora_rank"),
    ("attention.q_lora_rank", "q_lora_rank"),
    ("attention.value_length_mla", "v_head_dim"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("logit_scale", "logit_scale"),
    ("logit_scale", "logits_scaling"),
    ("residual_scale", "residual_multiplier"),
    ("embedding_scale", "embedding_multiplier"),
    ("attention.scale", "attention_multiplier"),
];

/// The config of a file, or why there is none.
pub fn config(header: &Header) -> Result<Json, String> {
    let name = header.architecture().ok_or("it does not say general.architecture")?;
    let kind = architecture::model_type(name)
        .ok_or_else(|| format!("models of GGUF architecture {name} are not known here"))?;
    Ok(of_type(header, name, kind))
}

/// The same of an architecture that is not known, as a plain decoder: for engines that go by the file.
pub fn decoder(header: &Header) -> Option<Json> {
    let name = header.architecture()?;
    header.number("block_count")?;
    Some(of_type(header, name, "llama"))
}

fn of_type(header: &Header, name: &str, kind: &str) -> Json {
    let mut config = Map::new();
    let get = |key: &str| header.get(&format!("{name}.{key}"));
    for (from, to) in KEYS {
        if let Some(value) = get(from).and_then(plain) {
            config.insert((*to).to_owned(), value);
        }
    }
    let has = |tensor: &str| header.tensors.iter().any(|own| own.name == tensor);
    let rows = header.tensors.iter().find(|tensor| tensor.name == "token_embd.weight").and_then(|t| t.shape.first());
    let listed = header.get("tokenizer.ggml.tokens").and_then(Value::array_length);
    let vocabulary = rows.copied().or(listed).or_else(|| header.number("vocab_size"));
    config.insert("vocab_size".into(), json!(vocabulary));
    config.insert("tie_word_embeddings".into(), json!(!has("output.weight")));
    let split = header.tensors.iter().find(|tensor| tensor.name.ends_with("ffn_down_exps.weight"));
    let experts = split.is_some() && kind == "llama";
    config.insert("model_type".into(), json!(if experts { "mixtral" } else { kind }));
    let latent = get("attention.kv_lora_rank").is_some();
    if latent {
        let number = |key: &str| get(key).and_then(Value::as_u64).unwrap_or(0);
        let turned = number("rope.dimension_count");
        let whole =
            if number("attention.key_length_mla") > 0 { "attention.key_length_mla" } else { "attention.key_length" };
        config.insert("qk_rope_head_dim".into(), json!(turned));
        config.insert("qk_nope_head_dim".into(), json!(number(whole).saturating_sub(turned)));
        let heads = config.get("num_attention_heads").cloned();
        config.insert("num_key_value_heads".into(), json!(heads));
        if !config.contains_key("q_lora_rank") {
            config.insert("q_lora_rank".into(), Json::Null);
        }
        let value = number("attention.value_length_mla").max(if config.contains_key("v_head_dim") {
            0
        } else {
            number("attention.value_length")
        });
        config.insert("v_head_dim".into(), json!(value));
        if get("expert_gating_func").and_then(Value::as_u64) == Some(2) {
            config.insert("model_type".into(), json!("deepseek_v3"));
        }
    } else if let Some(width) = get("attention.key_length").and_then(Value::as_u64) {
        config.insert("head_dim".into(), json!(width));
        let turned = get("rope.dimension_count").and_then(Value::as_u64).filter(|turned| *turned < width);
        if let Some(turned) = turned {
            config.insert("partial_rotary_factor".into(), json!(turned as f64 / width as f64));
        }
    }
    // Biases that a config may have or not.
    if has("blk.0.attn_q.bias") {
        config.insert("attention_bias".into(), json!(true));
    }
    if let Some(pattern) = get("attention.sliding_window_pattern").and_then(Value::as_array) {
        let slides = |value: &Value| matches!(value, Value::Bool(true)) || value.as_u64().is_some_and(|v| v > 0);
        let layers = pattern.iter().map(|value| if slides(value) { "sliding_attention" } else { "full_attention" });
        config.insert("layer_types".into(), json!(layers.collect::<Vec<_>>()));
    }
    if let Some(width) = split.map(|tensor| tensor.shape.last().copied()) {
        config.entry("moe_intermediate_size").or_insert(json!(width));
    }
    states::read(header, name, &mut config);
    rope(header, name, &mut config);
    Json::Object(config)
}

/// How the rotary embedding is stretched.
fn rope(header: &Header, name: &str, config: &mut Map<String, Json>) {
    let get = |key: &str| header.get(&format!("{name}.rope.scaling.{key}"));
    let has = |tensor: &str| header.tensors.iter().any(|own| own.name == tensor);
    let original = get("original_context_length").and_then(Value::as_u64);
    if has("rope_freqs.weight") {
        let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": original.unwrap_or(8192)});
        config.insert("rope_scaling".into(), scaling);
        return;
    }
    if let Some(original) = original {
        config.insert("original_max_position_embeddings".into(), json!(original));
    }
    let kind = get("type").and_then(Value::as_str).filter(|kind| *kind == "yarn");
    if let (Some(kind), Some(factor)) = (kind, get("factor").and_then(plain)) {
        let scaling = json!({"rope_type": kind, "factor": factor, "original_max_position_embeddings": original});
        config.insert("rope_scaling".into(), scaling);
    }
}

/// A number, a flag or a text; of an array of numbers the largest, as configs have one for all layers.
fn plain(value: &Value) -> Option<Json> {
    Some(match value {
        Value::Unsigned(number) => json!(number),
        Value::Signed(number) => json!(number),
        // Metadata are single precision: the decimal that was meant.
        Value::Float(number) => json!((*number as f32).to_string().parse::<f64>().unwrap_or(*number)),
        Value::Bool(flag) => json!(flag),
        Value::Text(text) => json!(text),
        Value::Array(all) => json!(all.iter().filter_map(Value::as_u64).max()?),
        Value::LongText { .. } | Value::LongArray { .. } => return None,
    })
}
