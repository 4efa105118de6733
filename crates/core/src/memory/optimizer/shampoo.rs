//! Shampoo of torch_optimizer: per dimension a preconditioner and its inverse root, both square, and the last direction,
//! which it keeps as a momentum buffer even without momentum. The decomposition itself runs on the host.

use super::Trained;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;

/// The squares of one parameter, and its direction.
pub(super) fn states(torch: &mut Torch, parameter: &Tensor) -> Vec<Tensor> {
    let mut states = Vec::new();
    for &size in parameter.shape.sizes() {
        let square = Shape::from([size, size]);
        let identity = torch.fresh("eye", square, parameter.dtype);
        states.push(torch.fresh("optimizer state", square, parameter.dtype));
        drop(identity);
        states.push(torch.fresh("optimizer state", square, parameter.dtype));
    }
    states.push(torch.fresh_like("optimizer state", parameter, parameter.dtype));
    states
}

/// Per dimension: the gradient's own product, the inverse root brought from the host, the preconditioned gradient.
pub(super) fn step(torch: &mut Torch, parameters: &[Trained]) {
    for parameter in parameters.iter().filter(|p| p.leaf.grad.borrow().is_some()) {
        let dtype = parameter.tensor.dtype;
        // The name `grad`: what it held dies when it is bound anew.
        let mut bound: [Option<Tensor>; 1] = [None];
        for (dim, &size) in parameter.tensor.shape.sizes().iter().enumerate() {
            let square = Shape::from([size, size]);
            if dim > 0 {
                // Turned, then made contiguous.
                bound[0] = Some(torch.fresh_like("contiguous", &parameter.tensor, dtype));
            }
            torch.use_blas();
            drop(torch.fresh("mm", square, dtype));
            drop(torch.fresh("_to_copy", square, dtype));
            let direction = torch.fresh_like("mm", &parameter.tensor, dtype);
            bound[0] = Some(direction);
        }
        // It takes the place of the direction kept before, which this tape goes on holding instead.
        drop(bound);
    }
}
