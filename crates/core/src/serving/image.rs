//! Encoders of images, as far as an engine's profile run needs them.

use crate::model::facts::{ImageTokens, VideoTokens};
use crate::model::{Config, families};

/// What the largest image costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageEncoder {
    /// Positions of the text that it takes.
    pub tokens: u64,
    /// Patches of the encoder for each of them.
    pub merged: u64,
    /// Patches beyond that, where tokens are pooled.
    pub patches: u64,
    /// Tokens of a video, where the model sees some.
    pub video: Option<VideoTokens>,
    /// Numbers of the picture in a patch.
    pub pixels: u64,
    /// The encoder's width.
    pub hidden: u64,
    /// The width of its feed-forward.
    pub width: u64,
    /// Whether its positions are a table, whose rows are added to the patches.
    pub positions: bool,
    /// Widths of the text's stream that a token has: one, and one for every layer whose states go in as well.
    pub streams: u64,
    /// Whether pictures go through it one after the other.
    pub alone: bool,
    /// Images that a prompt may hold.
    pub per_prompt: u64,
}

impl ImageEncoder {
    /// Pictures of no more than so many pixels, where they come in any size: Qwen's (`smart_resize` of its processor).
    pub(super) fn bound(&mut self, pixels: u64) {
        if matches!(self.video, Some(VideoTokens::Fixed(_) | VideoTokens::Frames | VideoTokens::None)) {
            // A patch has three colours of two frames.
            let token = (self.pixels / 6).saturating_mul(self.merged).max(1);
            self.tokens = self.tokens.min(pixels / token).max(1);
            self.patches = self.tokens.saturating_mul(self.merged);
        }
    }
}

/// The encoder of a config; none where it has none, or where the size of an image is not known to us.
pub(super) fn encoder(config: &Config<'_>) -> Option<ImageEncoder> {
    let kind = families::facts(config.model_type()).image_tokens?;
    let vision = Config::new(config.get("vision_config")?).ok()?;
    let size = |keys: &[&str]| vision.size_or(keys, 0).ok().filter(|size| *size > 0);
    let hidden = size(&["embed_dim", "hidden_size"])?;
    let width = size(&["intermediate_size"]).unwrap_or(hidden.saturating_mul(4));
    let squares = || Some((size(&["image_size"])? / size(&["patch_size"])?).saturating_pow(2));
    let (tokens, merged, patches, video) = match kind {
        ImageTokens::Patches => (squares()?, 1, squares()?, None),
        ImageTokens::Pooled(usual) => (config.size_or(&["mm_tokens_per_image"], usual).ok()?, 1, squares()?, None),
        ImageTokens::Merged(tokens, video) => {
            let merged = vision.size_or(&["spatial_merge_size"], 2).ok()?.clamp(1, 64).pow(2);
            (tokens, merged, tokens.saturating_mul(merged), Some(video))
        }
        ImageTokens::Alone => {
            let tokens = vision.size_or(&["default_output_length"], 280).ok()?.clamp(1, 1 << 16);
            let merged = vision.size_or(&["pooling_kernel_size"], 3).ok()?.clamp(1, 64).pow(2);
            (tokens, merged, tokens.saturating_mul(merged), Some(VideoTokens::Stills))
        }
    };
    let alone = kind == ImageTokens::Alone;
    let frames = vision.size_or(&["temporal_patch_size"], if video.is_some() && !alone { 2 } else { 1 }).ok()?;
    let pixels = size(&["patch_size"]).unwrap_or(14).saturating_pow(2).saturating_mul(3).saturating_mul(frames);
    let streams = 1 + vision.sizes("deepstack_visual_indexes").ok().flatten().map_or(0, |layers| layers.len() as u64);
    let positions = video.is_some() && vision.has("num_position_embeddings");
    Some(ImageEncoder {
        tokens,
        merged,
        patches,
        video,
        pixels,
        hidden,
        width,
        positions,
        streams,
        alone,
        per_prompt: u64::MAX,
    })
}
