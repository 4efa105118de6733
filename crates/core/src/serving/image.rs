//! Encoders of images, as far as an engine's profile run needs them.

use crate::model::Config;

/// What the largest image costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageEncoder {
    /// Positions of the text that it takes.
    pub tokens: u64,
    /// Patches that the encoder sees.
    pub patches: u64,
    /// The encoder's width.
    pub hidden: u64,
    /// The width of its feed-forward.
    pub width: u64,
}

/// Tokens of the largest image by default of Qwen's processors: 12,845,056 pixels in squares of 28, or 16,777,216 of 32
/// (`size.longest_edge` of their preprocessor_config.json).
const QWEN_TOKENS: u64 = 16_384;

/// The encoder of a config; none where it has none, or where the size of an image is not known to us.
pub(super) fn encoder(config: &Config<'_>) -> Option<ImageEncoder> {
    let kind = config.get("model_type").and_then(|kind| kind.as_str())?;
    let vision = Config::new(config.get("vision_config")?).ok()?;
    let size = |keys: &[&str]| vision.size_or(keys, 0).ok().filter(|size| *size > 0);
    let hidden = size(&["embed_dim", "hidden_size"])?;
    let width = size(&["intermediate_size"]).unwrap_or(hidden.saturating_mul(4));
    let squares = || Some((size(&["image_size"])? / size(&["patch_size"])?).saturating_pow(2));
    let (tokens, patches) = match kind {
        "gemma3" => (config.size_or(&["mm_tokens_per_image"], 256).ok()?, squares()?),
        "llava" => (squares()?, squares()?),
        kind if kind.starts_with("qwen") => {
            let merged = vision.size_or(&["spatial_merge_size"], 2).ok()?.clamp(1, 64);
            (QWEN_TOKENS, QWEN_TOKENS.saturating_mul(merged * merged))
        }
        _ => return None,
    };
    Some(ImageEncoder { tokens, patches, hidden, width })
}
