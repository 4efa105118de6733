//! Steps of the element-wise optimizers of torch: what their lists need beside parameters, gradients and state.

use super::Trained;
use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::plan::{Implementation, OptimizerKind};

/// One step.
pub(super) fn step(
    torch: &mut Torch,
    kind: OptimizerKind,
    implementation: Implementation,
    parameters: &[Trained],
    prepare: impl FnMut(&mut Torch, usize),
) {
    if implementation == Implementation::Forloop || kind == OptimizerKind::Lamb {
        return one_by_one(torch, kind, parameters, prepare);
    }
    let lists = match kind {
        // `_foreach_sqrt` of the second moments.
        OptimizerKind::AdamW | OptimizerKind::Adam | OptimizerKind::Amsgrad | OptimizerKind::Nadam => 1,
        OptimizerKind::Rmsprop => 1,
        // The square roots, and the scaled gradients.
        OptimizerKind::Adagrad => 2,
        _ => return,
    };
    match implementation {
        Implementation::Fused | Implementation::Forloop => {}
        Implementation::Foreach => {
            // One list per element type; the variable of one group is bound until the next is made.
            let mut dtypes: Vec<_> = parameters.iter().map(|p| p.tensor.dtype).collect();
            crate::order::sort(&mut dtypes);
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
    }
}

/// One parameter after the other; the last one's name is still bound while the next one's value is made.
fn one_by_one(
    torch: &mut Torch,
    kind: OptimizerKind,
    parameters: &[Trained],
    mut prepare: impl FnMut(&mut Torch, usize),
) {
    let mut bound: Option<Tensor> = None;
    let stepped = parameters.iter().enumerate().filter(|(_, p)| p.leaf.grad.borrow().is_some());
    for (index, parameter) in stepped {
        let like = |torch: &mut Torch, name| torch.fresh_like(name, &parameter.tensor, parameter.tensor.dtype);
        match kind {
            OptimizerKind::AdamW | OptimizerKind::Adam | OptimizerKind::Amsgrad | OptimizerKind::Nadam => {
                let root = like(torch, "sqrt");
                let ratio = like(torch, "div");
                drop(root);
                drop(bound.replace(ratio));
            }
            OptimizerKind::Rmsprop | OptimizerKind::Adagrad => {
                let root = like(torch, "sqrt");
                drop(bound.replace(root));
            }
            OptimizerKind::Nesterov => {
                // `grad` is bound to the next gradient first.
                drop(bound.take());
                prepare(torch, index);
                bound = Some(like(torch, "add"));
            }
            // LAMB's norm of the parameter is taken of an fp32 copy.
            OptimizerKind::Lamb => {
                prepare(torch, index);
                if parameter.tensor.dtype != DType::F32 {
                    drop(torch.fresh_like("_to_copy", &parameter.tensor, DType::F32));
                }
            }
            _ => return,
        }
    }
}
