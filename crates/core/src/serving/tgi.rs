//! Text Generation Inference: a warm-up prefill of the largest batch, then what is free becomes blocks, but a tenth of the
//! card.

use serde::{Deserialize, Serialize};

use super::model::{Element, ServedModel};
use super::{Budget, Paged, Share, communication, thousandths};
use crate::dtype::DType;
use crate::plan::Gpu;

/// What the launcher is started with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TgiPlan {
    /// `--num-shard`.
    pub shards: u64,
    /// `--max-total-tokens`.
    pub max_total_tokens: Option<u64>,
    /// `--max-batch-prefill-tokens`.
    pub max_batch_prefill_tokens: u64,
    /// `--cuda-memory-fraction`, in thousandths.
    pub fraction_thousandths: u64,
    /// The type of keys and values.
    pub cache_dtype: DType,
    /// What the card has, in bytes.
    pub memory: u64,
    /// What a torch process holds on the card before it asks for memory (`Gpu::context`).
    pub process: u64,
}

impl Default for TgiPlan {
    fn default() -> Self {
        Self {
            shards: 1,
            max_total_tokens: None,
            max_batch_prefill_tokens: 4096,
            fraction_thousandths: 1000,
            cache_dtype: DType::F16,
            memory: 80 << 30,
            process: Gpu::h200().context(),
        }
    }
}

/// `TGI_WIGGLE_ROOM` (0.90 in text_generation_server/models/globals.py): this share of the card may be used, in
/// thousandths. What is free is counted from the whole card (`get_cuda_free_space` of utils/import_utils.py, v3.3.7).
const WIGGLE_ROOM: u64 = 900;

impl TgiPlan {
    /// The budget of a model.
    pub fn budget(&self, model: &ServedModel) -> Budget {
        let ranks = self.shards.max(1);
        let tokens = self.max_batch_prefill_tokens;
        // The warm-up prefill: hidden states, the feed-forward's halves and their product.
        let width = model.hidden.saturating_mul(3).saturating_add(model.width.saturating_mul(3) / ranks);
        let prefill = tokens.saturating_mul(width).saturating_mul(2);
        let weights = model.weights() / ranks;
        let context = self.process.saturating_add(communication(ranks));
        let usable = thousandths(self.memory, thousandths(self.fraction_thousandths, WIGGLE_ROOM));
        let kept = self.memory.saturating_sub(usable);
        Paged {
            engine: "TGI 3".into(),
            granted: self.memory,
            parts: vec![
                Share::new("weights", weights),
                Share::new("warm-up prefill", prefill),
                Share::new("context", context),
                Share::new("left free", kept),
            ],
            bytes_per_token: model.bytes_per_token(Element::plain(self.cache_dtype), ranks),
            per_sequence: model.state_bytes(DType::BF16, DType::F32, ranks),
            block_size: 1,
            sequence: self.max_total_tokens.unwrap_or(model.longest).max(1),
            notes: vec!["the warm-up prefill is an estimate; no recorded logs of this engine to score against".into()],
        }
        .budget()
    }
}
