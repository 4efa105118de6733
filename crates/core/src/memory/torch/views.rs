//! Views, and the copies that reshaping, joining and cutting make.

use std::rc::Rc;

use super::{Torch, promote};
use crate::dtype::DType;
use crate::memory::tensor::{Strides, Tensor};
use crate::model::Shape;
use crate::model::shape::MAX_DIMS;
use smallvec::smallvec;

impl Torch {
    /// The same storage seen otherwise; `back` undoes it on a gradient.
    fn seen(
        &mut self,
        x: &Tensor,
        (shape, strides): (Shape, Strides),
        back: impl FnOnce(&mut Torch, Tensor) -> Tensor + 'static,
    ) -> Tensor {
        let (storage, layout) = (Rc::clone(&x.storage), self.layouts.of(&shape, &strides));
        let view = Tensor { storage, layout, dtype: x.dtype, viewed: true, edge: None };
        if !self.records(&[x]) {
            return view;
        }
        self.attach(view, &[x], move |torch, gradient| smallvec![Some(back(torch, gradient))])
    }

    /// A view where sizes and strides allow, else a dense copy.
    pub fn reshape(&mut self, x: &Tensor, shape: Shape) -> Tensor {
        if x.shape == shape {
            return x.clone();
        }
        if x.elements() != shape.elements() {
            // A family whose sizes contradict each other: a tensor of the asked size stands in, instead of no end.
            return self.fresh("reshape", shape, x.dtype);
        }
        match x.view_strides(&shape) {
            Some(strides) => {
                let old = x.shape;
                self.seen(x, (shape, strides), move |torch, gradient| torch.reshape(&gradient, old))
            }
            None => {
                let copy = self.dense_copy(x);
                self.reshape(&copy, shape)
            }
        }
    }

    /// `clone(memory_format=contiguous)`.
    pub fn dense_copy(&mut self, x: &Tensor) -> Tensor {
        let output = self.fresh("clone", x.shape, x.dtype);
        if !self.records(&[x]) {
            return output;
        }
        self.attach(output, &[x], |_, gradient| smallvec![Some(gradient)])
    }

    /// A dense copy unless it is dense already.
    pub fn contiguous(&mut self, x: &Tensor) -> Tensor {
        if x.is_contiguous() { x.clone() } else { self.dense_copy(x) }
    }

    /// Two dimensions swapped.
    pub fn transpose(&mut self, x: &Tensor, a: i64, b: i64) -> Tensor {
        let (Some(first), Some(second)) = (x.shape.axis(a), x.shape.axis(b)) else { return x.clone() };
        let shape = x.shape.with(a, x.shape.size(b)).with(b, x.shape.size(a));
        let mut strides = x.strides;
        strides.swap(first, second);
        self.seen(x, (shape, strides), move |torch, gradient| torch.transpose(&gradient, first as i64, second as i64))
    }

    /// All dimensions reordered.
    pub fn permute(&mut self, x: &Tensor, order: &[u8]) -> Tensor {
        let mut sizes = [1; MAX_DIMS];
        let mut strides = [1; MAX_DIMS];
        let mut inverse = vec![0u8; order.len()];
        for (to, &from) in order.iter().enumerate() {
            sizes[to] = x.shape.size(i64::from(from));
            strides[to] = x.strides[from as usize];
            inverse[from as usize] = to as u8;
        }
        let shape = Shape::new(&sizes[..order.len()]);
        self.seen(x, (shape, strides), move |torch, gradient| torch.permute(&gradient, &inverse))
    }

    /// Broadcast without memory; its gradient is summed.
    pub fn expand(&mut self, x: &Tensor, shape: Shape) -> Tensor {
        if x.shape == shape {
            return x.clone();
        }
        let missing = shape.rank().saturating_sub(x.shape.rank());
        let mut strides = [0; MAX_DIMS];
        let own = x.shape.sizes().iter().zip(x.strides);
        let whole = shape.sizes().iter().zip(&mut strides).skip(missing);
        for ((size, stride), (target, new)) in own.zip(whole) {
            *new = if size == target { stride } else { 0 };
        }
        let (old, dtype) = (x.shape, x.dtype);
        self.seen(x, (shape, strides), move |torch, gradient| torch.reduce_to(gradient, old, dtype))
    }

    /// A range of one dimension; its gradient is a whole tensor of zeros with the range copied in.
    pub fn slice(&mut self, x: &Tensor, dim: u8, length: u64, step: u64) -> Tensor {
        let dim_index = i64::from(dim);
        if length == x.shape.size(dim_index) && step == 1 {
            return x.clone();
        }
        let mut strides = x.strides;
        strides[dim as usize] *= step;
        let old = x.shape;
        self.seen(x, (old.with(dim_index, length), strides), move |torch, gradient| {
            torch.fresh("slice_backward", old, gradient.dtype)
        })
    }

    /// One index of a dimension, which goes.
    pub fn select(&mut self, x: &Tensor, dim: u8) -> Tensor {
        let old = x.shape;
        let shape = old.removed(i64::from(dim));
        let mut strides = x.strides;
        let (dim, rank) = (dim as usize, shape.rank());
        if let Some(kept) = x.strides.get(dim + 1..=rank) {
            strides[dim..rank].copy_from_slice(kept);
        }
        self.seen(x, (shape, strides), move |torch, gradient| torch.fresh("select_backward", old, gradient.dtype))
    }

    /// One dimension cut in parts; their gradients are joined again.
    pub fn split(&mut self, x: &Tensor, dim: u8, parts: &[u64]) -> Vec<Tensor> {
        let axis = i64::from(dim);
        let mut views: Vec<Tensor> = parts
            .iter()
            .map(|&part| Tensor { viewed: true, ..x.detached() }.with_layout(x.shape.with(axis, part), x.strides))
            .collect();
        if self.records(&[x]) {
            let (old, dtype, shapes) = (x.shape, x.dtype, views.iter().map(|v| v.shape).collect::<Vec<_>>());
            self.attach_many(&mut views, &[x], move |torch, gradients| {
                // Parts without a gradient are made of zeros first.
                let whole: Vec<Tensor> = gradients
                    .into_iter()
                    .zip(shapes)
                    .map(|(gradient, shape)| gradient.unwrap_or_else(|| torch.fresh("zeros", shape, dtype)))
                    .collect();
                let joined = torch.fresh("cat", old, dtype);
                drop(whole);
                smallvec![Some(joined)]
            });
        }
        views
    }

    /// Joined along a dimension, in the widest type.
    pub fn cat(&mut self, parts: &[&Tensor], dim: u8) -> Tensor {
        let axis = i64::from(dim);
        let Some(first) = parts.first() else { return self.phantom(Shape::new(&[]), DType::F32) };
        let dtype = parts.iter().fold(first.dtype, |dtype, part| promote(dtype, part.dtype));
        let total = parts.iter().map(|part| part.shape.size(axis)).sum();
        let output = self.fresh("cat", first.shape.with(axis, total), dtype);
        if !self.records(parts) {
            return output;
        }
        let needs: Vec<(bool, Shape, DType)> = parts.iter().map(|p| (p.needs_grad(), p.shape, p.dtype)).collect();
        self.attach(output, parts, move |torch, gradient| {
            let part = |(needed, shape, dtype): &(bool, Shape, DType)| {
                needed.then(|| {
                    let view = Tensor { viewed: true, ..gradient.detached() }.with_layout(*shape, gradient.strides);
                    if *dtype == gradient.dtype { view } else { torch.cast(&view, *dtype) }
                })
            };
            needs.iter().map(part).collect()
        })
    }

    /// Joined along a new dimension.
    pub fn stack(&mut self, parts: &[&Tensor], dim: u8) -> Tensor {
        let opened: Vec<Tensor> =
            parts.iter().map(|part| self.reshape(part, part.shape.inserted(i64::from(dim), 1))).collect();
        let inputs: Vec<&Tensor> = opened.iter().collect();
        self.cat(&inputs, dim)
    }

    /// Zero padding; its gradient is a copy of the middle. Padding by nothing is a copy with the layout that was there.
    pub fn pad(&mut self, x: &Tensor, shape: Shape) -> Tensor {
        let old = x.shape;
        let output = match old == shape {
            true => self.pointwise("clone", &[x], x.dtype),
            false => self.fresh("constant_pad_nd", shape, x.dtype),
        };
        if !self.records(&[x]) {
            return output;
        }
        self.attach(output, &[x], move |torch, gradient| {
            smallvec![Some(match old == shape {
                true => torch.pointwise("clone", &[&gradient], gradient.dtype),
                false => torch.fresh("clone", old, gradient.dtype),
            })]
        })
    }

    /// Each element repeated, or the whole tiled: a copy whose gradient is summed.
    pub fn repeated(&mut self, operation: &'static str, x: &Tensor, shape: Shape) -> Tensor {
        let output = self.fresh(operation, shape, x.dtype);
        if !self.records(&[x]) {
            return output;
        }
        let old = x.shape;
        self.attach(output, &[x], move |torch, gradient| smallvec![Some(torch.fresh("sum", old, gradient.dtype))])
    }

    /// A gradient brought to the sizes and type of what it is for, as the engine does with every one.
    pub fn reduce_to(&mut self, gradient: Tensor, shape: Shape, dtype: DType) -> Tensor {
        let mut gradient = gradient;
        if gradient.shape != shape {
            let summed = self.sum_to(&gradient, shape);
            gradient = summed.with_shape(shape);
        }
        if gradient.dtype != dtype { self.cast(&gradient, dtype) } else { gradient }
    }

    fn sum_to(&mut self, gradient: &Tensor, shape: Shape) -> Tensor {
        if gradient.elements() == shape.elements() {
            return self.reshape(&gradient.detached(), shape);
        }
        let output = self.fresh("sum", shape, gradient.dtype);
        let rows = shape.last() != gradient.shape.last();
        drop(self.reduction_scratch(gradient, shape.elements(), rows));
        output
    }
}
