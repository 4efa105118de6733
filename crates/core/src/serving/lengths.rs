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
pub fn stated(model: &Model) -> Option<u64> {
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

/// Rows of every table of turns that vLLM makes (`get_rope` of rotary_embedding/__init__.py): as many as positions, more where
/// they are scaled, four times as many where images have positions of their own (`MRotaryEmbedding`).
pub(crate) fn tables(model: &Model) -> Vec<u64> {
    let Some(most) = stated(model) else { return Vec::new() };
    let config = text(model.config());
    let turns = scaling(config).unwrap_or(&Value::Null);
    // Layers of several kinds have turns of their own (transformers 5).
    let mut kinds: Vec<&Value> = turns.as_object().into_iter().flat_map(|all| all.values()).collect();
    kinds.retain(|kind| kind.is_object());
    if !kinds.is_empty() {
        let first = |at: &usize| !kinds[..*at].contains(&kinds[*at]);
        // Heads of Gemma 4's full layers are wider, and turned whole (`Gemma4RotaryEmbedding`).
        let wider = ["global_head_dim", "head_dim"].map(|key| config[key].as_u64().filter(|dim| *dim > 0));
        let wider = if let [Some(full), Some(own)] = wider { full.div_ceil(own) } else { 1 };
        let table = |at: usize| match kind(kinds[at]) {
            "proportional" => most.saturating_mul(wider),
            _ => rows(kinds[at], most),
        };
        return (0..kinds.len()).filter(first).map(table).collect();
    }
    let windows = config["rope_local_base_freq"].is_number() || model.family().facts.turns_windows;
    // Layers that fold keys turn by another base (`build_deepseek_v4_rope` of models/deepseek_v4/common/rope.py).
    let folds = config["compress_rope_theta"].is_number().then(|| rows(turns, most));
    std::iter::once(rows(turns, most)).chain(windows.then_some(most)).chain(folds).collect()
}

fn rows(turns: &Value, most: u64) -> u64 {
    let (kind, factor) = (kind(turns), turns["factor"].as_f64().unwrap_or(1.0));
    let first = turns["original_max_position_embeddings"].as_u64().unwrap_or(most);
    let images = if turns["mrope_section"].is_array() { 4 } else { 1 };
    match kind {
        "linear" | "dynamic" => (most as f64 * factor) as u64,
        "yarn" | "deepseek_yarn" => ((first.saturating_mul(images)) as f64 * factor) as u64,
        // Short turns and long ones, one after the other (`Phi3LongRoPEScaledRotaryEmbedding`).
        "su" | "longrope" => first.saturating_add(most),
        "default" | "mrope" | "" => most.saturating_mul(images),
        _ => most,
    }
}

fn scaling(config: &Value) -> Option<&Value> {
    ["rope_scaling", "rope_parameters"].iter().map(|key| &config[*key]).find(|inner| inner.is_object())
}

fn kind(turns: &Value) -> &str {
    ["rope_type", "type"].iter().find_map(|key| turns[*key].as_str()).unwrap_or_default()
}

fn text(config: &Value) -> &Value {
    let inner = ["text_config", "llm_config", "thinker_config"].iter().map(|key| &config[*key]);
    inner.into_iter().find(|inner| inner.is_object()).unwrap_or(config)
}

fn scaled(config: &Value, most: u64) -> u64 {
    let Some(scaling) = scaling(config) else { return most };
    let factor = scaling["factor"].as_f64().filter(|factor| *factor > 1.0);
    match (kind(scaling), factor) {
        ("default" | "su" | "longrope" | "llama3" | "mrope", _) | (_, None) => most,
        ("yarn" | "deepseek_yarn", Some(factor)) => {
            let first = scaling["original_max_position_embeddings"].as_u64().unwrap_or(most);
            most.max((first as f64 * factor) as u64)
        }
        (_, Some(factor)) => (most as f64 * factor) as u64,
    }
}
