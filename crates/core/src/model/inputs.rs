//! What a forward pass runs on.

/// The sizes of a batch, and what the pass is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inputs {
    /// Samples.
    pub batch: u64,
    /// Tokens per sample (of the encoder where there is one).
    pub seq: u64,
    /// Tokens per sample of a decoder beside an encoder.
    pub target_seq: u64,
    /// Tokens already in the cache.
    pub past: u64,
    /// Whether keys and values are cached.
    pub cache: bool,
    /// Whether labels are given and a loss is computed.
    pub labels: bool,
    /// Whether the batch brings a 2-D attention mask.
    pub mask: bool,
    /// Images of the whole batch.
    pub images: Option<Images>,
    /// Audio frames per sample (mel frames for spectrogram models, samples for waveform models).
    pub audio_frames: Option<u64>,
    /// Logits of the last position only, as `generate` asks.
    pub last_logits_only: bool,
}

/// The images of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Images {
    /// How many images (or tiles, for models that cut them).
    pub count: u64,
    /// Height in pixels, or in patches for models fed with patches.
    pub height: u64,
    /// Width in pixels, or in patches for models fed with patches.
    pub width: u64,
    /// Frames (1 for a still).
    pub frames: u64,
}

impl Inputs {
    /// A small batch that touches every part of a model: what its parameters are does not depend on it.
    pub fn inventory() -> Self {
        Self {
            batch: 1,
            seq: 8,
            target_seq: 8,
            past: 0,
            cache: true,
            labels: false,
            mask: false,
            images: None,
            audio_frames: None,
            last_logits_only: true,
        }
    }
}
