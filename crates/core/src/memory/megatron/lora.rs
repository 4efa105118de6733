//! LoRA beside frozen linears. A frozen linear keeps nothing for its weight; the adapter keeps its input, which behind a norm is
//! the gathered one.
//!
//! Sources: Megatron-Bridge (067f987d), peft/{lora_layers,utils}.py (`LoRALinear`, `ParallelLinearAdapter`);
//! transformer_engine/pytorch/module/{layernorm_linear,linear}.py.

use smallvec::smallvec;
use std::rc::Rc;

use super::architecture::{Architecture, Branch, Column, Makes, Norm, Op, Row};
use super::chunks::Chunk;
use super::kernels::fresh_back;
use super::rank::{Rank, Rows, Split};
use super::weights::Weight;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::Binary;
use crate::plan::parallel::megatron::{LoraTarget, MegatronLora};
use crate::plan::parallel::mesh::Mesh;

/// The parameters of a chunk's adapters: two matrices each, both split over the tensor-parallel ranks.
pub fn weights(architecture: &Architecture, chunk: &Chunk, mesh: &Mesh, lora: &MegatronLora) -> Vec<Weight> {
    let (tp, hidden) = (mesh.tp.max(1), architecture.hidden);
    let weight = |matrix: [u64; 2]| Weight {
        elements: matrix[0].saturating_mul(matrix[1]),
        expert: false,
        shared_embedding: false,
        matrix,
        fp8: false,
        parts: tp,
    };
    let mut list = Vec::new();
    let branches = architecture.layers[chunk.layers.clone()].iter().flat_map(|layer| &layer.branches);
    for op in branches.flat_map(Branch::registered) {
        match op {
            Op::Column(own) if lora.adapts(own.target()) => {
                list.push(weight([lora.dim / tp, hidden]));
                list.push(weight([own.makes.outputs(tp) / tp, lora.dim]));
            }
            Op::Row(own) if lora.adapts(own.target()) => {
                list.push(weight([lora.dim, own.inputs / tp]));
                list.push(weight([hidden / tp, lora.dim]));
            }
            _ => {}
        }
    }
    list
}

impl Column {
    fn target(&self) -> LoraTarget {
        match self.makes {
            Makes::Heads(_) => LoraTarget::LinearQkv,
            Makes::Width(_) => LoraTarget::LinearFc1,
        }
    }
}

impl Row {
    fn target(&self) -> LoraTarget {
        if self.of_attention { LoraTarget::LinearProj } else { LoraTarget::LinearFc2 }
    }
}

/// A norm and a column-parallel linear.
pub(super) fn norm_linear(
    rank: &Rc<Rank>,
    torch: &mut Torch,
    x: &Tensor,
    (own, norm, outputs): (&Column, Norm, u64),
    lora: &MegatronLora,
) -> Tensor {
    let (rows, width) = (x.shape.size(0), x.shape.size(1));
    let Rows { total, .. } = rank.rows(Split::Column, rows);
    let normed = rank.matrix(torch, norm.name(), rows, width);
    let statistics = norm.statistics(torch, rows);
    let mut gathered = match rank.scattered() {
        true => rank.exchanged(torch, "all_gather", total, width),
        false => normed.clone(),
    };
    drop(normed);
    rank.use_workspace(torch, false);
    let output = rank.matrix(torch, "gemm", total, outputs);
    let mut results = [output, gathered.detached()];
    if torch.records(&[x]) {
        let saved: Vec<Saved> = std::iter::once(x).chain(&statistics).map(|kept| Saved::new(torch, kept)).collect();
        let shared = Rc::clone(rank);
        torch.attach_many(&mut results, &[x], move |torch, gradients| {
            let held: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let product = shared.matrix(torch, "dgrad", total, width);
            let scattered = shared.scattered().then(|| shared.exchanged(torch, "reduce_scatter", rows, width));
            let result = norm.backward(torch, &held[0]);
            drop((product, scattered, held, gradients));
            smallvec![Some(result)]
        });
    }
    let [output, normed] = results;
    gathered = normed;
    match lora.adapts(own.target()) {
        true => added(rank, torch, output, &gathered, (outputs, Split::Column), lora),
        false => output,
    }
}

/// A row-parallel linear.
pub(super) fn row_linear(
    rank: &Rc<Rank>,
    torch: &mut Torch,
    x: &Tensor,
    (own, outputs): (&Row, u64),
    lora: &MegatronLora,
) -> Tensor {
    let (rows, inputs) = (x.shape.size(0), x.shape.size(1));
    let Rows { scatters, output: out_rows, .. } = rank.rows(Split::Row, rows);
    rank.use_workspace(torch, false);
    let mut output = rank.matrix(torch, "gemm", rows, outputs);
    if scatters {
        output = rank.exchanged(torch, "reduce_scatter", out_rows, outputs);
    }
    if torch.records(&[x]) {
        let shared = Rc::clone(rank);
        output = torch.attach(output, &[x], move |torch, gradient| {
            let whole = scatters.then(|| shared.exchanged(torch, "all_gather", rows, outputs));
            let product = shared.matrix(torch, "dgrad", rows, inputs);
            drop((whole, gradient));
            smallvec![Some(product)]
        });
    }
    match lora.adapts(own.target()) {
        true => added(rank, torch, output, x, (outputs, Split::Row), lora),
        false => output,
    }
}

/// The adapter's output, scaled, beside the linear's.
fn added(
    rank: &Rc<Rank>,
    torch: &mut Torch,
    base: Tensor,
    x: &Tensor,
    (outputs, split): (u64, Split),
    lora: &MegatronLora,
) -> Tensor {
    let tp = rank.mesh.tp.max(1);
    let own = if split == Split::Column { lora.dim / tp } else { lora.dim };
    let narrow = kept(rank, torch, x, own);
    let narrow = if split == Split::Column && tp > 1 { joined(rank, torch, &narrow, lora.dim) } else { narrow };
    // The second matrix of a row-parallel linear gives a part of the outputs, which are gathered.
    let wide = kept(rank, torch, &narrow, if split == Split::Row { outputs / tp } else { outputs });
    drop(narrow);
    let wide = if split == Split::Row && tp > 1 { joined(rank, torch, &wide, outputs) } else { wide };
    let wide = match base.shape.size(0) == wide.shape.size(0) {
        true => wide,
        false => scattered(rank, torch, &wide, base.shape.size(0)),
    };
    let scaled = fresh_each_way(torch, "mul", &wide);
    drop(wide);
    torch.binary(Binary::Add, &base, &scaled)
}

/// A small linear of an adapter: its input is kept, its weight's gradient is summed at once.
fn kept(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, outputs: u64) -> Tensor {
    let (rows, inputs) = (x.shape.size(0), x.shape.size(1));
    let output = rank.matrix(torch, "adapter", rows, outputs);
    rank.use_torch_workspace(torch, false);
    if !torch.records(&[x]) {
        return output;
    }
    let (saved, shared) = (Saved::new(torch, x), Rc::clone(rank));
    torch.attach(output, &[x], move |torch, gradient| {
        let held = saved.get(torch);
        let product = shared.matrix(torch, "adapter backward", rows, inputs);
        shared.use_torch_workspace(torch, true);
        drop(shared.matrix(torch, "weight gradient", outputs, inputs));
        drop((held, gradient));
        smallvec![Some(product)]
    })
}

/// The parts of the tensor-parallel ranks side by side.
fn joined(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, width: u64) -> Tensor {
    let rows = x.shape.size(0);
    let gathered = rank.exchanged(torch, "all_gather", rows, width);
    let output = rank.matrix(torch, "cat", rows, width);
    drop(gathered);
    fresh_back(torch, output, x, "contiguous", None)
}

/// A rank's part of the sequence.
fn scattered(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, rows: u64) -> Tensor {
    let output = rank.matrix(torch, "contiguous", rows, x.shape.last());
    fresh_back(torch, output, x, "all_gather", None)
}

fn fresh_each_way(torch: &mut Torch, name: &'static str, x: &Tensor) -> Tensor {
    let output = torch.fresh(name, x.shape, x.dtype);
    fresh_back(torch, output, x, name, None)
}
