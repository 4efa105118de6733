//! The small models of torchtitan's own tests, which its first example trains (models/*/__init__.py, `debugmodel`; the same
//! sizes in 0.2 and in August 2026).

use serde_json::{Value, json};

/// The config of a debug flavor in transformers' words. What comes after an underscore is how it attends or talks.
pub(super) fn config(family: &str, flavor: &str) -> Option<Value> {
    let rest = flavor.strip_prefix("debugmodel")?;
    let mut config = match (family, rest.starts_with("_moe")) {
        ("llama3", false) => json!({"model_type": "llama", "num_hidden_layers": 6, "num_key_value_heads": 16,
            "intermediate_size": 768, "rope_theta": 500_000, "max_position_embeddings": 131_072}),
        ("qwen3", false) => json!({"model_type": "qwen3", "num_hidden_layers": 8, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 4096, "tie_word_embeddings": true}),
        ("qwen3", true) => json!({"model_type": "qwen3_moe", "num_hidden_layers": 8, "num_key_value_heads": 8,
            "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8,
            "max_position_embeddings": 4096, "tie_word_embeddings": false}),
        ("deepseek_v3", false) => {
            json!({"model_type": "deepseek_v2", "num_hidden_layers": 6, "num_key_value_heads": 16,
            "intermediate_size": 1024, "moe_intermediate_size": 256, "first_k_dense_replace": 1,
            "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "topk_method": "greedy",
            "q_lora_rank": null, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "max_position_embeddings": 16_384})
        }
        _ => return None,
    };
    config["_name_or_path"] = json!(format!("torchtitan's {family} {flavor}"));
    config["hidden_size"] = json!(256);
    config["num_attention_heads"] = json!(16);
    config["vocab_size"] = json!(2048);
    Some(config)
}
