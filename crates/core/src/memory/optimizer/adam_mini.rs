//! Adam-mini (adam-mini 1.1's `Adam_mini`): a whole first moment, and a second moment per block: per row of matrices (of
//! embeddings and heads too), per head for queries and keys, per tensor for the rest.

use super::Trained;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;

/// The moments of one parameter.
pub(super) fn states(torch: &mut Torch, parameter: &Tensor) -> Vec<Tensor> {
    let first = torch.fresh_like("optimizer state", parameter, parameter.dtype);
    vec![first, torch.fresh("optimizer state", blocks(parameter), parameter.dtype)]
}

/// Queries and keys have a block per head, which takes as little as a block per row: a few KiB at most.
fn blocks(parameter: &Tensor) -> Shape {
    match parameter.shape.rank() {
        0 | 1 => Shape::from([1]),
        _ => parameter.shape.with(-1, 1),
    }
}

/// One parameter at a time, its state made first; names stay bound until the next parameter rebinds them.
pub(super) fn step(torch: &mut Torch, parameters: &[Trained], mut prepare: impl FnMut(&mut Torch, usize)) {
    let mut bound: [Option<Tensor>; 2] = [None, None];
    for (index, parameter) in parameters.iter().enumerate() {
        if parameter.leaf.grad.borrow().is_none() {
            continue;
        }
        prepare(torch, index);
        let dtype = parameter.tensor.dtype;
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
