//! Adafactor of transformers and of torch: one parameter at a time, with temporaries of its size. Names bound by one
//! parameter live until the next rebinds them.

use super::{Trained, other};
use crate::dtype::DType;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::OptimizerKind;

/// One step of transformers/optimization.py; a parameter's state is made when it is first stepped.
pub(super) fn transformers_step(torch: &mut Torch, parameters: &[Trained], states: &mut Vec<Vec<Tensor>>) {
    let kind = OptimizerKind::Adafactor;
    let (mut names, mut update): ([Option<Tensor>; 2], Option<Tensor>) = ([None, None], None);
    let mut deviations: Vec<Tensor> = Vec::new();
    let first = states.is_empty();
    for parameter in parameters {
        let Some(gradient) = parameter.leaf.grad.borrow().clone() else { continue };
        let gradient = torch.cast(&gradient, DType::F32);
        names[0] = Some(gradient.clone());
        if first {
            let made = torch
                .in_category(Category::OptimizerState, |torch| other::states(torch, kind, false, &parameter.tensor));
            states.push(made);
        }
        let wide = torch.cast(&parameter.tensor.detached(), DType::F32);
        names[1] = Some(wide.clone());
        deviations.push(root_mean_square(torch, &wide));
        let squared = {
            let square = torch.fresh_like("pow", &gradient, DType::F32);
            let shifted = torch.fresh_like("add", &gradient, DType::F32);
            drop(square);
            shifted
        };
        drop(update.replace(squared.clone()));
        let made = match parameter.tensor.shape.rank() {
            0 | 1 => torch.fresh_like("rsqrt", &gradient, DType::F32),
            _ => approximate(torch, &squared),
        };
        drop(squared);
        drop(update.replace(made.clone()));
        let clipped = {
            let deviation = root_mean_square(torch, &made);
            let clipped = torch.fresh("div", Shape::new(&[]), DType::F32);
            drop(deviation);
            clipped
        };
        drop(clipped);
        drop(torch.fresh_like("neg", &made, DType::F32));
    }
}

/// Means over columns and rows, and the square of the gradient that they stand for.
fn approximate(torch: &mut Torch, squared: &Tensor) -> Tensor {
    let [rows, columns] = [squared.shape.removed(-1), squared.shape.removed(-2)];
    drop(torch.fresh("mean", rows, DType::F32));
    drop(reduced(torch, "mean", squared, columns));
    let row_factor = {
        let mean = torch.fresh("mean", rows.with(-1, 1), DType::F32);
        let ratio = torch.fresh("div", rows, DType::F32);
        drop(mean);
        ratio
    };
    let column_factor = torch.fresh("rsqrt", columns, DType::F32);
    let product = torch.fresh("mul", squared.shape, DType::F32);
    drop((row_factor, column_factor));
    product
}

/// `tensor.norm(2) / sqrt(numel)`.
fn root_mean_square(torch: &mut Torch, x: &Tensor) -> Tensor {
    let norm = norm(torch, x);
    let result = torch.fresh("div", Shape::new(&[]), DType::F32);
    drop(norm);
    result
}

fn norm(torch: &mut Torch, x: &Tensor) -> Tensor {
    let norm = torch.fresh("linalg_vector_norm", Shape::new(&[]), x.dtype);
    drop(torch.reduction_scratch(x, 1, true));
    norm
}

/// A reduction over the dimension before the last.
fn reduced(torch: &mut Torch, name: &'static str, x: &Tensor, shape: Shape) -> Tensor {
    let output = torch.fresh(name, shape, x.dtype);
    drop(torch.reduction_scratch(x, shape.elements(), false));
    output
}

/// One step of torch/optim/_adafactor.py (`_single_tensor_adafactor`, the default).
pub(super) fn torch_step(torch: &mut Torch, parameters: &[Trained]) {
    let mut names: [Option<Tensor>; 3] = [None, None, None];
    let mut update: Option<Tensor> = None;
    for parameter in parameters {
        let Some(gradient) = parameter.leaf.grad.borrow().clone() else { continue };
        drop(norm(torch, &parameter.tensor));
        let dtype = gradient.dtype;
        let estimate = if gradient.shape.rank() > 1 {
            let rows = gradient.shape.with(-1, 1);
            let row_mean = torch.fresh("linalg_vector_norm", rows, dtype);
            drop(names[0].replace(row_mean));
            let column_mean = reduced(torch, "linalg_vector_norm", &gradient, gradient.shape.with(-2, 1));
            drop(names[1].replace(column_mean));
            let estimate = torch.fresh("mm", gradient.shape, dtype);
            torch.use_blas();
            drop(torch.fresh("mean", rows.with(-2, 1), dtype));
            estimate
        } else {
            let square = torch.fresh_like("mul", &gradient, dtype);
            drop(names[2].replace(square));
            torch.fresh_like("clone", &gradient, dtype)
        };
        drop(update.replace(estimate.clone()));
        drop(norm(torch, &estimate));
    }
}
