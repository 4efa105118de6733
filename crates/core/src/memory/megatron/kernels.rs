//! Transformer Engine's modules on the tape: what each keeps for backward, and what its backward holds at once.
//!
//! Sources: transformer_engine/pytorch/module/{layernorm_linear,linear,grouped_linear}.py, ops/basic/rmsnorm.py of
//! version 2.11.

use smallvec::smallvec;
use std::rc::Rc;

use super::architecture::Norm;
use super::rank::{Rank, Rows, Split};
use crate::dtype::DType;
use crate::memory::autograd::Gradients;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;

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
    /// The input and the norm's output are kept, both split along the sequence; the gathered one is made again.
    pub(super) fn norm_linear(self: &Rc<Self>, torch: &mut Torch, x: &Tensor, norm: Norm, outputs: u64) -> Tensor {
        if let Some(fp8) = self.fp8_here(torch) {
            return self.norm_linear_fp8(torch, x, (norm, outputs), fp8);
        }
        let (rows, width) = (x.shape.size(0), x.shape.size(1));
        let normed = self.matrix(torch, norm.name(), rows, width);
        let statistics = norm.statistics(torch, rows);
        let Rows { total: total_rows, .. } = self.rows(Split::Column, rows);
        let total = self.scattered().then(|| self.exchanged(torch, "all_gather", total_rows, width));
        self.use_workspace(torch, false);
        let output = self.matrix(torch, "gemm", total_rows, outputs);
        drop(total);
        if !torch.records(&[x]) {
            return output;
        }
        let saved = [x, &normed].map(|kept| Saved::new(torch, kept));
        let statistics: Vec<Saved> = statistics.iter().map(|kept| Saved::new(torch, kept)).collect();
        let rank = Rc::clone(self);
        torch.attach(output, &[x], move |torch, gradient| {
            let [x, normed] = saved.map(|saved| saved.get(torch));
            let statistics: Vec<Tensor> = statistics.into_iter().map(|saved| saved.get(torch)).collect();
            let total = rank.scattered().then(|| rank.exchanged(torch, "all_gather", total_rows, width));
            let product = rank.matrix(torch, "dgrad", total_rows, width);
            let scattered = rank.scattered().then(|| rank.exchanged(torch, "reduce_scatter", rows, width));
            let read = total.as_ref().unwrap_or(&normed).detached();
            rank.weight_gradient(torch, outputs, width, vec![read, gradient.clone()]);
            // What waits with a weight gradient is not cleared.
            if !rank.defers() {
                normed.storage.empty();
            }
            drop(total);
            let result = norm.backward(torch, &x);
            drop((product, scattered, statistics, x, normed, gradient));
            smallvec![Some(result)]
        })
    }

    /// A linear whose input another module keeps too.
    pub(super) fn linear_of_kept(self: &Rc<Self>, torch: &mut Torch, x: &Tensor, outputs: u64, split: Split) -> Tensor {
        match self.fp8_here(torch) {
            Some(fp8) => self.linear_fp8(torch, x, outputs, (split, true), fp8),
            None => self.linear(torch, x, outputs, split),
        }
    }

    /// `TELinear` and its column- and row-parallel forms.
    pub(super) fn linear(self: &Rc<Self>, torch: &mut Torch, x: &Tensor, outputs: u64, split: Split) -> Tensor {
        if let Some(fp8) = self.fp8_here(torch) {
            return self.linear_fp8(torch, x, outputs, (split, false), fp8);
        }
        let (rows, inputs) = (x.shape.size(0), x.shape.size(1));
        let Rows { gathers, scatters, total: total_rows, output: out_rows } = self.rows(split, rows);
        let total = gathers.then(|| self.exchanged(torch, "all_gather", total_rows, inputs));
        self.use_workspace(torch, false);
        let mut output = self.matrix(torch, "gemm", total_rows, outputs);
        drop(total);
        if scatters {
            output = self.exchanged(torch, "reduce_scatter", out_rows, outputs);
        }
        if !torch.records(&[x]) {
            return output;
        }
        let saved = Saved::new(torch, x);
        let rank = Rc::clone(self);
        torch.attach(output, &[x], move |torch, gradient| {
            let held = saved.get(torch);
            let gathered = scatters.then(|| rank.exchanged(torch, "all_gather", total_rows, outputs));
            let total = gathers.then(|| rank.exchanged(torch, "all_gather", total_rows, inputs));
            let product = rank.matrix(torch, "dgrad", total_rows, inputs);
            let scattered = gathers.then(|| rank.exchanged(torch, "reduce_scatter", rows, inputs));
            let reads = [total.as_ref().unwrap_or(&held), gathered.as_ref().unwrap_or(&gradient)];
            rank.weight_gradient(torch, outputs, inputs, reads.map(Tensor::clone).to_vec());
            drop((total, gathered, held, gradient));
            smallvec![Some(scattered.unwrap_or(product))]
        })
    }

    /// `TEGroupedLinear`: one product per local expert. `kept` says that the input is made again when it is needed.
    pub(super) fn grouped_linear(self: &Rc<Self>, torch: &mut Torch, x: &Tensor, outputs: u64, kept: bool) -> Tensor {
        if let Some(fp8) = self.fp8_here(torch) {
            return self.grouped_linear_fp8(torch, x, outputs, kept, fp8);
        }
        let (rows, inputs) = (x.shape.size(0), x.shape.size(1));
        let output = self.matrix(torch, "grouped gemm", rows, outputs);
        self.use_workspace(torch, true);
        if !torch.records(&[x]) {
            return output;
        }
        let saved = Saved::new(torch, x);
        let rank = Rc::clone(self);
        torch.attach(output, &[x], move |torch, gradient| {
            let held = saved.get(torch);
            let result = rank.matrix(torch, "dgrad", rows, inputs);
            rank.weight_gradient(torch, outputs, inputs, vec![held.clone(), gradient.clone()]);
            drop((held, gradient));
            smallvec![Some(Tensor { viewed: true, ..result })]
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
