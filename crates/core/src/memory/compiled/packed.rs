//! Weights of few bits inside a graph: torchao's `NF4Tensor`, as torchtune's QLoRA has it.

use super::graph::{Graph, Id, Kind};
use crate::dtype::DType;
use crate::model::Shape;

impl Graph {
    /// A matrix as a product reads it: where it is stored as bytes, looked up and scaled by one kernel. Both halves of each
    /// byte are stacked (`aten.cat`), which the partitioner never computes again, and forward and backward unpack the same:
    /// so the matrix in full is kept for backward.
    pub(super) fn unpacked(&mut self, stored: Id, [rows, columns]: [u64; 2], dtype: DType) -> Id {
        if self.dtype(stored) != DType::U8 {
            return stored;
        }
        self.node(Kind::Join, &[stored], Shape::from([rows, columns]), dtype)
    }
}
