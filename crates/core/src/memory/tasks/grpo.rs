//! TRL's `GRPOTrainer` and `RLOOTrainer` (trl 1.16: trainer/grpo_trainer.py, trainer/rloo_trainer.py).
//!
//! `_prepare_inputs` generates for `steps_per_generation` micro-batches at once and keeps them for `num_iterations` rounds. What is
//! generated is scored without a graph, a micro-batch at a time: by the policy where it will have moved on before it is used (RLOO:
//! always), by the reference where `beta` is not 0, by a reward model all at once. The loss then runs the policy with a graph.

use super::dpo::labels;
use super::player::{End, Given, Player};
use super::rollout::{self, Rollout};
use super::{At, Stage, Task, in_evaluation, in_phase, numbers, other_model, programs_of, without_graph};
use crate::dtype::DType;
use crate::memory::log::Category;
use crate::memory::lower::Settings;
use crate::memory::lower::head::Scores;
use crate::memory::phase::Work;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, Reduction, Unary};
use crate::plan::{PlanError, TaskKind, TrainPlan};

#[derive(Default)]
pub(super) struct Grpo {
    /// What one generation left for its micro-batches.
    buffered: Vec<Tensor>,
    reward: Option<Player<'static>>,
}

/// Micro-batches that share a generation.
fn shared(plan: &TrainPlan) -> u64 {
    plan.objective.steps_per_generation.unwrap_or(u64::from(plan.gradient_accumulation.max(1)))
}

impl Task for Grpo {
    fn load(&mut self, torch: &mut Torch, stage: &mut Stage) -> Result<(), PlanError> {
        self.reward = reward_model(torch, stage)?;
        Ok(())
    }

    fn period(&self, plan: &TrainPlan) -> u64 {
        shared(plan) * plan.objective.num_iterations.unwrap_or(1)
    }

    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let plan = stage.plan;
        if !at.index.is_multiple_of(self.period(plan)) {
            return Ok(());
        }
        let sizes = stage.sizes(at);
        let completion = plan.objective.completion();
        let rows = sizes.samples * shared(plan);
        let what = Rollout { rows, prompt: sizes.longest, tokens: completion, padded: stage.padded(at) };
        let all = rollout::generate(torch, &mut stage.policy, (plan, at), what)?;
        // Completions go to the host and come back; prompts are padded anew: ids and mask of both, then joined.
        let mut kept: Vec<Tensor> = [sizes.longest, sizes.longest, completion, completion]
            .into_iter()
            .map(|columns| numbers(torch, rows, columns))
            .collect();
        drop(all);
        let joined = [(); 2].map(|()| numbers(torch, rows, sizes.longest + completion));
        let aligned = u64::from(plan.gradient_accumulation.max(1)).is_multiple_of(self.period(plan));
        let batch = Scored { ids: &joined[0], mask: &joined[1], chunk: sizes.samples, completion, padded: what.padded };
        // vLLM's own log-probabilities differ, so the policy's are computed too (`vllm_importance_sampling_correction`).
        if plan.objective.kind == TaskKind::Rloo || !aligned || plan.objective.vllm.is_some() {
            let old = |torch: &mut Torch| without_graph(torch, |torch| batch.score(torch, &mut stage.policy));
            kept.push(in_phase(torch, at, Work::Score, old)?);
        }
        if plan.objective.held_by_reference() {
            let refer = |torch: &mut Torch| stage.refer(torch, |torch, player| batch.score(torch, player));
            kept.push(in_phase(torch, at, Work::Reference, refer)?);
        }
        if let Some(reward) = &mut self.reward {
            let given = [(); 2].map(|()| numbers(torch, rows, sizes.longest + completion));
            in_phase(torch, at, Work::Reward, |torch| score_texts(torch, reward, &given))?;
        }
        kept.push(
            torch.in_category(Category::Batch, |torch| torch.fresh("advantages", Shape::from([rows]), DType::F32)),
        );
        // `shuffle_sequence_dict` copies what is then cut into micro-batches.
        let shuffled = torch.in_category(Category::Batch, |torch| {
            kept.iter().map(|tensor| torch.fresh("index", tensor.shape, tensor.dtype)).collect()
        });
        drop((kept, joined));
        self.buffered = shuffled;
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let start = At { index: at.index - at.index % self.period(stage.plan), ..at };
        let sizes = stage.sizes(start);
        let completion = stage.plan.objective.completion();
        let joined = [(); 2].map(|()| numbers(torch, sizes.samples, sizes.longest + completion));
        let wanted = labels(torch, &joined[0]);
        let given = Given { ids: &joined[0], mask: &joined[1], labels: Some(&wanted), padded: stage.padded(at) };
        let counted = Some(sizes.samples * completion);
        let scores = Scores { counted, entropy: true, ..Scores::default() };
        let scores = stage.policy.pass(torch, &given, End::Scores(scores))?;
        Ok(torch.in_category(Category::Logits, |torch| {
            let length = scores[0].shape.size(1);
            let own = torch.slice(&scores[0], 1, completion.min(length), 1);
            let own = torch.cat(&[&own], 0);
            let entropies = torch.fresh("cat", own.shape, DType::F32);
            drop((scores, wanted));
            let ratio = torch.unary(Unary::Exp, &own);
            let near = torch.unary(Unary::Clamp, &ratio);
            let [first, second] = [&ratio, &near].map(|factor| torch.scalar(Binary::Mul, factor));
            let smaller = torch.binary(Binary::Min, &first, &second);
            let masked = torch.scalar(Binary::Mul, &smaller);
            drop(entropies);
            torch.reduce(Reduction::Sum, &masked, None, false)
        }))
    }
}

/// What was generated, to be scored a micro-batch at a time (`_get_per_token_logps_and_entropies`).
struct Scored<'a> {
    ids: &'a Tensor,
    mask: &'a Tensor,
    chunk: u64,
    completion: u64,
    padded: bool,
}

impl Scored<'_> {
    fn score(&self, torch: &mut Torch, player: &mut Player) -> Result<Tensor, PlanError> {
        let (rows, columns) = (self.ids.shape.size(0), self.ids.shape.size(1));
        let mut all = Vec::new();
        let mut start = 0;
        while start < rows {
            let chunk = self.chunk.min(rows - start);
            let part = |whole: &Tensor| whole.detached().with_shape(Shape::from([chunk, columns]));
            let (ids, mask) = (part(self.ids), part(self.mask));
            let labels = labels(torch, &ids);
            let given = Given { ids: &ids, mask: &mask, labels: Some(&labels), padded: self.padded };
            let counted = Some(chunk * self.completion);
            let scores = player.pass(torch, &given, End::Scores(Scores { counted, ..Scores::default() }))?;
            all.extend(scores.into_iter().next());
            start += chunk;
        }
        Ok(torch
            .in_category(Category::Batch, |torch| torch.fresh("cat", Shape::from([rows, self.completion]), DType::F32)))
    }
}

/// The model that scores completions, where the plan names one.
pub(super) fn reward_model(torch: &mut Torch, stage: &mut Stage) -> Result<Option<Player<'static>>, PlanError> {
    let Some(other) = &stage.plan.objective.reward_model else { return Ok(None) };
    let model = other_model("objective.reward_model", other, "AutoModelForSequenceClassification")?;
    let programs = programs_of(model);
    let program = programs(crate::model::Inputs { labels: false, ..stage.plan.batch.training_inputs() })?;
    let weights = other.weights.unwrap_or(stage.plan.weights);
    let settings = Settings { weights, buffers: weights, ..stage.policy.settings };
    let reward = Player::frozen(torch, &program, (programs, settings), Category::Reward);
    Ok(Some(stage.apart(torch, &program, reward)))
}

/// `reward_func(**reward_inputs).logits[:, 0]`, of all texts at once.
pub(super) fn score_texts(torch: &mut Torch, reward: &mut Player, batch: &[Tensor; 2]) -> Result<(), PlanError> {
    let given = Given { ids: &batch[0], mask: &batch[1], labels: None, padded: false };
    in_evaluation(torch, |torch| without_graph(torch, |torch| reward.pass(torch, &given, End::Logits)))?;
    Ok(())
}
