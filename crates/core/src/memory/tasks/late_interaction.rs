//! sentence-transformers' `MultiVectorEncoder` (6.0: multi_vector_encoder/losses/multiple_negatives_ranking.py,
//! util/similarity.py, `_maxsim_score_documents`), ColBERT's late interaction: a vector for every token, and for every query
//! and document the sum of each query token's nearest document token. From sources, not measured.
//!
//! Every token of the batch's queries meets every token of its documents: one tensor of that size forward, two in backward.
//! The projection of hidden states to 128 (about a tenth of a million parameters) is not counted.

use smallvec::smallvec;

use super::contrastive::first;
use super::player::{End, Given, Player};
use super::{At, Stage, Task, numbers};
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, Reduction};
use crate::plan::PlanError;

/// Numbers of a token's vector (`Dense(out_features=128)` of a model that brings no projection).
const WIDTH: u64 = 128;

#[derive(Default)]
pub(super) struct LateInteraction {
    /// Token ids and masks of every column.
    features: Vec<Tensor>,
}

impl Task for LateInteraction {
    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let (sizes, objective) = (stage.sizes(at), &stage.plan.objective);
        let documents = (1..objective.texts.unwrap_or(2)).map(|_| sizes.longest);
        let columns = std::iter::once(objective.prompt(sizes.longest)).chain(documents);
        self.features =
            columns.flat_map(|tokens| [tokens; 2]).map(|tokens| numbers(torch, sizes.samples, tokens)).collect();
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let (sizes, objective) = (stage.sizes(at), &stage.plan.objective);
        let (padded, columns) = (stage.padded(at), objective.texts.unwrap_or(2) - 1);
        let query = (sizes.samples, objective.prompt(sizes.longest));
        let queries = vectors(torch, &mut stage.policy, query, padded)?;
        let documents = vectors(torch, &mut stage.policy, (columns * sizes.samples, sizes.longest), padded)?;
        Ok(torch.in_category(Category::Logits, |torch| {
            let stacked = torch.cat(&[&documents], 0);
            drop(documents);
            let scores: Vec<Tensor> = (0..columns)
                .map(|_| {
                    let group = torch.slice(&stacked, 0, sizes.samples, 1);
                    nearest(torch, &queries, &group)
                })
                .collect();
            let all = torch.cat(&scores.iter().collect::<Vec<_>>(), 1);
            drop((scores, queries, stacked));
            let scaled = torch.scalar(Binary::Mul, &all);
            let sums = torch.reduce(Reduction::LogSumExp, &scaled, Some(1), false);
            torch.reduce(Reduction::Mean, &sums, None, false)
        }))
    }
}

/// A pass, projected and of length one for each token.
fn vectors(
    torch: &mut Torch,
    player: &mut Player,
    (rows, tokens): (u64, u64),
    padded: bool,
) -> Result<Tensor, PlanError> {
    let [ids, mask] = [(); 2].map(|()| numbers(torch, rows, tokens));
    let given = Given { ids: &ids, mask: &mask, labels: None, padded };
    let hidden = first(player.pass(torch, &given, End::Logits)?)?;
    let projection = torch.phantom(Shape::from([hidden.shape.last(), WIDTH]), hidden.dtype);
    let projected = torch.matmul(&hidden, &projection);
    drop(hidden);
    let lengths = torch.reduce(Reduction::Norm, &projected, Some(2), true);
    Ok(torch.binary(Binary::Div, &projected, &lengths))
}

/// `maxsim`: scores of all queries and documents.
fn nearest(torch: &mut Torch, queries: &Tensor, documents: &Tensor) -> Tensor {
    let [a, s] = [0, 1].map(|dim| queries.shape.size(dim));
    let [b, t] = [0, 1].map(|dim| documents.shape.size(dim));
    let (dtype, every) = (queries.dtype, Shape::from([a, b, s, t]));
    // `einsum`; padding is masked in its place.
    let products = torch.fresh("bmm", every, dtype);
    let [best, which] = [dtype, DType::I64].map(|dtype| torch.fresh("max", Shape::from([a, b, s]), dtype));
    drop(products);
    let best = match torch.records(&[queries, documents]) {
        false => best,
        true => {
            let saved: Vec<Saved> = [queries, documents, &which].map(|tensor| Saved::new(torch, tensor)).into();
            let shapes = [queries.shape, documents.shape];
            torch.attach(best, &[queries, documents], move |torch, gradient| {
                let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
                let spread = torch.fresh("value_selecting_reduction_backward", every, dtype);
                drop(gradient);
                let masked = torch.fresh("masked_fill", every, dtype);
                drop(spread);
                // As the product lay, which is not as its sizes say.
                let laid = torch.fresh("clone", every, dtype);
                drop(masked);
                let gradients = shapes.map(|shape| torch.fresh("bmm", shape, dtype));
                drop((laid, kept));
                let [one, two] = gradients;
                smallvec![Some(one), Some(two)]
            })
        }
    };
    let wide = torch.cast(&best, DType::F32);
    drop((best, which));
    let masked = torch.scalar(Binary::Mul, &wide);
    torch.reduce(Reduction::Sum, &masked, Some(2), false)
}
