//! Who guesses tokens ahead: a smaller model, a head on the model's own states, or nobody (n-grams of the prompt).

use super::super::model::{ServedLayer, ServedModel};
use super::super::tensors::Division;
use super::{VllmPlan, folded, load, rules};
use crate::model::op::{CacheKind, CacheUpdate};

/// A way to guess.
#[derive(Debug, Clone, Copy)]
pub enum Speculation<'a> {
    /// A model of its own.
    Model(&'a ServedModel),
    /// The checkpoint's own layers for further tokens (DeepSeek-V3, Qwen3-Next): a norm for each side, a projection of
    /// both, a layer like the last that attends.
    MultiToken,
    /// One layer on the model's last states and embeddings; tables are the model's.
    Eagle,
    /// A layer of Llama's on states of three of the model's layers, with a head of its own for the usual words
    /// (vllm/model_executor/models/llama_eagle3.py); the table is the model's, where the checkpoint brings none that differs
    /// (`_maybe_share_embeddings`).
    Eagle3,
    /// Layers like the last one that weigh nothing: for heads whose weights are counted elsewhere.
    Layers(u64),
    /// Repetitions of the prompt: no weights, no cache.
    NGram,
}

/// What guessing takes on one card.
#[derive(Debug, Clone, Default)]
pub struct Draft {
    /// Bytes of weights.
    pub weights: u64,
    /// Layers that cache beside the model's own.
    pub layers: Vec<ServedLayer>,
    /// Who guesses, where that is nothing that the second runner knew from the start.
    pub(super) apart: Option<Apart>,
}

/// Who guesses without the model's own states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Apart {
    /// A model of its own.
    Model,
    /// Repetitions of the prompt.
    NGram,
}

impl Draft {
    /// What a way of guessing takes of a card that a plan describes.
    pub fn of(speculation: Speculation<'_>, model: &ServedModel, plan: &VllmPlan) -> Self {
        let tensor = plan.tensor_parallel.max(1);
        // States of constant size are no cache of a head.
        let attends = |layer: &&ServedLayer| !layer.caches.is_empty() && model.states(layer) == (0, 0);
        let last = model.layers.iter().rev().find(attends).cloned().unwrap_or_default();
        let last = without_folded(last);
        let layer = (last.split.saturating_sub(last.experts) / tensor)
            .saturating_add(last.whole)
            .saturating_add(last.experts / tensor.saturating_mul(plan.data_parallel.max(1)));
        // Both sides go in, one comes out, in 16 bits; the norms.
        let joined = model.hidden.saturating_mul(model.hidden).saturating_mul(4);
        let norms = model.hidden.saturating_mul(6);
        match speculation {
            Speculation::Model(draft) => {
                let count = draft.layers.len() as u64;
                let whole = load::Rank {
                    tensor,
                    experts: tensor,
                    whole_experts: false,
                    layers: [0, count],
                    ends: [true, true],
                    tiles: load::Tiles::of(&plan.card, &rules(&plan.version)),
                    hopper: plan.card.is_hopper(),
                    machete: rules(&plan.version).awq_machete && plan.card.is_hopper(),
                    swizzle: load::Swizzle::of(&plan.card, &rules(&plan.version)),
                    pads: load::pads_experts(draft, &plan.card),
                };
                let weights = load::weights(draft, whole, &rules(&plan.version), None, &[]).weights;
                Self { weights, layers: draft.layers.clone(), apart: Some(Apart::Model) }
            }
            Speculation::MultiToken => {
                let layer = if model.guesses_whole { whole_layer(model, tensor, plan) } else { layer };
                Self { weights: layer.saturating_add(joined).saturating_add(norms), layers: vec![last], apart: None }
            }
            Speculation::Eagle => Self { weights: layer.saturating_add(joined), layers: vec![last], apart: None },
            Speculation::Eagle3 => {
                Self { weights: eagle3(model, tensor), layers: vec![heads(model, last)], apart: None }
            }
            Speculation::Layers(count) => {
                let layers = vec![last; usize::try_from(count.min(64)).unwrap_or(0)];
                Self { weights: 0, layers, apart: None }
            }
            Speculation::NGram => Self { apart: Some(Apart::NGram), ..Self::default() },
        }
    }
}

/// Words that published heads choose from: `draft_vocab_size` of their configs (EAGLE-3, arXiv 2503.01840, keeps the most
/// frequent 32,000).
const USUAL_WORDS: u64 = 32_000;

/// A card's part of an EAGLE-3 head of the model's sizes, in 16 bits: queries, keys and values read embeddings beside states,
/// and every card joins the states of three layers to one.
fn eagle3(model: &ServedModel, cards: u64) -> u64 {
    let wide = model.hidden;
    let (queries, keys) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let split = [
        (2 * wide).saturating_mul(queries + 2 * keys),
        wide.saturating_mul(queries),
        (3 * wide).saturating_mul(model.width),
        wide.saturating_mul(USUAL_WORDS),
    ];
    let split = split.iter().fold(0u64, |sum, part| sum.saturating_add(*part));
    (split / cards).saturating_add((3 * wide).saturating_mul(wide)).saturating_add(4 * wide).saturating_mul(2)
}

/// The layer of an EAGLE-3 head: Llama's, of the sizes that the model's config states, whatever its last layer slides over or widens
/// (Gemma 4).
fn heads(model: &ServedModel, last: ServedLayer) -> ServedLayer {
    let plain = |cache: &CacheUpdate| matches!(cache.kind, CacheKind::Full | CacheKind::Sliding(_));
    if !last.caches.iter().all(plain) || model.kv_heads * model.head_dim == 0 {
        return last;
    }
    let (heads, wide) = (model.kv_heads, model.head_dim);
    let own = CacheUpdate { kind: CacheKind::Full, heads, key_dim: wide, value_dim: wide, true_heads: heads };
    ServedLayer { caches: vec![own], ..last }
}

/// A layer that guesses keeps its window alone (`compress_ratio` of layers after the last: models/deepseek_v4).
fn without_folded(mut layer: ServedLayer) -> ServedLayer {
    if folded::folds(&layer) {
        layer.caches.retain(|cache| matches!(cache.kind, CacheKind::Sliding(_)));
    }
    layer
}

/// A card's part of the last layer that attends, in 16 bits whatever the others are in: quantisers leave the checkpoint's layers
/// for further tokens as they are (`mtp*` of data/uploads.toml).
fn whole_layer(model: &ServedModel, tensor: u64, plan: &VllmPlan) -> u64 {
    let attends = |layer: &ServedLayer| !layer.caches.is_empty() && model.states(layer) == (0, 0);
    let last = model.layers.iter().rposition(attends);
    let own = model.tensors.iter().filter(|tensor| tensor.layer.is_some() && tensor.layer == last);
    own.fold(0u64, |sum, part| {
        let bytes = part.shape.iter().fold(2u64, |product, side| product.saturating_mul(*side));
        let cards = match part.division {
            Division::Whole => 1,
            Division::Experts => tensor.saturating_mul(plan.data_parallel.max(1)),
            _ => tensor,
        };
        sum.saturating_add(bytes / cards)
    })
}
