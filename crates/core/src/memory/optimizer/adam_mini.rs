//! Adam-mini (adam-mini's `Adam_mini`): a whole first moment, and a second moment per block: per element for embeddings
//! and the output head, per output neuron for matrices, per tensor for the rest.

use super::Trained;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;

/// The moments of one parameter; `whole` for embeddings and heads.
pub(super) fn states(torch: &mut Torch, parameter: &Tensor, whole: bool) -> Vec<Tensor> {
    let first = torch.fresh_like("optimizer state", parameter, parameter.dtype);
    let second = if whole { parameter.shape } else { blocks(parameter) };
    vec![first, torch.fresh("optimizer state", second, parameter.dtype)]
}

/// Queries and keys have a block per head, which takes as little as a block per row: a few KiB at most.
fn blocks(parameter: &Tensor) -> Shape {
    match parameter.shape.rank() {
        0 | 1 => Shape::from([1]),
        _ => parameter.shape.with(-1, 1),
    }
}

/// One parameter at a time; names stay bound until the next parameter rebinds them.
pub(super) fn step(torch: &mut Torch, parameters: &[Trained], whole: &[bool]) {
    let mut bound: [Option<Tensor>; 2] = [None, None];
    for (index, parameter) in parameters.iter().enumerate() {
        if parameter.leaf.grad.borrow().is_none() {
            continue;
        }
        let dtype = parameter.tensor.dtype;
        if whole.get(index).copied().unwrap_or(false) {
            // h = (v.sqrt() / c).add_(eps)
            let root = torch.fresh_like("sqrt", &parameter.tensor, dtype);
            let ratio = torch.fresh_like("div", &parameter.tensor, dtype);
            drop(root);
            bound[0] = Some(ratio);
            continue;
        }
        let square = torch.fresh_like("mul", &parameter.tensor, dtype);
        let mean = torch.fresh("mean", blocks(&parameter.tensor), dtype);
        drop(square);
        bound[0] = Some(mean);
        let update = torch.fresh_like("mul", &parameter.tensor, dtype);
        bound[1] = Some(update);
        // p.add_(-update)
        drop(torch.fresh_like("neg", &parameter.tensor, dtype));
    }
    drop(bound);
}
