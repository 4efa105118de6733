//! sentence-transformers' losses (6.0: sentence_transformer/losses, cross_encoder/losses, base/losses/gradcache.py).
//!
//! The anchors go through the model by themselves, all other texts of the samples together (`embed_columns`). A cached loss embeds
//! mini-batches without a graph, compares the embeddings, and then embeds each once more with a graph and goes back at once.

use super::player::{End, Given, Player};
use super::{At, Stage, Task, numbers, without_graph};
use crate::dtype::DType;
use crate::memory::autograd;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, Reduction, Unary};
use crate::plan::{Fault, Objective, PlanError, TaskKind};

#[derive(Default)]
pub(super) struct Contrastive {
    /// Token ids and masks of every column.
    features: Vec<Tensor>,
}

/// Texts of a sample.
fn texts(objective: &Objective) -> u64 {
    match objective.kind {
        TaskKind::Triplet => 3,
        TaskKind::CrossEncoder => 1,
        _ => objective.texts.unwrap_or(2),
    }
}

impl Task for Contrastive {
    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let sizes = stage.sizes(at);
        self.features =
            (0..2 * texts(&stage.plan.objective)).map(|_| numbers(torch, sizes.samples, sizes.longest)).collect();
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let (sizes, objective) = (stage.sizes(at), &stage.plan.objective);
        let padded = stage.padded(at);
        match objective.kind {
            TaskKind::CrossEncoder => {
                let given = Given { ids: &self.features[0], mask: &self.features[1], labels: None, padded };
                let scores = first(stage.policy.pass(torch, &given, End::Logits)?)?;
                let losses = torch.unary(Unary::LogSigmoid, &scores);
                Ok(torch.reduce(Reduction::Mean, &losses, None, false))
            }
            TaskKind::CachedMnrl => {
                let mini = objective.mini_batch_size.unwrap_or(32).min(sizes.samples);
                let columns = texts(objective);
                cached(torch, &mut stage.policy, (columns, sizes.samples, sizes.longest), (mini, padded))
            }
            _ => {
                let anchors = embed(torch, &mut stage.policy, (sizes.samples, sizes.longest), padded)?;
                let others = (texts(objective) - 1) * sizes.samples;
                let candidates = embed(torch, &mut stage.policy, (others, sizes.longest), padded)?;
                Ok(compared(torch, &anchors, &candidates))
            }
        }
    }
}

/// A pass and the mean over its tokens.
fn embed(torch: &mut Torch, player: &mut Player, (rows, seq): (u64, u64), padded: bool) -> Result<Tensor, PlanError> {
    let [ids, mask] = [(); 2].map(|()| numbers(torch, rows, seq));
    let given = Given { ids: &ids, mask: &mask, labels: None, padded };
    let hidden = first(player.pass(torch, &given, End::Logits)?)?;
    let width = hidden.shape.last();
    let weights = torch.fresh("_to_copy", hidden.shape, hidden.dtype);
    let weighted = torch.binary(Binary::Mul, &hidden, &weights);
    let sum = torch.reduce(Reduction::Sum, &weighted, Some(1), false);
    drop(weighted);
    let count = torch.fresh("clamp", Shape::from([rows, width]), hidden.dtype);
    Ok(torch.binary(Binary::Div, &sum, &count))
}

/// Cosines of every pair, and how likely the right one is.
fn compared(torch: &mut Torch, anchors: &Tensor, candidates: &Tensor) -> Tensor {
    torch.in_category(Category::Logits, |torch| {
        let [a, b] = [anchors, candidates].map(|x| {
            let norms = torch.reduce(Reduction::Norm, x, Some(1), true);
            torch.binary(Binary::Div, x, &norms)
        });
        let turned = torch.transpose(&b, 0, 1);
        let cosines = torch.matmul(&a, &turned);
        let scaled = torch.scalar(Binary::Mul, &cosines);
        let all = torch.reduce(Reduction::LogSumExp, &scaled, Some(1), false);
        torch.reduce(Reduction::Mean, &all, None, false)
    })
}

/// GradCache.
fn cached(
    torch: &mut Torch,
    player: &mut Player,
    (columns, samples, seq): (u64, u64, u64),
    (mini, padded): (u64, bool),
) -> Result<Tensor, PlanError> {
    let parts: Vec<u64> = (0..columns)
        .flat_map(|_| (0..samples.div_ceil(mini.max(1))).map(|part| mini.min(samples - part * mini)))
        .collect();
    let mut embeddings = Vec::new();
    for rows in &parts {
        let embedding = without_graph(torch, |torch| embed(torch, player, (*rows, seq), padded))?;
        embeddings.push(embedding);
    }
    let width = embeddings[0].shape.last();
    // The embeddings joined, and the gradients that come back to each.
    let all = torch.fresh("cat", Shape::from([columns * samples, width]), DType::F32);
    let gradients: Vec<Tensor> = embeddings.iter().map(|one| torch.fresh("grad", one.shape, one.dtype)).collect();
    drop(all);
    let loss = torch.fresh("mean", Shape::new(&[]), DType::F32);
    for rows in &parts {
        let mark = torch.graph_mark();
        let embedding = embed(torch, player, (*rows, seq), padded)?;
        let product = torch.scalar(Binary::Mul, &embedding);
        let surrogate = torch.reduce(Reduction::Sum, &product, None, false);
        drop((embedding, product));
        autograd::backward(torch, &surrogate);
        drop(surrogate);
        torch.drop_graph(mark);
    }
    drop((embeddings, gradients));
    Ok(loss)
}

/// What a forward pass gives to compare.
pub(super) fn first(outputs: Vec<Tensor>) -> Result<Tensor, PlanError> {
    let none =
        || Fault::unsupported("objective.task", "this loss on a model whose forward pass gives no embeddings").into();
    outputs.into_iter().next().ok_or_else(none)
}
