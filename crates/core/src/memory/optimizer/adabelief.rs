//! AdaBelief of adabelief-pytorch, with its defaults (decoupled decay, rectified): one parameter at a time.

use super::Trained;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;

/// `exp_avg` and `exp_avg_var`.
pub(super) fn states(torch: &mut Torch, parameter: &Tensor) -> Vec<Tensor> {
    (0..2).map(|_| torch.fresh_like("optimizer state", parameter, parameter.dtype)).collect()
}

/// The residual and the denominator of one parameter stay bound until the next rebinds them.
pub(super) fn step(torch: &mut Torch, parameters: &[Trained], mut prepare: impl FnMut(&mut Torch, usize)) {
    let mut bound: [Option<Tensor>; 2] = [None, None];
    let stepped = parameters.iter().enumerate().filter(|(_, p)| p.leaf.grad.borrow().is_some());
    for (index, parameter) in stepped {
        prepare(torch, index);
        let like =
            |torch: &mut Torch, operation| torch.fresh_like(operation, &parameter.tensor, parameter.tensor.dtype);
        // grad - exp_avg
        bound[0] = Some(like(torch, "sub"));
        // (exp_avg_var.add_(eps).sqrt() / c).add_(eps)
        let root = like(torch, "sqrt");
        let ratio = like(torch, "div");
        drop(root);
        bound[1] = Some(ratio);
        // Once enough steps are done the rectified branch takes the root again.
        bound[1] = Some(like(torch, "sqrt"));
    }
    drop(bound);
}
