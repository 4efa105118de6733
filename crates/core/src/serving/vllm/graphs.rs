//! Graphs that vLLM captures, as it foresees them before it makes the cache (`profile_cudagraph_memory`): of graphs over pieces
//! and of whole ones the two largest are captured on trial; the first shows what all share, the second what each further one takes.

use super::Card;
use super::profile::two;
use crate::serving::model::ServedModel;

/// What the driver holds of a graph for every layer, without experts and with: the median of what vLLM saw of second graphs in
/// 57 logs of an H100 (truth/external/found, 0.13 to 0.22 and 0.21 to 0.33 MiB; docs/open-constants.md).
const NODES: [u64; 2] = [160 << 10, 256 << 10];
/// What a further graph counts at least (`profile_cudagraph_memory` of gpu_model_runner.py).
const LEAST: u64 = 1 << 20;
/// Parts that FlashAttention 3 splits a sequence into inside a graph, whose outputs it keeps in fp32
/// (`flash_attn_max_num_splits_for_cuda_graph` of vllm/config/attention.py).
const SPLITS: u64 = 32;
/// FlashInfer's workspace, made when it first attends (`FLASHINFER_WORKSPACE_BUFFER_SIZE` of vllm/envs.py).
const FLASHINFER: u64 = 394 << 20;
/// Kernels that are loaded only when graphs are captured: 0.25 GiB outside torch on an H100 since graphs are captured while
/// vLLM profiles, 0.13 before (Qwen3-14B by 0.15 to 0.18 in truth/external/found), less the graphs of the trial.
const KERNELS: u64 = 97 << 20;

/// What is captured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Graphs<'a> {
    pub(super) model: &'a ServedModel,
    /// Layers on this card.
    pub(super) layers: u64,
    pub(super) tensor: u64,
    /// Sequences, and tokens that a batch may have.
    pub(super) sequences: u64,
    pub(super) batched: u64,
    /// Tokens of a sequence that are decoded at once.
    pub(super) decoded: u64,
    /// What is captured at most, where somebody says so.
    pub(super) largest: Option<u64>,
    pub(super) card: &'a Card,
    pub(super) workspace: u64,
    /// Whether the cache is in 8 bits.
    pub(super) narrow: bool,
}

impl Graphs<'_> {
    /// Sizes that are captured over pieces (`_set_cudagraph_sizes` of vllm/config/vllm.py).
    fn sizes(self) -> Vec<u64> {
        let usual = self.sequences.saturating_mul(self.decoded.max(1)).saturating_mul(2).min(512);
        let largest = self.largest.unwrap_or(usual).min(self.batched);
        let small = [1, 2, 4].into_iter().chain((8..256).step_by(8));
        small.chain((256..=1024).step_by(16)).filter(|size| *size <= largest.max(1)).collect()
    }

    /// Those that are captured whole: batches of sequences that decode. None where layers attend within chunks.
    fn whole(self) -> Vec<u64> {
        let most = self.sequences.saturating_mul(self.decoded.max(1));
        if self.model.chunked { Vec::new() } else { self.sizes().into_iter().filter(|size| *size <= most).collect() }
    }

    fn further(self) -> u64 {
        let node = NODES[usize::from(self.model.chosen_experts > 0)];
        self.layers.saturating_mul(node).max(LEAST)
    }

    /// What vLLM sets aside; the second runner captures all pieces on trial and then adds whole graphs to them.
    pub(super) fn foreseen(self, second: bool) -> u64 {
        let (pieces, whole) = (self.sizes(), self.whole());
        let further = |sizes: &[u64]| self.further().saturating_mul((sizes.len() as u64).saturating_sub(1));
        let width =
            self.model.hidden.saturating_mul(3).saturating_add(self.model.width.saturating_mul(3) / self.tensor);
        let first = two(pieces.last().copied().unwrap_or(0), width).saturating_add(self.workspace);
        let attention = self.attention(whole.last().copied().unwrap_or(0)).saturating_add(self.further());
        let shared = if second { first.saturating_add(attention) } else { first.max(attention) };
        shared.saturating_add(further(&pieces)).saturating_add(further(&whole))
    }

    /// What attention holds inside a whole graph of `size` sequences.
    fn attention(self, size: u64) -> u64 {
        let latent = self.model.latent_rank();
        let sinks = self.model.tensors.iter().any(|tensor| tensor.name.ends_with(".sinks"));
        let flashinfer = latent.is_none() && (self.narrow || self.card.is_large_blackwell());
        if sinks || self.model.vllm.triton {
            0
        } else if self.card.is_hopper() {
            let heads = (self.model.heads / self.tensor).max(1);
            let out = latent.unwrap_or(self.model.head_dim).saturating_add(1);
            SPLITS.saturating_mul(size).saturating_mul(heads).saturating_mul(out).saturating_mul(4)
        } else if flashinfer {
            FLASHINFER
        } else {
            0
        }
    }

    /// What stays with the driver after the trial, where that is counted: kernels, and the graphs' memory, which it gives to
    /// later graphs but not back (seen on an H200).
    pub(super) fn left(self) -> u64 {
        KERNELS.saturating_add(self.further().saturating_mul(4))
    }
}
