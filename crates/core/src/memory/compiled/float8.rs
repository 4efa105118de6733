//! Products of torchao's `Float8Linear` (torchao/float8/float8_linear.py, 0.18): what goes in, the weight and the gradient are
//! scaled by their largest element and cast to a byte, once for the whole tensor or once for each row.
//!
//! What goes in is kept as it came and cast again on the way back, there on flat rows, so that nothing is shared with the cast
//! of the forward pass: the partitioner is free to compute a norm's output or an activation again.

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

impl Float8 {
    fn along(self, rows: Scale) -> Scale {
        if self == Self::Tensorwise { Scale::Tensor } else { rows }
    }
}

impl Graph {
    /// `x · Wᵀ` of bytes; the result has the type of what goes in.
    pub(super) fn float8_linear(&mut self, x: Id, weight: Id, how: Float8) -> Id {
        let dtype = self.dtype(x);
        let turned = self.turned(weight);
        let (scaled, scale) = self.bytes(x, DType::F8E4M3, how.along(Scale::Rows));
        let (table, other) = self.bytes(turned, DType::F8E4M3, how.along(Scale::Columns));
        let flat = self.flat(scaled);
        let [scale, other] = [scale, other].map(|scale| self.map("reciprocal", scale, DType::F32));
        let sizes = Shape::from([self.shape(flat).size(0), self.shape(weight).size(0)]);
        let rule = Rule::Float8 { x, weight, how };
        self.with_rule(Kind::Product, &[flat, table, scale, other], sizes, dtype, rule)
    }

    pub(super) fn float8_back(&mut self, gradient: Id, x: Id, weight: Id, how: Float8) -> Vec<(Id, Id)> {
        let dtype = self.dtype(gradient);
        let (rows, width) = (self.shape(gradient).size(0), self.shape(weight).size(1));
        let mut found = Vec::new();
        if self.needs[x as usize] {
            let (left, scale) = self.bytes(gradient, DType::F8E5M2, how.along(Scale::Rows));
            let turned = self.turned(weight);
            let (table, other) = self.bytes(turned, DType::F8E4M3, how.along(Scale::Rows));
            // The second operand must lie by columns.
            let dense = self.map("clone", table, DType::F8E4M3);
            let right = self.turned(dense);
            let [scale, other] = [scale, other].map(|scale| self.map("reciprocal", scale, DType::F32));
            let product = self.node(Kind::Product, &[left, right, scale, other], Shape::from([rows, width]), dtype);
            found.push((x, self.view("view", product, self.shape(x))));
        }
        if self.needs[weight as usize] {
            let (left, scale) = self.bytes(gradient, DType::F8E5M2, how.along(Scale::Columns));
            let left = self.turned(left);
            let left = self.map("clone", left, DType::F8E5M2);
            let flat = self.flat(x);
            let (right, other) = self.bytes(flat, DType::F8E4M3, how.along(Scale::Columns));
            let right = self.turned(right);
            let right = self.map("clone", right, DType::F8E4M3);
            let right = self.turned(right);
            let [scale, other] = [scale, other].map(|scale| self.map("reciprocal", scale, DType::F32));
            let product = self.node(Kind::Product, &[left, right, scale, other], self.shape(weight), dtype);
            found.push((weight, self.cast(product, self.dtype(weight))));
        }
        found
    }

    /// `hp_tensor_to_float8_dynamic`: the bytes and their scale, node by node, since chains are cut by their length.
    fn bytes(&mut self, x: Id, to: DType, scale: Scale) -> (Id, Id) {
        let (shape, own) = (self.shape(x), self.dtype(x));
        let size = self.map("abs", x, own);
        let (name, sizes) = match scale {
            Scale::Tensor => ("amax of all", Shape::new(&[])),
            Scale::Rows => ("amax", shape.with(-1, 1)),
            Scale::Columns => ("column amax", shape.with(0, 1)),
        };
        let largest = self.node(Kind::Reduce(name), &[size], sizes, own);
        let mut factor = largest;
        for name in ["to fp64", "clamp", "reciprocal", "scale"] {
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
