//! TensorRT-LLM: a fraction of what is free after engine and activations becomes paged cache (0.9 by default, its
//! documentation of `KvCacheConfig`). Its activations are fixed at build time by TensorRT's own planner; ours are an estimate.

use serde::{Deserialize, Serialize};

use super::model::{Element, ServedModel};
use super::{Budget, Paged, Share, communication, thousandths};
use crate::dtype::DType;
use crate::plan::Gpu;

/// What the engine is built and started with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TensorRtLlmPlan {
    /// `--tp_size`.
    pub tensor_parallel: u64,
    /// `max_num_tokens`.
    pub max_num_tokens: u64,
    /// `max_batch_size`.
    pub max_batch_size: u64,
    /// `max_seq_len`.
    pub max_seq_len: Option<u64>,
    /// `free_gpu_memory_fraction`, in thousandths.
    pub free_thousandths: u64,
    /// The type of keys and values.
    pub cache_dtype: DType,
    /// What the card has, in bytes.
    pub memory: u64,
    /// What a torch process holds on the card before it asks for memory (`Gpu::context`).
    pub process: u64,
}

impl Default for TensorRtLlmPlan {
    fn default() -> Self {
        Self {
            tensor_parallel: 1,
            max_num_tokens: 8192,
            max_batch_size: 2048,
            max_seq_len: None,
            free_thousandths: 900,
            cache_dtype: DType::BF16,
            memory: 80 << 30,
            process: Gpu::h200().context(),
        }
    }
}

/// Tokens of a block (`tokens_per_block`).
const BLOCK: u64 = 32;

impl TensorRtLlmPlan {
    /// The budget of a model.
    pub fn budget(&self, model: &ServedModel) -> Budget {
        let ranks = self.tensor_parallel.max(1);
        let weights = model.weights() / ranks;
        let width = model.hidden.saturating_mul(4).saturating_add(model.width.saturating_mul(2) / ranks);
        let activations = self
            .max_num_tokens
            .saturating_mul(width)
            .saturating_mul(2)
            .saturating_add(self.max_batch_size.saturating_mul(model.vocabulary).saturating_mul(4) / ranks);
        let context = self.process.saturating_add(communication(ranks));
        let free = self.memory.saturating_sub(weights).saturating_sub(activations).saturating_sub(context);
        let kept = free - thousandths(free, self.free_thousandths);
        Paged {
            engine: "TensorRT-LLM 1".into(),
            granted: self.memory,
            parts: vec![
                Share::new("weights", weights),
                Share::new("activations", activations),
                Share::new("context", context),
                Share::new("left free", kept),
            ],
            bytes_per_token: model.bytes_per_token(Element::plain(self.cache_dtype), ranks),
            // `mamba_ssm_cache_dtype`: auto is what the config says, else the model's own type.
            per_sequence: model.state_bytes(DType::BF16, model.state_dtype.unwrap_or(DType::BF16), ranks),
            block_size: BLOCK,
            sequence: self.max_seq_len.unwrap_or(model.longest).max(1),
            notes: vec!["activations are an estimate; no recorded logs of this engine to score against".into()],
        }
        .budget()
    }
}
