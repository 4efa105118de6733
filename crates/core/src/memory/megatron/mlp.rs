//! Gated feed-forwards. Source: megatron/core/transformer/mlp.py, fusions/fused_bias_swiglu.py.

use std::rc::Rc;

use super::lora;
use super::rank::{Rank, Split};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::Binary;
use crate::plan::parallel::megatron::{LoraTarget, RecomputeModule};

/// A dense feed-forward with its norm.
pub(super) fn normed(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, width: u64) -> Tensor {
    let outputs = 2 * width / rank.mesh.tp.max(1);
    let wide = match &rank.options.lora {
        Some(lora) => lora::norm_linear(rank, torch, x, (outputs, LoraTarget::LinearFc1), lora),
        None => rank.norm_linear(torch, x, outputs),
    };
    finish(rank, torch, wide, x.shape.last())
}

/// The same without its norm: shared experts.
pub(super) fn gated(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, width: u64) -> Tensor {
    let wide = first(rank, torch, x, width, Split::Column);
    finish(rank, torch, wide, x.shape.last())
}

/// The same on a gathered input, without exchange: shared experts beside the dispatch.
pub(super) fn local(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, width: u64) -> Tensor {
    let wide = first(rank, torch, x, width, Split::Duplicated);
    let activated = rank.swiglu(torch, &wide, None);
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

fn finish(rank: &Rc<Rank>, torch: &mut Torch, wide: Tensor, hidden: u64) -> Tensor {
    let activated = rank.swiglu(torch, &wide, None);
    drop(wide);
    match &rank.options.lora {
        Some(lora) => lora::row_linear(rank, torch, &activated, (hidden, LoraTarget::LinearFc2), lora),
        None => rank.linear(torch, &activated, hidden, Split::Row),
    }
}

/// The gate on the shared experts' output: a score per token.
pub(super) fn gate(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, output: &Tensor) -> Tensor {
    let score = torch.fresh("sigmoid", Shape::from([x.shape.size(0), 1]), rank.dtype);
    torch.binary(Binary::Mul, output, &score)
}
