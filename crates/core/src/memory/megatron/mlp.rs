//! Shared experts: gated feed-forwards without a norm of their own.
//!
//! Source: megatron/core/transformer/mlp.py, fusions/fused_bias_swiglu.py.

use std::rc::Rc;

use super::rank::{Rank, Split};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::Binary;
use crate::plan::parallel::megatron::RecomputeModule;

/// On the rank's part of the sequence.
pub(super) fn gated(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, width: u64) -> Tensor {
    let wide = first(rank, torch, x, width, Split::Column);
    let activated = rank.activation(torch, &wide, true, None);
    drop(wide);
    rank.linear(torch, &activated, x.shape.last(), Split::Row)
}

/// The same on a gathered input, without exchange: shared experts beside the dispatch.
pub(super) fn local(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, width: u64) -> Tensor {
    let wide = first(rank, torch, x, width, Split::Duplicated);
    let activated = rank.activation(torch, &wide, true, None);
    drop(wide);
    rank.linear(torch, &activated, x.shape.last(), Split::Duplicated)
}

/// The first product of shared experts: the router keeps its input too, unless all of it is run again.
fn first(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, width: u64, split: Split) -> Tensor {
    let outputs = 2 * width / rank.mesh.tp.max(1);
    match rank.recomputes(RecomputeModule::SharedExperts) {
        true => rank.linear(torch, x, outputs, split),
        false => rank.linear_of_kept(torch, x, outputs, split),
    }
}

/// The gate on the shared experts' output: a score per token.
pub(super) fn gate(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, output: &Tensor) -> Tensor {
    let score = torch.fresh("sigmoid", Shape::from([x.shape.size(0), 1]), rank.dtype);
    torch.binary(Binary::Mul, output, &score)
}
