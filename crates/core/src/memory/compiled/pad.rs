//! Products whose width is no multiple of 16 bytes: fx_passes/pad_mm.py pads their operands where its benchmark finds that
//! faster, as it does for heads of an odd vocabulary on cards with tensor cores; and the strides of what Inductor lays out.

use smallvec::SmallVec;

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

/// Rows from which on the forward product of an even width is found faster padded: 2048 are, 1024 are not.
const MANY: u64 = 2048;

/// Whether products by a matrix of a width that is no multiple of 16 bytes are padded at all. An H200 found none of 72 in fp32
/// faster so, and of 16 bits the gradient of the input of every one.
pub(super) fn pays(dtype: DType) -> bool {
    dtype.size() == 2
}

/// Whether the gradient of a weight of an odd width is padded: for narrow models the margin is small, and an H200 decided against it on
/// 4000 and 6000 rows in all of five runs, for it where rows are a multiple of 128, and mostly for it on fewer (docs/open-constants.md). The rehearsal has the same rules (`padding` in app/src/rehearse/kernels.py).
pub(crate) fn pads_weight(rows: u64, inner: u64) -> bool {
    inner > 768 || rows <= 3072 || rows.is_multiple_of(128)
}

impl Graph {
    /// `x · Wᵀ + b` by a padded matrix, cut to what was asked for. Where rows lie at even places plain kernels are good enough
    /// for few rows and for the gradient of the weight (132 shapes timed on an H200, docs/how-compiled-memory-works.md).
    pub(super) fn padded_linear(&mut self, x: Id, weight: Id, turned: Id, bias: Option<Id>) -> Id {
        let dtype = self.dtype(x);
        let (rows, inner, width) = (self.shape(x).size(0), self.shape(x).last(), self.shape(weight).size(0));
        let (sizes, rule) = (Shape::from([rows, width]), Rule::PaddedLinear { x, weight, bias });
        let padded = !width.is_multiple_of(2) || rows >= MANY;
        let whole = width.next_multiple_of(aligned(dtype));
        let matrix = match padded {
            true => self.node(Kind::Kept("pad columns"), &[turned], Shape::from([inner, whole]), dtype),
            false => turned,
        };
        let inputs: SmallVec<[Id; 3]> = [x, matrix].into_iter().chain(bias).collect();
        if !padded {
            return self.with_rule(Kind::Product, &inputs, sizes, dtype, rule);
        }
        let product = self.node(Kind::Product, &inputs, Shape::from([rows, whole]), dtype);
        self.with_rule(Kind::View("slice"), &[product], sizes, dtype, rule)
    }

    /// The way back: each product pads for itself. `addmm` goes to its input first.
    pub(super) fn padded_back(&mut self, gradient: Id, x: Id, weight: Id, bias: Option<Id>) -> Vec<(Id, Id)> {
        let order = if bias.is_some() { [x, weight] } else { [weight, x] };
        let mut found = Vec::new();
        for of in order.into_iter().filter(|of| self.needs[*of as usize]).collect::<SmallVec<[Id; 2]>>() {
            let made = if of == x { self.padded_input(gradient, weight) } else { self.padded_weight(gradient, x) };
            found.push((of, made));
        }
        found.extend(self.bias_back(gradient, bias));
        found
    }

    fn padded_input(&mut self, gradient: Id, weight: Id) -> Id {
        let dtype = self.dtype(gradient);
        let (rows, width, inner) =
            (self.shape(gradient).size(0), self.shape(gradient).last(), self.shape(weight).last());
        let whole = width.next_multiple_of(aligned(dtype));
        let lies = laid(Shape::from([rows, whole]), dtype).last();
        let wide = self.node(Kind::Kept("pad columns"), &[gradient], Shape::from([rows, lies]), dtype);
        let matrix = self.node(Kind::Kept("pad rows"), &[weight], Shape::from([whole, inner]), dtype);
        self.node(Kind::Product, &[wide, matrix], Shape::from([rows, inner]), dtype)
    }

    fn padded_weight(&mut self, gradient: Id, x: Id) -> Id {
        let dtype = self.dtype(gradient);
        let (rows, width, inner) = (self.shape(gradient).size(0), self.shape(gradient).last(), self.shape(x).last());
        let whole = width.next_multiple_of(aligned(dtype));
        let sizes = Shape::from([width, inner]);
        let turned = self.node(Kind::View("permute"), &[gradient], Shape::from([width, rows]), dtype);
        if self.pads_otherwise == pads_weight(rows, inner) || width.is_multiple_of(2) {
            return self.node(Kind::Product, &[turned, x], sizes, dtype);
        }
        let lies = laid(Shape::from([rows, whole]), dtype).last();
        let wide = self.node(Kind::Kept("pad rows"), &[turned], Shape::from([lies, rows]), dtype);
        let product = self.node(Kind::Product, &[wide, x], Shape::from([whole, inner]), dtype);
        self.node(Kind::View("slice"), &[product], sizes, dtype)
    }
}

/// Whether a result may lie where a padded product lies, of which it is as many rows as were asked for.
pub(super) fn within(product: &Node, result: &Node) -> bool {
    let (a, b) = (product.shape, result.shape);
    let rows = a.rank() == 2 && b.rank() == 2 && a.last() == b.last() && product.dtype == result.dtype;
    rows && product.kind == Kind::Product && a.size(0) == b.size(0).next_multiple_of(aligned(product.dtype))
}
