//! Collectives of tensor parallel along the sequence, as torchtitan's plan has DTensor make them (`PrepareModuleInput`,
//! `RowwiseParallel`; torch/distributed/_functional_collectives.py).

use super::graph::{Graph, Id, Kind};
use super::rules::Rule;
use crate::model::Shape;

impl Graph {
    /// `all_gather_tensor` along the sequence: parts of all cards one after the other, then side by side.
    pub(super) fn gather_sequence(&mut self, part: Id, ways: u64) -> Id {
        let (shape, dtype) = (self.shape(part), self.dtype(part));
        let stacked = shape.with(0, shape.size(0).saturating_mul(ways));
        let all = self.node(Kind::Library("all_gather_into_tensor"), &[part], stacked, dtype);
        let whole = shape.with(1, shape.size(1).saturating_mul(ways));
        let rule = Rule::GatherSequence { part, ways };
        self.with_rule(beside(shape), &[all], whole, dtype, rule)
    }

    /// `reduce_scatter_tensor` along the sequence: what each card gets is laid together first. A selective checkpoint keeps it;
    /// its gradient may come back as bytes.
    pub(super) fn scatter_sequence(&mut self, whole: Id, ways: u64, (kept, bytes): (bool, bool)) -> Id {
        let (shape, dtype) = (self.shape(whole), self.dtype(whole));
        let part = shape.with(1, shape.size(1) / ways.max(1));
        let stacked = part.with(0, part.size(0).saturating_mul(ways));
        let laid = self.node(beside(shape), &[whole], stacked, dtype);
        let rule = Rule::ScatterSequence { whole, ways, bytes };
        let sum = self.with_rule(Kind::Library("reduce_scatter_tensor"), &[laid], part, dtype, rule);
        self.nodes[sum as usize].kept = kept;
        sum
    }
}

/// One sample needs no copy (`_maybe_view_chunk_cat`).
fn beside(shape: Shape) -> Kind {
    if shape.size(0) == 1 { Kind::View("view") } else { Kind::Join }
}
