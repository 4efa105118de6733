//! What is held while kernels are tried out in the profile run, so that none is when the cache has taken the card.

use super::profile::two;
use super::{Card, Rules};
use crate::serving::model::ServedModel;

/// What Triton clears before every run of a kernel that it tries (`get_empty_cache_for_benchmark` of its driver.py).
const FLUSHED: u64 = 256 << 20;

/// Matrices into a layer of linear attention, whose products are at hand when its kernels are tried.
const INTO: [&str; 6] = ["in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_a"];

/// The first layer of gated delta nets, a full batch before it, when Triton tries the kernels for prompts
/// (`_warmup_prefill_kernels` of mamba/gdn/qwen_gdn_linear_attn.py). FlashInfer's kernels run on Hopper, since 0.24 on large
/// Blackwells, and are not tried (`_resolve_gdn_prefill_backend`).
pub(super) fn states(model: &ServedModel, rules: &Rules, card: &Card, tokens: u64, cards: u64) -> u64 {
    let others = card.is_hopper() || rules.tunes_states == Some(true) && card.is_large_blackwell();
    let first = model.tensors.iter().find(|tensor| tensor.layer.is_some() && INTO[..2].contains(&tensor.module()));
    let Some(layer) = first.filter(|_| rules.tunes_states.is_some() && !others).and_then(|tensor| tensor.layer) else {
        return 0;
    };
    let own = |names: &[&str], side: usize| -> u64 {
        let of = model.tensors.iter().filter(|tensor| tensor.layer == Some(layer) && names.contains(&tensor.module()));
        of.filter_map(|tensor| tensor.shape.get(side).copied()).fold(0, u64::saturating_add) / cards.max(1)
    };
    // What comes in, its residual, the products and the output that they will fill.
    let wide = model.hidden.saturating_mul(2).saturating_add(own(&INTO, 0)).saturating_add(own(&["out_proj"], 1));
    two(tokens, wide).saturating_add(FLUSHED)
}
