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
    /// Tokens that a cache allocated ahead of time has room for; `None`: it grows.
    pub static_cache: Option<u64>,
    /// Whether every sample brings its own positions, as `generate` gives them.
    pub position_ids: bool,
    /// Whether labels are given and a loss is computed.
    pub labels: bool,
    /// Whether the batch brings a 2-D attention mask.
    pub mask: bool,
    /// Images of the whole batch.
    pub images: Option<Images>,
    /// Audio frames per sample (mel frames for spectrogram models, samples for waveform models).
    pub audio_frames: Option<u64>,
    /// Logits of so many last positions only, as `generate` asks (`logits_to_keep`); `None`: of all.
    pub last_logits: Option<u64>,
    /// Sequences of a decoder per sample of its encoder (beams).
    pub beams: u64,
    /// Whether the encoder's states come with the batch, out of an earlier pass.
    pub encoded: bool,
    /// What becomes of parameters that layers share.
    pub sharing: Sharing,
    /// Major and minor version of transformers; the newest that is known when absent.
    pub transformers: Option<[u32; 2]>,
    /// Whether flash-linear-attention is installed.
    pub linear_attention_kernels: bool,
    /// How pictures are made.
    pub making: Making,
}

/// What somebody asked of a pipeline of diffusers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Making {
    /// Whether the denoiser sees every picture twice.
    pub guided: bool,
    /// Whether an autoencoder takes large pictures tile by tile.
    pub tiles: bool,
    /// Whether it takes several one by one.
    pub slices: bool,
    /// Whether a UNet attends half of its heads at a time.
    pub sliced_attention: bool,
}

/// What becomes of a parameter that several layers share by name. Layers that share a whole module are not meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// It exists once.
    #[default]
    Once,
    /// The weight of a linear exists in every layer, as after replacing linears one by one.
    LinearsApart,
    /// It exists in every layer, as after wrapping layers one by one.
    Apart,
}

/// The images of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Images {
    /// How many images (or tiles, for models that cut them).
    pub count: u64,
    /// Height in pixels.
    pub height: u64,
    /// Width in pixels.
    pub width: u64,
    /// Frames (1 for a still).
    pub frames: u64,
}

/// How a processor cuts images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImagePatches {
    /// Pixels of a patch's side.
    pub side: u64,
    /// Patches of a token's side.
    pub merge: u64,
}

impl ImagePatches {
    /// Patches along a side of so many pixels: images are scaled to whole tokens (`smart_resize` of transformers'
    /// Qwen2-VL processor).
    pub fn along(self, pixels: u64) -> u64 {
        let token = self.side.saturating_mul(self.merge).max(1);
        (pixels.saturating_add(token / 2) / token).max(1).saturating_mul(self.merge)
    }
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
            static_cache: None,
            position_ids: false,
            labels: false,
            mask: false,
            images: None,
            audio_frames: None,
            last_logits: Some(1),
            beams: 1,
            encoded: false,
            sharing: Sharing::Once,
            transformers: None,
            linear_attention_kernels: false,
            making: Making::default(),
        }
    }

    /// How many positions a layer's keys span when `queries` new ones come: what its cache hands back
    /// (`get_mask_sizes` and `update` of transformers/cache_utils.py). `window` is that of a sliding or chunked layer.
    pub fn keys(&self, window: Option<u64>, queries: u64) -> u64 {
        let grown = self.past.saturating_add(queries);
        match (self.static_cache, window) {
            (None, None) => grown,
            (None, Some(window)) => self.past.min(window.saturating_sub(1)).saturating_add(queries),
            (Some(room), None) => room,
            (Some(room), Some(window)) => match window.min(room) {
                held if self.past >= held => held.saturating_add(queries).saturating_sub(1),
                held => grown.max(held),
            },
        }
    }

    /// The same without images and audio where `gone`: they went in with an earlier pass.
    pub fn without_media(self, gone: bool) -> Self {
        if gone { Self { images: None, audio_frames: None, ..self } } else { self }
    }

    /// Rows of the positions: one for all samples, or one each.
    pub fn position_rows(&self) -> u64 {
        if self.position_ids { self.batch } else { 1 }
    }
}
