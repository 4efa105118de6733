//! TRL's `OnlineDPOTrainer` (trl 1.16: experimental/online_dpo, `training_step`): two completions of every prompt, then the policy with
//! a graph and the reference without one, each with all logits and a log-softmax over those of the completion.

use super::dpo::{preference, sum_of_tokens};
use super::grpo::{reward_model, score_texts};
use super::player::{End, Given, Player};
use super::rollout::{self, Rollout};
use super::{At, Stage, Task, in_phase, numbers};
use crate::memory::log::Category;
use crate::memory::phase::Work;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::PlanError;

#[derive(Default)]
pub(super) struct OnlineDpo {
    /// Prompts and completions, ids and masks.
    batch: Vec<Tensor>,
    reward: Option<Player<'static>>,
}

impl Task for OnlineDpo {
    fn load(&mut self, torch: &mut Torch, stage: &mut Stage) -> Result<(), PlanError> {
        self.reward = reward_model(torch, stage)?;
        Ok(())
    }

    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let (plan, sizes) = (stage.plan, stage.sizes(at));
        let (rows, tokens) = (2 * sizes.samples, plan.objective.completion());
        let prompts: Vec<Tensor> = (0..2).map(|_| numbers(torch, rows, sizes.longest)).collect();
        let what = Rollout { rows, prompt: sizes.longest, tokens, padded: stage.padded(at) };
        let all = rollout::generate(torch, &mut stage.policy, (plan, at), what)?;
        self.batch = prompts;
        self.batch.extend((0..2).map(|_| numbers(torch, rows, tokens)));
        drop(all);
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let sizes = stage.sizes(at);
        let (rows, tokens) = (2 * sizes.samples, stage.plan.objective.completion());
        let (prompt, padded) = (sizes.longest, stage.padded(at));
        // transformers' Trainer switches the policy's cache off (`TrainingArguments.use_cache`). A reference is a copy from before, and
        // `_forward` leaves its cache on; where layers are recomputed the config had said no by then.
        if let Some(reference) = &mut stage.reference {
            reference.settings.fills_cache = !stage.policy.settings.checkpointing;
        }
        let score = |torch: &mut Torch, player: &mut Player| {
            let joined = [(); 2].map(|()| numbers(torch, rows, prompt + tokens));
            let given = Given { ids: &joined[0], mask: &joined[1], labels: None, padded };
            let mut outputs = player.pass(torch, &given, End::Logits)?;
            let logits = outputs.swap_remove(0);
            let scores = torch.in_category(Category::Logits, |torch| completion_scores(torch, logits, tokens));
            drop(outputs);
            Ok::<_, PlanError>(scores)
        };
        let own = score(torch, &mut stage.policy)?;
        let reference = stage.refer(torch, score)?;
        if let Some(reward) = &mut self.reward {
            let given = [(); 2].map(|()| numbers(torch, rows, prompt + tokens));
            in_phase(torch, at, Work::Reward, |torch| score_texts(torch, reward, &given))?;
        }
        let sums = sum_of_tokens(torch, &own);
        drop(reference);
        Ok(preference(torch, &sums))
    }
}

/// `take_along_dim(logits[:, start:-1].log_softmax(-1), completion_ids)`.
fn completion_scores(torch: &mut Torch, logits: Tensor, tokens: u64) -> Tensor {
    let kept = torch.slice(&logits, 1, tokens, 1);
    let probabilities = torch.log_softmax(&kept);
    let places = Shape::from([kept.shape.size(0), tokens, 1]);
    let index = torch.fresh("index", places, crate::dtype::DType::I64);
    let picked = torch.gather(&probabilities, &index);
    drop((probabilities, kept, logits));
    torch.reshape(&picked, Shape::from([places.size(0), tokens]))
}
