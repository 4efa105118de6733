//! vLLM's cache groups: layers of one kind share block tables, and every group's page has the same size.

use super::super::model::{Element, ServedModel, per_token};
use crate::dtype::DType;
use crate::model::op::CacheKind;

/// A group of layers with one block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Keys and values of every position.
    Full,
    /// Of the last positions.
    Window(u64),
    /// A state of constant size.
    State,
}

/// How a model's cache is cut in blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Tokens of an attention block.
    pub block_size: u64,
    /// Bytes of one block over all layers of a group.
    pub block_bytes: u64,
    /// Groups, each with how a sequence fills it.
    groups: Vec<Kind>,
    state_blocks: u64,
}

impl Layout {
    /// Cuts the cache of a model on one of `ranks` cards.
    pub fn new(model: &ServedModel, element: Element, ranks: u64, block_size: u64, state_blocks: u64) -> Self {
        let mut kinds: Vec<(Kind, u64, u64)> = Vec::new();
        let mut add =
            |kind: Kind, bytes: u64| match kinds.iter_mut().find(|(known, size, _)| *known == kind && *size == bytes) {
                Some((_, _, count)) => *count += 1,
                None => kinds.push((kind, bytes, 1)),
            };
        for layer in &model.layers {
            // Index keys lie in the page of their layer.
            let grown: u64 = layer.caches.iter().map(|cache| per_token(cache, element, ranks)).sum();
            let window = layer.caches.iter().find_map(|cache| match cache.kind {
                CacheKind::Sliding(window) => Some(window),
                _ => None,
            });
            let (convolution, recurrent) = model.states(layer);
            let state = (convolution * DType::BF16.size() + recurrent * DType::F32.size()) / ranks.max(1);
            if grown > 0 {
                add(window.map_or(Kind::Full, Kind::Window), grown);
            }
            if state > 0 {
                add(Kind::State, state);
            }
        }
        Self::cut(&kinds, block_size.max(1), state_blocks)
    }

    fn cut(kinds: &[(Kind, u64, u64)], block_size: u64, state_blocks: u64) -> Self {
        let per_token = |kind: &Kind, bytes: u64| if *kind == Kind::State { 0 } else { bytes };
        let token = kinds.iter().map(|(kind, bytes, _)| per_token(kind, *bytes)).max().unwrap_or(0);
        let state = kinds.iter().filter(|(kind, ..)| *kind == Kind::State).map(|(_, bytes, _)| *bytes).max();
        // An attention page is made as large as the largest state, in steps of 16 tokens.
        let block_size = match (state, token) {
            (Some(state), 1..) => block_size.max(state.div_ceil(token).next_multiple_of(16)),
            _ => block_size,
        };
        let page = match token {
            0 => state.unwrap_or(0),
            token => token.saturating_mul(block_size),
        };
        // Groups have as many layers as the rarest kind; the others are cut in several, the last one padded.
        let counts = || kinds.iter().map(|(_, _, count)| *count);
        let (fewest, most) = (counts().min().unwrap_or(1).max(1), counts().max().unwrap_or(1));
        let size = if most * 4 < fewest * 5 { most } else { fewest };
        let groups = kinds
            .iter()
            .flat_map(|(kind, _, count)| std::iter::repeat_n(*kind, usize::try_from(count.div_ceil(size)).unwrap_or(1)))
            .collect();
        Self { block_size, block_bytes: page.saturating_mul(size), groups, state_blocks }
    }

    /// Groups.
    pub fn group_count(&self) -> u64 {
        self.groups.len() as u64
    }

    /// Blocks that one sequence of `length` tokens holds at most, `batched` of them computed at once.
    pub fn blocks(&self, length: u64, batched: u64) -> u64 {
        let full = length.div_ceil(self.block_size);
        let of = |kind: &Kind| match kind {
            Kind::Full => full,
            Kind::Window(window) => {
                let seen = window.saturating_sub(1).saturating_add(batched).min(length);
                seen.div_ceil(self.block_size).saturating_add(1).min(full.max(1))
            }
            Kind::State => self.state_blocks,
        };
        self.groups.iter().map(of).fold(0, u64::saturating_add)
    }
}
