//! AnyPrecisionAdamW of torchdistx (transformers' `adamw_anyprecision`), without Kahan summation: one parameter at a time.

use super::Trained;
use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::plan;

/// What the moments are kept in; transformers' default.
fn dtype(plan: plan::Optimizer) -> DType {
    plan.state.unwrap_or(DType::F32)
}

/// `exp_avg` and `exp_avg_sq`.
pub(super) fn states(torch: &mut Torch, plan: plan::Optimizer, parameter: &Tensor) -> Vec<Tensor> {
    (0..2).map(|_| torch.fresh_like("optimizer state", parameter, dtype(plan))).collect()
}

/// `(exp_avg_sq.sqrt() / correction).add_(eps)`: the result stays bound until the next parameter's is there.
pub(super) fn step(
    torch: &mut Torch,
    plan: plan::Optimizer,
    parameters: &[Trained],
    mut prepare: impl FnMut(&mut Torch, usize),
) {
    let mut bound: Option<Tensor> = None;
    let stepped = parameters.iter().enumerate().filter(|(_, p)| p.leaf.grad.borrow().is_some());
    for (index, parameter) in stepped {
        prepare(torch, index);
        let root = torch.fresh_like("sqrt", &parameter.tensor, dtype(plan));
        let ratio = torch.fresh_like("div", &parameter.tensor, dtype(plan));
        drop(root);
        drop(bound.replace(ratio));
    }
}
