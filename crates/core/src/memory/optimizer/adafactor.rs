//! Adafactor of transformers and of torch: one parameter at a time, with temporaries of its size.

use super::Trained;
use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::plan::OptimizerKind;

/// One step.
pub(super) fn step(torch: &mut Torch, kind: OptimizerKind, parameters: &[Trained]) {
    match kind {
        OptimizerKind::TorchAdafactor => torch_step(torch, parameters),
        _ => transformers_step(torch, parameters),
    }
}

/// transformers/optimization.py: gradient and parameter in fp32, `update = grad²`, the factored update, its product.
/// Names bound by one parameter live until the next rebinds them.
fn transformers_step(torch: &mut Torch, parameters: &[Trained]) {
    let mut bound: [Option<Tensor>; 3] = [None, None, None];
    for parameter in parameters {
        let Some(gradient) = parameter.leaf.grad.borrow().clone() else { continue };
        let wide_gradient = torch.cast(&gradient, DType::F32);
        bound[0] = Some(wide_gradient.clone());
        let wide_parameter = torch.cast(&parameter.tensor.detached(), DType::F32);
        bound[1] = Some(wide_parameter);
        let square = torch.fresh_like("pow", &wide_gradient, DType::F32);
        let shifted = torch.fresh_like("add", &wide_gradient, DType::F32);
        drop(square);
        bound[2] = Some(shifted);
        if parameter.tensor.shape.rank() >= 2 {
            let approximate = torch.fresh_like("mul", &wide_gradient, DType::F32);
            bound[2] = Some(approximate);
        } else {
            let root = torch.fresh_like("rsqrt", &wide_gradient, DType::F32);
            bound[2] = Some(root);
        }
        // The root mean square of the update squares it once more.
        drop(torch.fresh_like("norm", &wide_gradient, DType::F32));
    }
}

/// torch/optim/_adafactor.py, one parameter at a time.
fn torch_step(torch: &mut Torch, parameters: &[Trained]) {
    let mut bound: Option<Tensor> = None;
    for parameter in parameters {
        if parameter.leaf.grad.borrow().is_none() {
            continue;
        }
        let update = torch.fresh_like("update", &parameter.tensor, parameter.tensor.dtype);
        bound = Some(update);
    }
    drop(bound);
}
