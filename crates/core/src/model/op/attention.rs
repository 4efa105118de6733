//! Variants of attention: masks, caches, and how the models' own code computes it.

use super::ParameterId;

/// Which positions see which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All before.
    Causal,
    /// All before, always as the additive mask of eager code: what `create_causal_mask` makes for a model without SDPA.
    CausalEager,
    /// All before, never left out where a kernel could do without (`allow_is_causal_skip=False`, Falcon).
    CausalKept,
    /// The last `n` before.
    Sliding(u64),
    /// The last `n` before, always as the additive mask of eager code.
    SlidingEager(u64),
    /// Those before in the same chunk of `n`.
    Chunked(u64),
    /// All, in both directions.
    Full,
    /// All within `n` on either side.
    FullSliding(u64),
    /// All before (or the last `n`), and the tokens of one image among themselves in both directions: a real mask always.
    Images(Option<u64>),
}

/// What a layer adds to its cache per token, or keeps whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CacheUpdate {
    /// What kind of cache it is.
    pub kind: CacheKind,
    /// Heads that are stored.
    pub heads: u64,
    /// Elements of a key per head.
    pub key_dim: u64,
    /// Elements of a value per head.
    pub value_dim: u64,
    /// Heads of true keys and values, where the code stores more (Falcon broadcasts before it caches).
    pub true_heads: u64,
}

/// Kinds of cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheKind {
    /// Grows with every token.
    Full,
    /// Grows up to a window.
    Sliding(u64),
    /// The compressed latent of multi-head latent attention (key: latent, value: rotary part); expanded sizes beside it.
    Latent {
        /// Elements per token and layer when stored as full heads, as transformers 4 and 5.17 do.
        expanded: u64,
    },
    /// Grows beside keys and values (index keys of sparse attention, one tensor); no part of the KV bytes per token.
    Index,
    /// Grows by one entry (one tensor) every so many tokens (DeepSeek-V4's folded keys); no part of the KV bytes per token.
    Folded {
        /// Tokens of an entry.
        every: u64,
    },
    /// Filled once from the encoder or the image.
    Cross,
    /// Does not grow: this many elements per sequence in fp32 or the model's type.
    State {
        /// Elements.
        elements: u64,
    },
}

/// Softmax attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Query heads per key head.
    pub groups: u64,
    /// Whether the module is causal when no mask is passed.
    pub causal: bool,
    /// Attention dropout, in thousandths.
    pub dropout_per_mille: u32,
    /// Scores are squashed by tanh.
    pub softcap: bool,
    /// A learned sink per head joins the softmax.
    pub sinks: Option<ParameterId>,
    /// How the model's own eager code computes it.
    pub eager: EagerStyle,
    /// Whether the family offers SDPA at all; without it, it always runs eager.
    pub sdpa: bool,
}

/// How a family's eager attention is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EagerStyle {
    /// Llama's: repeat keys and values, scores, scale, mask, softmax in fp32, cast, dropout.
    Fp32Softmax,
    /// GPT-2's: softmax in the model's type, then cast to the type of the values, then dropout.
    PlainSoftmax,
    /// BERT's and BART's: softmax in the model's type, dropout, no cast (autocast leaves both in fp32, and the product
    /// casts its input).
    UncastSoftmax,
    /// Falcon's own: with SDPA, `F.scaled_dot_product_attention` itself is called (keys of fewer heads broadcast, not
    /// repeated, no `enable_gqa`) and its output transposed without a copy. Eager: `q @ kᵀ`, divided in place,
    /// `softmax(scores + mask)` in the model's type, `@ v`. With a fifth input (ALiBi, `[batch, heads, 1, keys]`) eager
    /// goes through fp32: scores to fp32, plus ALiBi, times the scale in place, plus the mask, softmax to the
    /// model's type, dropout, `@ v`; SDPA ignores that input.
    Falcon,
}
