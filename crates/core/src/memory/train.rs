//! The training loop, the only one: load, forward, backward, clip, step, zero. Engines do their part in it.

use std::rc::Rc;

use super::adapters::{self, Loaded};
use super::autograd;
use super::device::Device;
use super::engine::{Alone, Engine};
use super::load::{self, Batch, Changes};
use super::log::{Category, Event, Log};
use super::lower::{Runner, Settings};
use super::optimizer::{Optimizer, Trained, in_backward};
use super::phase::{Phase, Work};
use super::repeat::{self, Start};
use super::sharding::Spread;
use super::tensor::Tensor;
use super::torch::Torch;
use super::torch::attention::Kernel;
use crate::dtype::DType;
use crate::model::{Program, Shape};
use crate::plan::parallel::Place;
use crate::plan::{Checkpointing, PlanError, TrainPlan};

/// Steps that are run: the first makes the optimizer's state, the second is what all later ones allocate, and with the
/// third the cache of segments has settled.
pub(super) const STEPS: u32 = 3;

/// Micro-batches that are run: from the second on all are alike, and after a few the cache of segments has settled.
const MOST_MICRO_BATCHES: u32 = 16;

/// Runs a program on the card at `place`, of the only one or of those that `spread` says, and returns what happened to memory.
pub(super) fn simulate(
    program: &Rc<Program>,
    plan: &TrainPlan,
    changes: Changes,
    (spread, place): (Option<Spread>, Place),
) -> Result<Log, PlanError> {
    let mut torch = Torch::new(Device::of(&plan.gpu));
    torch.log.borrow_mut().reserve(program.steps.len());
    torch.forced_kernel = plan.sdpa_kernel.map(Kernel::from);
    let mut settings = settings(plan);
    if let Some(spread) = spread {
        spread.set_types(plan, &mut settings);
        torch.ring = spread.ring(place);
        if let Some(pipeline) = spread.pipeline() {
            let (rank, engine) = pipeline.load(&mut torch, program, (plan, settings), changes, place.pp)?;
            return run(torch, plan, engine, rank);
        }
    }
    let loaded = load::model(&mut torch, program, plan, changes);
    let (loaded, engine): (Loaded, Rc<dyn Engine>) = match spread {
        Some(spread) => spread.wrap(&mut torch, program, plan, loaded),
        None => {
            let (loaded, alone) = Alone::around(loaded);
            (loaded, alone)
        }
    };
    let Batch { inputs, beside } = match spread.map_or(1, |spread| spread.parallel.mesh.cp) {
        1 => load::batch(&mut torch, program, plan),
        cp => load::shared_batch(&mut torch, program, (1, cp), true),
    };
    let Loaded { parameters, wrapped, .. } = loaded;
    let runner = Runner::with(Rc::clone(program), parameters, inputs, settings, Rc::new(wrapped), None);
    let runner = Rc::new(runner.hooked(Rc::clone(&engine).hooks()));
    let syncs = spread.is_none_or(|spread| !spread.parallel.no_sync);
    run(torch, plan, engine, OneByOne { runner, syncs, held: Vec::new(), _beside: beside })
}

/// The passes of a step.
pub(super) trait Passes {
    /// Runs all micro-batches of a step.
    fn run(&mut self, torch: &mut Torch, plan: &TrainPlan, engine: &dyn Engine, step: u32) -> Result<(), PlanError>;
}

/// The loop itself.
fn run(mut torch: Torch, plan: &TrainPlan, engine: Rc<dyn Engine>, mut passes: impl Passes) -> Result<Log, PlanError> {
    let mut optimizer = None;
    if plan.optimizer_in_backward {
        in_backward::attach(&mut torch, plan.optimizer, engine.trained());
    } else {
        let mut made = Optimizer::new(&mut torch, plan.optimizer, engine.trained());
        engine.prepare(&mut torch, &mut made, plan.optimizer);
        optimizer = Some(made);
    }
    torch.log.borrow_mut().events.push(Event::EmptyCache);
    let start = Start::now(&torch.log.borrow());
    // A step begins with what the last one left behind where the loss is kept.
    let steps = if engine.repeats() && !plan.keep_loss { 1 } else { STEPS };
    for step in 0..steps {
        passes.run(&mut torch, plan, &*engine, step)?;
        if plan.clip && !engine.steps_alone() {
            phase(&mut torch, Phase::of_step(step, Work::Clip), |torch| clip(torch, engine.trained()));
        }
        phase(&mut torch, Phase::of_step(step, Work::Optimizer), |torch| {
            optimizer.iter_mut().for_each(|optimizer| engine.step(torch, optimizer));
        });
        if !engine.steps_alone() {
            phase(&mut torch, Phase::of_step(step, Work::Zero), |_| {
                optimizer.iter().for_each(Optimizer::zero_masters);
                engine.trained().iter().for_each(|parameter| drop(parameter.leaf.grad.take()));
            });
        }
    }
    if steps < STEPS {
        repeat::first_step(&mut torch.log.borrow_mut(), start, STEPS);
    }
    torch.finish((optimizer, passes, engine))
}

/// Micro-batches one after the other, through the whole model.
struct OneByOne {
    runner: Rc<Runner>,
    /// Whether gradients are reduced after every micro-batch.
    syncs: bool,
    /// What the loop's names hold from one micro-batch to the next.
    held: Vec<Tensor>,
    _beside: Option<Tensor>,
}

impl Passes for OneByOne {
    fn run(&mut self, torch: &mut Torch, plan: &TrainPlan, engine: &dyn Engine, step: u32) -> Result<(), PlanError> {
        let micro_batches = plan.gradient_accumulation.clamp(1, MOST_MICRO_BATCHES);
        for micro in 0..micro_batches {
            let last = micro + 1 == micro_batches;
            engine.begin(last);
            // Loss and output die between the phases: the loop rebinds their names.
            torch.last = Some((std::mem::take(&mut self.held), torch.graph_mark()));
            let micro = u64::from(micro);
            let (loss, outputs) = phase(torch, Phase::pass(step, micro, Work::Forward), |torch| {
                engine.before_forward(torch, self.syncs || last);
                let mut outputs = self.runner.forward(torch);
                engine.after_forward(torch, &outputs);
                let loss = outputs.first().cloned();
                if !plan.keep_outputs {
                    outputs.clear();
                }
                torch.let_go_of_last();
                (loss, outputs)
            });
            phase(torch, Phase::pass(step, micro, Work::Backward), |torch| {
                if let Some(loss) = &loss {
                    autograd::backward(torch, loss);
                }
                engine.after_backward(torch);
            });
            match plan.keep_loss {
                true => self.held.extend(loss.into_iter().chain(outputs)),
                false => {
                    drop((loss, outputs));
                    torch.drop_graph(0);
                }
            }
        }
        Ok(())
    }
}

/// Runs a part of a run as a phase of its own.
pub(super) fn phase<T>(torch: &mut Torch, phase: Phase, body: impl FnOnce(&mut Torch) -> T) -> T {
    torch.log.borrow_mut().phase(phase);
    let result = body(torch);
    torch.log.borrow_mut().end_phase();
    result
}

/// What of a plan the lowering needs.
fn settings(plan: &TrainPlan) -> Settings {
    Settings {
        attention: plan.attention,
        checkpointing: plan.checkpointing == Checkpointing::Full,
        kernels: plan.kernels,
        autocast: plan.autocast,
        weights: adapters::hidden_dtype(plan),
        buffers: adapters::hidden_dtype(plan),
        padded: plan.batch.padded,
        mask: plan.batch.mask || plan.batch.padded,
        real_tokens: plan.batch.real_tokens,
        save_on_cpu: plan.save_on_cpu,
    }
}

/// `clip_grad_norm_`: a norm per parameter, then in place.
fn clip(torch: &mut Torch, trained: &[Trained]) {
    torch.in_category(Category::Temporaries, |torch| {
        let with_gradient = trained.iter().filter(|parameter| parameter.leaf.grad.borrow().is_some());
        let norms: Vec<Tensor> =
            with_gradient.map(|_| torch.fresh("_foreach_norm", Shape::new(&[]), DType::F32)).collect();
        let stacked = torch.fresh("stack", Shape::from([norms.len() as u64]), DType::F32);
        drop((norms, stacked));
    });
}
