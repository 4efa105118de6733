//! TRL's `DPOTrainer` (trl 1.16: trainer/dpo_trainer.py, `_compute_loss`): chosen and rejected in one batch, the policy
//! with a graph, then the reference without one, both by the fused head on completion tokens alone.
//!
//! With transformers' own loss instead of TRL's head it is the plain loop that TRL was before 1.0: the reference first, logits in
//! full, a log-softmax over them.

use super::player::{End, Given};
use super::{At, Stage, Task, in_phase, numbers};
use crate::dtype::DType;
use crate::memory::log::Category;
use crate::memory::lower::head::Scores;
use crate::memory::phase::Work;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, Reduction, Unary};
use crate::plan::{LossKind, PlanError};

#[derive(Default)]
pub(super) struct Dpo {
    batch: Vec<Tensor>,
    /// The reference's sums, where they are computed before the policy's.
    known: Option<Tensor>,
}

impl Task for Dpo {
    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let sizes = stage.sizes(at);
        let plain = stage.plan.loss.kind == LossKind::Standard;
        // Token ids, attention mask, completion mask.
        let tensors = if plain { 2 } else { 3 };
        self.batch = (0..tensors).map(|_| numbers(torch, 2 * sizes.samples, sizes.longest)).collect();
        if plain && stage.plan.objective.held_by_reference() {
            let (ids, mask) = (self.batch[0].clone(), self.batch[1].clone());
            let given = Given { ids: &ids, mask: &mask, labels: None, padded: stage.padded(at) };
            let refer = |torch: &mut Torch| {
                stage.refer(torch, |torch, player| {
                    let outputs = player.pass(torch, &given, End::Logits)?;
                    Ok(summed(torch, outputs, &ids))
                })
            };
            self.known = Some(in_phase(torch, at, Work::Reference, refer)?);
        }
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let (ids, mask) = (self.batch[0].clone(), self.batch[1].clone());
        let padded = stage.padded(at);
        if stage.plan.loss.kind == LossKind::Standard {
            let given = Given { ids: &ids, mask: &mask, labels: None, padded };
            let outputs = stage.policy.pass(torch, &given, End::Logits)?;
            let sums = summed(torch, outputs, &ids);
            let loss = preference(torch, &sums);
            self.known = None;
            return Ok(loss);
        }
        let objective = &stage.plan.objective;
        let counted = completion_tokens(stage, at, 2);
        let labels = labels(torch, &ids);
        let given = Given { ids: &ids, mask: &mask, labels: Some(&labels), padded };
        let further = 1 + u8::from(objective.use_weighting);
        let wanted = Scores { counted, entropy: true, further, top: true };
        let scores = stage.policy.pass(torch, &given, End::Scores(wanted))?;
        let sums = sum_of_tokens(torch, &scores[0]);
        let reference = match objective.held_by_reference() {
            true => Some(stage.refer(torch, |torch, player| {
                let scores = player.pass(torch, &given, End::Scores(Scores { counted, ..Scores::default() }))?;
                Ok(sum_of_tokens(torch, &scores[0]))
            })?),
            false => None,
        };
        let loss = preference(torch, &sums);
        drop((scores, reference, labels));
        Ok(loss)
    }
}

/// `input_ids.masked_fill(completion_mask == 0, -100)`.
pub(super) fn labels(torch: &mut Torch, ids: &Tensor) -> Tensor {
    torch.in_category(Category::Batch, |torch| {
        let outside = torch.fresh("eq", ids.shape, DType::Bool);
        let labels = torch.fresh("masked_fill", ids.shape, DType::I64);
        drop(outside);
        labels
    })
}

/// Tokens of a batch that count: those behind the prompts, as far as they are no padding.
pub(super) fn completion_tokens(stage: &Stage, at: At, texts: u64) -> Option<u64> {
    let sizes = stage.sizes(at);
    let prompt = stage.plan.objective.max_prompt_length.unwrap_or(0).min(sizes.longest);
    Some((texts * sizes.real.saturating_sub(prompt.saturating_mul(sizes.samples))).max(1))
}

/// `log_probs.sum(dim=1)`.
pub(super) fn sum_of_tokens(torch: &mut Torch, scores: &Tensor) -> Tensor {
    torch.in_category(Category::Logits, |torch| torch.reduce(Reduction::Sum, scores, Some(1), false))
}

/// `-logsigmoid(beta * ((chosen - rejected) - reference)).mean()`.
pub(super) fn preference(torch: &mut Torch, sums: &Tensor) -> Tensor {
    torch.in_category(Category::Logits, |torch| {
        let half = sums.shape.size(0) / 2;
        let pair = torch.split(sums, 0, &[half, sums.shape.size(0) - half]);
        let difference = torch.binary(Binary::Sub, &pair[0], &pair[1]);
        let scaled = torch.scalar(Binary::Mul, &difference);
        let losses = torch.unary(Unary::Sigmoid, &scaled);
        torch.reduce(Reduction::Mean, &losses, None, false)
    })
}

/// `gather(logits[:, :-1].log_softmax(-1), -1, ids[:, 1:, None]).squeeze(-1).sum(-1)`.
fn summed(torch: &mut Torch, mut outputs: Vec<Tensor>, ids: &Tensor) -> Tensor {
    torch.in_category(Category::Logits, |torch| {
        let logits = outputs.swap_remove(0);
        drop(outputs);
        let before = torch.slice(&logits, 1, logits.shape.size(1) - 1, 1);
        drop(logits);
        let probabilities = torch.log_softmax(&before);
        let places = Shape::from([before.shape.size(0), before.shape.size(1), 1]);
        drop(before);
        let picked = torch.gather(&probabilities, &ids.detached().with_shape(places));
        drop(probabilities);
        let flat = torch.reshape(&picked, Shape::from([places.size(0), places.size(1)]));
        torch.reduce(Reduction::Sum, &flat, Some(1), false)
    })
}
