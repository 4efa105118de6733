//! Convolutions: the output, the kept input, the gradients. Workspaces of the libraries are not modelled.

use super::Torch;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;

impl Torch {
    /// A convolution with this output shape.
    pub fn convolution(&mut self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, shape: Shape) -> Tensor {
        let bias = bias.map(|bias| self.narrow(bias));
        let weight = &self.narrow(weight);
        let x = &self.narrow(x);
        let mut inputs = vec![x, weight];
        inputs.extend(bias.as_ref());
        let records = self.records(&inputs);
        let saved = records.then(|| [Saved::new(self, x), Saved::new(self, weight)]);
        // The library wants it dense; what is kept is the tensor as it came.
        let dense = (!x.is_contiguous()).then(|| self.fresh("contiguous", x.shape, x.dtype));
        let output = self.fresh("convolution", shape, x.dtype);
        // Each output sums over the channels of its group and the window.
        let (window, places) =
            (weight.elements() / weight.shape.size(0).max(1), shape.elements() / shape.size(1).max(1));
        self.multiply(x.dtype, 1, [places, window, weight.shape.size(0)]);
        let of_weight = [places, window / weight.shape.size(1).max(1) * x.shape.size(1), weight.shape.size(0)];
        drop(dense);
        let Some([saved_x, saved_weight]) = saved else { return output };
        let needs: Vec<_> = inputs.iter().map(|t| (t.needs_grad(), t.shape, t.dtype)).collect();
        self.attach(output, &inputs, move |torch, gradient| {
            let (x, weight) = (saved_x.get(torch), saved_weight.get(torch));
            let dense = (torch.contiguous(&gradient), torch.contiguous(&x.detached()));
            let make = |(needed, shape, dtype): &(bool, Shape, _)| {
                needed.then(|| torch.fresh("convolution_backward", *shape, *dtype))
            };
            let gradients = needs.iter().map(make).collect();
            if needs[0].0 {
                torch.multiply(x.dtype, 1, [places, window, weight.shape.size(0)]);
            }
            if needs[1].0 {
                // FlopCounter does not look at groups here.
                torch.multiply(x.dtype, 1, of_weight);
            }
            drop((x, weight, dense));
            gradients
        })
    }
}
