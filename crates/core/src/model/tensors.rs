//! Plain tensor operations of the forward pass, named as tensor libraries name them.

use super::graph::{Graph, Value};
use super::op::{Binary, Cast, Input, Op, Reduction, Unary};
use super::shape::{MAX_DIMS, Shape};
use crate::dtype::DType;

impl Graph {
    /// A tensor of the batch.
    pub fn input(&mut self, kind: Input, shape: impl Into<Shape>) -> Value {
        self.run(Op::Input(kind), &[], shape)
    }

    /// A fresh tensor made on the device.
    pub fn fill(&mut self, dtype: DType, shape: impl Into<Shape>) -> Value {
        self.run(Op::Fill(dtype), &[], shape)
    }

    /// A fresh tensor of these sizes in the element type of another.
    pub fn fill_like(&mut self, like: &Value, shape: impl Into<Shape>) -> Value {
        self.run(Op::FillLike, &[like], shape)
    }

    /// A buffer of the current module (positions, frequencies), declared and read.
    pub fn held(&mut self, name: &str, shape: impl Into<Shape>, dtype: DType) -> Value {
        let shape = shape.into();
        self.buffer(name, shape, dtype, false);
        self.run(Op::Buffer(dtype), &[], shape)
    }

    /// The same elements under other sizes, as a view.
    pub fn view(&mut self, x: &Value, shape: impl Into<Shape>) -> Value {
        self.reshaped(Op::View, x, shape.into())
    }

    /// The same elements under other sizes, copied where no view can do.
    pub fn reshape(&mut self, x: &Value, shape: impl Into<Shape>) -> Value {
        self.reshaped(Op::Reshape, x, shape.into())
    }

    fn reshaped(&mut self, op: Op, x: &Value, shape: Shape) -> Value {
        if shape.elements() != x.shape().elements() {
            self.fail(format!("{:?} cannot be viewed as {shape:?}", x.shape()));
        }
        self.run(op, &[x], shape)
    }

    /// `[…, a·b] → […, a, b]`.
    pub fn split_last(&mut self, x: &Value, outer: u64, inner: u64) -> Value {
        let mut sizes = x.shape().sizes().to_vec();
        sizes.pop();
        sizes.extend([outer, inner]);
        self.view(x, sizes.as_slice())
    }

    /// Two dimensions swapped, as a view.
    pub fn transpose(&mut self, x: &Value, a: i64, b: i64) -> Value {
        let (Some(first), Some(second)) = (x.shape().axis(a), x.shape().axis(b)) else {
            self.fail(format!("{:?} has no dimensions {a} and {b}", x.shape()));
            return x.clone();
        };
        let shape = x.shape().with(a, x.size(b)).with(b, x.size(a));
        self.run(Op::Transpose(first as u8, second as u8), &[x], shape)
    }

    /// All dimensions reordered, as a view.
    pub fn permute(&mut self, x: &Value, order: &[u8]) -> Value {
        let mut full = [0; MAX_DIMS];
        let mut sizes = Vec::with_capacity(order.len());
        for (to, &from) in order.iter().enumerate().take(MAX_DIMS) {
            full[to] = from;
            sizes.push(x.size(i64::from(from)));
        }
        self.run(Op::Permute(full), &[x], sizes.as_slice())
    }

    /// A dense copy unless it is dense already.
    pub fn contiguous(&mut self, x: &Value) -> Value {
        self.run(Op::Contiguous, &[x], x.shape())
    }

    /// Broadcast to other sizes without memory.
    pub fn expand(&mut self, x: &Value, shape: impl Into<Shape>) -> Value {
        self.run(Op::Expand, &[x], shape)
    }

    /// A dimension of size 1 inserted (a view).
    pub fn unsqueeze(&mut self, x: &Value, dim: i64) -> Value {
        self.view(x, x.shape().inserted(dim, 1))
    }

    /// A dimension of size 1 removed (a view).
    pub fn squeeze(&mut self, x: &Value, dim: i64) -> Value {
        self.view(x, x.shape().removed(dim))
    }

    /// `length` indices of one dimension from `start` (a view).
    pub fn slice(&mut self, x: &Value, dim: i64, start: u64, length: u64) -> Value {
        self.slice_step(x, dim, start, length, 1)
    }

    /// `length` indices of one dimension from `start`, every `step`-th (a view).
    pub fn slice_step(&mut self, x: &Value, dim: i64, start: u64, length: u64, step: u64) -> Value {
        let Some(axis) = x.shape().axis(dim) else {
            self.fail(format!("{:?} has no dimension {dim}", x.shape()));
            return x.clone();
        };
        if length > 0 && start.saturating_add((length - 1).saturating_mul(step)) >= x.size(dim) {
            self.fail(format!("{length} elements from {start} do not fit in {:?}", x.shape()));
        }
        self.run(Op::Slice { dim: axis as u8, start, step }, &[x], x.shape().with(dim, length))
    }

    /// One index of a dimension, which goes (a view).
    pub fn select(&mut self, x: &Value, dim: i64, index: u64) -> Value {
        let part = self.slice(x, dim, index, 1);
        self.squeeze(&part, dim)
    }

    /// `x[…, start : start + n, …] = y` along a dimension, for an `y` of `n` elements there; the result is `x`.
    pub fn assign(&mut self, x: &Value, dim: i64, start: u64, y: &Value) -> Value {
        if x.shape().with(dim, y.size(dim)) != y.shape() || start.saturating_add(y.size(dim)) > x.size(dim) {
            self.fail(format!("{:?} does not fit in {:?} at {start}", y.shape(), x.shape()));
        }
        let dim = x.shape().axis(dim).unwrap_or(0) as u8;
        self.run(Op::Assign { dim, start }, &[x, y], x.shape())
    }

    /// One dimension cut in parts (views).
    pub fn split(&mut self, x: &Value, dim: i64, parts: &[u64]) -> Vec<Value> {
        if parts.iter().fold(0u64, |sum, &part| sum.saturating_add(part)) != x.size(dim) {
            self.fail(format!("parts {parts:?} do not add up to dimension {dim} of {:?}", x.shape()));
        }
        let shapes: Vec<_> = parts.iter().map(|&part| x.shape().with(dim, part)).collect();
        self.run_many(Op::Split(x.shape().axis(dim).unwrap_or(0) as u8), &[x], &shapes)
    }

    /// One dimension cut in two (views).
    pub fn split2(&mut self, x: &Value, dim: i64, first: u64, second: u64) -> (Value, Value) {
        let mut parts = self.split(x, dim, &[first, second]);
        let last = parts.pop();
        match (parts.pop(), last) {
            (Some(a), Some(b)) => (a, b),
            _ => unreachable!("split returns one value per part"),
        }
    }

    /// One dimension cut in three (views).
    pub fn split3(&mut self, x: &Value, dim: i64, parts: [u64; 3]) -> (Value, Value, Value) {
        let mut values = self.split(x, dim, &parts);
        let (c, b) = (values.pop(), values.pop());
        match (values.pop(), b, c) {
            (Some(a), Some(b), Some(c)) => (a, b, c),
            _ => unreachable!("split returns one value per part"),
        }
    }

    /// Joined along a dimension.
    pub fn cat(&mut self, parts: &[&Value], dim: i64) -> Value {
        let Some(first) = parts.first() else {
            self.fail("nothing to join");
            return self.fill(DType::F32, [1]);
        };
        let total = parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.size(dim)));
        let axis = first.shape().axis(dim).unwrap_or(0) as u8;
        self.run(Op::Cat(axis), parts, first.shape().with(dim, total))
    }

    /// Joined along a new dimension.
    pub fn stack(&mut self, parts: &[&Value], dim: i64) -> Value {
        self.stack_of(parts, dim, parts.len() as u64)
    }

    pub(super) fn stack_of(&mut self, parts: &[&Value], dim: i64, count: u64) -> Value {
        let Some(first) = parts.first() else {
            self.fail("nothing to join");
            return self.fill(DType::F32, [1]);
        };
        let shape = first.shape().inserted(dim, count);
        let axis = if dim < 0 { (dim + shape.rank() as i64).max(0) } else { dim } as u8;
        self.run(Op::Stack(axis), parts, shape)
    }

    /// Zeros added; the result has these sizes.
    pub fn pad(&mut self, x: &Value, shape: impl Into<Shape>) -> Value {
        self.run(Op::Pad, &[x], shape)
    }

    /// A pointwise operation.
    pub fn unary(&mut self, kind: Unary, x: &Value) -> Value {
        self.run(Op::Unary(kind), &[x], x.shape())
    }

    /// A pointwise operation on two tensors.
    pub fn binary(&mut self, kind: Binary, a: &Value, b: &Value) -> Value {
        let shape = a.shape().broadcast(&b.shape()).unwrap_or_else(|| {
            self.fail(format!("{:?} and {:?} do not broadcast", a.shape(), b.shape()));
            a.shape()
        });
        self.run(Op::Binary(kind), &[a, b], shape)
    }

    /// `a + b`.
    pub fn add(&mut self, a: &Value, b: &Value) -> Value {
        self.binary(Binary::Add, a, b)
    }

    /// `a * b`.
    pub fn mul(&mut self, a: &Value, b: &Value) -> Value {
        self.binary(Binary::Mul, a, b)
    }

    /// `a - b`.
    pub fn sub(&mut self, a: &Value, b: &Value) -> Value {
        self.binary(Binary::Sub, a, b)
    }

    /// `a / b`.
    pub fn div(&mut self, a: &Value, b: &Value) -> Value {
        self.binary(Binary::Div, a, b)
    }

    /// An operation with a number: `x * 0.5`, `x + 1`, `x ** 2`.
    pub fn scalar(&mut self, kind: Binary, x: &Value) -> Value {
        self.run(Op::Scalar(kind), &[x], x.shape())
    }

    /// `x * number`.
    pub fn scale(&mut self, x: &Value) -> Value {
        self.scalar(Binary::Mul, x)
    }

    /// `a op= b`: the result is `a`, overwritten.
    pub fn in_place(&mut self, kind: Binary, a: &Value, b: &Value) -> Value {
        self.run(Op::InPlace(kind), &[a, b], a.shape())
    }

    /// To fp32 (nothing when it is).
    pub fn float(&mut self, x: &Value) -> Value {
        self.run(Op::Cast(Cast::To(DType::F32)), &[x], x.shape())
    }

    /// To a given element type.
    pub fn to(&mut self, x: &Value, dtype: DType) -> Value {
        self.run(Op::Cast(Cast::To(dtype)), &[x], x.shape())
    }

    /// To the element type of another tensor.
    pub fn type_as(&mut self, x: &Value, like: &Value) -> Value {
        self.run(Op::Cast(Cast::Like), &[x, like], x.shape())
    }

    /// To a given element type and dense, in one copy.
    pub fn to_dense(&mut self, x: &Value, dtype: DType) -> Value {
        self.run(Op::Cast(Cast::Dense(dtype)), &[x], x.shape())
    }

    /// To the element type of another tensor and dense, in one copy.
    pub fn to_dense_like(&mut self, x: &Value, like: &Value) -> Value {
        self.run(Op::Cast(Cast::DenseLike), &[x, like], x.shape())
    }

    /// To the element type of the model's weights.
    pub fn to_model_type(&mut self, x: &Value) -> Value {
        self.run(Op::Cast(Cast::Model), &[x], x.shape())
    }

    /// Softmax along a dimension, in a given type where the code says so.
    pub fn softmax(&mut self, x: &Value, dim: i64, dtype: Option<DType>) -> Value {
        let dim = x.shape().axis(dim).unwrap_or(0) as u8;
        self.run(Op::Softmax { dim, dtype }, &[x], x.shape())
    }

    /// A reduction along a dimension.
    pub fn reduce(&mut self, kind: Reduction, x: &Value, dim: i64, keep: bool) -> Value {
        let axis = x.shape().axis(dim).unwrap_or(0) as u8;
        let shape = if keep { x.shape().with(dim, 1) } else { x.shape().removed(dim) };
        self.run(Op::Reduce { kind, dim: Some(axis), keep }, &[x], shape)
    }

    /// A reduction over everything, to a scalar.
    pub fn reduce_all(&mut self, kind: Reduction, x: &Value) -> Value {
        self.run(Op::Reduce { kind, dim: None, keep: false }, &[x], Shape::new(&[]))
    }

    /// Batched matrix product.
    pub fn matmul(&mut self, a: &Value, b: &Value) -> Value {
        if a.size(-1) != b.size(-2) {
            self.fail(format!("{:?} and {:?} cannot be multiplied", a.shape(), b.shape()));
        }
        let rank = a.shape().rank().max(b.shape().rank());
        let mut sizes: Vec<u64> = (3..=rank as i64).rev().map(|back| a.size(-back).max(b.size(-back))).collect();
        sizes.extend([a.size(-2), b.size(-1)]);
        self.run(Op::MatMul, &[a, b], sizes.as_slice())
    }

    /// The solution of `a x = b` for triangular matrices `a`.
    pub fn solve_triangular(&mut self, a: &Value, b: &Value) -> Value {
        self.run(Op::SolveTriangular, &[a, b], b.shape())
    }

    /// The gated delta rule in one kernel of flash-linear-attention: its output, and the last state where it is asked for.
    pub fn gated_delta_rule(&mut self, recurrent: bool, inputs: [&Value; 5], keeps: bool) -> (Value, Option<Value>) {
        let [query, _, value, ..] = inputs;
        let state = Shape::from([value.size(0), value.size(2), query.size(-1), value.size(-1)]);
        let shapes = [value.shape(), state];
        let mut made = self.run_many(Op::GatedDeltaRule { recurrent }, &inputs, &shapes[..1 + usize::from(keeps)]);
        let last = if keeps { made.pop() } else { None };
        (made.pop().unwrap_or_else(|| unreachable!("an operation returns a value for every shape")), last)
    }

    /// A lower or upper triangle kept, the rest zero.
    pub fn triangle(&mut self, x: &Value) -> Value {
        self.run(Op::Triangle, &[x], x.shape())
    }

    /// The `k` largest along the last dimension: values and indices.
    pub fn top_k(&mut self, x: &Value, k: u64) -> (Value, Value) {
        if k > x.size(-1) {
            self.fail(format!("the best {k} of {}: there are not so many", x.size(-1)));
        }
        let shape = x.shape().with(-1, k);
        let mut both = self.run_many(Op::TopK { sorted: true }, &[x], &[shape, shape]);
        let indices = both.pop();
        match (both.pop(), indices) {
            (Some(values), Some(indices)) => (values, indices),
            _ => unreachable!("run_many returns one value per shape"),
        }
    }

    /// Elements by index along a dimension.
    pub fn gather(&mut self, x: &Value, dim: i64, index: &Value) -> Value {
        let axis = x.shape().axis(dim).unwrap_or(0) as u8;
        self.run(Op::Gather(axis), &[x, index], index.shape())
    }

    /// Whole rows by index.
    pub fn index(&mut self, x: &Value, index: &Value) -> Value {
        let mut sizes = index.shape().sizes().to_vec();
        sizes.extend(x.shape().sizes().iter().skip(1));
        self.run(Op::Index, &[x, index], sizes.as_slice())
    }

    /// A number where the mask is set.
    pub fn masked_fill(&mut self, x: &Value, mask: &Value) -> Value {
        self.run(Op::MaskedFill { in_place: false }, &[x, mask], x.shape())
    }

    /// Elements of `source` put where the mask is set (image features among text embeddings).
    pub fn masked_scatter(&mut self, x: &Value, mask: &Value, source: &Value) -> Value {
        let width = x.size(-1).max(1);
        self.place_media(source.shape().elements() / width, x.shape().elements() / width);
        self.run(Op::MaskedScatter, &[x, mask, source], x.shape())
    }

    /// A boolean of the same shape.
    pub fn compare(&mut self, x: &Value) -> Value {
        self.run(Op::Compare, &[x], x.shape())
    }

    /// Running sums along a dimension.
    pub fn cumulative_sum(&mut self, x: &Value, dim: i64) -> Value {
        let axis = x.shape().axis(dim).unwrap_or(0) as u8;
        self.run(Op::CumulativeSum(axis), &[x], x.shape())
    }

    /// Each element repeated along a dimension (a copy).
    pub fn repeat_interleave(&mut self, x: &Value, dim: i64, times: u64) -> Value {
        let axis = x.shape().axis(dim).unwrap_or(0) as u8;
        self.run(Op::RepeatInterleave(axis), &[x], x.shape().with(dim, x.size(dim).saturating_mul(times)))
    }
}
