//! Experts in the profile run, by the kernels that run them.

use super::profile::two;
use super::{Rules, VllmPlan, load};
use crate::serving::model::ServedModel;
use crate::serving::tensors::{Division, ServedTensor};

/// Tokens that experts are run on at once (`VLLM_FUSED_MOE_CHUNK_SIZE`).
const EXPERT_CHUNK: u64 = 32 << 10;

fn experts(model: &ServedModel) -> impl Iterator<Item = &ServedTensor> {
    model.tensors.iter().filter(|tensor| tensor.division == Division::Experts)
}

impl VllmPlan {
    /// Whether experts in MXFP4 run in Triton's own kernels, which keep no buffers.
    pub(super) fn swizzles(&self, model: &ServedModel, rules: &Rules) -> bool {
        load::Swizzle::of(&self.card, rules) != load::Swizzle::None && experts(model).any(load::is_mxfp4)
    }

    /// What those hold: products and outputs of the chosen, their sum, and the residual stream around it
    /// (`triton_kernel_fused_experts` of gpt_oss_triton_kernels_moe.py).
    pub(super) fn swizzled(&self, model: &ServedModel, tokens: u64) -> u64 {
        let cards = if self.expert_parallel { 1 } else { self.tensor_parallel.max(1) };
        let chosen = two(tokens.saturating_mul(model.chosen_experts), model.expert_width / cards + model.hidden);
        chosen.saturating_add(two(tokens, model.hidden.saturating_mul(4)))
    }

    /// Both buffers of experts, one after the other (`TritonExperts.workspace_shapes` of v0.14.0): outputs or products, and
    /// both halves or outputs.
    pub(super) fn expert_buffers(&self, model: &ServedModel, rules: &Rules, tokens: u64) -> u64 {
        let (tensor, replicas) = (self.tensor_parallel.max(1), self.data_parallel.max(1));
        let cards = if self.expert_parallel { 1 } else { tensor.saturating_mul(replicas) };
        let (hidden, width) = (load::Tiles::of(&self.card, rules).hidden(model), model.expert_width / cards);
        let both = match self.cuts(model, rules) {
            // Both halves count twice (`CutlassExpertsFp4.workspace_shapes` of v0.19.1, whose N is both).
            true => width.saturating_mul(4).max(hidden).saturating_add(width.saturating_mul(2)),
            false => width.max(hidden).saturating_add(width.saturating_mul(2).max(hidden)),
        };
        two(tokens.saturating_mul(replicas).saturating_mul(model.chosen_experts), both)
    }

    /// Chosen experts: both halves or the outputs in one buffer, the product in another (`fused_experts_impl` of
    /// fused_moe.py), on the tokens of all replicas that share the experts.
    pub(super) fn experts(&self, model: &ServedModel, tokens: u64) -> u64 {
        if model.chosen_experts == 0 {
            return 0;
        }
        let (tensor, replicas) = (self.tensor_parallel.max(1), self.data_parallel.max(1));
        let gathered = tokens.saturating_mul(replicas);
        // Whole experts run on the tokens that chose them, a share of all; parts of experts run on all tokens.
        let width = model.expert_width / tensor.saturating_mul(replicas);
        let widest = width.saturating_mul(2).max(model.hidden).saturating_add(width);
        let pairs = gathered.min(EXPERT_CHUNK).saturating_mul(model.chosen_experts);
        two(pairs, widest).saturating_add(two(gathered, model.hidden.saturating_mul(3)))
    }

    /// Whether experts in NVFP4 run in vLLM's own CUTLASS kernels: on Blackwell, where FlashInfer's do not know their activation and
    /// none is whole (`select_nvfp4_moe_backend` of fused_moe/oracle/nvfp4.py, `CutlassExpertsFp4` of cutlass_moe.py, v0.19.1).
    pub(super) fn cuts(&self, model: &ServedModel, rules: &Rules) -> bool {
        let blackwell = self.card.capability >= 100 && !self.expert_parallel;
        rules.gelu_cut && model.vllm.gelu_experts && blackwell && experts(model).any(load::is_nvfp4)
    }

    /// What those hold beside their buffers when the chosen outputs are weighed (`run_cutlass_moe_fp4` of cutlass_moe.py, v0.19.1):
    /// the inputs of the chosen in the order of experts, which a name holds to the end, their outputs in the order of tokens,
    /// those weighed, and the sum; around them the layer's residual, the dense half and what goes in, and what the compiled
    /// piece was given, which its caller holds: the residual before and what attention made.
    pub(super) fn cut(&self, model: &ServedModel, tokens: u64) -> u64 {
        let (tensor, replicas) = (self.tensor_parallel.max(1), self.data_parallel.max(1));
        let gathered = tokens.saturating_mul(replicas);
        let chosen = two(gathered.saturating_mul(model.chosen_experts), model.hidden.saturating_mul(3));
        let made = model.tensors.iter().filter(|tensor| tensor.layer.is_some() && tensor.module() == "o_proj");
        let attended = made.filter_map(|tensor| tensor.shape.get(1).copied()).max().unwrap_or(0) / tensor;
        let around = two(tokens, model.hidden.saturating_mul(4).saturating_add(attended));
        chosen.saturating_add(two(gathered, model.hidden)).saturating_add(around)
    }
}
