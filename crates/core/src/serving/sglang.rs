//! SGLang: weights and cache share a static fraction of the card; activations and graphs get the rest.

use serde::{Deserialize, Serialize};

use super::model::{Element, ServedModel};
use super::{Budget, Paged, Share, thousandths};
use crate::dtype::DType;

/// What SGLang is started with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SglangPlan {
    /// `--mem-fraction-static`, in thousandths; by the rule of `server_args.py` when absent.
    pub static_thousandths: Option<u64>,
    /// `--tp-size`.
    pub tensor_parallel: u64,
    /// `--context-length`.
    pub context: Option<u64>,
    /// `--chunked-prefill-size`.
    pub chunked_prefill: u64,
    /// `--cuda-graph-max-bs`.
    pub graph_batch: u64,
    /// The type of keys and values.
    pub cache_dtype: DType,
    /// What the card has, in bytes.
    pub memory: u64,
}

impl Default for SglangPlan {
    fn default() -> Self {
        Self {
            static_thousandths: None,
            tensor_parallel: 1,
            context: None,
            chunked_prefill: 8192,
            graph_batch: 256,
            cache_dtype: DType::BF16,
            memory: 80 << 30,
        }
    }
}

impl SglangPlan {
    /// What stays free by default (`_handle_gpu_memory_settings` of sglang/srt/server_args.py, 0.5): 512 MiB, 1.5 MiB per
    /// token of a prefill chunk, 2 MiB per captured sequence, 128 MiB per rank; on cards above 60 GiB at least 10 GiB.
    /// Data-parallel attention, speculation and piecewise graphs reserve more and are not counted.
    fn reserved(&self) -> u64 {
        let base = 512u64 << 20;
        let chunk = self.chunked_prefill.max(2048).saturating_mul(3 << 19);
        let graphs = self.graph_batch.saturating_mul(2 << 20);
        let ranks = self.tensor_parallel.max(1).saturating_mul(128 << 20);
        let reserved = base.saturating_add(chunk).saturating_add(graphs).saturating_add(ranks);
        if self.memory > 60 << 30 { reserved.max(10 << 30) } else { reserved }
    }

    /// The budget of a model.
    pub fn budget(&self, model: &ServedModel) -> Budget {
        let ranks = self.tensor_parallel.max(1);
        let granted = match self.static_thousandths {
            Some(fraction) => thousandths(self.memory, fraction),
            None => self.memory.saturating_sub(self.reserved()),
        };
        let length = self.context.unwrap_or(model.positions).max(1);
        Paged {
            engine: "SGLang 0.5".into(),
            granted,
            parts: vec![Share::new("weights", model.weights() / ranks)],
            bytes_per_token: model.bytes_per_token(Element::plain(self.cache_dtype), ranks),
            per_sequence: model.state_bytes(DType::BF16, DType::F32, ranks),
            block_size: 1,
            sequence: length,
            notes: vec!["by published rules; no recorded logs of this engine to score against".into()],
        }
        .budget()
    }
}
