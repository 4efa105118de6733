//! State of the optimizers of torch and transformers, and the steps that fit nowhere else.

use super::{Trained, bitsandbytes};
use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::OptimizerKind;

/// The state of one parameter.
pub(super) fn states(torch: &mut Torch, kind: OptimizerKind, fused: bool, parameter: &Tensor) -> Vec<Tensor> {
    let dtype = parameter.dtype;
    let like = |torch: &mut Torch, count: usize, dtype: DType| -> Vec<Tensor> {
        (0..count).map(|_| torch.fresh_like("optimizer state", parameter, dtype)).collect()
    };
    match kind {
        OptimizerKind::AdamW | OptimizerKind::Adam | OptimizerKind::Nadam | OptimizerKind::Amsgrad => {
            // A fused step keeps its counter on the device.
            let mut states: Vec<Tensor> =
                fused.then(|| torch.fresh("step", Shape::new(&[]), DType::F32)).into_iter().collect();
            states.extend(like(torch, if kind == OptimizerKind::Amsgrad { 3 } else { 2 }, dtype));
            states
        }
        OptimizerKind::SgdMomentum | OptimizerKind::Nesterov | OptimizerKind::Adagrad | OptimizerKind::Rmsprop => {
            like(torch, 1, dtype)
        }
        OptimizerKind::Sgd => Vec::new(),
        OptimizerKind::Muon => {
            if parameter.shape.rank() == 2 {
                like(torch, 1, dtype)
            } else {
                Vec::new()
            }
        }
        OptimizerKind::Adafactor => factored(torch, parameter, DType::F32),
        OptimizerKind::TorchAdafactor => factored(torch, parameter, dtype),
        _ => bitsandbytes::states(torch, kind, parameter),
    }
}

/// Row and column means of matrices; a whole second moment of vectors.
fn factored(torch: &mut Torch, parameter: &Tensor, dtype: DType) -> Vec<Tensor> {
    if parameter.shape.rank() < 2 {
        return vec![torch.fresh_like("optimizer state", parameter, dtype)];
    }
    let row = parameter.shape.with(-1, 1);
    let column = parameter.shape.with(-2, 1);
    vec![torch.fresh("optimizer state", row, dtype), torch.fresh("optimizer state", column, dtype)]
}

/// torch.optim.Muon: five Newton-Schulz steps in bf16 per matrix. The update of one matrix stays bound until that of the
/// next is made; within a matrix the update itself, the last iterate and the new one live together.
pub(super) fn muon_step(torch: &mut Torch, parameters: &[Trained]) {
    const STEPS: u32 = 5;
    let mut bound: Option<Tensor> = None;
    for parameter in parameters.iter().filter(|p| p.tensor.shape.rank() == 2 && p.leaf.grad.borrow().is_some()) {
        let update = torch.fresh_like("lerp", &parameter.tensor, parameter.tensor.dtype);
        drop(bound.take());
        let mut iterate = torch.cast(&update.detached(), DType::BF16);
        let side = parameter.tensor.shape.size(0).min(parameter.tensor.shape.size(1));
        let square = Shape::from([side, side]);
        let mut squares: [Option<Tensor>; 2] = [None, None];
        for _ in 0..STEPS {
            squares[0] = Some(torch.fresh("mm", square, DType::BF16));
            squares[1] = Some(torch.fresh("addmm", square, DType::BF16));
            iterate = torch.fresh("addmm", parameter.tensor.shape, DType::BF16);
        }
        torch.use_blas();
        drop((squares, update));
        bound = Some(iterate);
    }
}
