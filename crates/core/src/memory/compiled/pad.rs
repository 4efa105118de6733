//! Products whose width is no multiple of 16 bytes: fx_passes/pad_mm.py pads their operands where its benchmark finds that
//! faster, as it does for heads of an odd vocabulary on cards with tensor cores; and the strides of what Inductor lays out.

use super::graph::{Graph, Id, Kind, Node};
use super::rules::Rule;
use crate::dtype::DType;
use crate::model::Shape;

/// `padding_stride_threshold` and `padding_alignment_bytes` of torch/_inductor/config.py.
const LONG: u64 = 1024;
const LINE: u64 = 128;

/// Operations per byte below which no card computes more than it moves (a T4: 65 TFLOPS, 320 GB/s).
pub(super) const LEAST_BALANCE: u64 = 16;

/// `get_alignment_size`: 16 bytes.
pub(super) fn aligned(dtype: DType) -> u64 {
    16 / dtype.size().max(1)
}

/// The sizes as they lie in memory (`_pad_strides`).
pub(super) fn laid(shape: Shape, dtype: DType) -> Shape {
    let width = shape.last();
    if shape.rank() > 1 && width > LONG {
        shape.with(-1, width.next_multiple_of(LINE / dtype.size().max(1)))
    } else {
        shape
    }
}

impl Graph {
    /// `x · Wᵀ` by a padded matrix, cut to what was asked for.
    pub(super) fn padded_linear(&mut self, x: Id, weight: Id, turned: Id) -> Id {
        let dtype = self.dtype(x);
        let (rows, inner, width) = (self.shape(x).size(0), self.shape(x).last(), self.shape(weight).size(0));
        let whole = width.next_multiple_of(aligned(dtype));
        let wide = self.node(Kind::Kept("pad columns"), &[turned], Shape::from([inner, whole]), dtype);
        let product = self.node(Kind::Product, &[x, wide], Shape::from([rows, whole]), dtype);
        self.with_rule(
            Kind::View("slice"),
            &[product],
            Shape::from([rows, width]),
            dtype,
            Rule::PaddedLinear { x, weight },
        )
    }

    /// The way back: each product pads for itself.
    pub(super) fn padded_back(&mut self, gradient: Id, x: Id, weight: Id) -> Vec<(Id, Id)> {
        let dtype = self.dtype(gradient);
        let (rows, width) = (self.shape(gradient).size(0), self.shape(gradient).last());
        let inner = self.shape(x).last();
        let whole = width.next_multiple_of(aligned(dtype));
        let lies = laid(Shape::from([rows, whole]), dtype).last();
        let mut found = Vec::new();
        if self.needs[weight as usize] {
            let turned = self.node(Kind::View("permute"), &[gradient], Shape::from([width, rows]), dtype);
            let sizes = Shape::from([width, inner]);
            let made = if self.pads_weights {
                let wide = self.node(Kind::Kept("pad rows"), &[turned], Shape::from([lies, rows]), dtype);
                let product = self.node(Kind::Product, &[wide, x], Shape::from([whole, inner]), dtype);
                self.node(Kind::View("slice"), &[product], sizes, dtype)
            } else {
                self.node(Kind::Product, &[turned, x], sizes, dtype)
            };
            found.push((weight, made));
        }
        if self.needs[x as usize] {
            let wide = self.node(Kind::Kept("pad columns"), &[gradient], Shape::from([rows, lies]), dtype);
            let matrix = self.node(Kind::Kept("pad rows"), &[weight], Shape::from([whole, inner]), dtype);
            found.push((x, self.node(Kind::Product, &[wide, matrix], self.shape(x), dtype)));
        }
        found
    }
}

/// Whether a result may lie where a padded product lies, of which it is as many rows as were asked for.
pub(super) fn within(product: &Node, result: &Node) -> bool {
    let (a, b) = (product.shape, result.shape);
    let rows = a.rank() == 2 && b.rank() == 2 && a.last() == b.last() && product.dtype == result.dtype;
    rows && product.kind == Kind::Product && a.size(0) == b.size(0).next_multiple_of(aligned(product.dtype))
}
