//! Multi-token prediction: layers behind the last one, each with its own loss.
//!
//! Source: megatron/core/transformer/multi_token_prediction.py of version 0.20.

use smallvec::smallvec;
use std::rc::Rc;

use super::architecture::Architecture;
use super::rank::{Rank, Split};
use super::{ends, layers, recompute};
use crate::dtype::DType;
use crate::memory::autograd::Gradients;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::megatron::Recompute;

/// Runs the layers on the normed output of the model and returns that output, into whose graph their losses are hung
/// (`MTPLossAutoScaler`). The outputs of all layers are joined once, and taken apart for the output layer.
pub(super) fn predict(
    rank: &Rc<Rank>,
    architecture: &Rc<Architecture>,
    torch: &mut Torch,
    normed: Tensor,
    (ids, table): (&Tensor, &Tensor),
) -> Tensor {
    let depth = rank.options.mtp_layers as usize;
    let mut outputs = vec![normed];
    for _ in 0..depth {
        let rolled = torch.in_category(Category::Batch, |torch| torch.fresh("roll", ids.shape, DType::I64));
        let embedded = ends::embedding(rank, torch, &rolled, table);
        let inputs = [outputs[outputs.len() - 1].clone(), embedded];
        let (shared, own) = (Rc::clone(rank), Rc::clone(architecture));
        let part = move |torch: &mut Torch, inputs: &[Tensor]| layer(&shared, &own, torch, inputs);
        let output = match rank.options.recompute {
            Recompute::Uniform(_) | Recompute::Block(_) => recompute::checkpoint(torch, &inputs, part),
            _ => part(torch, &inputs),
        };
        outputs.push(output);
    }
    let mut parts = joined(rank, torch, &outputs);
    drop(outputs);
    let rows = table.shape.size(0);
    let losses: Vec<Tensor> = parts
        .split_off(1)
        .into_iter()
        .map(|hidden| {
            let logits = ends::output_layer(rank, torch, &hidden, rows);
            drop(hidden);
            let labels = torch.in_category(Category::Batch, |torch| torch.fresh("roll", ids.shape, DType::I64));
            ends::cross_entropy(rank, torch, logits, &labels)
        })
        .collect();
    let main = parts.remove(0);
    let inputs: Vec<&Tensor> = std::iter::once(&main).chain(&losses).collect();
    let shapes: Vec<Shape> = losses.iter().map(|loss| loss.shape).collect();
    let alias = Tensor { viewed: true, ..main.detached() };
    torch.attach(alias, &inputs, move |torch, gradient| {
        let mut results: Gradients = smallvec![Some(gradient)];
        results.extend(shapes.iter().map(|shape| Some(torch.fresh("loss scale", *shape, DType::F32))));
        results
    })
}

/// Both inputs normed and joined, projected, and one more layer like the last.
fn layer(rank: &Rc<Rank>, architecture: &Architecture, torch: &mut Torch, inputs: &[Tensor]) -> Tensor {
    let Some(last) = architecture.layers.last() else { return inputs[0].clone() };
    torch.set_module(last.module);
    let hidden = architecture.hidden;
    let embedded = rank.norm(torch, &inputs[1], architecture.norm);
    let before = rank.norm(torch, &inputs[0], architecture.norm);
    let (rows, width) = (before.shape.size(0), before.shape.last() + embedded.shape.last());
    let both = rank.matrix(torch, "cat", rows, width);
    let both = torch.attach(both, &[&embedded, &before], move |torch, gradient| {
        // Views of the joined gradient; norms make them dense.
        let halves = [0, 1].map(|_| Some(torch.fresh("contiguous", Shape::from([rows, hidden]), gradient.dtype)));
        drop(gradient);
        halves.into()
    });
    drop((embedded, before));
    let tp = rank.mesh.tp.max(1);
    let narrow = rank.linear(torch, &both, hidden / tp, Split::Column);
    drop(both);
    let x = if tp > 1 { whole(rank, torch, &narrow, rows, hidden) } else { narrow };
    let x = layers::layer(rank, torch, &x, last);
    rank.norm(torch, &x, architecture.norm)
}

/// The parts of the width gathered, and with sequence parallel the rank's tokens taken out.
fn whole(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, rows: u64, hidden: u64) -> Tensor {
    let total_rows = x.shape.size(0);
    let gathered = rank.exchanged(torch, "all_gather", total_rows, hidden);
    let output = rank.matrix(torch, "cat", total_rows, hidden);
    drop(gathered);
    let output = if rows == total_rows { output } else { rank.matrix(torch, "contiguous", rows, hidden) };
    let (shared, narrow) = (Rc::clone(rank), x.shape);
    torch.attach(output, &[x], move |torch, gradient| {
        let scattered = (rows != total_rows).then(|| shared.exchanged(torch, "all_gather", total_rows, hidden));
        let result = torch.fresh("contiguous", narrow, shared.dtype);
        drop((scattered, gradient));
        smallvec![Some(result)]
    })
}

/// One tensor of all outputs, and views of it.
fn joined(rank: &Rank, torch: &mut Torch, outputs: &[Tensor]) -> Vec<Tensor> {
    let Some(first) = outputs.first() else { return Vec::new() };
    let (rows, width, count) = (first.shape.size(0), first.shape.last(), outputs.len());
    let all = rank.matrix(torch, "cat", rows * count as u64, width);
    let inputs: Vec<&Tensor> = outputs.iter().collect();
    let shape = Shape::from([rows, width]);
    let mut views: Vec<Tensor> =
        (0..count).map(|_| Tensor { viewed: true, ..all.detached().with_shape(shape) }).collect();
    let dtype = rank.dtype;
    if torch.records(&inputs) {
        torch.attach_many(&mut views, &inputs, move |torch, gradients| {
            let whole = torch.fresh("cat", Shape::from([rows * count as u64, width]), dtype);
            drop(gradients);
            (0..count).map(|_| Some(Tensor { viewed: true, ..whole.detached().with_shape(shape) })).collect()
        });
    }
    views
}
