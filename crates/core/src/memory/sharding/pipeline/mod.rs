//! One rank of a pipeline of `torch.distributed.pipelining`: its stages, what they receive, and the schedule they run by.
//!
//! Follows torch/distributed/pipelining/{stage,schedules}.py of torch 2.11. What is sent is freed when nothing holds it any
//! more; NCCL may hold it until the send is over.

mod stages;

use std::rc::Rc;

use self::stages::{Cut, Stack};
use super::{Loaded, Staged, Wrapped, alone, finish, fsdp2};
use crate::dtype::DType;
use crate::memory::autograd::{self, Leaf};
use crate::memory::log::{Category, Event, Log};
use crate::memory::lower::tensor_parallel::Split;
use crate::memory::lower::{Runner, Settings};
use crate::memory::optimizer::{Optimizer, Trained};
use crate::memory::schedule::{Action, PipelineRank};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::{tensor_parallel, train};
use crate::model::op::{Op, ValueId};
use crate::model::{Program, Shape, Step};
use crate::plan::parallel::{Fsdp2, Parallel, Schedule, TensorForm};
use crate::plan::{PlanError, TrainPlan};

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
}

/// Runs a rank and returns what happened to its memory.
pub(super) fn simulate(
    mut torch: Torch,
    program: &Program,
    (plan, parallel, options): (&TrainPlan, &Parallel, &Fsdp2),
    split: Option<Split>,
    rank: u64,
) -> Result<Log, PlanError> {
    let (pp, micro) = (parallel.mesh.pp, u64::from(plan.gradient_accumulation.max(1)));
    let stack = Stack::of(program)?;
    let ranges = options.pipeline.split(stack.len(), pp)?;
    let own = options.pipeline.stages_of(rank, pp);
    let cuts =
        own.into_iter().map(|index| stack.cut(&ranges[index as usize])).collect::<Result<Vec<Cut>, PlanError>>()?;
    let ways = split.as_ref().filter(|split| split.sequence).map_or(1, |split| split.ways);
    let mut settings = train::settings(plan);
    settings.weights = parallel.compute_type().unwrap_or(settings.weights);
    let mut loaded = Vec::new();
    for cut in cuts {
        let wrapped = load(&mut torch, &cut.program, (plan, parallel, options), split.clone());
        loaded.push((cut, wrapped));
    }
    let positions = parallel.mesh.cp > 1 || options.tensor.form == TensorForm::Torchtitan;
    let inputs = batch(&mut torch, program, (micro, parallel.mesh.cp), positions);
    let mut trained = Vec::new();
    let mut stages = Vec::new();
    for (cut, Wrapped { loaded: Loaded { parameters, trained: own, wrapped }, engine, .. }) in loaded {
        trained.extend(own);
        let wrapped = Rc::new(wrapped);
        let bind = |program: &Program, parameters: Vec<Tensor>| {
            Runner::with(Rc::new(program.clone()), parameters, inputs.clone(), settings, Rc::clone(&wrapped), None)
        };
        let loss = cut.loss.as_ref().map(|loss| bind(&with_labels(loss, program), Vec::new()));
        let runner = bind(&cut.program, parameters).hooked(Rc::clone(&engine).hooks());
        let Some(engine) = engine.staged() else { continue };
        engine.be_stage(stages.len() as u8);
        let (received, gradients, outputs, losses) = Default::default();
        stages.push(Stage { cut, runner, loss, engine, received, gradients, outputs, losses });
    }
    drop(inputs);
    let place = PipelineRank { rank, ranks: pp, chunks: options.pipeline.per_rank(), micro_batches: micro };
    let rank = Rank {
        actions: place.torch(options.pipeline.schedule)?,
        schedule: options.pipeline.schedule,
        micro,
        ways,
        stages,
    };
    Ok(rank.run(torch, plan, settings, trained))
}

/// The loss by itself reads labels from the batch.
fn with_labels(loss: &Program, whole: &Program) -> Program {
    let inputs = whole.steps.iter().filter(|step| matches!(step, Step::Run { op: Op::Input(_), .. }));
    Program { steps: inputs.chain(&loss.steps).cloned().collect(), ..loss.clone() }
}

fn load(
    torch: &mut Torch,
    program: &Program,
    (plan, parallel, options): (&TrainPlan, &Parallel, &Fsdp2),
    split: Option<Split>,
) -> Wrapped {
    let (parameters, trained) = match &split {
        Some(split) => tensor_parallel::load(torch, program, split, plan),
        None => train::load(torch, program, plan),
    };
    let mut loaded = Loaded { parameters, trained, wrapped: Default::default() };
    loaded.wrapped.checkpoints = plan.checkpoints;
    loaded.wrapped.split = split;
    match (parallel.sharded_over(), parallel.mesh.dp_replicate) {
        (1, 1) => Wrapped { loaded, on_host: Vec::new(), engine: Rc::new(alone::Alone) },
        over => fsdp2::wrap(torch, program, loaded, options, over),
    }
}

/// The tensors of the batch of a step, of which micro-batches and context-parallel cards see parts.
pub(super) fn batch(
    torch: &mut Torch,
    program: &Program,
    (micro, cp): (u64, u64),
    positions: bool,
) -> Vec<(ValueId, Tensor)> {
    let mut inputs = Vec::new();
    torch.in_category(Category::Batch, |torch| {
        for step in &program.steps {
            let Step::Run { op: Op::Input(_), outputs, .. } = step else { continue };
            let part = program.values[outputs[0].0 as usize];
            let rows = part.with(0, part.size(0).saturating_mul(micro));
            let whole = torch.fresh("batch", rows.with(1, part.size(1).saturating_mul(cp)), DType::I64);
            inputs.push((outputs[0], whole.with_shape(part)));
        }
        if let (true, Some((_, first))) = (positions, inputs.first()) {
            let whole = Shape::from([1, first.shape.size(1).saturating_mul(cp)]);
            inputs.push((ValueId(u32::MAX), torch.fresh("batch", whole, DType::I64)));
        }
    });
    inputs
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
struct Rank {
    actions: Vec<Action>,
    schedule: Schedule,
    micro: u64,
    ways: u64,
    stages: Vec<Stage>,
}

impl Rank {
    fn run(mut self, mut torch: Torch, plan: &TrainPlan, settings: Settings, trained: Vec<Trained>) -> Log {
        let mut optimizer = Optimizer::new(&mut torch, plan.optimizer, &trained);
        torch.log.borrow_mut().events.push(Event::EmptyCache);
        for step in 0..train::STEPS {
            train::phase(&mut torch, format!("{step}.0.pipe"), |torch| {
                if step == 0 {
                    let (micro, ways) = (self.micro, self.ways);
                    self.stages.iter_mut().for_each(|stage| stage.prepare(torch, micro, ways, settings));
                    self.stages.iter_mut().for_each(|stage| stage.prepare_backward(torch, micro, ways, settings));
                }
                self.step(torch);
            });
            if plan.clip {
                train::phase(&mut torch, format!("{step}.clip"), |torch| train::clip(torch, &trained));
            }
            train::phase(&mut torch, format!("{step}.opt"), |torch| optimizer.step(torch, &trained));
            train::phase(&mut torch, format!("{step}.zero"), |_| {
                trained.iter().for_each(|parameter| drop(parameter.leaf.grad.take()));
            });
        }
        finish(torch, (optimizer, self, trained))
    }

    fn step(&mut self, torch: &mut Torch) {
        // Names of the schedule's own: the last output and the last gradient that was sent.
        let (mut output, mut sent): (Option<Tensor>, Option<Tensor>) = (None, None);
        let (single, keeps_sent) = (self.schedule.is_single(), self.schedule == Schedule::OneForwardOneBackward);
        for &action in &self.actions {
            let stage = &mut self.stages[action.chunk()];
            match action {
                Action::Forward { micro, .. } => {
                    if !single {
                        stage.engine.wait_for_all(torch);
                    }
                    let given = stage.received.get(micro as usize).map(|(tensor, _)| tensor.clone());
                    let made = stage.forward(torch, given);
                    stage.outputs[micro as usize] = made.clone();
                    if let (Some(runner), Some(logits)) = (&stage.loss, &made) {
                        let loss = runner.forward_from(torch, Some((stage.cut.output, logits.clone())));
                        stage.losses[micro as usize] = loss.into_iter().next();
                    }
                    if single {
                        output = made;
                    }
                }
                Action::Backward { micro, .. } => {
                    if !single {
                        stage.engine.wait_for_all(torch);
                    }
                    if !keeps_sent {
                        drop(sent.take());
                    }
                    let gradient = stage.backward(torch, micro as usize);
                    sent = gradient.filter(|_| single);
                }
                Action::Gather(_) => stage.engine.gather_all(torch),
                Action::Scatter(_) => stage.engine.scatter_all(),
                Action::Reduce(_) => stage.engine.reduce(torch),
                // No schedule of torch's that is modelled runs a backward pass in two halves.
                Action::BackwardOfInputs { .. } | Action::Weights { .. } => {}
            }
        }
        drop((output, sent));
        self.stages.iter_mut().for_each(|stage| stage.losses.fill(None));
        torch.drop_graph(0);
    }
}
