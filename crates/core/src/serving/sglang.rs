//! SGLang: weights and cache share a static fraction of the card; activations and graphs get the rest.
//!
//! Rules of 0.5 (sglang/srt/server_args.py of v0.5.18 `_handle_gpu_memory_settings`, and
//! mem_cache/kv_cache_configurator.py `_profile_available_bytes`): the fraction is of what is free before weights are
//! loaded; sliding layers get 0.8 tokens for each of the others (`swa_full_tokens_ratio`), states of constant size 0.9
//! bytes for each of the cache (`mamba_full_memory_ratio`).

use serde::{Deserialize, Serialize};

use super::model::{Element, ServedModel, per_token};
use super::tensors::{Division, ServedTensor};
use super::{Budget, Paged, Share, communication, thousandths};
use crate::dtype::DType;
use crate::model::op::CacheKind;
use crate::plan::Gpu;

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
    /// `--chunked-prefill-size`; by the card when absent.
    pub chunked_prefill: Option<u64>,
    /// `--cuda-graph-max-bs`; by the card when absent.
    pub graph_batch: Option<u64>,
    /// `--dp-size`.
    pub replicas: u64,
    /// `--enable-dp-attention`.
    pub dp_attention: bool,
    /// `--page-size`.
    pub page_size: u64,
    /// Whether graphs are captured (not `--disable-cuda-graph`).
    pub captures: bool,
    /// The type of keys and values.
    pub cache_dtype: DType,
    /// What the card has, in bytes.
    pub memory: u64,
    /// What a torch process holds on the card before it asks for memory (`Gpu::context`).
    pub process: u64,
}

impl Default for SglangPlan {
    fn default() -> Self {
        Self {
            static_thousandths: None,
            tensor_parallel: 1,
            context: None,
            chunked_prefill: None,
            graph_batch: None,
            replicas: 1,
            dp_attention: false,
            page_size: 1,
            captures: true,
            cache_dtype: DType::BF16,
            memory: 80 << 30,
            process: Gpu::h200().context(),
        }
    }
}

/// Tokens of sliding layers for a thousand of the others.
const SLIDING: u64 = 800;
/// Bytes of states for a thousand of the cache.
const STATES: u64 = 900;
/// What a token of a prefill chunk is given (`_handle_gpu_memory_settings`): 1.5 MiB.
const ACTIVATIONS: u64 = 3 << 19;
/// What a captured sequence is given (`_handle_gpu_memory_settings`): 2 MiB.
const GRAPH: u64 = 2 << 20;
/// What a captured sequence of every replica of attention is given, half as much again where graphs hold over 300
/// (`_handle_gpu_memory_settings`, `enable_dp_attention`): 3 MiB.
const REPLICA: u64 = 3 << 20;

impl SglangPlan {
    /// Tokens of a prefill chunk and captured sequences by the card's memory.
    fn defaults(&self) -> [u64; 2] {
        let many = |few: u64, more: u64| if self.tensor_parallel < 4 { few } else { more };
        let [chunk, graphs] = match self.memory >> 30 {
            0..20 => [2048, 8],
            20..35 => [2048, many(24, 80)],
            35..60 => [4096, many(32, 160)],
            60..160 => [8192, many(256, 512)],
            _ => [16_384, 512],
        };
        [self.chunked_prefill.unwrap_or(chunk), self.graph_batch.unwrap_or(graphs)]
    }

    /// What stays free by default: 512 MiB, 1.5 MiB per token of a prefill chunk, 2 MiB per captured sequence, 128 MiB per
    /// rank, for replicas of attention 3 MiB per captured sequence of each and half as much again above 300
    /// (`reserve_for_graph_mb`); on cards above 60 GiB at least 10 GiB. Speculation and captured prefills reserve more and are not
    /// counted.
    fn reserved(&self) -> u64 {
        let [chunk, graphs] = self.defaults();
        let base = 512u64 << 20;
        let chunk = chunk.max(2048).saturating_mul(ACTIVATIONS);
        let padding = if graphs > 300 { REPLICA + REPLICA / 2 } else { REPLICA };
        let padded = graphs.saturating_mul(self.attention()).saturating_mul(padding);
        let padded = if self.attention() > 1 { padded } else { 0 };
        let graphs = if self.captures { graphs.saturating_mul(GRAPH) } else { 0 }.saturating_add(padded);
        let ranks = self.tensor_parallel.max(1).saturating_mul(128 << 20);
        let reserved = base.saturating_add(chunk).saturating_add(graphs).saturating_add(ranks);
        if self.memory > 60 << 30 { reserved.max(10 << 30) } else { reserved }
    }

    /// Replicas of attention: the same cards are in groups, each with sequences of its own. One is none
    /// (`_data_parallelism_defaults` of arg_groups/overrides.py).
    fn attention(&self) -> u64 {
        if self.dp_attention { self.replicas.max(1) } else { 1 }
    }

    /// A card's weights: attention and the table of words are split within a group, the rest, the head too, over all cards
    /// (`attn_tp_size` of models/qwen3_moe.py and deepseek_v2.py, `use_attn_tp_group` of vocab_parallel_embedding.py).
    fn weights(&self, model: &ServedModel) -> u64 {
        let ranks = self.tensor_parallel.max(1);
        let of_group = |tensor: &&ServedTensor| match tensor.layer {
            Some(_) => ["attn.", "attention."].iter().any(|name| tensor.name.contains(name)),
            None => tensor.division == Division::Table && !model.is_head(tensor),
        };
        let own = model.tensors.iter().filter(of_group).map(ServedTensor::bytes).fold(0u64, u64::saturating_add);
        let own = if self.attention() > 1 { own } else { 0 };
        let group = (ranks / self.attention()).max(1);
        (model.weights().saturating_sub(own) / ranks).saturating_add(own / group)
    }

    /// The fraction by default, rounded to thousandths as SGLang does.
    fn fraction(&self) -> u64 {
        let left = u128::from(self.memory.saturating_sub(self.reserved())) * 1000;
        let memory = u128::from(self.memory.max(1));
        u64::try_from((left + memory / 2) / memory).unwrap_or(1000)
    }

    /// The budget of a model.
    pub fn budget(&self, model: &ServedModel) -> Budget {
        let ranks = self.tensor_parallel.max(1);
        let free = self.memory.saturating_sub(self.process).saturating_sub(communication(ranks));
        let granted = thousandths(free, self.static_thousandths.unwrap_or_else(|| self.fraction()));
        let weights = self.weights(model);
        // Cards that keep one sequence's cache together.
        let group = (ranks / self.attention()).max(1);
        let mut parts = vec![Share::new("weights", weights)];
        let state = model.state_bytes(DType::BF16, DType::F32, group);
        let left = granted.saturating_sub(weights);
        let states = if state > 0 { thousandths(left, STATES * 1000 / (1000 + STATES)) } else { 0 };
        if states > 0 {
            parts.push(Share::new("states of sequences", states));
        }
        let mut budget = Paged {
            engine: "SGLang 0.5".into(),
            granted,
            parts,
            bytes_per_token: self.bytes_per_token(model, group),
            per_sequence: 0,
            block_size: self.page_size.max(1),
            sequence: self.context.unwrap_or(model.longest).max(1),
            notes: Vec::new(),
        }
        .budget();
        if let Some(slots) = states.checked_div(state) {
            budget.concurrency_thousandths = budget.concurrency_thousandths.min(slots.saturating_mul(1000));
            budget.fits &= slots > 0;
        }
        // What stays outside the pool, by the rule that leaves room for it; the process before it takes the rest.
        let [chunk, captured] = self.defaults();
        let chunk = chunk / self.attention();
        let captured = if self.captures { captured } else { 0 };
        // Embeddings, residual and norm; the feed-forward's two halves and their product.
        let widest = model.hidden.saturating_mul(3).saturating_add(model.width.saturating_mul(3) / ranks);
        budget.parts.push(Share::new("activations", chunk.saturating_mul(widest).saturating_mul(2)));
        budget.parts.push(Share::new("CUDA graphs", captured.saturating_mul(GRAPH)));
        budget.parts.push(Share::new("outside torch", self.process.saturating_add(communication(ranks))));
        budget.notes.push(
            "activations are those of a chunk in the widest layer, graphs what SGLang's own rule leaves for them"
                .into(),
        );
        match (self.dp_attention, self.replicas) {
            (true, 0..2) => {
                budget.notes.push("dp_attention changes nothing: there is one replica (--data-parallel-size)".into())
            }
            (true, replicas) => {
                budget.notes.push(format!(
                    "sizes and tokens are of one card: {replicas} replicas of attention hold as many each"
                ));
            }
            (false, 2..) => budget.notes.push("replicas are alike: sizes are of one card".into()),
            _ => {}
        }
        if model.multimodal {
            budget.notes.push("an image encoder lowers the default fraction, which is not counted".into());
        }
        budget
    }

    fn bytes_per_token(&self, model: &ServedModel, ranks: u64) -> u64 {
        let element = Element::plain(self.cache_dtype);
        let caches = || model.layers.iter().flat_map(|layer| &layer.caches);
        let slides = |kind: CacheKind| matches!(kind, CacheKind::Sliding(_));
        let mixed = caches().any(|cache| slides(cache.kind)) && caches().any(|cache| cache.kind == CacheKind::Full);
        let sum = |sliding: bool| -> u64 {
            let own = caches().filter(|cache| slides(cache.kind) == sliding);
            own.map(|cache| per_token(cache, element, ranks)).fold(0, u64::saturating_add)
        };
        let sliding = if mixed { thousandths(sum(true), SLIDING) } else { sum(true) };
        sum(false).saturating_add(sliding)
    }
}
