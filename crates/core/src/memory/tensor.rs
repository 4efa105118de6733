//! A tensor without data: sizes, strides, an element type and a share of a storage.

use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use smallvec::SmallVec;

use super::autograd::Edge;
use super::log::Storage;
use crate::dtype::DType;
use crate::model::Shape;
use crate::model::shape::MAX_DIMS;

/// Strides in elements, outermost first.
pub type Strides = [u64; MAX_DIMS];

/// How a tensor looks at its storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Its sizes.
    pub shape: Shape,
    /// Its strides.
    pub strides: Strides,
}

/// Layouts made lately: most tensors look like one that was made before, and then share its layout.
#[derive(Debug)]
pub struct Layouts([Option<Rc<Layout>>; 256]);

impl Default for Layouts {
    fn default() -> Self {
        Self([const { None }; 256])
    }
}

impl Layouts {
    /// The layout of these sizes and strides.
    pub fn of(&mut self, shape: &Shape, strides: &Strides) -> Rc<Layout> {
        let mix = |bits: u64, size: &u64| (bits ^ size).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // Sizes in another order, a view of them, differ in one of the outer strides.
        let outer = strides[0].wrapping_add(strides[1].wrapping_mul(3)).wrapping_add(strides[2].wrapping_mul(5));
        let slot = shape.sizes().iter().fold(outer, mix) >> 56;
        match &mut self.0[slot as usize] {
            Some(known) if known.shape == *shape && known.strides == *strides => Rc::clone(known),
            slot => Rc::clone(slot.insert(Rc::new(Layout { shape: *shape, strides: *strides }))),
        }
    }
}

/// A tensor. Its sizes and strides are read as if they were fields of it; they are shared, since tensors are moved and
/// copied far more often than made.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// The bytes it looks at.
    pub storage: Rc<Storage>,
    /// How it looks at them.
    pub layout: Rc<Layout>,
    /// Its element type.
    pub dtype: DType,
    /// Whether it is a view: torch then keeps the tensor it was made from alive too.
    pub viewed: bool,
    /// Where its gradient goes; `None`: it needs none.
    pub edge: Option<Edge>,
}

impl Deref for Tensor {
    type Target = Layout;

    fn deref(&self) -> &Layout {
        &self.layout
    }
}

impl DerefMut for Tensor {
    fn deref_mut(&mut self) -> &mut Layout {
        Rc::make_mut(&mut self.layout)
    }
}

impl Tensor {
    /// A tensor outside the graph that looks at a storage.
    pub fn new(storage: Rc<Storage>, layout: Rc<Layout>, dtype: DType) -> Self {
        Self { storage, layout, dtype, viewed: false, edge: None }
    }

    /// The same bytes under other sizes and strides.
    pub fn with_layout(self, shape: Shape, strides: Strides) -> Self {
        Self { layout: Rc::new(Layout { shape, strides }), ..self }
    }

    /// The same bytes, densely in row-major order under other sizes.
    pub fn with_shape(self, shape: Shape) -> Self {
        self.with_layout(shape, contiguous_strides(&shape))
    }

    /// Whether a gradient flows into it.
    pub fn needs_grad(&self) -> bool {
        self.edge.is_some()
    }

    /// The same tensor cut off from the graph.
    pub fn detached(&self) -> Self {
        Self { edge: None, ..self.clone() }
    }

    /// How many elements it shows.
    pub fn elements(&self) -> u64 {
        self.shape.elements()
    }

    /// Whether its elements lie densely in row-major order.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for dim in (0..self.shape.rank()).rev() {
            let size = self.shape.sizes()[dim];
            if size == 1 {
                continue;
            }
            if self.strides[dim] != expected {
                return false;
            }
            expected = expected.saturating_mul(size);
        }
        true
    }

    /// Whether its elements lie densely in some order, none shared.
    pub fn is_dense(&self) -> bool {
        if self.is_contiguous() {
            return true;
        }
        let mut dims: SmallVec<[(u64, u64); MAX_DIMS]> =
            self.shape.sizes().iter().copied().zip(self.strides).filter(|d| d.0 != 1).collect();
        // A handful at most: the standard library's sort is kilobytes of code.
        for last in 1..dims.len() {
            for at in (1..=last).rev() {
                if dims[at - 1].1 <= dims[at].1 {
                    break;
                }
                dims.swap(at - 1, at);
            }
        }
        let mut expected = 1;
        dims.iter().all(|(size, stride)| {
            let fits = *stride == expected;
            expected *= size;
            fits
        })
    }

    /// Strides of the same elements under other sizes, when no copy is needed. The rule is torch's `computeStride`.
    pub fn view_strides(&self, shape: &Shape) -> Option<Strides> {
        let (old, new) = (self.shape.sizes(), shape.sizes());
        if self.elements() == 0 {
            return Some(contiguous_strides(shape));
        }
        let mut strides = [1; MAX_DIMS];
        let mut view_dim = new.len();
        let Some(&last) = self.strides[..old.len()].last() else {
            return Some(strides);
        };
        let mut chunk_stride = last;
        let (mut old_count, mut new_count) = (1u64, 1u64);
        for dim in (0..old.len()).rev() {
            old_count = old_count.saturating_mul(old[dim]);
            let ends =
                dim == 0 || (old[dim - 1] != 1 && self.strides[dim - 1] != old_count.saturating_mul(chunk_stride));
            if !ends {
                continue;
            }
            while view_dim > 0 && (new_count < old_count || new[view_dim - 1] == 1) {
                strides[view_dim - 1] = new_count.saturating_mul(chunk_stride);
                new_count = new_count.saturating_mul(new[view_dim - 1]);
                view_dim -= 1;
            }
            if new_count != old_count {
                return None;
            }
            if dim > 0 {
                chunk_stride = self.strides[dim - 1];
                (old_count, new_count) = (1, 1);
            }
        }
        (view_dim == 0).then_some(strides)
    }
}

/// Row-major strides.
pub fn contiguous_strides(shape: &Shape) -> Strides {
    let mut strides = [1; MAX_DIMS];
    let mut step: u64 = 1;
    for dim in (0..shape.rank()).rev() {
        strides[dim] = step;
        step = step.saturating_mul(shape.sizes()[dim].max(1));
    }
    strides
}

/// Strides of the output of a pointwise operation: torch's TensorIterator keeps the order of dimensions that its inputs
/// have, and makes the output dense in it.
pub fn pointwise_strides(shape: &Shape, inputs: &[&Tensor]) -> Strides {
    let rank = shape.rank();
    if rank <= 1 || inputs.iter().all(|t| t.shape == *shape && t.is_contiguous()) {
        return contiguous_strides(shape);
    }
    // Where the first input says it all, the others are not asked.
    let full = |t: &&&Tensor| t.shape == *shape && shape.sizes().iter().all(|size| *size > 1);
    if let Some(first) = inputs.first().filter(full).filter(|first| first.is_dense()) {
        return first.strides;
    }
    let stride_of = |tensor: &Tensor, dim: usize| {
        let missing = rank - tensor.shape.rank();
        let broadcast = dim < missing || (tensor.shape.sizes()[dim - missing] == 1 && shape.sizes()[dim] != 1);
        if broadcast { 0 } else { tensor.strides[dim - missing] }
    };
    // -1: `a` belongs inside `b`; 1: outside; 0: the inputs do not say. As `should_swap` in reorder_dimensions.
    let order = |a: usize, b: usize| -> i32 {
        for tensor in inputs {
            let (x, y) = (stride_of(tensor, a), stride_of(tensor, b));
            if x == 0 || y == 0 {
                continue;
            }
            if x < y {
                return -1;
            }
            if x > y {
                return 1;
            }
            if shape.sizes()[a] > shape.sizes()[b] {
                return 1;
            }
        }
        0
    };
    let mut inner_first: SmallVec<[usize; MAX_DIMS]> = (0..rank).rev().collect();
    for i in 1..rank {
        let mut at = i;
        for before in (0..i).rev() {
            match order(inner_first[before], inner_first[at]) {
                1 => {
                    inner_first.swap(before, at);
                    at = before;
                }
                -1 => break,
                _ => {}
            }
        }
    }
    let mut strides = [1; MAX_DIMS];
    let mut step: u64 = 1;
    for dim in inner_first {
        strides[dim] = step;
        step = step.saturating_mul(shape.sizes()[dim].max(1));
    }
    strides
}
