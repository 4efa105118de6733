//! TRL's `KTOTrainer` (trl 1.16: trainer/kto_trainer.py, `_compute_loss`): completions of other prompts tell how far the
//! policy has gone (the policy on them without a graph), then the policy, then the reference on both.

use super::dpo::{completion_tokens, labels, sum_of_tokens};
use super::player::{End, Given};
use super::{At, Stage, Task, numbers, without_graph};
use crate::memory::lower::head::Scores;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{Binary, Reduction, Unary};
use crate::plan::PlanError;

#[derive(Default)]
pub(super) struct Kto {
    /// Ids, attention mask and completion mask; then the same of the completions of other prompts.
    batch: Vec<Tensor>,
}

impl Task for Kto {
    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let sizes = stage.sizes(at);
        let tensors = if stage.plan.objective.measures_divergence() { 6 } else { 3 };
        self.batch = (0..tensors).map(|_| numbers(torch, sizes.samples, sizes.longest)).collect();
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let padded = stage.padded(at);
        let counted = completion_tokens(stage, at, 1);
        let alone = End::Scores(Scores { counted, ..Scores::default() });
        let batch = self.batch.clone();
        let others = batch.get(3).map(|ids| (ids, &batch[4]));
        let own = match others {
            Some((ids, mask)) => {
                let labels = labels(torch, ids);
                let given = Given { ids, mask, labels: Some(&labels), padded };
                let scores = without_graph(torch, |torch| stage.policy.pass(torch, &given, alone))?;
                Some(sum_of_tokens(torch, &scores[0]))
            }
            None => None,
        };
        let labels_of = labels(torch, &batch[0]);
        let given = Given { ids: &batch[0], mask: &batch[1], labels: Some(&labels_of), padded };
        let wanted = Scores { counted, entropy: true, further: 1, top: true };
        let scores = stage.policy.pass(torch, &given, End::Scores(wanted))?;
        let sums = sum_of_tokens(torch, &scores[0]);
        let reference = match stage.plan.objective.held_by_reference() {
            true => Some(stage.refer(torch, |torch, player| {
                if let Some((ids, mask)) = others {
                    let labels = labels(torch, ids);
                    let given = Given { ids, mask, labels: Some(&labels), padded };
                    player.pass(torch, &given, alone)?;
                }
                let scores = player.pass(torch, &given, alone)?;
                Ok(sum_of_tokens(torch, &scores[0]))
            })?),
            false => None,
        };
        let scaled = torch.scalar(Binary::Mul, &sums);
        let losses = torch.unary(Unary::Sigmoid, &scaled);
        drop((scores, reference, own, labels_of));
        Ok(torch.reduce(Reduction::Mean, &losses, None, false))
    }
}
