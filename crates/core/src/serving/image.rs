//! Encoders of images, as far as an engine's profile run needs them.

use crate::model::facts::ImageTokens;
use crate::model::{Config, families};

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

/// The encoder of a config; none where it has none, or where the size of an image is not known to us.
pub(super) fn encoder(config: &Config<'_>) -> Option<ImageEncoder> {
    let tokens = families::facts(config.model_type()).image_tokens?;
    let vision = Config::new(config.get("vision_config")?).ok()?;
    let size = |keys: &[&str]| vision.size_or(keys, 0).ok().filter(|size| *size > 0);
    let hidden = size(&["embed_dim", "hidden_size"])?;
    let width = size(&["intermediate_size"]).unwrap_or(hidden.saturating_mul(4));
    let squares = || Some((size(&["image_size"])? / size(&["patch_size"])?).saturating_pow(2));
    let (tokens, patches) = match tokens {
        ImageTokens::Patches => (squares()?, squares()?),
        ImageTokens::Pooled(usual) => (config.size_or(&["mm_tokens_per_image"], usual).ok()?, squares()?),
        ImageTokens::Merged(tokens) => {
            let merged = vision.size_or(&["spatial_merge_size"], 2).ok()?.clamp(1, 64);
            (tokens, tokens.saturating_mul(merged * merged))
        }
    };
    Some(ImageEncoder { tokens, patches, hidden, width })
}
