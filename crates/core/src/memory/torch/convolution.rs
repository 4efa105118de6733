//! Convolutions: the output, the kept input, the gradients, and what cuDNN takes beside them for pictures.

use super::Torch;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;

/// What is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward,
    OfInput,
    OfWeight,
}

/// A convolution of pictures without groups.
#[derive(Debug, Clone, Copy)]
struct Pictures {
    count: u64,
    /// Channels of input and output.
    channels: [u64; 2],
    /// Pixels of input and output.
    places: [u64; 2],
    /// Places of the kernel.
    window: u64,
    /// Bytes of an element.
    element: u64,
}

impl Pictures {
    fn of(x: &Tensor, weight: &Tensor, output: Shape) -> Option<Self> {
        let plain = weight.shape.rank() == 4 && weight.shape.size(1) == x.shape.size(1);
        let places = |shape: Shape| shape.size(2).saturating_mul(shape.size(3));
        plain.then(|| Self {
            count: x.shape.size(0),
            channels: [x.shape.size(1), output.size(1)],
            places: [places(x.shape), places(output)],
            window: places(weight.shape),
            element: x.dtype.size(),
        })
    }

    /// Bytes of cuDNN's workspace. Tensor cores read channels last, in pieces of 16 bytes; so input, kernel and output are copied
    /// there, with their channels filled up. The weight's gradient of a kernel of one place is a product for each picture, summed
    /// in fp32. Read off truth/convolutions (an H200, cuDNN 9.19); what some of its engines take beyond that is not known.
    fn workspace(self, pass: Pass) -> u64 {
        const PIECE: u64 = 16;
        const ALIGNMENT: u64 = 512;
        // So few channels are read as they lie.
        const FEW: u64 = 4;
        let [inputs, outputs] = self.channels;
        if self.window == 1 {
            let sums = pass == Pass::OfWeight && (self.count > 1 || self.element < 4);
            return if sums { self.count.saturating_mul(inputs).saturating_mul(outputs).saturating_mul(4) } else { 0 };
        }
        if pass == Pass::Forward && inputs <= FEW {
            return 0;
        }
        let filled = self.channels.map(|channels| channels.next_multiple_of((PIECE / self.element.max(1)).max(1)));
        let product = |sizes: &[u64]| sizes.iter().fold(self.element, |all, size| all.saturating_mul(*size));
        let copy = |side: usize| product(&[self.count, filled[side], self.places[side]]);
        copy(0)
            .saturating_add(copy(1))
            .saturating_add(product(&[filled[0], filled[1], self.window]))
            .saturating_add(ALIGNMENT)
    }
}

impl Torch {
    fn workspace_of(&mut self, pictures: Option<Pictures>, pass: Pass) {
        let bytes = pictures.map_or(0, |pictures| pictures.workspace(pass));
        if bytes > 0 {
            drop(self.fresh("convolution workspace", Shape::from([bytes]), DType::U8));
        }
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
        let dense = (!x.is_contiguous()).then(|| self.fresh("contiguous", x.shape, x.dtype));
        let output = self.fresh("convolution", shape, x.dtype);
        let pictures = Pictures::of(x, weight, shape);
        self.workspace_of(pictures, Pass::Forward);
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
            let passes = [Some(Pass::OfInput), Some(Pass::OfWeight), None];
            let make = |((needed, shape, dtype), pass): (&(bool, Shape, _), Option<Pass>)| {
                needed.then(|| {
                    let made = torch.fresh("convolution_backward", *shape, *dtype);
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
            drop((x, weight, dense));
            gradients
        })
    }
}
