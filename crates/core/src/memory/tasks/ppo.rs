//! `PPOTrainer` of trl.experimental (trl 1.12, the last that has it: experimental/ppo/ppo_trainer.py).
//!
//! A step begins with a rollout of all its micro-batches, whose scores of every token stay until the next one; reference, value and
//! reward model go over it some rows at a time. Then the value model and the policy are trained as one model, in epochs that are
//! alike. Every pass returns all hidden states, and what one returned is held until the next has, or until its part of the batch is over.

use smallvec::smallvec;

use super::grpo::reward_model;
use super::player::{End, Given, Player};
use super::rollout::{self, Rollout};
use super::{At, Stage, Task, in_evaluation, in_phase, numbers, other_model, programs_of, without_graph};
use crate::dtype::DType;
use crate::memory::adapters::Loaded;
use crate::memory::autograd::Saved;
use crate::memory::load;
use crate::memory::log::{Category, Event, StorageInfo};
use crate::memory::lower::{Settings, Wrapped};
use crate::memory::phase::Work;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{Binary, Reduction, Unary};
use crate::model::{Inputs, Shape};
use crate::plan::{PlanError, TaskKind, TrainPlan};

/// Epochs over a rollout; all from the second on are alike.
const EPOCHS: u64 = 2;

/// PPOConfig.local_rollout_forward_batch_size of trl 1.12.
const USUAL_ROWS: u64 = 64;

#[derive(Default)]
pub(super) struct Ppo {
    reward: Option<Player<'static>>,
    /// What tokens of the rollout were sampled from.
    sampled: Option<Tensor>,
    /// What the rollout left for its micro-batches.
    kept: Vec<Tensor>,
    /// What the policy returned for the last micro-batch, logits first, and probabilities made of them.
    output: Vec<Tensor>,
}

/// The value model of PPO onto the card, its parameters among those that are trained.
pub(in crate::memory) fn value_model(
    torch: &mut Torch,
    plan: &TrainPlan,
    (settings, loaded): (Settings, &mut Loaded),
) -> Result<Option<Player<'static>>, PlanError> {
    let Some(other) = plan.objective.value_model.as_ref().filter(|_| plan.objective.kind == TaskKind::Ppo) else {
        return Ok(None);
    };
    let programs = programs_of(other_model("objective.value_model", other, "AutoModelForSequenceClassification")?);
    let program = programs(Inputs { labels: false, ..plan.batch.training_inputs() })?;
    let weights = other.weights.unwrap_or(plan.weights);
    let whole = TrainPlan { adapter: None, quantization: None, frozen: Vec::new(), weights, ..plan.clone() };
    let first = torch.log.borrow().storages.len();
    let (parameters, trained) = load::parameters(torch, &program, &whole);
    let own = |info: &&mut StorageInfo| info.category == Category::Weights;
    torch.log.borrow_mut().storages[first..].iter_mut().filter(own).for_each(|info| info.category = Category::Value);
    loaded.trained.extend(trained);
    Ok(Some(Player {
        programs,
        parameters,
        wrapped: Wrapped::default(),
        liger: None,
        settings: Settings { weights, buffers: weights, ..settings },
        hooks: None,
        engine: None,
        widens: false,
        adapters_off: false,
        whole: None,
        known: Default::default(),
    }))
}

/// Rows of a micro-batch, and how many of them a part of the batch has.
fn parts(plan: &TrainPlan) -> (u64, u64) {
    let part = (plan.objective.rollout(plan) / plan.objective.num_mini_batches.unwrap_or(1).max(1)).max(1);
    let rows = plan.batch.batch_size.min(part).max(1);
    (rows, part / rows)
}

impl Task for Ppo {
    fn load(&mut self, torch: &mut Torch, stage: &mut Stage) -> Result<(), PlanError> {
        self.reward = reward_model(torch, stage)?;
        Ok(())
    }

    fn period(&self, plan: &TrainPlan) -> u64 {
        EPOCHS * u64::from(plan.gradient_accumulation.max(1))
    }

    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let (_, held) = parts(stage.plan);
        self.measure(torch, stage);
        if at.index.is_multiple_of(held.max(1)) {
            self.output.clear();
            empty_cache(torch);
        }
        if at.index.is_multiple_of(self.period(stage.plan)) {
            self.kept.clear();
            self.roll_out(torch, stage, at)?;
        }
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let (rows, _) = parts(stage.plan);
        let (prompt, tokens) = (stage.sizes(at).longest, stage.plan.objective.completion());
        let padded = stage.padded(at);
        // Of the rollout: sequences, responses, log-probabilities, advantages, returns, values.
        let sequences = numbers(torch, rows, prompt + tokens);
        let drawn = figures(torch, rows, tokens, 5);
        let given = Inputted::of(torch, &sequences);
        let critic = match &mut stage.value {
            Some(value) => given.pass(torch, value, (padded, true))?,
            None => Vec::new(),
        };
        let foreseen = critic.first().cloned();
        let output = given.pass(torch, &mut stage.policy, (padded, true))?;
        drop((critic, given));
        self.output = output;
        let Some(logits) = self.output.first() else { return Ok(drawn[0].clone()) };
        let own = torch.in_category(Category::Logits, |torch| scores(torch, logits, tokens));
        let loss = torch.in_category(Category::Logits, |torch| {
            let ratio = torch.unary(Unary::Exp, &own);
            let near = torch.unary(Unary::Clamp, &ratio);
            let [first, second] = [&ratio, &near].map(|factor| torch.scalar(Binary::Mul, factor));
            let larger = torch.binary(Binary::Max, &first, &second);
            let policy = torch.reduce(Reduction::Mean, &larger, None, false);
            match foreseen {
                Some(foreseen) => {
                    let value = torch.reduce(Reduction::Mean, &foreseen, None, false);
                    torch.binary(Binary::Add, &policy, &value)
                }
                None => policy,
            }
        });
        drop((drawn, sequences));
        Ok(loss)
    }
}

impl Ppo {
    /// After a micro-batch, its step included, the entropy: probabilities of every token, and what is taken of them.
    fn measure(&mut self, torch: &mut Torch, stage: &Stage) {
        let Some(logits) = self.output.first() else { return };
        let tokens = stage.plan.objective.completion();
        let shape = Shape::from([logits.shape.size(0), tokens, logits.shape.last()]);
        let dtype = logits.dtype;
        let made = torch.in_category(Category::Logits, |torch| {
            let dense = torch.fresh("contiguous", shape, dtype);
            let probabilities = torch.fresh("_softmax", shape, dtype);
            drop(dense);
            drop(torch.fresh("logsumexp", shape, dtype));
            drop(torch.fresh("mul", shape, dtype));
            probabilities
        });
        self.output.push(made);
    }

    fn roll_out(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let plan = stage.plan;
        let (prompt, tokens) = (stage.sizes(at).longest, plan.objective.completion());
        let (all, padded) = (plan.objective.rollout(plan), stage.padded(at));
        let chunk = plan.objective.mini_batch_size.unwrap_or(USUAL_ROWS).min(all).max(1);
        let queries = numbers(torch, all, prompt);
        let sequences = self.generate(torch, stage, at, (all, chunk, padded))?;
        let mut start = 0;
        let mut kept = Vec::new();
        while start < all {
            let rows = chunk.min(all - start);
            let part = sequences.detached().with_shape(Shape::from([rows, prompt + tokens]));
            in_phase(torch, at, Work::Score, |torch| {
                if let Some(sampled) = &self.sampled {
                    torch.in_category(Category::Logits, |torch| row_sums(torch, sampled, tokens));
                }
                empty_cache(torch);
            });
            let reference = |torch: &mut Torch| {
                stage.refer(torch, |torch, player| {
                    let given = Inputted::of(torch, &part);
                    let output = given.pass(torch, player, (padded, true))?;
                    Ok(torch.in_category(Category::Logits, |torch| scores(torch, &output[0], tokens)))
                })
            };
            kept.push(in_phase(torch, at, Work::Reference, reference)?);
            empty_cache(torch);
            let joined = numbers(torch, rows, prompt + tokens);
            let judges = [(stage.value.as_mut(), Work::Score), (self.reward.as_mut(), Work::Reward)];
            for (judge, work) in judges {
                let Some(judge) = judge else { continue };
                in_phase(torch, at, work, |torch| {
                    let given = Inputted::of(torch, &joined);
                    let judged = |torch: &mut Torch| given.pass(torch, judge, (padded, false));
                    in_evaluation(torch, |torch| without_graph(torch, judged)).map(drop)
                })?;
            }
            start += rows;
        }
        // Responses as they came and cut, log-probabilities of both, values, masks, rewards, advantages, returns.
        self.kept = figures(torch, all, tokens, 10);
        self.kept.push(sequences);
        drop((queries, kept));
        empty_cache(torch);
        Ok(())
    }

    /// `batch_generation`: some rows at a time with their scores, which are stacked, then joined once more.
    fn generate(
        &mut self,
        torch: &mut Torch,
        stage: &mut Stage,
        at: At,
        (all, chunk, padded): (u64, u64, bool),
    ) -> Result<Tensor, PlanError> {
        let plan = stage.plan;
        let (prompt, tokens) = (stage.sizes(at).longest, plan.objective.completion());
        let (sequences, sampled) = in_phase(torch, at, Work::Generate, |torch| {
            let mut parts = Vec::new();
            let mut start = 0;
            while start < all {
                let rows = chunk.min(all - start);
                let what = Rollout { rows, prompt, tokens, padded };
                let (ids, scores) = rollout::scored(torch, &mut stage.policy, plan, what)?;
                let of = Shape::from([rows, tokens, scores.first().map_or(1, |one| one.shape.last())]);
                let stacked = torch.in_category(Category::Logits, |torch| torch.fresh("stack", of, DType::F32));
                parts.push((numbers(torch, rows, prompt + tokens), stacked));
                drop((ids, scores));
                start += rows;
            }
            let padded = numbers(torch, chunk * parts.len() as u64, prompt + tokens);
            let vocabulary = parts.first().map_or(1, |(_, scores)| scores.shape.last());
            let whole = Shape::from([chunk * parts.len() as u64, tokens, vocabulary]);
            let joined = torch.in_category(Category::Logits, |torch| torch.fresh("full", whole, DType::F32));
            Ok::<_, PlanError>((padded, joined))
        })?;
        // Those of the rollout before go only now.
        self.sampled = Some(sampled);
        Ok(sequences)
    }
}

/// What `forward` and `get_reward` make of sequences.
struct Inputted {
    ids: Tensor,
    mask: Tensor,
    _positions: Tensor,
}

impl Inputted {
    fn of(torch: &mut Torch, sequences: &Tensor) -> Self {
        let (rows, columns) = (sequences.shape.size(0), sequences.shape.size(1));
        let mask = torch.in_category(Category::Batch, |torch| torch.fresh("ne", sequences.shape, DType::Bool));
        let [positions, ids] = [(); 2].map(|()| numbers(torch, rows, columns));
        Self { ids, mask, _positions: positions }
    }

    /// A pass that returns all hidden states, and a cache where nobody says no.
    fn pass(
        &self,
        torch: &mut Torch,
        player: &mut Player,
        (padded, caches): (bool, bool),
    ) -> Result<Vec<Tensor>, PlanError> {
        let before = player.settings;
        player.settings = Settings { fills_cache: caches, keeps_hidden: true, ..before };
        let given = Given { ids: &self.ids, mask: &self.mask, labels: None, padded };
        let made = player.pass(torch, &given, End::Logits);
        player.settings = before;
        made
    }
}

fn empty_cache(torch: &mut Torch) {
    torch.log.borrow_mut().events.push(Event::EmptyCache);
}

fn figures(torch: &mut Torch, rows: u64, tokens: u64, count: usize) -> Vec<Tensor> {
    let shape = Shape::from([rows, tokens]);
    torch.in_category(Category::Batch, |torch| (0..count).map(|_| torch.fresh("index", shape, DType::F32)).collect())
}

/// `torch.logsumexp` of one row after the other: what goes in is shifted by its maxima and exponentiated.
fn row_sums(torch: &mut Torch, logits: &Tensor, tokens: u64) {
    drop(torch.fresh("logsumexp", Shape::from([tokens, logits.shape.last()]), logits.dtype));
}

/// `selective_log_softmax` of the last tokens' logits, which were divided in their place: fp32 by sums of rows, others by a
/// log-softmax of each row.
fn scores(torch: &mut Torch, logits: &Tensor, tokens: u64) -> Tensor {
    let (rows, vocabulary, dtype) = (logits.shape.size(0), logits.shape.last(), logits.dtype);
    let row = Shape::from([tokens, vocabulary]);
    let part = Shape::from([rows, tokens, vocabulary]);
    let wide = dtype == DType::F32;
    let mut saved = Vec::new();
    let records = torch.records(&[logits]);
    for _ in 0..rows {
        let made = torch.fresh(if wide { "logsumexp" } else { "_log_softmax" }, row, dtype);
        if records && !wide {
            saved.push(Saved::new(torch, &made));
        }
    }
    let result = torch.fresh("stack", Shape::from([rows, tokens]), dtype);
    if !records {
        return result;
    }
    let kept = Saved::new(torch, logits);
    let whole = logits.shape;
    torch.attach(result, &[logits], move |torch, gradient| {
        let logits = kept.get(torch);
        // Rows from the last to the first; then all of them stacked (`unbind`).
        let mut parts = Vec::new();
        for _ in 0..rows {
            let output = saved.pop().map(|saved| saved.get(torch));
            let first = torch.fresh(if wide { "sub" } else { "gather_backward" }, row, dtype);
            let second = wide.then(|| torch.fresh("exp", row, dtype));
            let first = Some(first).filter(|_| !wide);
            parts.push(torch.fresh("_log_softmax_backward", row, dtype));
            drop((first, second, output));
        }
        let joined = torch.fresh("stack", part, dtype);
        drop(parts);
        if wide {
            // Of the logits that were picked, added to it in place.
            drop(torch.fresh("gather_backward", part, dtype));
        }
        let padded = torch.fresh("slice_backward", whole, dtype);
        drop((joined, gradient));
        // `CopySlices`: a copy of it all, of the part that was divided, and that divided.
        let result = torch.fresh("new_empty_strided", whole, dtype);
        let inner = [torch.fresh("clone", part, dtype), torch.fresh("div", part, dtype)];
        drop((inner, padded, logits));
        smallvec![Some(result)]
    })
}
