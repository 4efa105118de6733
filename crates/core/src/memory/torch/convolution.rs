//! Convolutions: the output, the kept input, the gradients, and what cuDNN takes beside them for pictures.

use super::Torch;
use super::cudnn::{Pass, Pictures};
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::{Strides, Tensor, contiguous_strides};
use crate::model::Shape;
use smallvec::smallvec;

/// Whether a tensor of pictures lies with its channels innermost; the rule is torch's `is_channels_last_strides_2d`, which looks at the
/// stride of a single picture too.
fn is_channels_last(x: &Tensor) -> bool {
    let mut least = 0;
    x.shape.rank() == 4
        && !x.is_contiguous()
        && [1, 3, 2, 0].into_iter().all(|dim| {
            let (size, stride) = (x.shape.sizes()[dim], x.strides[dim]);
            let fits = stride >= least && !(dim == 0 && least == x.strides[1]);
            least = stride.saturating_mul(size.max(1));
            fits
        })
}

fn channels_last(shape: Shape) -> Strides {
    let [channels, height, width] = [1, 2, 3].map(|dim| shape.size(dim));
    let row = width.saturating_mul(channels);
    let mut strides = contiguous_strides(&shape);
    strides[..4].copy_from_slice(&[row.saturating_mul(height), 1, row, channels]);
    strides
}

impl Pictures {
    fn of(x: &Tensor, weight: &Tensor, output: Shape) -> Option<Self> {
        let places = |shape: Shape| shape.sizes()[2..].iter().fold(1, |all: u64, size| all.saturating_mul(*size));
        let along_time = weight.shape.rank() == 5;
        // Many patches that become one place each are read as they lie (truth/convolutions/h200-videos.jsonl, 3 channels to 1,152 and 1,280).
        let copied = weight.shape.rank() == 4 || (along_time && places(output) > 1);
        let plain = copied && weight.shape.size(1) == x.shape.size(1);
        plain.then(|| Self {
            count: x.shape.size(0),
            channels: [x.shape.size(1), output.size(1)],
            places: [places(x.shape), places(output)],
            window: places(weight.shape),
            along_time,
            element: x.dtype.size(),
            channels_last: is_channels_last(x),
        })
    }
}

impl Torch {
    fn workspace_of(&mut self, pictures: Option<Pictures>, pass: Pass) {
        let bytes = pictures.map_or(0, |pictures| pictures.workspace(pass));
        if bytes > 0 {
            drop(self.fresh("convolution workspace", Shape::from([bytes]), DType::U8));
        }
    }

    /// Pictures made larger: they lie as they lay, and so does their gradient.
    pub fn upsampled(&mut self, x: &Tensor, shape: Shape) -> Tensor {
        let last = is_channels_last(x);
        let lying = move |shape: Shape| if last { channels_last(shape) } else { contiguous_strides(&shape) };
        let output = self.fresh_strided("upsample", shape, lying(shape), x.dtype);
        if !self.records(&[x]) {
            return output;
        }
        let old = x.shape;
        self.attach(output, &[x], move |torch, gradient| {
            smallvec![Some(torch.fresh_strided("upsample_backward", old, lying(old), gradient.dtype))]
        })
    }

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
        let pictures = Pictures::of(x, weight, shape);
        let last = pictures.is_some_and(|pictures| pictures.channels_last);
        let turned = last.then(|| self.fresh("contiguous", weight.shape, weight.dtype));
        let dense = (!last && !x.is_contiguous()).then(|| self.fresh("contiguous", x.shape, x.dtype));
        let strides = if last { channels_last(shape) } else { contiguous_strides(&shape) };
        let output = self.fresh_strided("convolution", shape, strides, x.dtype);
        self.workspace_of(pictures, Pass::Forward);
        // Each output sums over the channels of its group and the window.
        let (window, places) =
            (weight.elements() / weight.shape.size(0).max(1), shape.elements() / shape.size(1).max(1));
        self.multiply(x.dtype, 1, [places, window, weight.shape.size(0)]);
        let of_weight = [places, window / weight.shape.size(1).max(1) * x.shape.size(1), weight.shape.size(0)];
        drop((dense, turned));
        let Some([saved_x, saved_weight]) = saved else { return output };
        let needs: Vec<_> = inputs.iter().map(|t| (t.needs_grad(), t.shape, t.dtype)).collect();
        self.attach(output, &inputs, move |torch, gradient| {
            let (x, weight) = (saved_x.get(torch), saved_weight.get(torch));
            let dense = [&gradient, &x.detached()].map(|x| match last {
                true if is_channels_last(x) => x.clone(),
                true => torch.fresh_strided("contiguous", x.shape, channels_last(x.shape), x.dtype),
                false => torch.contiguous(x),
            });
            let turned = last.then(|| torch.fresh("contiguous", weight.shape, weight.dtype));
            let passes = [Some(Pass::OfInput), Some(Pass::OfWeight), None];
            let make = |((needed, shape, dtype), pass): (&(bool, Shape, _), Option<Pass>)| {
                needed.then(|| {
                    let turned = last && pass == Some(Pass::OfInput);
                    let strides = if turned { channels_last(*shape) } else { contiguous_strides(shape) };
                    let made = torch.fresh_strided("convolution_backward", *shape, strides, *dtype);
                    pass.into_iter().for_each(|pass| torch.workspace_of(pictures, pass));
                    made
                })
            };
            let gradients = needs.iter().zip(passes).map(make).collect();
            if needs[0].0 {
                torch.multiply(x.dtype, 1, [places, window, weight.shape.size(0)]);
            }
            if needs[1].0 {
                // FlopCounter does not look at groups here.
                torch.multiply(x.dtype, 1, of_weight);
            }
            drop((x, weight, dense, turned));
            gradients
        })
    }
}
