//! Products of torchao's `Float8Linear` (torchao/float8/float8_linear.py, 0.18): what goes in, the weight and the gradient are
//! scaled by their largest element and cast to a byte, once for the whole tensor or once for each row.
//!
//! What goes in is kept as it came and cast again on the way back, there on flat rows, so that nothing is shared with the cast
//! of the forward pass: the partitioner is free to compute a norm's output or an activation again.
//!
//! Under tensor parallel with one scale for each tensor (torchao/float8/float8_tensor_parallel.py) what goes in is cast before
//! the linear, once for both ways, and bytes are gathered; so are those of the gradients of what was scattered.

use super::graph::{Graph, Id, Kind};
use super::rules::Rule;
use crate::dtype::DType;
use crate::model::Shape;
use crate::plan::Float8;

/// What shares a scale.
#[derive(Clone, Copy)]
enum Scale {
    Tensor,
    /// Along the last dimension.
    Rows,
    /// Along the first.
    Columns,
}

/// Which side of a weight is spread over cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spread {
    Nowhere,
    Outputs,
    Inputs,
}

/// How a linear is scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scaling {
    pub(super) how: Float8,
    pub(super) spread: Spread,
}

impl Scaling {
    /// What shares a scale, and whether its elements are on several cards, which then find their largest together.
    fn along(self, rows: Scale, over: Spread) -> (Scale, bool) {
        match self.how {
            Float8::Tensorwise => (Scale::Tensor, self.spread != Spread::Nowhere),
            Float8::Rowwise => (rows, self.spread == over && over != Spread::Nowhere),
        }
    }
}

impl Graph {
    /// `x · Wᵀ` of bytes; the result has the type of what goes in before it is cast.
    pub(super) fn float8_linear(&mut self, x: Id, weight: Id, how: Scaling) -> Id {
        let dtype = self.scaled(x).map_or(self.dtype(x), |(_, wide)| wide);
        let turned = self.turned(weight);
        let (scaled, scale) = self.as_bytes(x, DType::F8E4M3, how.along(Scale::Rows, Spread::Inputs));
        let (table, other) = self.as_bytes(turned, DType::F8E4M3, how.along(Scale::Columns, Spread::Inputs));
        let flat = self.flat(scaled);
        let [scale, other] = [scale, other].map(|scale| self.map("reciprocal", scale, DType::F32));
        let sizes = Shape::from([self.shape(flat).size(0), self.shape(weight).size(0)]);
        let rule = Rule::Float8 { x, weight, how };
        self.with_rule(Kind::Product, &[flat, table, scale, other], sizes, dtype, rule)
    }

    pub(super) fn float8_back(&mut self, at: Id, gradient: Id, [x, weight]: [Id; 2], how: Scaling) -> Vec<(Id, Id)> {
        let dtype = self.dtype(at);
        let (rows, width) = (self.shape(gradient).size(0), self.shape(weight).size(1));
        let mut found = Vec::new();
        if self.needs[x as usize] {
            let (left, scale) = self.as_bytes(gradient, DType::F8E5M2, how.along(Scale::Rows, Spread::Outputs));
            let turned = self.turned(weight);
            let (table, other) = self.as_bytes(turned, DType::F8E4M3, how.along(Scale::Rows, Spread::Outputs));
            // The second operand must lie by columns.
            let dense = self.map("clone", table, DType::F8E4M3);
            let right = self.turned(dense);
            let [scale, other] = [scale, other].map(|scale| self.map("reciprocal", scale, DType::F32));
            let product = self.node(Kind::Product, &[left, right, scale, other], Shape::from([rows, width]), dtype);
            found.push((x, self.view("view", product, self.shape(x))));
        }
        if self.needs[weight as usize] {
            let (left, scale) = self.as_bytes(gradient, DType::F8E5M2, how.along(Scale::Columns, Spread::Nowhere));
            let left = self.turned(left);
            let left = self.map("clone", left, DType::F8E5M2);
            let flat = self.flat(x);
            let (right, other) = self.as_bytes(flat, DType::F8E4M3, how.along(Scale::Columns, Spread::Nowhere));
            let right = self.turned(right);
            let right = self.map("clone", right, DType::F8E4M3);
            let right = self.turned(right);
            let [scale, other] = [scale, other].map(|scale| self.map("reciprocal", scale, DType::F32));
            let product = self.node(Kind::Product, &[left, right, scale, other], self.shape(weight), dtype);
            // A weight that came as bytes has a gradient in the type it was before.
            let bytes = self.dtype(weight).size() == 1;
            found.push((weight, if bytes { product } else { self.cast(product, self.dtype(weight)) }));
        }
        found
    }

    /// A cast that forward and backward share.
    pub(super) fn cast_once(&mut self, x: Id, to: DType) -> Id {
        let wide = self.dtype(x);
        let (bytes, scale) = self.bytes(x, to, (Scale::Tensor, true));
        self.rules[bytes as usize] = Rule::Straight(x);
        self.scales.insert(bytes, (scale, wide));
        bytes
    }

    /// The scale of what is bytes already, and its type before.
    fn scaled(&self, mut x: Id) -> Option<(Id, DType)> {
        while self.dtype(x).size() == 1 {
            if let Some(known) = self.scales.get(&x) {
                return Some(*known);
            }
            x = *self.nodes[x as usize].inputs.first()?;
        }
        None
    }

    fn as_bytes(&mut self, x: Id, to: DType, scale: (Scale, bool)) -> (Id, Id) {
        match self.scaled(x) {
            Some((scale, _)) => (x, scale),
            // A weight that was gathered as bytes brings its scale along.
            None if self.dtype(x).size() == 1 => {
                (x, self.node(Kind::Pointwise("buffer"), &[], Shape::new(&[]), DType::F32))
            }
            None => self.bytes(x, to, scale),
        }
    }

    /// `hp_tensor_to_float8_dynamic`: the bytes and their scale, node by node, since chains are cut by their length.
    fn bytes(&mut self, x: Id, to: DType, (scale, spread): (Scale, bool)) -> (Id, Id) {
        let (shape, own) = (self.shape(x), self.dtype(x));
        let size = self.map("abs", x, own);
        let (name, sizes) = match scale {
            Scale::Tensor => ("amax of all", Shape::new(&[])),
            Scale::Rows => ("amax", shape.with(-1, 1)),
            Scale::Columns => ("column amax", shape.with(0, 1)),
        };
        let largest = self.node(Kind::Reduce(name), &[size], sizes, own);
        let mut factor = self.map("to fp64", largest, DType::F64);
        if spread {
            factor = self.node(Kind::Library("all_reduce"), &[factor], sizes, DType::F64);
        }
        for name in ["clamp", "reciprocal", "scale"] {
            factor = self.map(name, factor, DType::F64);
        }
        let factor = self.map("to fp32", factor, DType::F32);
        let wide = self.cast(x, DType::F32);
        let scaled = self.both("mul", wide, factor);
        let below = self.map("clamp from below", scaled, DType::F32);
        let within = self.map("clamp from above", below, DType::F32);
        (self.map("to bytes", within, to), factor)
    }

    fn turned(&mut self, x: Id) -> Id {
        let sizes = self.shape(x);
        self.node(Kind::View("permute"), &[x], Shape::from([sizes.size(1), sizes.size(0)]), self.dtype(x))
    }
}
