//! Config keys that most families read the same way.

use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::op::Activation;

/// Width of a head: `head_dim`, else hidden divided by heads.
pub fn head_dim(config: &Config<'_>, hidden: u64, heads: u64) -> Result<u64, ModelError> {
    match config.size_or(&["head_dim"], 0)? {
        0 if heads == 0 => Err(config.refuse("num_attention_heads", "at least 1")),
        0 => Ok(hidden / heads),
        dim => Ok(dim),
    }
}

/// A positive size, for what is divided by.
pub fn positive(config: &Config<'_>, keys: &[&str], default: u64) -> Result<u64, ModelError> {
    match config.size_or(keys, default)? {
        0 => Err(config.refuse(keys.first().copied().unwrap_or_default(), "at least 1")),
        size => Ok(size),
    }
}

/// An activation by transformers' name for it.
pub fn activation(config: &Config<'_>, key: &str, default: &'static str) -> Result<Activation, ModelError> {
    Ok(match config.str_or(key, default) {
        "silu" | "swish" | "swiglu" => Activation::Silu,
        "gelu" | "gelu_pytorch_tanh" | "gelu_python_tanh" | "gelu_accurate" => Activation::Gelu,
        "gelu_new" => Activation::GeluNew,
        "gelu_fast" => Activation::GeluFast,
        "quick_gelu" => Activation::QuickGelu,
        "relu" => Activation::Relu,
        "relu2" => Activation::ReluSquared,
        "tanh" => Activation::Tanh,
        "sigmoid" => Activation::Sigmoid,
        "mish" => Activation::Mish,
        _ => return Err(config.refuse(key, "an activation vramcast knows (silu, gelu, gelu_new, relu, relu2, …)")),
    })
}

/// Rotated dimensions of a head: `partial_rotary_factor` under any of its names.
pub fn rotary_dim(config: &Config<'_>, head_dim: u64, default_factor: f64) -> Result<u64, ModelError> {
    let nested = config.section("rope_parameters");
    let factor = match (config.has("partial_rotary_factor"), config.has("rotary_pct")) {
        (true, _) => config.number("partial_rotary_factor", default_factor)?,
        (_, true) => config.number("rotary_pct", default_factor)?,
        _ => nested.number("partial_rotary_factor", default_factor)?,
    };
    Ok((head_dim as f64 * factor.clamp(0.0, 1.0)) as u64)
}

/// Whether rotary frequencies depend on how long the batch is (`dynamic_rope_update` of transformers).
pub fn follows_length(config: &Config<'_>) -> bool {
    let kind = |section: &str| {
        let section = config.section(section);
        section.get("rope_type").or_else(|| section.get("type")).and_then(|kind| kind.as_str())
    };
    let kind = kind("rope_parameters").or_else(|| kind("rope_scaling"));
    kind.is_some_and(|kind| kind.contains("dynamic") || kind == "longrope")
}

/// The window of every layer by `layer_types`, or by the class's own rule where that key is absent.
///
/// `window` is what the layers named `sliding_attention` see; without one they see everything.
pub fn layer_windows(
    config: &Config<'_>,
    layers: u64,
    window: Option<u64>,
    slides: impl Fn(u64) -> bool,
) -> Result<Vec<Option<u64>>, ModelError> {
    let Some(types) = config.strings("layer_types")? else {
        return Ok((0..layers).map(|index| window.filter(|_| slides(index))).collect());
    };
    if types.len() as u64 != layers {
        return Err(config.refuse("layer_types", "one entry per layer"));
    }
    let window_of = |kind: &&str| match *kind {
        "sliding_attention" => Ok(window),
        "full_attention" => Ok(None),
        _ => Err(config.refuse("layer_types", "a list of full_attention and sliding_attention")),
    };
    types.iter().map(window_of).collect()
}

/// Key and value heads: `null` means as many as query heads, an absent key the class default; they divide the heads.
pub fn kv_heads(config: &Config<'_>, heads: u64, absent: u64) -> Result<u64, ModelError> {
    let key = "num_key_value_heads";
    match positive(config, &[key], if is_null(config, key) { heads } else { absent })? {
        kv_heads if heads.is_multiple_of(kv_heads) => Ok(kv_heads),
        kv_heads => Err(config.refuse(key, &format!("a divisor of {heads} heads (read as {kv_heads})"))),
    }
}

/// A window: `null` means none, an absent key the class default.
pub fn window(config: &Config<'_>, key: &str, absent: Option<u64>) -> Result<Option<u64>, ModelError> {
    match (config.has(key), is_null(config, key)) {
        (true, _) => config.size(&[key]).map(Some),
        (false, true) => Ok(None),
        (false, false) => Ok(absent),
    }
}

/// Whether a key is there as `null`, which some classes take for another thing than an absent key.
pub fn is_null(config: &Config<'_>, key: &str) -> bool {
    !config.has(key) && config.keys().any(|name| name == key)
}
