//! Cross entropy and the other losses.

use super::Torch;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;
use smallvec::smallvec;

impl Torch {
    /// `F.cross_entropy` on `[rows, classes]`: log-softmax, kept, then the negative log likelihood.
    pub fn cross_entropy(&mut self, logits: &Tensor, target: &Tensor) -> Tensor {
        // It names the type itself, so autocast leaves the log-softmax alone and widens only what comes after.
        let autocast = self.autocast.take();
        let log_probabilities = self.log_softmax(logits);
        self.autocast = autocast;
        self.nll_loss(&log_probabilities, target)
    }

    /// The same with `reduction="none"`: a figure for every row.
    pub fn cross_entropies(&mut self, logits: &Tensor, target: &Tensor) -> Tensor {
        let autocast = self.autocast.take();
        let log_probabilities = self.log_softmax(logits);
        self.autocast = autocast;
        self.nll_loss_of(&log_probabilities, target, target.shape)
    }

    /// Log-softmax over the last dimension: its output is kept.
    pub fn log_softmax(&mut self, x: &Tensor) -> Tensor {
        let fused = x.dtype == DType::F16 && self.autocast.is_some();
        let x = &if fused { x.clone() } else { self.widen(x) };
        // The kernel reads dense rows (`host_softmax` of SoftMax.cu).
        let dense = (!x.is_contiguous()).then(|| self.fresh("contiguous", x.shape, x.dtype));
        let like = dense.as_ref().unwrap_or(x).detached();
        let output = self.fresh_like("_log_softmax", &like, if fused { DType::F32 } else { x.dtype });
        drop((dense, like));
        if !self.records(&[x]) {
            return output;
        }
        let saved = Saved::new(self, &output);
        let own = x.dtype;
        self.attach(output, &[x], move |torch, gradient| {
            let kept = saved.get(torch);
            let result = torch.pointwise("_log_softmax_backward_data", &[&gradient], own);
            drop(kept);
            smallvec![Some(result)]
        })
    }

    /// `F.mse_loss`: both sides are kept, and the prediction has a gradient.
    pub fn mean_squared(&mut self, x: &Tensor, target: &Tensor) -> Tensor {
        let records = self.records(&[x]);
        let saved = records.then(|| [Saved::new(self, x), Saved::new(self, target)]);
        let output = self.fresh("mse_loss", Shape::new(&[]), x.dtype);
        let Some([saved_x, saved_target]) = saved else { return output };
        self.attach(output, &[x], move |torch, _| {
            let (x, target) = (saved_x.get(torch), saved_target.get(torch));
            let result = torch.fresh("mse_loss_backward", x.shape, x.dtype);
            drop((x, target));
            smallvec![Some(result)]
        })
    }

    fn nll_loss(&mut self, log_probabilities: &Tensor, target: &Tensor) -> Tensor {
        self.nll_loss_of(log_probabilities, target, Shape::new(&[]))
    }

    /// `shape` is that of the result: a scalar, or one figure for every row.
    fn nll_loss_of(&mut self, log_probabilities: &Tensor, target: &Tensor, shape: Shape) -> Tensor {
        let log_probabilities = &self.widen(log_probabilities);
        let records = self.records(&[log_probabilities]);
        let saved = records.then(|| [Saved::new(self, log_probabilities), Saved::new(self, target)]);
        let output = self.fresh("nll_loss_forward", shape, log_probabilities.dtype);
        let total = self.fresh("nll_loss_forward", Shape::new(&[]), log_probabilities.dtype);
        let Some([saved_input, saved_target]) = saved else { return output };
        let saved_total = Saved::new(self, &total);
        self.attach(output, &[log_probabilities], move |torch, gradient| {
            let (input, target, total) = (saved_input.get(torch), saved_target.get(torch), saved_total.get(torch));
            let result = torch.fresh("nll_loss_backward", input.shape, gradient.dtype);
            drop((input, target, total));
            smallvec![Some(result)]
        })
    }
}
