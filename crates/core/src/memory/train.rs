//! The training loop, the only one: load, forward, backward, clip, step, zero. Engines do their part in it.

use std::rc::Rc;
use std::sync::Arc;

use super::adapters::{self, Loaded};
use super::autograd;
use super::device::Device;
use super::engine::{Alone, Engine};
use super::fold;
use super::job::{self, Shallow};
use super::load::{self, Batch, Changes};
use super::log::{Category, Event, Log};
use super::lower::{Runner, Settings};
use super::merging;
use super::optimizer::{Optimizer, Trained, in_backward};
use super::phase::{Phase, Work};
use super::ready::{Programs, Ready};
use super::repeat::{self, Start};
use super::saved::ToHost;
use super::sharding::Spread;
use super::tasks::{self, Player};
use super::tensor::Tensor;
use super::torch::Torch;
use super::torch::attention::Kernel;
use crate::dtype::DType;
use crate::model::{Program, Shape};
use crate::plan::parallel::Place;
use crate::plan::{Checkpointing, Job, ModelCode, Package, PlanError, TrainPlan};

/// Steps that are run of batches that are alike.
pub(super) const STEPS: u32 = Job::ALIKE;

/// Micro-batches that are run: from the second on all are alike, and after a few the cache of segments has settled.
pub(super) const MOST_MICRO_BATCHES: u32 = 16;

/// Runs a program on the card at `place`, of the only one or of those that `spread` says, and returns what happened to memory.
pub(super) fn simulate(
    (program, programs): (&Arc<Program>, &Programs),
    plan: &TrainPlan,
    changes: Changes,
    (spread, place): (Option<Spread>, Place),
    shallow: Option<Shallow>,
) -> Result<Log, PlanError> {
    let log = attempt((program, programs), plan, changes.clone(), (spread, place), (shallow, true))?;
    match log.misfolded {
        false => Ok(log),
        // Without folding a job needs no shallow model beside it either.
        true => attempt((program, programs), plan, changes, (spread, place), (None, false)),
    }
}

/// The same, with layers that are alike run in part where that may be.
fn attempt(
    (program, programs): (&Arc<Program>, &Programs),
    plan: &TrainPlan,
    changes: Changes,
    (spread, place): (Option<Spread>, Place),
    (shallow, folds): (Option<Shallow>, bool),
) -> Result<Log, PlanError> {
    let mut torch = Torch::new(Device::of(&plan.gpu));
    torch.log.borrow_mut().reserve(program.operations());
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
    let liger = changes.liger;
    if plan.job.from_pretrained {
        // Files are mapped, not read: pages of them, which the system takes back when it needs them.
        let bytes = program.parameters.iter().map(|one| one.shape.elements().saturating_mul(plan.weights.size())).sum();
        torch.log.borrow_mut().on_host("the checkpoint's file, mapped while loading", bytes, false);
    }
    let mut loaded = match plan.job.from_pretrained {
        true => phase(&mut torch, Work::Load.into(), |torch| load::model(torch, program, plan, changes)),
        false => load::model(&mut torch, program, plan, changes),
    };
    if plan.job.merge || plan.job.steps == Some(0) {
        if plan.job.merge {
            merging::check(&loaded)?;
            phase(&mut torch, Work::Merge.into(), |torch| merging::run(torch, program, &mut loaded));
        }
        return torch.finish(loaded);
    }
    let value = tasks::value_model(&mut torch, plan, (settings, &mut loaded))?;
    let (loaded, engine): (Loaded, Rc<dyn Engine>) = match spread {
        // TRL's trainers wrap when they begin to train: for adapters of a small model the pieces that DDP sends may be the most.
        Some(spread) if spread.replicates() && !plan.objective.is_plain() => {
            phase(&mut torch, Work::Load.into(), |torch| spread.wrap(torch, program, plan, loaded))
        }
        Some(spread) => spread.wrap(&mut torch, program, plan, loaded),
        None => {
            let (loaded, alone) = Alone::around(loaded);
            (loaded, alone)
        }
    };
    let syncs = spread.is_none_or(|spread| !spread.parallel.no_sync);
    let Loaded { parameters, wrapped, .. } = loaded;
    let hooks = Rc::clone(&engine).hooks();
    let goes_along = match &hooks {
        Some(hooks) => hooks.along().is_some(),
        // Without an engine nothing is done between layers, also where tensors are split over cards.
        None => engine.repeats(),
    };
    torch.folds = folds && fold::is_allowed() && goes_along && !plan.keep_loss && !plan.optimizer_in_backward;
    if !plan.objective.is_plain() {
        let programs = Rc::new(programs);
        let (widens, known) = (settings.autocast.is_some(), Default::default());
        let adapters_off = false;
        let engine_of = None;
        let policy = Player {
            programs,
            parameters,
            wrapped,
            liger,
            settings,
            hooks,
            engine: engine_of,
            widens,
            adapters_off,
            whole: tasks::WholeLogits::of(plan),
            known,
        };
        return tasks::run(torch, plan, (engine, spread), (policy, value, syncs));
    }
    if !plan.job.is_one_step() {
        let known = Default::default();
        let ready = Ready { programs, plan, parameters, wrapped, liger, settings, hooks, known };
        return job::run(torch, plan, engine, (ready, syncs), shallow);
    }
    let Batch { inputs, beside } = match spread.map_or(1, |spread| spread.parallel.mesh.cp) {
        1 => load::batch(&mut torch, program, plan),
        cp => load::shared_batch(&mut torch, program, (1, cp), true),
    };
    if plan.job.cast_on_card {
        torch.log.borrow_mut().events.push(Event::EmptyCache);
    }
    let runner = Runner::with(Arc::clone(program), parameters, inputs, settings, Rc::new(wrapped), None);
    let runner = Rc::new(runner.hooked(hooks));
    let repeats = match spread {
        _ if !folds || !fold::is_allowed() || plan.keep_loss => Repeats::None,
        None => Repeats::Alone,
        Some(_) => Repeats::Spread,
    };
    run(torch, plan, engine, OneByOne { runner, syncs, repeats, held: Vec::new(), _beside: beside })
}

/// The passes of a step.
pub(super) trait Passes {
    /// Runs all micro-batches of a step.
    fn run(&mut self, torch: &mut Torch, plan: &TrainPlan, engine: &dyn Engine, step: u32) -> Result<(), PlanError>;

    /// How many of a step's micro-batches are run.
    fn micro_batches(&self, all: u64) -> u64 {
        all
    }
}

/// The loop itself, over steps that are alike.
fn run(mut torch: Torch, plan: &TrainPlan, engine: Rc<dyn Engine>, mut passes: impl Passes) -> Result<Log, PlanError> {
    let mut optimizer = prepare(&mut torch, plan, &*engine);
    let first = Start::now(&torch.log.borrow());
    // A step begins with what the last one left behind where the loss is kept.
    let steps = if engine.repeats() && !plan.keep_loss { 1 } else { STEPS };
    for step in 0..steps {
        let (start, before) = (Start::now(&torch.log.borrow()), torch.effort);
        passes.run(&mut torch, plan, &*engine, step)?;
        let ran = torch.effort.since(&before);
        let between = torch.effort;
        update(&mut torch, plan, &*engine, (&mut optimizer, step));
        let micro = u64::from(plan.gradient_accumulation.max(1));
        let all = ran.times(micro, passes.micro_batches(micro));
        torch.log.borrow_mut().effort = all.and(&torch.effort.since(&between));
        if settles(&torch, start, step) {
            break;
        }
    }
    if steps < STEPS {
        repeat::first_step(&mut torch.log.borrow_mut(), first, STEPS);
    }
    torch.finish((optimizer, passes, engine))
}

/// Whether all steps behind this one are written down: engines set up what they keep, and learn the order of modules, in the first
/// step, so where the second one leaves memory as it found it, those that follow do the same.
pub(super) fn settles(torch: &Torch, start: Start, step: u32) -> bool {
    step > 0
        && step + 1 < STEPS
        && fold::is_allowed()
        && repeat::last_step(&mut torch.log.borrow_mut(), start, step + 1..STEPS)
}

/// The optimizer around what an engine trains.
pub(super) fn prepare(torch: &mut Torch, plan: &TrainPlan, engine: &dyn Engine) -> Option<Optimizer> {
    let mut optimizer = None;
    if plan.optimizer_in_backward {
        in_backward::attach(torch, plan.optimizer, engine.trained());
    } else {
        let mut made = Optimizer::new(torch, plan.optimizer, engine.trained());
        engine.prepare(torch, &mut made, plan.optimizer);
        optimizer = Some(made);
    }
    if plan.job.resume && plan.adapter.is_some() {
        phase(torch, Work::Resume.into(), |torch| read_adapter(torch, engine.trained()));
    }
    if plan.job.warm {
        torch.use_blas_everywhere();
    }
    torch.log.borrow_mut().events.push(Event::EmptyCache);
    if let Some(optimizer) = optimizer.as_mut().filter(|_| plan.job.resume) {
        phase(torch, Work::Resume.into(), |torch| optimizer.read_back(torch, engine.trained()));
    }
    optimizer
}

/// `load_adapter` of PEFT: its weights are on the card beside those they replace. Those of a whole model come by way of the host.
fn read_adapter(torch: &mut Torch, trained: &[Trained]) {
    let read: Vec<Tensor> = torch.in_category(Category::Temporaries, |torch| {
        trained.iter().map(|one| torch.fresh("load", one.tensor.shape, one.tensor.dtype)).collect()
    });
    drop(read);
}

/// What follows the passes of a step: clip, step, zero.
pub(super) fn update(
    torch: &mut Torch,
    plan: &TrainPlan,
    engine: &dyn Engine,
    (optimizer, step): (&mut Option<Optimizer>, u32),
) {
    if plan.clip && !engine.steps_alone() {
        phase(torch, Phase::of_step(step, Work::Clip), |torch| clip(torch, engine.trained()));
    }
    phase(torch, Phase::of_step(step, Work::Optimizer), |torch| {
        optimizer.iter_mut().for_each(|optimizer| engine.step(torch, optimizer));
    });
    if !engine.steps_alone() {
        phase(torch, Phase::of_step(step, Work::Zero), |_| {
            optimizer.iter().for_each(Optimizer::zero_masters);
            engine.trained().iter().for_each(|parameter| drop(parameter.leaf.grad.take()));
        });
    }
}

/// Which micro-batches may be written down instead of run.
#[derive(Clone, Copy)]
enum Repeats {
    None,
    /// All from the third on.
    Alone,
    /// Those between the third and the last.
    Spread,
}

/// Micro-batches one after the other, through the whole model.
struct OneByOne {
    runner: Rc<Runner>,
    /// Whether gradients are reduced after every micro-batch.
    syncs: bool,
    repeats: Repeats,
    /// What the loop's names hold from one micro-batch to the next.
    held: Vec<Tensor>,
    _beside: Vec<Tensor>,
}

impl Passes for OneByOne {
    fn micro_batches(&self, all: u64) -> u64 {
        all.min(MOST_MICRO_BATCHES.into())
    }

    fn run(&mut self, torch: &mut Torch, plan: &TrainPlan, engine: &dyn Engine, step: u32) -> Result<(), PlanError> {
        let micro_batches = plan.gradient_accumulation.clamp(1, MOST_MICRO_BATCHES);
        let (mut micro, mut last_start) = (0, Start::now(&torch.log.borrow()));
        while micro < micro_batches {
            let last = micro + 1 == micro_batches;
            let pass = Pass { step, micro: micro.into(), last, syncs: self.syncs, empties: false, told: true };
            let (start, before) = (Start::now(&torch.log.borrow()), torch.effort);
            let on_host = torch.log.borrow().host_parts.clone();
            pass.run(torch, (plan, engine), &mut self.held, |torch| Ok(self.runner.forward(torch)))?;
            micro += 1;
            let unchanged = on_host == torch.log.borrow().host_parts;
            let more = match self.repeats {
                _ if !unchanged => 0,
                // The first makes gradients; what the second leaves as it found it, so do all that follow.
                Repeats::Alone if micro == 2 => micro_batches - micro,
                // An engine may begin otherwise, and end otherwise: the last one is run.
                Repeats::Spread if micro == 3 && repeat::are_alike(&torch.log.borrow(), [last_start, start]) => {
                    (micro_batches - micro).saturating_sub(1)
                }
                _ => 0,
            };
            if more > 0 && repeat::micro_batches(&torch.log, start, more) {
                torch.effort = torch.effort.and(&torch.effort.since(&before).times(more.into(), 1));
                micro += more;
            }
            last_start = start;
        }
        Ok(())
    }
}

/// One micro-batch of a step.
pub(super) struct Pass {
    pub(super) step: u32,
    pub(super) micro: u64,
    /// Whether a step follows it.
    pub(super) last: bool,
    /// Whether gradients are reduced after every micro-batch.
    pub(super) syncs: bool,
    /// Whether cached memory is given back between forward and backward.
    pub(super) empties: bool,
    /// Whether the engine is told of the forward pass here.
    pub(super) told: bool,
}

impl Pass {
    /// There and back.
    pub(super) fn run(
        &self,
        torch: &mut Torch,
        (plan, engine): (&TrainPlan, &dyn Engine),
        held: &mut Vec<Tensor>,
        forward: impl FnOnce(&mut Torch) -> Result<Vec<Tensor>, PlanError>,
    ) -> Result<(), PlanError> {
        engine.begin(self.last);
        // Loss and output die between the phases: the loop rebinds their names.
        torch.last = Some((std::mem::take(held), torch.graph_mark()));
        let (loss, outputs) = phase(torch, Phase::pass(self.step, self.micro, Work::Forward), |torch| {
            if self.told {
                engine.before_forward(torch, self.syncs || self.last);
            }
            let mut outputs = forward(torch)?;
            if self.told {
                engine.after_forward(torch, &outputs);
            }
            let loss = outputs.first().cloned();
            if !plan.keep_outputs {
                outputs.clear();
            }
            torch.let_go_of_last();
            Ok::<_, PlanError>((loss, outputs))
        })?;
        if self.empties {
            torch.log.borrow_mut().events.push(Event::EmptyCache);
        }
        phase(torch, Phase::pass(self.step, self.micro, Work::Backward), |torch| {
            if let Some(loss) = &loss {
                autograd::backward(torch, loss);
            }
            engine.after_backward(torch);
        });
        match plan.keep_loss {
            true => held.extend(loss.into_iter().chain(outputs)),
            false => {
                drop((loss, outputs));
                torch.drop_graph(0);
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
pub(super) fn settings(plan: &TrainPlan) -> Settings {
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
        counted: None,
        documents: None,
        save_on_cpu: plan.save_on_cpu.then_some(match plan.model_code {
            ModelCode::Torchtune => ToHost::Activations,
            _ => ToHost::All,
        }),
        fills_cache: false,
        keeps_hidden: false,
        // TRL's reward and value models are called so.
        refuses_cache: plan.objective.kind.auto_class().is_some(),
        compile: plan.compile,
        pads_otherwise: plan.pads_otherwise,
        reuses_all: plan.stack.before(Package::Torch, 2, 9, 0),
        float8: plan.float8,
        drops_outputs: !plan.keep_outputs,
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
