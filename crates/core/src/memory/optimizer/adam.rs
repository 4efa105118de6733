//! Steps of the element-wise optimizers of torch: what their lists need beside parameters, gradients and state.

use super::Trained;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::plan::{Implementation, OptimizerKind};

/// One step.
pub(super) fn step(torch: &mut Torch, kind: OptimizerKind, implementation: Implementation, parameters: &[Trained]) {
    let lists = match kind {
        // `_foreach_sqrt` of the second moments.
        OptimizerKind::AdamW | OptimizerKind::Adam | OptimizerKind::Amsgrad | OptimizerKind::Nadam => 1,
        OptimizerKind::Rmsprop => 1,
        // The square roots, and the scaled gradients.
        OptimizerKind::Adagrad => 2,
        _ => return,
    };
    match implementation {
        Implementation::Fused => {}
        Implementation::Foreach => {
            // One list per element type; the variable of one group is bound until the next is made.
            let mut dtypes: Vec<_> = parameters.iter().map(|p| p.tensor.dtype).collect();
            dtypes.sort();
            dtypes.dedup();
            let mut bound: Vec<Tensor> = Vec::new();
            for dtype in dtypes {
                let group = || parameters.iter().filter(|p| p.tensor.dtype == dtype && p.leaf.grad.borrow().is_some());
                let made: Vec<Tensor> = (0..lists)
                    .flat_map(|_| group())
                    .map(|p| torch.fresh_like("_foreach_sqrt", &p.tensor, dtype))
                    .collect();
                bound = made;
            }
            drop(bound);
        }
        Implementation::Forloop => {
            // sqrt and div of one parameter, while the last parameter's denominator is still bound.
            let mut denominator: Option<Tensor> = None;
            for parameter in parameters.iter().filter(|p| p.leaf.grad.borrow().is_some()) {
                let root = torch.fresh_like("sqrt", &parameter.tensor, parameter.tensor.dtype);
                let ratio = torch.fresh_like("div", &parameter.tensor, parameter.tensor.dtype);
                drop(root);
                drop(denominator.replace(ratio));
            }
        }
    }
}
