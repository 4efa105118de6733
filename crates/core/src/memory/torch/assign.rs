//! Writing into parts of tensors, and the nodes that such writes leave in the graph.

use super::Torch;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;
use crate::model::op::Binary;
use smallvec::smallvec;

impl Torch {
    /// `x[…, range, …] = y`: nothing is made, but the graph gets a `CopySlices` node, whose backward copies the whole
    /// gradient and then the range.
    pub fn assign(&mut self, x: &Tensor, y: &Tensor) -> Tensor {
        let output = x.detached();
        if !self.records(&[x, y]) {
            return output;
        }
        let (part, dtype) = (y.shape, y.dtype);
        let (need_x, need_y) = (x.needs_grad(), y.needs_grad());
        self.attach(output, &[x, y], move |torch, gradient| {
            let whole = torch.fresh_like("copy_slices", &gradient, gradient.dtype);
            let range = need_y.then(|| torch.fresh("clone", part, gradient.dtype));
            drop(gradient);
            let range = range.map(|range| torch.cast(&range, dtype));
            smallvec![need_x.then_some(whole), range]
        })
    }

    /// `x[…, range, …] += y`, `part` being the sizes of the range: the same, and the part's gradient goes to `y`, summed
    /// to its sizes.
    pub fn add_to_slice(&mut self, x: &Tensor, y: &Tensor, part: Shape) -> Tensor {
        let output = x.detached();
        if !self.records(&[x, y]) {
            return output;
        }
        let (need_x, need_y, to) = (x.needs_grad(), y.needs_grad(), (y.shape, y.dtype));
        self.attach(output, &[x, y], move |torch, gradient| {
            let whole = torch.fresh_like("new_empty_strided", &gradient, gradient.dtype);
            let slice = torch.fresh("clone", part, gradient.dtype);
            let for_y = need_y.then(|| torch.reduce_to(slice, to.0, to.1));
            smallvec![need_x.then_some(whole), for_y]
        })
    }

    /// A fresh tensor, filled part by part.
    pub fn copy_slices(&mut self, parts: &[&Tensor], shape: Shape) -> Tensor {
        let dtype = parts.first().map_or(DType::F32, |part| part.dtype);
        let whole = self.fresh("new_empty", shape, dtype);
        parts.iter().fold(whole, |whole, part| self.assign(&whole, part))
    }

    /// `x *= noise` with noise made on the spot.
    pub fn jitter(&mut self, x: &Tensor) -> Tensor {
        if !self.training {
            return x.clone();
        }
        let noise = self.fresh_like("empty_like", x, x.dtype);
        self.in_place(Binary::Mul, x, &noise)
    }

    /// Rows added into the first input itself (`index_add_`).
    pub fn index_add_in_place(&mut self, x: &Tensor, index: &Tensor, source: &Tensor) -> Tensor {
        self.indexed_in_place(x, source, &[index])
    }

    /// Elements written into the first input itself (`index_copy_`), whose backward asks the source for its shape and so
    /// keeps it.
    pub fn index_copy_in_place(&mut self, x: &Tensor, index: &Tensor, source: &Tensor) -> Tensor {
        self.indexed_in_place(x, source, &[index, source])
    }

    fn indexed_in_place(&mut self, x: &Tensor, source: &Tensor, kept: &[&Tensor]) -> Tensor {
        let output = x.detached();
        if !self.records(&[x, source]) {
            return output;
        }
        let saved: Vec<Saved> = kept.iter().map(|tensor| Saved::new(self, tensor)).collect();
        let (part, need_x, need_source) = (source.shape, x.needs_grad(), source.needs_grad());
        self.attach(output, &[x, source], move |torch, gradient| {
            let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let rows = need_source.then(|| torch.fresh("index_select", part, gradient.dtype));
            drop(kept);
            smallvec![need_x.then_some(gradient), rows]
        })
    }
}
