//! Transformer Engine's modules on the tape: what each keeps for backward, and what its backward holds at once.
//!
//! Sources: transformer_engine/pytorch/module/{layernorm_linear,linear,grouped_linear}.py, ops/basic/rmsnorm.py of
//! version 2.11, those for fp8 of version 2.20.

use smallvec::smallvec;
use std::rc::Rc;

use super::architecture::Norm;
use super::fp8::{self, Quantised, Sides};
use super::rank::{Rank, Rows, Split};
use crate::dtype::DType;
use crate::memory::autograd::Gradients;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::megatron::Fp8Recipe;

/// Hangs an output into the graph whose gradient becomes a fresh tensor in the shape of the input.
pub(super) fn fresh_back(
    torch: &mut Torch,
    output: Tensor,
    x: &Tensor,
    name: &'static str,
    category: Option<Category>,
) -> Tensor {
    if !torch.records(&[x]) {
        return output;
    }
    let (shape, dtype) = (x.shape, x.dtype);
    torch.attach(output, &[x], move |torch, gradient| {
        let make = |torch: &mut Torch| torch.fresh(name, shape, dtype);
        let result = match category {
            Some(category) => torch.in_category(category, make),
            None => make(torch),
        };
        drop(gradient);
        smallvec![Some(result)]
    })
}

/// How a linear runs.
#[derive(Clone, Copy)]
struct Product {
    split: Split,
    /// Whether the input is kept as it is, since another module keeps it too, and quantised again in backward
    /// (`save_original_input`; the delayed recipe cannot).
    original: bool,
    /// Whether there is a product for every local expert.
    grouped: bool,
}

impl Rank {
    /// `TENorm`: a norm that stands alone.
    pub(super) fn norm(self: &Rc<Self>, torch: &mut Torch, x: &Tensor, norm: Norm) -> Tensor {
        let output = torch.fresh(norm.name(), x.shape, x.dtype);
        let statistics = norm.statistics(torch, x.elements() / x.shape.last().max(1));
        if !torch.records(&[x]) {
            return output;
        }
        let saved: Vec<Saved> = std::iter::once(x).chain(&statistics).map(|kept| Saved::new(torch, kept)).collect();
        torch.attach(output, &[x], move |torch, gradient| {
            let held: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let result = norm.backward(torch, &held[0]);
            drop((held, gradient));
            smallvec![Some(result)]
        })
    }

    /// `TELayerNormColumnParallelLinear`: norm, gather along the sequence, product.
    ///
    /// The input and the norm's output are kept, both split along the sequence; the gathered one is made again. In fp8 the
    /// norm's output is kept so; only the delayed recipe knows the factor before the norm has run.
    pub(super) fn norm_linear(self: &Rc<Self>, torch: &mut Torch, x: &Tensor, norm: Norm, outputs: u64) -> Tensor {
        let fp8 = self.fp8_here(torch);
        let (rows, width) = (x.shape.size(0), x.shape.size(1));
        let Rows { gathers, total: total_rows, .. } = self.rows(Split::Column, rows);
        // Per-tensor data is gathered by rows only.
        let by_row = gathers && fp8.is_some_and(|fp8| fp8.recipe.is_per_tensor());
        let delayed = fp8.is_some_and(|fp8| fp8.recipe == Fp8Recipe::Delayed);
        let plain = (!delayed).then(|| self.matrix(torch, norm.name(), rows, width));
        let statistics = norm.statistics(torch, rows);
        let sides = Sides { row: true, column: !by_row };
        let normed = match (fp8, plain) {
            (None, Some(plain)) => Quantised::plain(plain),
            (fp8, _plain) => fp8::in_fp8(torch, fp8, norm.name_in_fp8(), [rows, width], sides),
        };
        let total = gathers.then(|| self.gathered(torch, fp8, [total_rows, width], fp8::ROW));
        let weight = self.own_weight(torch, fp8, [outputs, width]);
        self.use_workspace(torch, false);
        let output = self.matrix(torch, "gemm", total_rows, outputs);
        torch.multiply(self.dtype, 1, [total_rows, width, outputs]);
        drop(total);
        if !torch.records(&[x]) {
            return output;
        }
        let kept = if by_row { normed.by_rows() } else { normed.by_columns() };
        let saved = Saved::new(torch, x);
        let normed: Vec<Saved> = kept.iter().chain(&weight).map(|kept| Saved::new(torch, kept)).collect();
        let statistics: Vec<Saved> = statistics.iter().map(|kept| Saved::new(torch, kept)).collect();
        drop((kept, weight));
        let rank = Rc::clone(self);
        torch.attach(output, &[x], move |torch, gradient| {
            let x = saved.get(torch);
            let [normed, statistics] =
                [normed, statistics].map(|list| list.into_iter().map(|saved| saved.get(torch)).collect::<Vec<_>>());
            let quantised = fp8::in_fp8(torch, fp8, "gradient fp8", [total_rows, outputs], fp8::BOTH);
            let sides = if by_row { fp8::ROW } else { fp8::COLUMN };
            let total = gathers.then(|| rank.gathered(torch, fp8, [total_rows, width], sides));
            let product = rank.matrix(torch, "dgrad", total_rows, width);
            torch.multiply(rank.dtype, 2, [total_rows, width, outputs]);
            let scattered = gathers.then(|| rank.exchanged(torch, "reduce_scatter", rows, width));
            let turned = by_row.then(|| fp8::turned(torch, fp8, [total_rows, width])).flatten();
            let input = [&turned, &total].into_iter().flatten().next();
            let input = input.map_or(&normed[..], Quantised::read_by_columns);
            rank.weight_gradient(torch, outputs, width, fp8::operands(input, &quantised, &gradient));
            // What waits with a weight gradient is not cleared (`clear_tensor_data`).
            if fp8.is_none() && !rank.defers() {
                normed.iter().for_each(|normed| normed.storage.empty());
            }
            drop((total, turned, quantised, normed));
            let result = norm.backward(torch, &x);
            drop((product, scattered, statistics, x, gradient));
            smallvec![Some(result)]
        })
    }

    /// A linear whose input another module keeps too.
    pub(super) fn linear_of_kept(self: &Rc<Self>, torch: &mut Torch, x: &Tensor, outputs: u64, split: Split) -> Tensor {
        self.product(torch, x, outputs, Product { split, original: true, grouped: false })
    }

    /// `TELinear` and its column- and row-parallel forms.
    pub(super) fn linear(self: &Rc<Self>, torch: &mut Torch, x: &Tensor, outputs: u64, split: Split) -> Tensor {
        self.product(torch, x, outputs, Product { split, original: false, grouped: false })
    }

    /// `TEGroupedLinear`: one product per local expert, without exchange. `original` says that the input is made again when
    /// it is needed.
    pub(super) fn grouped_linear(
        self: &Rc<Self>,
        torch: &mut Torch,
        x: &Tensor,
        outputs: u64,
        original: bool,
    ) -> Tensor {
        self.product(torch, x, outputs, Product { split: Split::Duplicated, original, grouped: true })
    }

    fn product(self: &Rc<Self>, torch: &mut Torch, x: &Tensor, outputs: u64, how: Product) -> Tensor {
        let fp8 = self.fp8_here(torch);
        let original = how.original && fp8.is_some_and(|fp8| fp8.recipe != Fp8Recipe::Delayed);
        let (rows, inputs) = (x.shape.size(0), x.shape.size(1));
        let Rows { gathers, scatters, total: total_rows, output: out_rows } = self.rows(how.split, rows);
        let per_tensor = fp8.is_some_and(|fp8| fp8.recipe.is_per_tensor());
        let by_row = gathers && per_tensor;
        let sides = Sides { row: true, column: !by_row && !original };
        let own = fp8::in_fp8(torch, fp8, "input fp8", [rows, inputs], sides);
        let total = gathers.then(|| self.gathered(torch, fp8, [total_rows, inputs], fp8::ROW));
        let weight = self.own_weight(torch, fp8, [outputs, inputs]);
        let mut output = match how.grouped {
            true => {
                let output = self.matrix(torch, "grouped gemm", total_rows, outputs);
                self.use_workspace(torch, true);
                output
            }
            false => {
                self.use_workspace(torch, false);
                self.matrix(torch, "gemm", total_rows, outputs)
            }
        };
        torch.multiply(self.dtype, 1, [total_rows, inputs, outputs]);
        drop(total);
        if scatters {
            output = self.exchanged(torch, "reduce_scatter", out_rows, outputs);
        }
        if !torch.records(&[x]) {
            return output;
        }
        let kept = match (fp8, by_row) {
            (None, _) => vec![x.clone()],
            _ if original => vec![x.detached()],
            (_, true) => own.by_rows(),
            (_, false) => own.by_columns(),
        };
        let saved: Vec<Saved> = kept.iter().chain(&weight).map(|tensor| Saved::new(torch, tensor)).collect();
        drop((kept, weight));
        let rank = Rc::clone(self);
        torch.attach(output, &[x], move |torch, gradient| {
            let held: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let one_sided = scatters && per_tensor;
            let wanted = if one_sided { fp8::ROW } else { fp8::BOTH };
            let mut quantised = fp8::in_fp8(torch, fp8, "gradient fp8", [out_rows, outputs], wanted);
            if scatters {
                quantised = rank.gathered(torch, fp8, [total_rows, outputs], wanted);
            }
            let sides = if by_row { fp8::ROW } else { fp8::COLUMN };
            let again = |torch: &mut Torch, here: bool| {
                (original && here).then(|| fp8::in_fp8(torch, fp8, "input fp8", [rows, inputs], sides))
            };
            let before = again(torch, !how.grouped);
            let total = gathers.then(|| rank.gathered(torch, fp8, [total_rows, inputs], sides));
            let product = rank.matrix(torch, "dgrad", total_rows, inputs);
            torch.multiply(rank.dtype, 2, [total_rows, inputs, outputs]);
            let scattered = gathers.then(|| rank.exchanged(torch, "reduce_scatter", rows, inputs));
            let behind = again(torch, how.grouped);
            let turned_input = by_row.then(|| fp8::turned(torch, fp8, [total_rows, inputs])).flatten();
            let turned_gradient = one_sided.then(|| fp8::turned(torch, fp8, [total_rows, outputs])).flatten();
            let input = [&turned_input, &total, &before, &behind].into_iter().flatten().next();
            let input = input.map_or(&held[..], Quantised::read_by_columns);
            let other = turned_gradient.as_ref().unwrap_or(&quantised);
            rank.weight_gradient(torch, outputs, inputs, fp8::operands(input, other, &gradient));
            drop((total, turned_input, turned_gradient, before, behind, quantised, held, gradient));
            let product = if how.grouped { Tensor { viewed: true, ..product } } else { product };
            smallvec![Some(scattered.unwrap_or(product))]
        })
    }

    /// A fused function that keeps its input, in one kernel each way: SwiGLU and its like, which halve the width, or an
    /// activation alone. `weights` are the probabilities of routed tokens, which are multiplied in.
    pub(super) fn activation(
        self: &Rc<Self>,
        torch: &mut Torch,
        x: &Tensor,
        gated: bool,
        weights: Option<&Tensor>,
    ) -> Tensor {
        let (rows, width) = (x.shape.size(0), x.shape.size(1));
        let (name, width) = if gated { ("swiglu", width / 2) } else { ("activation", width) };
        let output = self.matrix(torch, name, rows, width);
        let inputs: Vec<&Tensor> = std::iter::once(x).chain(weights).collect();
        if !torch.records(&inputs) {
            return output;
        }
        let saved: Vec<Saved> = inputs.iter().map(|tensor| Saved::new(torch, tensor)).collect();
        let shape = x.shape;
        let weights = weights.map(|tensor| (tensor.shape, tensor.dtype));
        torch.attach(output, &inputs, move |torch, gradient| {
            let held: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let mut results: Gradients = smallvec![Some(torch.fresh("swiglu backward", shape, held[0].dtype))];
            results.extend(weights.map(|(shape, dtype)| Some(torch.fresh("probs gradient", shape, dtype))));
            drop((held, gradient));
            results
        })
    }
}

impl Norm {
    /// What it is called in a log.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rms => "rmsnorm",
            Self::Layer => "layernorm",
        }
    }

    /// What its backward kernel, its partial sums and its output in fp8 are called.
    fn other_names(self) -> [&'static str; 3] {
        match self {
            Self::Rms => ["rmsnorm backward", "rmsnorm partial sums", "rmsnorm fp8"],
            Self::Layer => ["layernorm backward", "layernorm partial sums", "layernorm fp8"],
        }
    }

    /// What its output in fp8 is called.
    pub(super) fn name_in_fp8(self) -> &'static str {
        self.other_names()[2]
    }

    /// What it keeps of every row, fp32: the inverse deviation, and the mean where there is a shift.
    pub(super) fn statistics(self, torch: &mut Torch, rows: u64) -> Vec<Tensor> {
        let names = ["rsigma", "mu"].into_iter().take(self.vectors() as usize);
        names.map(|name| torch.fresh(name, Shape::from([rows]), DType::F32)).collect()
    }

    /// The backward kernel: the gradient, those of scale and shift, and partial sums of the latter, a row of fp32 for every
    /// multiprocessor (common/normalization).
    pub(super) fn backward(self, torch: &mut Torch, x: &Tensor) -> Tensor {
        let (width, count) = (x.shape.last(), self.vectors());
        let [name, sums, _] = self.other_names();
        let result = torch.fresh(name, x.shape, x.dtype);
        let vector = |torch: &mut Torch| torch.fresh(name, Shape::from([width]), x.dtype);
        let vectors: Vec<Tensor> = (0..count).map(|_| vector(torch)).collect();
        let partial = torch.device.multiprocessors.saturating_mul(width).saturating_mul(4);
        let scratch: Vec<Option<Tensor>> = (0..count).map(|_| torch.scratch(sums, partial)).collect();
        drop((scratch, vectors));
        Tensor { viewed: true, ..result }
    }
}
