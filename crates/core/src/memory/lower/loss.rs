//! Losses as transformers computes them (transformers/loss/loss_utils.py).

use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Loss, Reduction};

/// One loss: a scalar; `parallel`: of logits whose classes are split over tensor-parallel cards.
pub(super) fn lower(torch: &mut Torch, kind: Loss, logits: &Tensor, labels: &Tensor, parallel: bool) -> Tensor {
    let classes = logits.shape.last();
    let rows = logits.elements() / classes.max(1);
    match kind {
        Loss::CausalLm => {
            let wide = torch.cast(logits, DType::F32);
            // Labels are padded by one and shifted, so every position of the logits counts. Those of one sample lie densely
            // in the padded ones, which keep their name until the loss is there.
            let padded = torch.fresh("constant_pad_nd", labels.shape.with(-1, labels.shape.last() + 1), DType::I64);
            let later = torch.slice(&padded, (labels.shape.rank().max(1) - 1) as u8, labels.shape.last(), 1);
            let shifted = torch.contiguous(&later);
            let flat = torch.reshape(&wide, Shape::from([rows, classes]));
            let shifted = torch.reshape(&shifted, Shape::from([rows]));
            match parallel {
                true => torch.parallel_cross_entropy(&flat, &shifted),
                false => torch.cross_entropy(&flat, &shifted),
            }
        }
        Loss::EachToken => torch.cross_entropies(logits, labels),
        Loss::CrossEntropy | Loss::CrossEntropyFp32 => {
            let logits = if kind == Loss::CrossEntropyFp32 { torch.cast(logits, DType::F32) } else { logits.clone() };
            let flat = torch.reshape(&logits, Shape::from([rows, classes]));
            let target = torch.reshape(labels, Shape::from([labels.elements()]));
            torch.cross_entropy(&flat, &target)
        }
        Loss::Ctc => {
            let log_probabilities = torch.log_softmax(logits);
            torch.reduce(Reduction::Mean, &log_probabilities, None, false)
        }
        Loss::MeanSquared if logits.shape == labels.shape => torch.mean_squared(logits, labels),
        _ => torch.reduce(Reduction::Mean, logits, None, false),
    }
}
