//! A model out of Megatron-LM's arguments: its sizes stand in the line itself.
//!
//! Source: megatron/training/arguments.py (`validate_args`) for what is taken where an argument is absent.

use serde_json::{Value, json};

use super::super::reader::Reader;
use crate::source::catalogue;

/// A `config.json` of the decoder that the arguments describe; `None` where they describe none that is known.
pub(super) fn config(reader: &mut Reader<'_>) -> Option<Value> {
    let layers = reader.number("num_layers")?;
    let hidden = reader.number("hidden_size")?;
    let heads = reader.number("num_attention_heads")?.max(1);
    let Some(vocabulary) = vocabulary(reader) else {
        reader.notes.push(
            "the line tells the model's sizes but not its vocabulary's: --vocab-size, or a tokenizer that is known"
                .into(),
        );
        return None;
    };
    let shared = reader.number("moe_shared_expert_intermediate_size").unwrap_or(0) > 0;
    // Layers that are not all alike.
    let dealt = reader.get("moe_layer_freq").is_some_and(|every| *every != 1);
    if reader.is_on("multi_latent_attention") || shared || dealt {
        return None;
    }
    let gated = reader.is_on("swiglu");
    let rms = reader.text("normalization") == Some("RMSNorm");
    let width = reader.number("ffn_hidden_size").unwrap_or(match gated {
        true => hidden.saturating_mul(8) / 3 / 64 * 64,
        false => hidden.saturating_mul(4),
    });
    let groups = match reader.is_on("group_query_attention") {
        true => reader.number("num_query_groups").unwrap_or(1),
        false => heads,
    };
    let bias = !reader.is_on("disable_bias_linear") && reader.switch("add_bias_linear").unwrap_or(true);
    let positions = reader.number("max_position_embeddings").or_else(|| reader.number("seq_length")).unwrap_or(2048);
    let rotary = reader.is_on("use_rotary_position_embeddings")
        || [reader.text("position_embedding_type"), reader.text("position_embedding")].contains(&Some("rope"));
    let tied = !reader.is_on("untie_embeddings_and_output_weights");
    let mut config = json!({
        "_name_or_path": "the line's own model", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": groups, "head_dim": reader.number("kv_channels").unwrap_or(hidden / heads),
        "intermediate_size": width, "vocab_size": vocabulary, "max_position_embeddings": positions.max(1),
        "tie_word_embeddings": tied, "hidden_act": "silu",
    });
    let mut put =
        |values: Value| values.as_object().into_iter().flatten().for_each(|(key, value)| config[key] = value.clone());
    let (norms, biased) = (reader.is_on("qk_layernorm"), reader.is_on("add_qkv_bias") || bias);
    let experts = reader.number("num_experts").filter(|experts| *experts > 0);
    let kind = match (experts, gated) {
        (Some(experts), true) => {
            let top = reader.number("moe_router_topk").unwrap_or(2);
            let each = reader.number("moe_ffn_hidden_size").unwrap_or(width);
            put(
                json!({"num_experts_per_tok": top, "moe_intermediate_size": each, "decoder_sparse_step": 1, "mlp_only_layers": []}),
            );
            if norms {
                put(json!({"num_experts": experts, "norm_topk_prob": true}));
                "qwen3_moe"
            } else {
                put(json!({"num_local_experts": experts, "intermediate_size": each}));
                "mixtral"
            }
        }
        (Some(_), false) => return None,
        (None, true) if norms => "qwen3",
        (None, true) if reader.is_on("add_qkv_bias") && !bias => "qwen2",
        (None, true) => {
            put(json!({"attention_bias": biased, "mlp_bias": bias}));
            "llama"
        }
        (None, false) => {
            put(
                json!({"use_bias": bias, "hidden_act": "gelu_pytorch_tanh", "embedding_dropout": 0.0, "residual_dropout": 0.0,
                "attention_dropout": 0.0}),
            );
            "starcoder2"
        }
    };
    put(json!({"model_type": kind}));
    reader.notes.push(format!("the model is built of the line's own sizes, as one of {kind}; --model names another"));
    if rms != (kind != "starcoder2") {
        reader.say(
            "normalization",
            if rms { "norms are simulated as LayerNorm's" } else { "norms are simulated as RMSNorm's" },
        );
    }
    if !rotary {
        reader.say("position_embedding_type", "positions are simulated as rotary ones, which have no parameters");
    }
    Some(config)
}

/// Rows of the embedding before they are padded: said, or the tokenizer's.
fn vocabulary(reader: &mut Reader<'_>) -> Option<u64> {
    if let Some(size) = reader.number("padded_vocab_size").or_else(|| reader.number("vocab_size")) {
        return Some(size);
    }
    let named = reader.text("tokenizer_model").and_then(|name| {
        // A folder or a file is known by its name.
        let path = name.trim_end_matches('/').trim_end_matches("/tokenizer.model").trim_end_matches("/tokenizer.json");
        catalogue::find(path).or_else(|| catalogue::find(catalogue::kin(path)?))
    });
    // The older way: GPT-2's two files.
    let files = reader.has("vocab_file") && reader.has("merge_file");
    match reader.text("tokenizer_type").or(files.then_some("GPT2BPETokenizer"))? {
        "GPT2BPETokenizer" => Some(50257),
        "BertWordPieceLowerCase" => Some(30522),
        "BertWordPieceCase" => Some(28996),
        "Llama2Tokenizer" => Some(32000),
        "Llama3Tokenizer" => Some(128_256),
        "TikTokenizer" => Some(131_072),
        _ => named?.config["vocab_size"].as_u64(),
    }
}
