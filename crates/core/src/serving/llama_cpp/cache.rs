//! Cells, and what one holds.

use super::{Build, LlamaCppPlan};
use crate::model::op::{CacheKind, CacheUpdate};
use crate::serving::model::{Element, ServedLayer, ServedModel};

/// Keys, values and states of a layer.
pub(super) fn bytes(
    plan: &LlamaCppPlan,
    model: &ServedModel,
    layer: &ServedLayer,
    keys: Element,
    values: Element,
) -> u64 {
    let grown = |cache: &CacheUpdate| match cache.kind {
        CacheKind::Sliding(window) => {
            let cells = cells(plan, Some(window));
            heads(cache, cache.true_heads, cells, keys, values)
        }
        CacheKind::Full => heads(cache, cache.true_heads, cells(plan, None), keys, values),
        CacheKind::Latent { .. } => latent(plan, model, cache, keys, values),
        CacheKind::Folded { every } => {
            keys.size(cells(plan, None).div_ceil(every.max(1)).saturating_mul(cache.key_dim))
        }
        CacheKind::Index | CacheKind::Cross | CacheKind::State { .. } => 0,
    };
    let growing = layer.caches.iter().map(grown).fold(0, u64::saturating_add);
    // States are fp32, one per sequence (llama-memory-recurrent).
    let (convolution, recurrent) = model.states(layer);
    let states = convolution.saturating_add(recurrent).saturating_mul(4).saturating_mul(plan.parallel);
    growing.saturating_add(states)
}

fn heads(cache: &CacheUpdate, heads: u64, cells: u64, keys: Element, values: Element) -> u64 {
    let rows = |dim: u64| cells.saturating_mul(heads.saturating_mul(dim));
    keys.size(rows(cache.key_dim)).saturating_add(values.size(rows(cache.value_dim)))
}

/// Multi-head latent attention: whole heads, or the latent (key: rank, value: rotary part) as one key.
fn latent(plan: &LlamaCppPlan, model: &ServedModel, cache: &CacheUpdate, keys: Element, values: Element) -> u64 {
    let cells = cells(plan, None);
    let (rank, turned) = (cache.key_dim, cache.value_dim);
    let compressed = keys.size(cells.saturating_mul(rank + turned));
    let with_values = || compressed.saturating_add(values.size(cells.saturating_mul(rank)));
    match plan.build {
        Build::Current | Build::Ik { mla: 2.. } | Build::Numbered(Build::NO_VALUES..) => compressed,
        Build::Ik { mla: 1 } | Build::Numbered(Build::LATENT..) => with_values(),
        Build::Early | Build::Ik { .. } | Build::Numbered(_) => {
            // `expanded` is keys and values of all heads; a value is as wide as a key without its rotary part.
            let CacheKind::Latent { expanded } = cache.kind else { return compressed };
            let per_head = expanded / model.heads.max(1);
            let value = per_head.saturating_sub(turned) / 2;
            let rows = |dim: u64| cells.saturating_mul(model.heads.saturating_mul(dim));
            keys.size(rows(per_head - value)).saturating_add(values.size(rows(value)))
        }
    }
}

/// Cells of a layer over all sequences (llama-kv-cache.cpp and llama-kv-cache-iswa.cpp).
pub(super) fn cells(plan: &LlamaCppPlan, window: Option<u64>) -> u64 {
    let sequences = plan.parallel.max(1);
    let (streams, shared) = if plan.unified { (1, sequences) } else { (sequences, 1) };
    let step = if plan.build.number() >= Build::PADDED || plan.flashes() { 256 } else { 32 };
    let whole = (plan.context / streams).next_multiple_of(step);
    let own = match window {
        Some(window) if plan.build.number() >= Build::WINDOWS && !plan.full_windows => {
            let seen = window.saturating_mul(shared).saturating_add(plan.micro_batch);
            whole.min(seen.next_multiple_of(256))
        }
        _ => whole,
    };
    own.saturating_mul(streams)
}
