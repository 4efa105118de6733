//! One rank of a pipeline of `torch.distributed.pipelining`: its stages, what they receive, and the schedule they run by.
//!
//! Follows torch/distributed/pipelining/{stage,schedules}.py of torch 2.11 with `return_outputs=False`, which came with 2.10. Before it
//! (read in 2.5 to 2.9) a step kept outputs and gradients of what was received until the next one began, and hooks alone gathered
//! parameters. What is sent is freed when nothing holds it any more; NCCL may hold it until the send is over.

mod stages;
mod turns;

use std::rc::Rc;
use std::sync::Arc;

use self::stages::{Cut, Stack};
use self::turns::Turns;
use super::fsdp2;
use crate::dtype::DType;
use crate::memory::adapters::Loaded;
use crate::memory::autograd::{self, Leaf};
use crate::memory::engine::{Alone, Engine, Staged};
use crate::memory::load::{self, Batch, Changes};
use crate::memory::log::Category;
use crate::memory::lower::{Runner, Settings};
use crate::memory::optimizer::Trained;
use crate::memory::phase::{Phase, Work};
use crate::memory::schedule::{Action, PipelineRank};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::train::{self, Passes};
use crate::model::op::{Op, ValueId};
use crate::model::{Program, Shape, Step};
use crate::plan::parallel::{Fsdp2, Mesh, Parallel, Schedule, TensorForm};
use crate::plan::{Package, PlanError, TrainPlan};

/// A stage that is loaded.
struct Stage {
    cut: Cut,
    runner: Rc<Runner>,
    loss: Option<Rc<Runner>>,
    engine: Rc<dyn Staged>,
    /// What comes from the stage before, for every micro-batch, and where its gradient goes.
    received: Vec<(Tensor, Rc<Leaf>)>,
    /// Gradients that come from the stage after.
    gradients: Vec<Tensor>,
    /// What went forward and has not come back (`fwd_cache`).
    outputs: Vec<Option<Tensor>>,
    losses: Vec<Option<Tensor>>,
    /// Whether outputs are kept (`output_chunks`), to be joined in the end: of the last stage before torch 2.10, of every one before 2.8.
    keeps: bool,
}

/// A pipeline of a plan.
pub(in crate::memory) struct PipelineOf<'a> {
    pub(super) parallel: &'a Parallel,
    pub(super) options: &'a Fsdp2,
}

impl PipelineOf<'_> {
    /// A rank with its stages loaded, and what the optimizer sees of it.
    pub(in crate::memory) fn load(
        &self,
        torch: &mut Torch,
        program: &Program,
        (plan, settings): (&TrainPlan, Settings),
        changes: Changes,
        rank: u64,
    ) -> Result<(Rank, Rc<dyn Engine>), PlanError> {
        let (Mesh { pp, cp, dp_replicate, .. }, pipeline) = (self.parallel.mesh, self.options.pipeline);
        let micro = u64::from(plan.gradient_accumulation.max(1));
        let stack = Stack::of(program)?;
        let ranges = pipeline.split(stack.len(), pp)?;
        let own = pipeline.stages_of(rank, pp).into_iter();
        let cuts = own.map(|place| stack.cut(&ranges, place as usize)).collect::<Result<Vec<Cut>, PlanError>>()?;
        let ways = changes.split.as_ref().filter(|split| split.sequence).map_or(1, |split| split.ways);
        let before = |minor| plan.stack.before(Package::Torch, 2, minor, 0);
        let mut wrapped = Vec::new();
        for cut in cuts {
            let loaded = load::model(torch, &cut.program, plan, changes.clone());
            let (loaded, engine): (Loaded, Rc<dyn Staged>) = match (self.parallel.sharded_over(), dp_replicate) {
                (1, 1) => {
                    let (loaded, alone) = Alone::around(loaded);
                    (loaded, alone)
                }
                over => {
                    let (loaded, engine, _) =
                        fsdp2::wrap(torch, &cut.program, loaded, (self.options, &plan.stack), over);
                    (loaded, engine)
                }
            };
            wrapped.push((cut, loaded, engine));
        }
        let positions = cp > 1 || self.options.tensor.form == TensorForm::Torchtitan;
        let Batch { inputs, beside } = load::shared_batch(torch, program, (micro, cp), positions);
        let mut trained = Vec::new();
        let mut stages = Vec::new();
        for (cut, loaded, engine) in wrapped {
            trained.extend_from_slice(engine.trained());
            let patches = Rc::new(loaded.wrapped);
            let bind = |program: &Program, parameters: Vec<Tensor>| {
                Runner::with(Arc::new(program.clone()), parameters, inputs.clone(), settings, Rc::clone(&patches), None)
            };
            let loss = cut.loss.as_ref().map(|loss| Rc::new(bind(&with_labels(loss, program), Vec::new())));
            let runner = Rc::new(bind(&cut.program, loaded.parameters).hooked(Rc::clone(&engine).hooks()));
            engine.be_stage(stages.len() as u8);
            let (received, gradients, outputs, losses) = Default::default();
            let keeps = before(8) || loss.is_some() && before(10);
            stages.push(Stage { cut, runner, loss, engine, received, gradients, outputs, losses, keeps });
        }
        let place = PipelineRank { rank, ranks: pp, chunks: pipeline.per_rank(), micro_batches: micro };
        let (schedule, kept) = (pipeline.schedule, Vec::new());
        let keeps_gradients = before(10);
        let by_hooks = schedule.is_single() || before(10);
        let mut actions = place.torch(schedule)?;
        actions.retain(|action| !by_hooks || !matches!(action, Action::Gather(_) | Action::Scatter(_)));
        let rank =
            Rank { actions, schedule, by_hooks, keeps_gradients, micro, ways, settings, stages, kept, _beside: beside };
        Ok((rank, Rc::new(Together { trained })))
    }
}

/// The stages of a rank as the optimizer sees them; each has its own engine.
struct Together {
    trained: Vec<Trained>,
}

impl Engine for Together {
    fn trained(&self) -> &[Trained] {
        &self.trained
    }
}

/// The loss by itself reads labels from the batch.
fn with_labels(loss: &Program, whole: &Program) -> Program {
    let inputs = whole.steps.iter().filter(|step| matches!(step, Step::Run { op: Op::Input(_), .. }));
    Program { steps: inputs.chain(&loss.steps).cloned().collect(), ..loss.clone() }
}

impl Stage {
    /// What goes between stages: hidden states, split along the sequence where tensor parallel does that.
    fn sent(&self, value: ValueId, ways: u64) -> Shape {
        let shape = self.cut.program.values[value.0 as usize];
        shape.with(1, shape.size(1).div_ceil(ways.max(1)))
    }

    /// `forward_one_chunk`.
    fn forward(&self, torch: &mut Torch, given: Option<Tensor>) -> Option<Tensor> {
        self.engine.before_stage(torch);
        let outputs = self.runner.forward_from(torch, self.cut.input.zip(given));
        self.engine.after_forward(torch, &outputs);
        outputs.into_iter().next()
    }

    /// `_shape_inference`: the stage runs once without a graph on zeros; then places for what comes are made.
    fn prepare(&mut self, torch: &mut Torch, micro: u64, ways: u64, settings: Settings) {
        let zeros = match self.cut.input {
            Some(value) => torch.fresh("zeros_like", self.sent(value, ways), settings.weights),
            None => {
                let ids = self.cut.program.values.first().copied().unwrap_or(Shape::new(&[]));
                torch.fresh("zeros_like", ids, DType::I64)
            }
        };
        torch.grad_enabled = false;
        drop(self.forward(torch, Some(zeros)));
        torch.grad_enabled = true;
        if let Some(value) = self.cut.input {
            let shape = self.sent(value, ways);
            for _ in 0..micro {
                let place = torch
                    .in_category(Category::Communication, |torch| torch.fresh("received", shape, settings.weights));
                self.received.push(torch.leaf(place));
            }
        }
        self.outputs = vec![None; micro as usize];
        self.losses = vec![None; micro as usize];
    }

    fn prepare_backward(&mut self, torch: &mut Torch, micro: u64, ways: u64, settings: Settings) {
        if self.loss.is_some() {
            return;
        }
        let shape = self.sent(self.cut.output, ways);
        torch.in_category(Category::Communication, |torch| {
            self.gradients = (0..micro).map(|_| torch.fresh("received", shape, settings.weights)).collect();
        });
    }

    /// `backward_one_chunk`: the gradient for the stage before.
    fn backward(&mut self, torch: &mut Torch, index: usize) -> Option<Tensor> {
        let output = self.outputs[index].take();
        self.engine.begin_backward();
        match (&self.losses[index], &output) {
            (Some(loss), _) => autograd::backward(torch, loss),
            (None, Some(output)) => {
                autograd::backward_nested(torch, &[(output.clone(), self.gradients[index].clone())]);
            }
            (None, None) => {}
        }
        self.engine.after_stage_backward(torch);
        drop(output);
        self.received.get(index).and_then(|(_, leaf)| leaf.grad.take())
    }
}

/// A rank with all its stages.
pub(in crate::memory) struct Rank {
    actions: Vec<Action>,
    schedule: Schedule,
    /// Whether hooks alone gather parameters: with one stage, and before torch 2.10 with several.
    by_hooks: bool,
    /// Whether gradients of what was received are kept (before torch 2.10).
    keeps_gradients: bool,
    micro: u64,
    ways: u64,
    settings: Settings,
    stages: Vec<Stage>,
    /// What is kept until the next step begins (`clear_runtime_states`).
    kept: Vec<Tensor>,
    _beside: Vec<Tensor>,
}

impl Passes for Rank {
    fn run(&mut self, torch: &mut Torch, _plan: &TrainPlan, _engine: &dyn Engine, step: u32) -> Result<(), PlanError> {
        train::phase(torch, Phase::pass(step, 0, Work::Pipeline), |torch| {
            if step == 0 {
                let (micro, ways, settings) = (self.micro, self.ways, self.settings);
                self.stages.iter_mut().for_each(|stage| stage.prepare(torch, micro, ways, settings));
                self.stages.iter_mut().for_each(|stage| stage.prepare_backward(torch, micro, ways, settings));
            }
            self.step(torch)
        })
    }
}

impl Rank {
    fn step(&mut self, torch: &mut Torch) -> Result<(), PlanError> {
        // Names of the schedule's own: the last output and the last gradient that was sent.
        let (mut output, mut sent): (Option<Tensor>, Option<Tensor>) = (None, None);
        let (by_hooks, keeps_sent) = (self.by_hooks, self.schedule == Schedule::OneForwardOneBackward);
        let kept = &mut self.kept;
        kept.clear();
        let mut joined = None;
        // What is kept grows from turn to turn.
        let alike = !self.keeps_gradients;
        let mut turns = if alike { Turns::of(self.schedule, &self.actions, self.micro) } else { None };
        let mut at = 0;
        while let Some(&action) = self.actions.get(at) {
            let stage = &mut self.stages[action.chunk()];
            let skipped = turns.as_mut().map_or(0, |turns| turns.skip(torch, stage, at));
            if skipped > 0 {
                // A turn is two actions; what is left goes back.
                at += 2 * skipped;
                continue;
            }
            at += 1;
            match action {
                Action::Forward { micro, .. } => {
                    if !by_hooks {
                        stage.engine.wait_for_all(torch);
                    }
                    let given = stage.received.get(micro as usize).map(|(tensor, _)| tensor.clone());
                    let made = stage.forward(torch, given);
                    stage.outputs[micro as usize] = made.clone();
                    kept.extend(made.iter().filter(|_| stage.keeps).map(Tensor::detached));
                    if let (Some(runner), Some(logits)) = (&stage.loss, &made) {
                        let loss = runner.forward_from(torch, Some((stage.cut.output, logits.clone())));
                        stage.losses[micro as usize] = loss.into_iter().next();
                        joined = stage.keeps.then_some((logits.shape, logits.dtype));
                    }
                    if by_hooks {
                        output = made;
                    }
                }
                Action::Backward { micro, .. } => {
                    if !by_hooks {
                        stage.engine.wait_for_all(torch);
                    }
                    if !keeps_sent {
                        drop(sent.take());
                    }
                    let gradient = stage.backward(torch, micro as usize);
                    kept.extend(gradient.iter().filter(|_| self.keeps_gradients).cloned());
                    sent = gradient.filter(|_| by_hooks);
                }
                Action::Gather(_) => stage.engine.gather_all(torch),
                Action::Scatter(_) => stage.engine.scatter_all(),
                Action::Reduce(_) => stage.engine.reduce(torch),
                Action::BackwardOfInputs { .. } | Action::Weights { .. } => {
                    return Err(PlanError::Internal { what: "half a backward pass in a pipeline of torch's".into() });
                }
            }
        }
        drop((output, sent));
        if let Some((shape, dtype)) = joined {
            // `merge_chunks`; nobody takes what is returned.
            drop(torch.fresh("cat", shape.with(0, shape.size(0).saturating_mul(self.micro)), dtype));
        }
        self.stages.iter_mut().for_each(|stage| stage.losses.fill(None));
        torch.drop_graph(0);
        Ok(())
    }
}
