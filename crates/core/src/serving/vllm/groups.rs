//! vLLM's cache groups: layers of one kind share block tables, and every group's page has the same size
//! (`get_kv_cache_groups` of vllm/v1/core/kv_cache_utils.py).

use super::super::model::{Element, ServedLayer, ServedModel, per_token};
use super::{Rules, folded};
use crate::dtype::DType;
use crate::model::op::{CacheKind, CacheUpdate};

/// What layers keep of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Keys and values of every position.
    Full,
    /// Of the last positions.
    Window(u64),
    /// A state of constant size.
    State,
}

/// Layers that keep the same.
#[derive(Debug, Clone, Copy)]
struct Layers {
    kind: Kind,
    /// Bytes of a token, or of a state.
    bytes: u64,
    count: u64,
}

/// A group of layers with one block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) kind: Kind,
    /// Tokens of its blocks.
    pub(super) block_size: u64,
    /// What a block of it counts where a sequence's blocks are counted, in parts of the layout's unit.
    pub(super) bytes: u64,
}

impl Group {
    const fn new(kind: Kind, block_size: u64) -> Self {
        Self { kind, block_size, bytes: 1 }
    }
}

/// What is known of a cache besides the model.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// The type of keys and values.
    pub element: Element,
    /// The same where it is a plain type, for states that had it before 0.10.1.
    pub dtype: DType,
    /// Tensor-parallel cards.
    pub ranks: u64,
    /// `--block-size`.
    pub block_size: u64,
    /// `--enable-prefix-caching`, where it was asked for.
    pub prefix_caching: bool,
    /// Tokens guessed ahead, for each of which a state is kept.
    pub speculative_tokens: u64,
}

/// How a model's cache is cut in blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Tokens of an attention block, the smallest where groups differ.
    pub block_size: u64,
    /// Bytes of one block over all layers of a group.
    pub block_bytes: u64,
    groups: Vec<Group>,
    state_blocks: u64,
    /// What a block counts.
    unit: u64,
}

impl Layout {
    /// Cuts the cache of a model on one card.
    pub fn new(model: &ServedModel, terms: Terms, rules: &Rules) -> Self {
        let folded = model.layers.iter().any(folded::folds).then(|| folded::layout(&model.layers, rules));
        if let Some(layout) = folded.flatten() {
            return layout;
        }
        let kinds = kinds(model, terms, rules);
        let aligned = terms.prefix_caching && rules.states_kept;
        let kept = u64::from(aligned) + u64::from(aligned && rules.checkpoints && model.has_second_mamba());
        let state_blocks = terms.speculative_tokens.saturating_add(1 + kept);
        let is_latent = |cache: &CacheUpdate| matches!(cache.kind, CacheKind::Latent { .. });
        let latent = model.layers.iter().flat_map(|layer| &layer.caches).any(is_latent);
        let step = if latent { rules.latent_step } else { 16 };
        Self::cut(&kinds, terms.block_size.max(1), step, rules, state_blocks)
    }

    /// One of groups that are known.
    pub(super) const fn of(block_size: u64, block_bytes: u64, groups: Vec<Group>, unit: u64) -> Self {
        Self { block_size, block_bytes, groups, state_blocks: 1, unit }
    }

    fn cut(kinds: &[Layers], block_size: u64, step: u64, rules: &Rules, state_blocks: u64) -> Self {
        let growing = || kinds.iter().filter(|layers| layers.kind != Kind::State);
        let token = growing().map(|layers| layers.bytes).max().unwrap_or(0);
        let state = kinds.iter().filter(|layers| layers.kind == Kind::State).map(|layers| layers.bytes).max();
        // Layers that all need the same slots are one group, however wide each is (`UniformTypeKVCacheSpecs`).
        if let (Some(first), None) = (growing().next(), state)
            && growing().all(|layers| layers.kind == first.kind)
        {
            let tokens: u64 = growing().map(|l| l.bytes.saturating_mul(l.count)).fold(0, u64::saturating_add);
            let groups = vec![Group::new(first.kind, block_size)];
            return Self { block_size, block_bytes: tokens.saturating_mul(block_size), groups, state_blocks, unit: 1 };
        }
        // An attention page is made as large as the largest state.
        let block_size = match (state, token) {
            (Some(state), 1..) => block_size.max(state.div_ceil(token).next_multiple_of(step)),
            _ => block_size,
        };
        let page = match token {
            0 => state.unwrap_or(0),
            token => token.saturating_mul(block_size),
        };
        // Groups have as many layers as the rarest kind; the others are cut in several, the last one padded.
        let counts = || kinds.iter().map(|layers| layers.count);
        let (fewest, most) = (counts().min().unwrap_or(1).max(1), counts().max().unwrap_or(1));
        let near = most.saturating_mul(100) < fewest.saturating_mul(100 + rules.group_slack);
        let size = if near { most } else { fewest };
        let groups: Vec<Group> = kinds
            .iter()
            .flat_map(|layers| {
                // Narrower layers get blocks of more tokens where that fills the page, else padded ones.
                let own = if layers.bytes > 0 && page.is_multiple_of(layers.bytes) { page / layers.bytes } else { 0 };
                let whole = layers.kind != Kind::State && own.is_multiple_of(block_size);
                let block_size = if whole { own.max(block_size) } else { block_size };
                let group = Group::new(layers.kind, block_size);
                std::iter::repeat_n(group, usize::try_from(layers.count.div_ceil(size)).unwrap_or(1))
            })
            .collect();
        Self { block_size, block_bytes: page.saturating_mul(size), groups, state_blocks, unit: 1 }
    }

    /// Groups.
    pub fn group_count(&self) -> u64 {
        self.groups.len() as u64
    }

    /// Blocks that one sequence of `length` tokens holds at most, `batched` of them computed at once.
    pub fn blocks(&self, length: u64, batched: u64) -> u64 {
        let of = |group: &Group| match group.kind {
            Kind::Full => length.div_ceil(group.block_size.max(1)),
            Kind::Window(window) => {
                // A window need not begin with a block (`SlidingWindowSpec.max_memory_usage_bytes`).
                let seen = window.saturating_sub(1).saturating_add(batched).min(length);
                seen.div_ceil(group.block_size.max(1)).saturating_add(1)
            }
            Kind::State => self.state_blocks,
        };
        let counted = self.groups.iter().map(|group| of(group).saturating_mul(group.bytes));
        counted.fold(0, u64::saturating_add).div_ceil(self.unit.max(1))
    }
}

/// The layers of a model by what they keep.
fn kinds(model: &ServedModel, terms: Terms, rules: &Rules) -> Vec<Layers> {
    let mut kinds: Vec<Layers> = Vec::new();
    let mut add =
        |kind: Kind, bytes: u64| match kinds.iter_mut().find(|layers| layers.kind == kind && layers.bytes == bytes) {
            Some(layers) => layers.count += 1,
            None => kinds.push(Layers { kind, bytes, count: 1 }),
        };
    let full = |cache: &CacheUpdate| matches!(cache.kind, CacheKind::Full | CacheKind::Latent { .. });
    let any_full = model.layers.iter().flat_map(|layer| &layer.caches).any(full);
    // Without groups, sliding layers beside others are kept like those.
    let flat = any_full && (!rules.groups || (model.chunked && !rules.chunked_groups));
    let element = terms.element;
    // Layers that read an encoder have blocks like the others (Mllama, which only the older engine ran:
    // `get_num_layers_by_block_type` of vllm/config.py counts all of them).
    let like = model.layers.iter().find(|layer| !layer.caches.is_empty()).filter(|_| model.reads_encoder);
    for layer in &model.layers {
        let layer = if layer.caches.is_empty() { like.unwrap_or(layer) } else { layer };
        // Index keys lie in the page of their layer.
        let grown: u64 = layer.caches.iter().map(|cache| per_token(&filled(*cache, rules), element, terms.ranks)).sum();
        let window = layer.caches.iter().find_map(|cache| match cache.kind {
            CacheKind::Sliding(window) if !flat => Some(window),
            _ => None,
        });
        let state = state_bytes(model, layer, terms, rules);
        if grown > 0 {
            add(window.map_or(Kind::Full, Kind::Window), grown);
        }
        if state > 0 {
            add(Kind::State, state);
        }
    }
    kinds
}

/// A token's entry as it is laid out: latents fill whole multiples.
fn filled(cache: CacheUpdate, rules: &Rules) -> CacheUpdate {
    match cache.kind {
        CacheKind::Latent { .. } => {
            let elements = (cache.key_dim + cache.value_dim).next_multiple_of(rules.latent_entry);
            CacheUpdate { key_dim: elements, value_dim: 0, ..cache }
        }
        _ => cache,
    }
}

/// A layer's state: the convolution's in the model's type, a position longer per guessed token, the rest as the config
/// says (vllm/model_executor/layers/mamba/mamba_utils.py).
fn state_bytes(model: &ServedModel, layer: &ServedLayer, terms: Terms, rules: &Rules) -> u64 {
    let (convolution, recurrent) = model.states(layer);
    let positions = model.convolution.max(2) - 1;
    let per_token = if recurrent > 0 { convolution / positions } else { 0 };
    let guessed = per_token.saturating_mul(terms.speculative_tokens);
    let [first, rest] =
        if rules.state_types { [DType::BF16, model.state_dtype.unwrap_or(DType::BF16)] } else { [terms.dtype; 2] };
    let convolution = convolution.saturating_add(guessed).saturating_mul(first.size());
    convolution.saturating_add(recurrent.saturating_mul(rest.size())) / terms.ranks.max(1)
}
