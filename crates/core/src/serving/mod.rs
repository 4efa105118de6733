//! Serving engines as budgets: what each sets aside for weights, cache and scratch, by its own published rules.
//!
//! These engines plan their memory ahead, so what they need follows from rules, not from running a program; the rules
//! are data with the version they hold for and where they were read.
//!
//! | module | engine |
//! |---|---|
//! | [`model`] | a model as an engine sees it: weights by layer, a cache by layer |
//! | [`tensors`] | its weights one by one |
//! | `image` | its encoder of images |
//! | [`lengths`] | the longest sequence that it allows |
//! | [`vllm`] | vLLM: profile, blocks, hybrid groups |
//! | [`llama_cpp`] | llama.cpp and Ollama: buffers by device |
//! | [`sglang`], [`tgi`], [`tensorrt_llm`] | their budgets over the same cache |
//! | `local` | from what llama.cpp and Ollama are started with to their buffers |
//! | [`start`] | from what an engine is started with to what it sets aside |
//! | [`solve`] | largest batch, context or concurrency; smallest card |

pub(crate) mod ggml;
mod image;
pub mod lengths;
pub mod llama_cpp;
mod local;
pub mod model;
pub mod sglang;
pub mod solve;
pub mod start;
pub mod tensorrt_llm;
pub mod tensors;
pub mod tgi;
pub mod vllm;

use serde::Serialize;

pub use model::{ServedLayer, ServedModel, WeightFormat};
pub use start::{Served, start};

/// What an engine would do with a model on a card. All sizes are bytes per card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Budget {
    /// The engine and the version whose rules were used.
    pub engine: String,
    /// What the engine may use of the card.
    pub granted: u64,
    /// What it holds, by name, largest decisions first.
    pub parts: Vec<Share>,
    /// What is left for keys and values.
    pub cache: u64,
    /// What is missing before a cache of any size fits, or the one of a size that was given.
    pub missing: u64,
    /// Tokens the cache holds, as the engine prints them.
    pub cache_tokens: u64,
    /// Blocks or pages of the cache.
    pub blocks: u64,
    /// Tokens in a block.
    pub block_size: u64,
    /// Tokens of a sequence of full length.
    pub full_length: u64,
    /// What the cache takes for one of those.
    pub full_bytes: u64,
    /// Sequences of full length that run at once, in thousandths.
    pub concurrency_thousandths: u64,
    /// Whether one sequence of full length fits.
    pub fits: bool,
    /// The longest sequence that fits.
    pub largest_sequence: u64,
    /// What a reader should know.
    pub notes: Vec<String>,
}

/// One thing an engine holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Share {
    /// What it is.
    pub name: String,
    /// Bytes per card.
    pub bytes: u64,
}

impl Share {
    /// A named size.
    pub fn new(name: impl Into<String>, bytes: u64) -> Self {
        Self { name: name.into(), bytes }
    }
}

/// What further ranks add to a torch process: 0.55 and 0.54 GiB outside torch on two H100 against 0.13 on one (vLLM 0.11.0,
/// the first four rows of truth/external/vllm_logs.json). NCCL, its kernels and the engine's own reductions together, so
/// it is another sum than a training process has (memory/process.rs).
pub(crate) fn communication(ranks: u64) -> u64 {
    if ranks > 1 { 424 << 20 } else { 0 }
}

/// `part` of `whole` by a fraction in thousandths.
pub(crate) fn thousandths(whole: u64, part: u64) -> u64 {
    u64::try_from(u128::from(whole) * u128::from(part) / 1000).unwrap_or(u64::MAX)
}

/// A budget over a cache of plain pages: every token costs the same.
pub(crate) struct Paged {
    pub(crate) engine: String,
    pub(crate) granted: u64,
    pub(crate) parts: Vec<Share>,
    pub(crate) bytes_per_token: u64,
    pub(crate) per_sequence: u64,
    pub(crate) block_size: u64,
    pub(crate) sequence: u64,
    pub(crate) notes: Vec<String>,
}

impl Paged {
    pub(crate) fn budget(self) -> Budget {
        let held = self.parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.bytes));
        let cache = self.granted.saturating_sub(held);
        let missing = held.saturating_sub(self.granted);
        let block = self.bytes_per_token.saturating_mul(self.block_size).max(1);
        let blocks = if self.bytes_per_token == 0 { 0 } else { cache / block };
        let tokens = blocks.saturating_mul(self.block_size);
        let need = self
            .sequence
            .div_ceil(self.block_size.max(1))
            .saturating_mul(block)
            .saturating_add(self.per_sequence)
            .max(1);
        let concurrency = u128::from(cache) * 1000 / u128::from(need);
        Budget {
            engine: self.engine,
            granted: self.granted,
            parts: self.parts,
            cache,
            missing,
            cache_tokens: tokens,
            blocks,
            block_size: self.block_size,
            full_length: self.sequence,
            full_bytes: need,
            concurrency_thousandths: u64::try_from(concurrency).unwrap_or(u64::MAX),
            fits: need <= cache,
            largest_sequence: cache.saturating_sub(self.per_sequence) / block * self.block_size,
            notes: self.notes,
        }
    }
}
