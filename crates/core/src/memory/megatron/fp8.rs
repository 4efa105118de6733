//! Transformer Engine's modules with products in fp8: what is quantised when, and which side of it is kept.
//!
//! A quantised tensor has data by rows and, where a product wants it by columns, data by columns; Blackwell reads per-tensor
//! data both ways. Sources: transformer_engine/pytorch/module/{layernorm_linear,linear,grouped_linear,base}.py and
//! tensor/{float8_tensor,mxfp8_tensor,float8_blockwise_tensor}.py of version 2.20.

use smallvec::smallvec;
use std::rc::Rc;

use super::architecture::Norm;
use super::rank::{Rank, Rows, Split};
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::megatron::{Fp8, Fp8Recipe};

/// Data and factors of a matrix in fp8.
#[derive(Default)]
pub(super) struct Quantised {
    row: Vec<Tensor>,
    column: Vec<Tensor>,
}

impl Quantised {
    /// What the product of the weight gradient reads: columns, or rows where the card reads them both ways.
    fn by_columns(self) -> Vec<Tensor> {
        if self.column.is_empty() { self.row } else { self.column }
    }

    /// The same, left where it is.
    fn read_by_columns(&self) -> &[Tensor] {
        if self.column.is_empty() { &self.row } else { &self.column }
    }

    /// Everything.
    pub(super) fn all(self) -> Vec<Tensor> {
        self.row.into_iter().chain(self.column).collect()
    }
}

/// Which sides of a matrix are wanted.
#[derive(Clone, Copy)]
pub(super) struct Sides {
    pub row: bool,
    pub column: bool,
}

pub(super) const BOTH: Sides = Sides { row: true, column: true };
const ROW: Sides = Sides { row: true, column: false };
const COLUMN: Sides = Sides { row: false, column: true };

/// Makes the sides of a matrix; per-tensor data is read both ways from Blackwell on.
pub(super) fn quantise(
    torch: &mut Torch,
    recipe: Fp8Recipe,
    name: &'static str,
    [rows, columns]: [u64; 2],
    sides: Sides,
) -> Quantised {
    let one_for_both = recipe.is_per_tensor() && torch.device.capability >= 100;
    let mut side = |wanted: bool| -> Vec<Tensor> {
        if !wanted {
            return Vec::new();
        }
        let (factors, dtype) = match recipe {
            Fp8Recipe::Delayed | Fp8Recipe::Tensorwise => (1, DType::F32),
            Fp8Recipe::Blockwise => (rows.next_multiple_of(4) * columns.div_ceil(128), DType::F32),
            Fp8Recipe::Mxfp8 => (rows.next_multiple_of(128) * columns.div_ceil(32).next_multiple_of(4), DType::U8),
        };
        let data = torch.fresh(name, Shape::from([rows, columns]), DType::U8);
        vec![data, torch.fresh("fp8 factors", Shape::from([factors]), dtype)]
    };
    match one_for_both {
        true => Quantised { row: side(sides.row || sides.column), column: Vec::new() },
        false => Quantised { row: side(sides.row), column: side(sides.column) },
    }
}

/// Both operands of a product.
fn joined(first: &[Tensor], second: &[Tensor]) -> Vec<Tensor> {
    first.iter().chain(second).cloned().collect()
}

impl Rank {
    /// The recipe, where the layer that runs has its products in fp8.
    pub(super) fn fp8_here(&self, torch: &Torch) -> Option<Fp8> {
        self.options.fp8.filter(|_| self.fp8_layers.contains(&torch.module()))
    }

    /// The fp8 copy of a bf16 weight that only the graph of this micro-batch holds.
    fn own_weight(&self, torch: &mut Torch, fp8: Fp8, sizes: [u64; 2]) -> Vec<Tensor> {
        if fp8.param_gather || fp8.weight_cache {
            return Vec::new();
        }
        quantise(torch, fp8.recipe, "fp8 weight", sizes, BOTH).all()
    }

    fn exchange(&self, torch: &mut Torch, recipe: Fp8Recipe, sizes: [u64; 2], sides: Sides) -> Quantised {
        torch.in_category(Category::Communication, |torch| quantise(torch, recipe, "all_gather fp8", sizes, sides))
    }

    /// `TELayerNormColumnParallelLinear`: the norm's output is kept in fp8.
    pub(super) fn norm_linear_fp8(
        self: &Rc<Self>,
        torch: &mut Torch,
        x: &Tensor,
        (norm, outputs): (Norm, u64),
        fp8: Fp8,
    ) -> Tensor {
        let recipe = fp8.recipe;
        let (rows, width) = (x.shape.size(0), x.shape.size(1));
        let Rows { gathers, total: total_rows, .. } = self.rows(Split::Column, rows);
        // Per-tensor data is gathered by rows only.
        let by_row = gathers && recipe.is_per_tensor();
        // Only the delayed recipe knows the factor before the norm has run.
        let plain = (recipe != Fp8Recipe::Delayed).then(|| self.matrix(torch, norm.name(), rows, width));
        let statistics = norm.statistics(torch, rows);
        let normed = quantise(torch, recipe, norm.name_in_fp8(), [rows, width], Sides { row: true, column: !by_row });
        drop(plain);
        let total = gathers.then(|| self.exchange(torch, recipe, [total_rows, width], ROW));
        let weight = self.own_weight(torch, fp8, [outputs, width]);
        self.use_workspace(torch, false);
        let output = self.matrix(torch, "gemm", total_rows, outputs);
        drop(total);
        if !torch.records(&[x]) {
            return output;
        }
        let kept = if by_row { normed.row } else { normed.by_columns() };
        let saved: Vec<Saved> = std::iter::once(x).chain(&statistics).map(|kept| Saved::new(torch, kept)).collect();
        let saved_normed: Vec<Saved> = kept.iter().chain(&weight).map(|tensor| Saved::new(torch, tensor)).collect();
        drop((kept, weight));
        let rank = Rc::clone(self);
        torch.attach(output, &[x], move |torch, gradient| {
            let held: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let normed: Vec<Tensor> = saved_normed.into_iter().map(|saved| saved.get(torch)).collect();
            let quantised = quantise(torch, recipe, "gradient fp8", [total_rows, outputs], BOTH);
            let total =
                gathers.then(|| rank.exchange(torch, recipe, [total_rows, width], if by_row { ROW } else { COLUMN }));
            let product = rank.matrix(torch, "dgrad", total_rows, width);
            let scattered = gathers.then(|| rank.exchanged(torch, "reduce_scatter", rows, width));
            let turned = by_row.then(|| rank.turned(torch, recipe, [total_rows, width])).flatten();
            let reads = [&turned, &total].into_iter().flatten().next().map_or(&normed[..], Quantised::read_by_columns);
            rank.weight_gradient(torch, outputs, width, joined(reads, quantised.read_by_columns()));
            drop((total, turned, quantised, normed));
            let result = norm.backward(torch, &held[0]);
            drop((product, scattered, held, gradient));
            smallvec![Some(result)]
        })
    }

    /// The columns of per-tensor data that came by rows; Blackwell needs none.
    fn turned(&self, torch: &mut Torch, recipe: Fp8Recipe, sizes: [u64; 2]) -> Option<Quantised> {
        (torch.device.capability < 100).then(|| quantise(torch, recipe, "transpose fp8", sizes, COLUMN))
    }

    /// `TELinear` and its forms. With `original` the input is kept as it is, since another module keeps it too, and is
    /// quantised again in backward (`save_original_input`; the delayed recipe cannot).
    pub(super) fn linear_fp8(
        self: &Rc<Self>,
        torch: &mut Torch,
        x: &Tensor,
        outputs: u64,
        (split, original): (Split, bool),
        fp8: Fp8,
    ) -> Tensor {
        let recipe = fp8.recipe;
        let original = original && recipe != Fp8Recipe::Delayed;
        let (rows, inputs) = (x.shape.size(0), x.shape.size(1));
        let Rows { gathers, scatters, total: total_rows, output: out_rows } = self.rows(split, rows);
        let by_row = gathers && recipe.is_per_tensor();
        let own =
            quantise(torch, recipe, "input fp8", [rows, inputs], Sides { row: true, column: !by_row && !original });
        let total = gathers.then(|| self.exchange(torch, recipe, [total_rows, inputs], ROW));
        let weight = self.own_weight(torch, fp8, [outputs, inputs]);
        self.use_workspace(torch, false);
        let mut output = self.matrix(torch, "gemm", total_rows, outputs);
        drop(total);
        if scatters {
            output = self.exchanged(torch, "reduce_scatter", out_rows, outputs);
        }
        if !torch.records(&[x]) {
            return output;
        }
        let kept = match (original, by_row) {
            (true, _) => vec![x.detached()],
            (false, true) => own.row,
            (false, false) => own.by_columns(),
        };
        let saved: Vec<Saved> = kept.iter().chain(&weight).map(|tensor| Saved::new(torch, tensor)).collect();
        drop((kept, weight));
        let rank = Rc::clone(self);
        torch.attach(output, &[x], move |torch, gradient| {
            let held: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let wanted = if scatters && recipe.is_per_tensor() { ROW } else { BOTH };
            let mut quantised = quantise(torch, recipe, "gradient fp8", [out_rows, outputs], wanted);
            if scatters {
                quantised = rank.exchange(torch, recipe, [total_rows, outputs], wanted);
            }
            let again = original
                .then(|| quantise(torch, recipe, "input fp8", [rows, inputs], if by_row { ROW } else { COLUMN }));
            let total =
                gathers.then(|| rank.exchange(torch, recipe, [total_rows, inputs], if by_row { ROW } else { COLUMN }));
            let product = rank.matrix(torch, "dgrad", total_rows, inputs);
            let scattered = gathers.then(|| rank.exchanged(torch, "reduce_scatter", rows, inputs));
            let turned_input = by_row.then(|| rank.turned(torch, recipe, [total_rows, inputs])).flatten();
            let one_sided = scatters && recipe.is_per_tensor();
            let turned_gradient = one_sided.then(|| rank.turned(torch, recipe, [total_rows, outputs])).flatten();
            let input = [&turned_input, &total, &again].into_iter().flatten().next();
            let reads = input.map_or(&held[..], Quantised::read_by_columns);
            let gradients = turned_gradient.as_ref().unwrap_or(&quantised).read_by_columns();
            rank.weight_gradient(torch, outputs, inputs, joined(reads, gradients));
            drop((total, turned_input, turned_gradient, again, quantised, held, gradient));
            smallvec![Some(scattered.unwrap_or(product))]
        })
    }

    /// `TEGroupedLinear`: like a linear without exchange, every expert's tokens quantised on their own.
    pub(super) fn grouped_linear_fp8(
        self: &Rc<Self>,
        torch: &mut Torch,
        x: &Tensor,
        outputs: u64,
        original: bool,
        fp8: Fp8,
    ) -> Tensor {
        let recipe = fp8.recipe;
        let original = original && recipe != Fp8Recipe::Delayed;
        let (rows, inputs) = (x.shape.size(0), x.shape.size(1));
        let own = quantise(torch, recipe, "input fp8", [rows, inputs], Sides { row: true, column: !original });
        let weight = self.own_weight(torch, fp8, [outputs, inputs]);
        let output = self.matrix(torch, "grouped gemm", rows, outputs);
        self.use_workspace(torch, true);
        if !torch.records(&[x]) {
            return output;
        }
        let kept = if original { vec![x.detached()] } else { own.by_columns() };
        let saved: Vec<Saved> = kept.iter().chain(&weight).map(|tensor| Saved::new(torch, tensor)).collect();
        drop((kept, weight));
        let rank = Rc::clone(self);
        torch.attach(output, &[x], move |torch, gradient| {
            let held: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let quantised = quantise(torch, recipe, "gradient fp8", [rows, outputs], BOTH);
            let result = rank.matrix(torch, "dgrad", rows, inputs);
            let again = original.then(|| quantise(torch, recipe, "input fp8", [rows, inputs], COLUMN));
            let reads = again.as_ref().map_or(&held[..], Quantised::read_by_columns);
            rank.weight_gradient(torch, outputs, inputs, joined(reads, quantised.read_by_columns()));
            drop((again, quantised, held, gradient));
            smallvec![Some(Tensor { viewed: true, ..result })]
        })
    }
}
