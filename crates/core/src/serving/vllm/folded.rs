//! The cache of models that fold keys (DeepSeek-V4): what a layer keeps of every position, of its window and of the windows that
//! its compressors have begun are pages of several sizes, which share one block (`_get_kv_cache_groups_uniform_groups` of
//! vllm/v1/core/kv_cache_utils.py, v0.25.0; models/deepseek_v4/attention.py and compressor.py).

use super::super::model::{ServedLayer, ServedModel};
use super::Rules;
use super::groups::{Group, Kind, Layout};
use super::profile::two;
use crate::model::op::CacheKind;

/// Tokens of a block of folded keys, which the model sets (`block_size` of its metadata builders).
const BLOCK: u64 = 256;

/// Tokens of a window's block (`DeepseekV4SWACache`).
const WINDOW_BLOCK: u64 = 64;

/// Bytes of a key: 448 elements in fp8, 64 that turn in 16 bits, 8 of scales (`fp8_ds_mla`), whatever `--kv-cache-dtype` says.
const KEY: u64 = 584;

/// What every page is a whole multiple of (`alignment` of `MLAAttentionSpec`).
const ALIGNMENT: u64 = 576;

/// Folded keys that an indexer's buffer holds for every token of the longest sequence (`get_max_prefill_buffer_size` of
/// v1/attention/backends/mla/indexer.py).
const GATHERED: u64 = 40;
/// Bytes of the choice beside it (`RADIX_TOPK_WORKSPACE_SIZE`).
const CHOICE: u64 = 1 << 20;

/// Logits of an indexer for which the profile run makes room (`VLLM_SPARSE_INDEXER_MAX_LOGITS_MB`).
const LOGITS: u64 = 512 << 20;

/// FlashInfer's buffer, whose kernels run this attention on Blackwell's cards for desks
/// (`_FLASHINFER_DSV4_WORKSPACE_BUFFER_SIZE` of models/deepseek_v4/nvidia/flashinfer_sparse.py).
pub(super) const FLASHINFER: u64 = 128 << 20;

/// What a layer keeps under one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Page {
    kind: Kind,
    /// Tokens of its block.
    block_size: u64,
    bytes: u64,
}

impl Page {
    const fn new(kind: Kind, block_size: u64, bytes: u64) -> Self {
        Self { kind, block_size, bytes: bytes.next_multiple_of(ALIGNMENT) }
    }
}

/// Whether a layer folds keys.
pub(super) fn folds(layer: &ServedLayer) -> bool {
    layer.caches.iter().any(|cache| matches!(cache.kind, CacheKind::Folded { .. }))
}

/// The indexer's part of the workspace that all layers share, for sequences of that length (`sparse_attn_indexer` while it profiles).
pub(super) fn gathered(model: &ServedModel, length: u64) -> u64 {
    let window = |layer: &ServedLayer| {
        layer.caches.iter().find(|cache| matches!(cache.kind, CacheKind::Sliding(_))).map(|cache| cache.key_dim)
    };
    let indexed = |layer: &ServedLayer| {
        let wide = window(layer);
        layer.caches.iter().find_map(|cache| match cache.kind {
            CacheKind::Folded { every } if wide.is_some_and(|wide| wide != cache.key_dim) => {
                Some((every, cache.key_dim))
            }
            _ => None,
        })
    };
    let found = model.layers.iter().find_map(indexed);
    found.map_or(0, |(every, wide)| {
        (length.saturating_mul(GATHERED) / every.max(1)).saturating_mul(wide + 4).saturating_add(CHOICE)
    })
}

/// Elements of a token's residual streams; none where there is one.
pub(super) fn streams(model: &ServedModel) -> u64 {
    let mixes = model.tensors.iter().find(|tensor| tensor.module() == "hc_fn");
    mixes.map_or(0, |tensor| tensor.shape.get(1).copied().unwrap_or(0))
}

/// What a full batch holds around a layer that chooses: the streams before it, what goes in and out, and its logits.
pub(super) fn chosen(model: &ServedModel, tokens: u64) -> u64 {
    match streams(model) {
        0 => 0,
        wide => two(tokens, wide.saturating_add(model.hidden.saturating_mul(2))).saturating_add(LOGITS),
    }
}

/// Sizes of pages, and how many there are of each.
type Sizes = Vec<(u64, u64)>;

/// How such layers' cache is cut.
pub(super) fn layout(layers: &[ServedLayer], rules: &Rules) -> Option<Layout> {
    let pages: Vec<Page> = layers.iter().flat_map(pages).collect();
    let all: Vec<Page> = pages.iter().copied().filter(|page| page.kind == Kind::Full).collect();
    let sizes = counts(all.iter().map(|page| page.bytes));
    let whole = all.iter().map(|page| page.bytes).fold(0, u64::saturating_add);
    // Windows by their length and blocks, each page as large as the next of those above.
    let mut windows: Vec<([u64; 2], Sizes)> = Vec::new();
    for page in pages.iter().filter(|page| page.kind != Kind::Full) {
        let Kind::Window(window) = page.kind else { continue };
        let key = [page.block_size, window];
        let size = sizes.iter().map(|(size, _)| *size).filter(|size| *size >= page.bytes).min().unwrap_or(page.bytes);
        let at = windows.iter().position(|(own, _)| *own == key).unwrap_or_else(|| {
            windows.push((key, Vec::new()));
            windows.len() - 1
        });
        count(&mut windows.get_mut(at)?.1, size);
    }
    let tuples: Vec<u64> = std::iter::once(most(&sizes)).chain(windows.iter().map(|(_, sizes)| most(sizes))).collect();
    let step = least_padded(&tuples)?;
    let mut groups = vec![Group { kind: Kind::Full, block_size: BLOCK, bytes: whole }];
    let mut slots = sizes.clone();
    for ([block_size, window], sizes) in &windows {
        let parts = most(sizes).div_ceil(step).max(1);
        for part in 0..parts {
            // Every so manieth layer.
            let own = |count: u64| count.saturating_sub(part).div_ceil(parts);
            let bytes =
                sizes.iter().fold(0u64, |sum, (size, count)| sum.saturating_add(size.saturating_mul(own(*count))));
            groups.push(Group { kind: Kind::Window(*window), block_size: *block_size, bytes });
        }
        for (size, count) in sizes {
            let own = count.div_ceil(parts);
            match slots.iter_mut().find(|(other, _)| other == size) {
                Some((_, most)) => *most = own.max(*most),
                None => slots.push((*size, own)),
            }
        }
    }
    let block_bytes = if rules.packed_pages {
        slots.iter().fold(0u64, |sum, (size, count)| sum.saturating_add(size.saturating_mul(*count)))
    } else {
        let row = sizes.iter().fold(0u64, |sum, (size, _)| sum.saturating_add(*size));
        let slots = windows.iter().map(|(_, sizes)| most(sizes).div_ceil(most(sizes).div_ceil(step).max(1))).max();
        row.saturating_mul(slots.unwrap_or(0).max(most(&sizes)))
    };
    let unit = if rules.counts_blocks { 1 } else { whole };
    if rules.counts_blocks {
        groups.iter_mut().for_each(|group| group.bytes = 1);
    }
    Some(Layout::of(BLOCK, block_bytes, groups, unit))
}

fn most(sizes: &[(u64, u64)]) -> u64 {
    sizes.iter().map(|(_, count)| *count).max().unwrap_or(0)
}

/// What a layer keeps: its window; folded keys, and the states of the compressor that folds them, in fp32.
fn pages(layer: &ServedLayer) -> Vec<Page> {
    let mut made = Vec::new();
    let window = layer.caches.iter().find_map(|cache| match cache.kind {
        CacheKind::Sliding(window) => Some((window, cache.key_dim)),
        _ => None,
    });
    if let Some((window, _)) = window {
        made.push(Page::new(Kind::Window(window), WINDOW_BLOCK, WINDOW_BLOCK * KEY));
    }
    for cache in &layer.caches {
        let CacheKind::Folded { every } = cache.kind else { continue };
        let every = every.max(1);
        // Keys as wide as the window's are the layer's own, others its indexer's: fp8 with a scale of four bytes.
        let own = window.is_none_or(|(_, wide)| wide == cache.key_dim);
        let key = if own { KEY } else { cache.key_dim + 4 };
        made.push(Page::new(Kind::Full, BLOCK, (BLOCK / every).saturating_mul(key)));
        // Windows of four overlap, for which twice as many keys and gates are kept (`CompressorStateCache`).
        let (block, overlap) = if every == 4 { (4, 2) } else { (8, 1) };
        let state = (block * overlap * 2 * 4u64).saturating_mul(cache.key_dim);
        made.push(Page::new(Kind::Window(every.saturating_mul(overlap)), block, state));
    }
    made
}

fn count(sizes: &mut Sizes, size: u64) {
    match sizes.iter_mut().find(|(own, _)| *own == size) {
        Some((_, count)) => *count += 1,
        None => sizes.push((size, 1)),
    }
}

fn counts(all: impl Iterator<Item = u64>) -> Sizes {
    let mut sizes = Vec::new();
    all.for_each(|size| count(&mut sizes, size));
    sizes
}

/// Layers of a group so that all groups are padded least, the larger of equals (`_approximate_gcd`).
fn least_padded(counts: &[u64]) -> Option<u64> {
    let (first, most) = (*counts.first()?, *counts.iter().max()?);
    let padding = |step: u64| counts.iter().map(|count| count.next_multiple_of(step) - count).sum::<u64>();
    (first.max(1)..=most).min_by_key(|step| (padding(*step), u64::MAX - step))
}
