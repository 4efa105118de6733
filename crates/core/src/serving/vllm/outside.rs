//! What vLLM's process holds outside torch and counts as its own: kernels, and what its ranks speak to one another with.

use super::rules::{OUTSIDE_TORCH, Rules};
use super::{VllmPlan, graphs::Graphs};
use crate::serving::communication;

/// Kernels that are loaded by the time of the profile run where ranks have met before: 0.07 GiB outside torch on every card of two
/// and of four stages (vLLM 0.19.0 on H100s in truth/external/found), where a card alone has 0.25.
const MET: u64 = 72 << 20;
/// A communicator of NCCL on cards with NVLink's switch: 0.92 GiB more on a rank than on a card alone before vLLM looks what is
/// free (two stages, the same logs; docs/open-constants.md).
const COMMUNICATOR: u64 = 942 << 20;
/// torch's own communicator, which FlashInfer's workspace is exchanged over: 1.50 GiB between two H100s, 2.03 between four, which
/// also multicast (2.07 and 2.13 GiB outside torch less `MET` and the workspace; the same logs).
const EXCHANGE: [u64; 2] = [1536 << 20, 2079 << 20];
/// What a channel of NCCL has for each neighbour: 4 MiB, and the smaller protocols' 4.69 and 0.5 (`DEFAULT_BUFFSIZE`,
/// `DEFAULT_LL128_BUFFSIZE` and `DEFAULT_LL_BUFFSIZE` of NCCL's init.cc), in a ring and in a tree.
const CHANNEL: u64 = 2 * ((4 << 20) + 640 * 120 * 8 * 8 + 512 * 8 * 8 * 16);
/// Cards without NVLink (`many_channels` of data/gpus.toml) have the two of PCI Express.
const CHANNELS: u64 = 2;
/// What a communicator takes there besides, NCCL's code above all: 0.25 GiB outside torch on each of two RTX 4090 (vLLM 0.7,
/// truth/external/vllm_logs.json) less its channels and what a card alone has.
const NEIGHBOUR: u64 = 90 << 20;
/// What vLLM's own process takes of the host's memory while it starts, where that is the card's: vLLM asks the host what is left
/// (`MemorySnapshot.measure` of mem_utils.py, v0.11.1), so that libraries, compilers and pinned buffers count. Read off the one log
/// that states all (k29 of truth/external/found: 3.35 GiB consumed by a model of 1.12 on a DGX Spark, less what any card has); other
/// logs have 0.1 to 4.6 GiB, by what else the host does meanwhile.
const HOST: u64 = 2232 << 20;
/// Buffers of a fused sum: the sum's own, and three that take turns
/// (`trtllm_create_ipc_workspace_for_all_reduce_fusion` of FlashInfer 0.6).
const FUSED_BUFFERS: u64 = 4;

impl VllmPlan {
    /// What is outside torch on a rank of `tensor` cards in `stages`; graphs, where they are captured while it profiles.
    pub(super) fn outside_torch(&self, rules: &Rules, stages: u64, hidden: u64, graphs: Option<Graphs<'_>>) -> u64 {
        let tensor = self.tensor_parallel.max(1);
        let context = if rules.context_counted { self.bare_context } else { 0 };
        let kernels = self.multiprocessors.saturating_mul(OUTSIDE_TORCH);
        let left = graphs.map_or(0, Graphs::left);
        let meets = tensor.saturating_mul(stages) > 1;
        // Ranks met after vLLM had looked what is free (`init_snapshot` of gpu_worker.py).
        let communicator = if meets && !rules.met_before && self.card.is_hopper() { COMMUNICATOR } else { 0 };
        let own = match self.fused_sums(rules, tensor, stages, hidden) {
            Some(workspace) => MET.saturating_add(workspace).saturating_add(EXCHANGE[usize::from(tensor > 2)]),
            None if meets && tensor == 1 && rules.met_before => MET,
            None if meets && !self.card.many_channels => {
                let met = if rules.met_before { 0 } else { NEIGHBOUR };
                kernels.saturating_add(left).saturating_add(CHANNELS * CHANNEL).saturating_add(met)
            }
            None => kernels.saturating_add(left).saturating_add(communication(tensor.max(stages))),
        };
        let host = if self.card.hosted { HOST } else { 0 };
        own.saturating_add(context).saturating_add(communicator).saturating_add(host)
    }

    /// What is not known where a card's memory is the host's.
    pub(super) fn host_note(&self) -> Option<String> {
        let guess = HOST as f64 / f64::from(1u32 << 30);
        self.card.hosted.then(|| {
            format!(
                "its memory is the host's: what vLLM's process takes of it while it starts is guessed ({guess:.1} GiB; logs have 0.1 to 4.6), and how much there is in all depends on the system (a DGX Spark shows 121.7 GiB, before July 2026 119.7)"
            )
        })
    }

    /// The workspace of sums over cards that are fused with the norm after them: compiled models on cards with a switch, since
    /// 0.17 (`enable_allreduce_rms_fusion` of vllm/config/vllm.py).
    fn fused_sums(&self, rules: &Rules, tensor: u64, stages: u64, hidden: u64) -> Option<u64> {
        let blackwell = self.card.is_large_blackwell();
        if !rules.sums_fused || self.enforce_eager || stages > 1 || !(blackwell || self.card.is_hopper()) {
            return None;
        }
        // `FI_ALLREDUCE_FUSION_MAX_SIZE_MB` of allreduce_rms_fusion.py, in KiB.
        let largest: u64 = match (tensor, blackwell) {
            (2, _) => 64 << 10,
            (4, true) => 32 << 10,
            (4, false) => 2 << 10,
            (8, true) => 1 << 10,
            (8, false) => 512,
            _ => return None,
        };
        let row = hidden.saturating_mul(2).max(1);
        let tokens = ((largest << 10) / row).min(self.batched(rules, self.max_model_len.unwrap_or(u64::MAX)));
        Some(tokens.saturating_mul(row).saturating_mul(tensor).saturating_mul(FUSED_BUFFERS))
    }
}
