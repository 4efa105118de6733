//! Tasks: what a micro-batch does where it is not the model's own loss on its batch.
//!
//! | module | whose trainer |
//! |---|---|
//! | `dpo`, `kto`, `odds` | preferences: TRL's DPO and KTO, and those without a reference (ORPO, CPO) |
//! | `reward` | TRL's reward models, of answers and of steps |
//! | `ppo` | TRL's PPO, which trains a value model too |
//! | `grpo`, `online_dpo`, `distillation`, `gkd` | what the policy generates: GRPO and RLOO, online DPO, a teacher |
//! | `roles` | the updates of verl's and OpenRLHF's actor and critic |
//! | `contrastive`, `late_interaction` | sentence-transformers' losses |
//! | `engine` | a rollout engine beside the trainer |
//! | [`player`] | a model on the card: the policy, its reference, a reward model, a teacher |
//! | [`rollout`] | `generate` inside a training run |
//! | `whole` | log-probabilities as TRL took them before it had a fused head |
//!
//! A task is a file here and its line in [`of`]: `prepare` is the trainer's `_prepare_inputs`, `loss` its `compute_loss`. The
//! loop around them (backward, clip, step) is the one of [`super::train`], and so are its engines.

mod contrastive;
mod distillation;
mod dpo;
pub(super) mod engine;
mod gkd;
mod grpo;
mod kto;
mod late_interaction;
mod odds;
mod online_dpo;
mod player;
mod ppo;
mod reward;
mod roles;
mod rollout;
mod whole;

use std::rc::Rc;

use super::engine::Engine;
use super::log::Category;
use super::phase::{Phase, Work};
use super::ready::Programs;
use super::repeat::Tape;
use super::sharding::Spread;
use super::tensor::Tensor;
use super::torch::Torch;
use super::train::{self, Pass, phase};
use crate::dtype::DType;
use crate::model::{Model, Program, Shape};
use crate::plan::job::Sizes;
use crate::plan::{self, Fault, OtherModel, PlanError, TaskKind, TrainPlan};
pub(super) use player::Player;
pub(super) use ppo::value_model;
pub(super) use whole::WholeLogits;

/// One way to train.
trait Task {
    /// Before the first step: models beside the policy come onto the card.
    fn load(&mut self, _torch: &mut Torch, _stage: &mut Stage) -> Result<(), PlanError> {
        Ok(())
    }

    /// What comes before the loss of a micro-batch: its tensors, generation, scores that need no graph.
    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError>;

    /// The loss.
    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError>;

    /// After so many micro-batches the same comes again.
    fn period(&self, _plan: &TrainPlan) -> u64 {
        1
    }
}

/// Who is on the card, and what they run on.
pub(super) struct Stage<'a> {
    pub(super) plan: &'a TrainPlan,
    /// What is trained.
    pub(super) policy: Player<'a>,
    /// Its copy from the start, where that has weights of its own.
    pub(super) reference: Option<Player<'a>>,
    /// A model that is trained beside it.
    value: Option<Player<'static>>,
    /// How the run is spread over cards.
    spread: Option<Spread<'a>>,
    /// The sizes of every micro-batch.
    batches: Vec<Sizes>,
}

/// Where a run is.
#[derive(Clone, Copy)]
pub(super) struct At {
    step: u32,
    micro: u64,
    /// Micro-batches before this one.
    index: u64,
}

impl At {
    fn phase(self, work: Work) -> Phase {
        Phase::pass(self.step, self.micro, work)
    }
}

impl Stage<'_> {
    /// Whether masks mask anything.
    fn padded(&self, at: At) -> bool {
        self.plan.batch.padded || self.sizes(at).padded()
    }

    fn sizes(&self, at: At) -> Sizes {
        let last = self.batches.len().saturating_sub(1);
        self.batches[(at.index as usize).min(last)]
    }

    /// A model that is not trained, spread as TRL spreads it.
    fn beside<'p>(&self, torch: &mut Torch, program: &Program, player: Player<'p>) -> Player<'p> {
        match self.spread {
            Some(spread) => player.beside(torch, program, (self.plan, spread)),
            None => player,
        }
    }

    /// Another model than the policy's: sharded under ZeRO 3, whole on every card under FSDP (`prepare_model` in evaluation).
    fn apart<'p>(&self, torch: &mut Torch, program: &Program, player: Player<'p>) -> Player<'p> {
        match self.spread.filter(|spread| spread.is_deepspeed()) {
            Some(spread) => player.beside(torch, program, (self.plan, spread)),
            None => player,
        }
    }

    /// Runs the reference: its own weights, or the policy's without their adapters.
    fn refer(
        &mut self,
        torch: &mut Torch,
        body: impl FnOnce(&mut Torch, &mut Player) -> Result<Tensor, PlanError>,
    ) -> Result<Tensor, PlanError> {
        let no_graph = |torch: &mut Torch, player: &mut Player| without_graph(torch, |torch| body(torch, player));
        match &mut self.reference {
            Some(reference) => in_evaluation(torch, |torch| no_graph(torch, reference)),
            None => {
                self.policy.adapters_off = true;
                let made = no_graph(torch, &mut self.policy);
                self.policy.adapters_off = false;
                made
            }
        }
    }
}

/// The task of a plan.
fn of(kind: TaskKind) -> Box<dyn Task> {
    match kind {
        TaskKind::Sft | TaskKind::Dpo => Box::new(dpo::Dpo::default()),
        TaskKind::Kto => Box::new(kto::Kto::default()),
        TaskKind::Orpo | TaskKind::Cpo => Box::new(odds::Odds::default()),
        TaskKind::Reward => Box::new(reward::Reward::default()),
        TaskKind::Prm => Box::new(reward::Process::default()),
        TaskKind::Grpo | TaskKind::Rloo => Box::new(grpo::Grpo::default()),
        TaskKind::OnlineDpo => Box::new(online_dpo::OnlineDpo::default()),
        TaskKind::Ppo => Box::new(ppo::Ppo::default()),
        TaskKind::Gkd => Box::new(gkd::Gkd::default()),
        TaskKind::Distillation => Box::new(distillation::Distillation::default()),
        TaskKind::Policy | TaskKind::Value => Box::new(roles::Update::default()),
        TaskKind::Mnrl | TaskKind::CachedMnrl | TaskKind::Triplet | TaskKind::CrossEncoder => {
            Box::new(contrastive::Contrastive::default())
        }
        TaskKind::Colbert => Box::new(late_interaction::LateInteraction::default()),
    }
}

/// Whether the trainer of a task sets every dropout to 0 (`disable_dropout`, on in these configs of trl 1.16).
fn drops(kind: TaskKind) -> bool {
    use TaskKind::{Cpo, Dpo, Gkd, Kto, OnlineDpo, Orpo, Ppo, Prm, Reward};
    !matches!(kind, Dpo | Kto | Orpo | Cpo | Reward | Prm | OnlineDpo | Ppo | Gkd)
}

/// Runs a task in the training loop.
pub(super) fn run<'a>(
    mut torch: Torch,
    plan: &'a TrainPlan,
    (engine, spread): (Rc<dyn Engine>, Option<Spread<'a>>),
    (policy, value, syncs): (Player<'a>, Option<Player<'static>>, bool),
) -> Result<super::log::Log, PlanError> {
    let objective = &plan.objective;
    torch.drops = drops(objective.kind);
    let micro = plan.gradient_accumulation.clamp(1, train::MOST_MICRO_BATCHES);
    let mut task = of(objective.kind);
    let batch = match objective.kind.rolls_out() {
        true => plan::Batch { seq_len: objective.prompt(plan.batch.seq_len), ..plan.batch.clone() },
        false => plan.batch.clone(),
    };
    let mut stage = Stage { plan, policy, reference: None, value, spread, batches: plan.job.batches(&batch, micro) };
    if objective.held_by_reference() && plan.adapter.is_none() {
        let program = stage.policy.first_program(plan)?;
        let reference = stage.policy.copy_of(&mut torch, &program, Category::Reference, plan);
        stage.reference = Some(stage.beside(&mut torch, &program, reference));
    }
    let gathers = engine.gathers();
    task.load(&mut torch, &mut stage)?;
    let mut optimizer = train::prepare(&mut torch, plan, &*engine);
    // Two whole periods, so that what the first leaves behind is there in the second; then one step more.
    let period = task.period(plan).div_ceil(u64::from(micro)) as u32;
    let known = (stage.batches.len() as u32).div_ceil(micro);
    let steps = plan.job.steps.unwrap_or_else(|| known.max(2 * period.min(32) + 1));
    let mut tape = Tape::new(engine.repeats());
    let mut held = Vec::new();
    for step in 0..steps {
        let first = u64::from(step) * u64::from(micro);
        let sizes: Vec<Sizes> =
            (first..first + u64::from(micro)).map(|index| stage.sizes(At { step, micro: 0, index })).collect();
        let key = (sizes, u64::from(step % period.max(1)));
        let before = torch.effort;
        tape.part(&mut torch, key, step, |torch| {
            for micro_batch in 0..u64::from(micro) {
                let at = At { step, micro: micro_batch, index: first + micro_batch };
                let last = micro_batch + 1 == u64::from(micro);
                stage.policy.engine = gathers.then(|| (Rc::clone(&engine), syncs || last));
                task.prepare(torch, &mut stage, at)?;
                let empties = plan.job.empty_cache_steps.is_some_and(|every| step.is_multiple_of(every.max(1)));
                let pass = Pass { step, micro: micro_batch, last, syncs, empties, told: !gathers };
                pass.run(torch, (plan, &*engine), &mut held, |torch| Ok(vec![task.loss(torch, &mut stage, at)?]))?;
            }
            train::update(torch, plan, &*engine, (&mut optimizer, step));
            Ok(())
        })?;
        if step == 0 {
            torch.log.borrow_mut().effort = torch.effort.since(&before);
        }
    }
    let Stage { policy, reference, value, .. } = stage;
    torch.finish((optimizer, task, policy, reference, value, engine, held))
}

/// `torch.no_grad()`.
fn without_graph<T>(torch: &mut Torch, body: impl FnOnce(&mut Torch) -> T) -> T {
    let before = (torch.grad_enabled, torch.no_graph);
    (torch.grad_enabled, torch.no_graph) = (false, true);
    let made = crate::work::without_graph(|| body(torch));
    (torch.grad_enabled, torch.no_graph) = before;
    made
}

/// A model that is not in training mode.
fn in_evaluation<T>(torch: &mut Torch, body: impl FnOnce(&mut Torch) -> T) -> T {
    let before = std::mem::replace(&mut torch.training, false);
    let made = body(torch);
    torch.training = before;
    made
}

/// A tensor of whole numbers that comes with a batch.
fn numbers(torch: &mut Torch, rows: u64, columns: u64) -> Tensor {
    torch.in_category(Category::Batch, |torch| torch.fresh("batch", Shape::from([rows, columns]), DType::I64))
}

/// A model that a plan names besides its own, with the auto class it is loaded by.
fn other_model(path: &str, other: &OtherModel, auto_class: &str) -> Result<Model, PlanError> {
    if other.config.is_null() {
        let expected = format!("a model whose config is known, or its config is under {{{path}.config}}");
        return Err(Fault::value(format!("{path}.model"), &other.model, expected).into());
    }
    let mut config = other.config.clone();
    if auto_class == "AutoModelForSequenceClassification"
        && let Some(object) = config.as_object_mut()
    {
        object.insert("num_labels".into(), 1.into());
    }
    Ok(Model::new(config, Some(auto_class))?)
}

/// The programs of another model.
fn programs_of(model: Model) -> Rc<Programs<'static>> {
    Rc::new(move |inputs| Ok(model.shared_program(inputs)?))
}

/// Runs something as a phase of a micro-batch.
fn in_phase<T>(torch: &mut Torch, at: At, work: Work, body: impl FnOnce(&mut Torch) -> T) -> T {
    phase(torch, at.phase(work), body)
}
