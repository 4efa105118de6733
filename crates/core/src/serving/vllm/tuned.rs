//! What is held while kernels are tried out in the profile run, so that none is when the cache has taken the card.

use super::profile::two;
use super::{Card, Rules};
use crate::serving::model::ServedModel;
use crate::serving::tensors::ServedTensor;

/// What Triton clears before every run of a kernel that it tries (`get_empty_cache_for_benchmark` of its driver.py).
const FLUSHED: u64 = 256 << 20;

/// Matrices into a layer of linear attention, whose products are at hand when its kernels are tried.
const INTO: [&str; 6] = ["in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_a"];

/// Sizes of a layer's matrices of these names, of its first layer that has one of the former.
fn sizes(model: &ServedModel, first: &[&str], names: &[&str], side: usize) -> u64 {
    let own = |names: &[&str], tensor: &&ServedTensor| tensor.layer.is_some() && names.contains(&tensor.module());
    let Some(layer) = model.tensors.iter().find(|tensor| own(first, tensor)).map(|tensor| tensor.layer) else {
        return 0;
    };
    let of = model.tensors.iter().filter(|tensor| tensor.layer == layer && own(names, tensor));
    of.filter_map(|tensor| tensor.shape.get(side).copied()).fold(0, u64::saturating_add)
}

/// Elements of a token that a compiled piece after gated delta nets was given and its caller holds until it is done, feed-forward
/// and all: what the states made, and their gate, a view of all that was projected (`mixed_qkvz.split` in `forward_cuda` of
/// mamba/gdn/qwen_gdn_linear_attn.py, v0.22.0; qwen3_5.py, v0.18.0; layers are cut at `gdn_attention_core`). Qwen3-Next's gate is a copy.
pub(super) fn passed(model: &ServedModel, rules: &Rules, cards: u64) -> u64 {
    if rules.tunes_states.is_none() {
        return 0;
    }
    let first = &INTO[1..2];
    let projected = sizes(model, first, &INTO[1..3], 0);
    projected.saturating_add(sizes(model, first, &["out_proj"], 1)) / cards.max(1)
}

/// The first layer of gated delta nets, a full batch before it, when Triton tries the kernels for prompts
/// (`_warmup_prefill_kernels` of mamba/gdn/qwen_gdn_linear_attn.py). FlashInfer's kernels run on Hopper, since 0.24 on large
/// Blackwells, and are not tried (`_resolve_gdn_prefill_backend`).
pub(super) fn states(model: &ServedModel, rules: &Rules, card: &Card, tokens: u64, cards: u64) -> u64 {
    let others = card.is_hopper() || rules.tunes_states == Some(true) && card.is_large_blackwell();
    let projected = sizes(model, &INTO[..2], &INTO, 0) / cards.max(1);
    if rules.tunes_states.is_none() || others || projected == 0 {
        return 0;
    }
    // What comes in, its residual, the products and the output that they will fill.
    let made = sizes(model, &INTO[..2], &["out_proj"], 1) / cards.max(1);
    two(tokens, model.hidden.saturating_mul(2).saturating_add(projected).saturating_add(made)).saturating_add(FLUSHED)
}
