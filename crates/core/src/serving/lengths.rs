//! The longest sequence that a config allows.

use serde_json::Value;

use crate::model::Model;

/// Tokens of a sequence where a config says none: vLLM's `default_max_len` (config/model.py, `_get_and_verify_max_len`),
/// SGLang's `get_context_length` and the converters of llama.cpp (Falcon) take as many.
pub const UNSTATED: u64 = 2048;

/// What engines read it from (vLLM's `possible_keys`); the smallest counts.
const KEYS: [&str; 7] = [
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
];

/// Positions that a model's config states, or its class does.
pub(crate) fn stated(model: &Model) -> Option<u64> {
    let config = text(model.config());
    // Cohere's is the length it was trained for, and stands over the others.
    let trained = config["model_max_length"].as_u64();
    let least = || KEYS.iter().filter_map(|key| config[*key].as_u64()).min();
    trained.or_else(least).or(model.family().facts.positions)
}

/// The longest sequence that a model's config allows, scaled positions counted (`_get_and_verify_max_len` of vLLM 0.11).
pub(crate) fn longest(model: &Model) -> Option<u64> {
    let most = stated(model)?;
    Some(if model.family().facts.scaled_positions { most } else { scaled(text(model.config()), most) })
}

fn text(config: &Value) -> &Value {
    let inner = ["text_config", "llm_config", "thinker_config"].iter().map(|key| &config[*key]);
    inner.into_iter().find(|inner| inner.is_object()).unwrap_or(config)
}

fn scaled(config: &Value, most: u64) -> u64 {
    let scaling = ["rope_scaling", "rope_parameters"].iter().map(|key| &config[*key]).find(|inner| inner.is_object());
    let Some(scaling) = scaling else { return most };
    let kind = ["rope_type", "type"].iter().find_map(|key| scaling[*key].as_str()).unwrap_or_default();
    let factor = scaling["factor"].as_f64().filter(|factor| *factor > 1.0);
    match (kind, factor) {
        ("default" | "su" | "longrope" | "llama3" | "mrope", _) | (_, None) => most,
        ("yarn" | "deepseek_yarn", Some(factor)) => {
            let first = scaling["original_max_position_embeddings"].as_u64().unwrap_or(most);
            most.max((first as f64 * factor) as u64)
        }
        (_, Some(factor)) => (most as f64 * factor) as u64,
    }
}
