//! A run on batches of many sizes: the one training loop with what comes between its steps.

use std::rc::Rc;
use std::sync::Arc;

use super::adapters::Loaded;
use super::depth::{Beside, Few};
use super::device::Device;
use super::engine::{Alone, Engine};
use super::evaluation;
use super::load::{self, Changes};
use super::log::{Log, ON_RANK_0, SharedLog};
use super::optimizer::Optimizer;
use super::phase::{Phase, Work};
use super::ready::{self, Programs, Ready};
use super::repeat::{Start, StepRange, Tape};
use super::tensor::Tensor;
use super::torch::Torch;
use super::torch::attention::Kernel;
use super::train::{Pass, Passes, phase, prepare, settings, update};
use crate::model::Program;
use crate::plan::job::{Saving, Sizes};
use crate::plan::{PlanError, TrainPlan};

/// The loop over batches of many sizes, and what comes between its steps.
pub(super) fn run(
    torch: Torch,
    plan: &TrainPlan,
    engine: Rc<dyn Engine>,
    (ready, syncs): (Ready, bool),
    shallow: Option<Shallow>,
) -> Result<Log, PlanError> {
    let micro = plan.gradient_accumulation.max(1) as usize;
    let batches: Vec<Sizes> = plan.batches().into_iter().map(|sizes| ready.alike(sizes)).collect();
    let steps = batches.len().div_ceil(micro) as u32;
    let mut job = RunningJob::new(torch, plan, engine, (ready, syncs));
    let mut tape = Tape::new(job.engine.repeats());
    let longest = batches.iter().copied().max_by_key(|sizes| sizes.samples.saturating_mul(sizes.longest));
    let mut depth = match (shallow, longest) {
        (Some(shallow), Some(longest)) if batches.len() > ENOUGH => shallow.beside(&mut job, longest)?,
        _ => Beside::default(),
    };
    for (step, sizes) in (0..).zip(batches.chunks(micro)) {
        let key = (sizes.to_vec(), job.empties(step));
        let RunningJob { torch, engine, optimizer, passes, .. } = &mut job;
        tape.part_or(torch, (key, step, (steps - step) as usize), &mut depth, |torch| {
            one_step(torch, (plan, &**engine), passes, (optimizer, step, sizes))
        })?;
        // Nobody said that the run ends here, so what comes later comes now.
        let due = |every: Option<u32>| match every {
            Some(every) if plan.job.steps.is_some() => (step + 1) % every.max(1) == 0,
            _ => (step + 1) % every.unwrap_or(steps).min(steps).max(1) == 0,
        };
        if let Some(evaluation) = plan.job.evaluation.as_ref().filter(|evaluation| due(evaluation.every)) {
            tape.apart(torch, |torch| {
                let running = (&mut passes.ready, &**engine);
                evaluation::run(torch, running, evaluation, step)
            })?;
        }
        let saving = plan.job.saving.filter(|saving| due(saving.every));
        if let Some(full) = saving.map(Saving::is_full) {
            tape.apart(torch, |torch| {
                let bytes = phase(torch, Phase::of_step(step, Work::Save), |torch| engine.save(torch, full));
                torch.log.borrow_mut().once_on_host(ON_RANK_0, bytes);
                Ok(())
            })?;
        }
    }
    let RunningJob { torch, engine, optimizer, passes, .. } = job;
    torch.finish((optimizer, passes, engine))
}

/// So many batches are worth a shallow model beside the whole.
const ENOUGH: usize = 8;

/// A run on batches of many sizes.
struct RunningJob<'a> {
    torch: Torch,
    plan: &'a TrainPlan,
    engine: Rc<dyn Engine>,
    optimizer: Option<Optimizer>,
    passes: OfAllSizes<'a>,
}

impl<'a> RunningJob<'a> {
    fn new(mut torch: Torch, plan: &'a TrainPlan, engine: Rc<dyn Engine>, (ready, syncs): (Ready<'a>, bool)) -> Self {
        let optimizer = prepare(&mut torch, plan, &*engine);
        let passes = OfAllSizes { ready, current: None, sizes: Vec::new(), syncs, held: Vec::new() };
        Self { torch, plan, engine, optimizer, passes }
    }

    /// Whether cached memory is given back within a step.
    fn empties(&self, step: u32) -> bool {
        self.passes.empties(step)
    }

    /// Runs a step; what it wrote down.
    fn run_step(&mut self, sizes: &[Sizes], step: u32) -> Result<StepRange, PlanError> {
        let start = Start::now(&self.torch.log.borrow());
        let Self { torch, engine, optimizer, passes, plan } = self;
        one_step(torch, (plan, &**engine), passes, (optimizer, step, sizes))?;
        let log = torch.log.borrow();
        Ok(start.until(&log))
    }
}

fn one_step(
    torch: &mut Torch,
    (plan, engine): (&TrainPlan, &dyn Engine),
    passes: &mut OfAllSizes,
    (optimizer, step, sizes): (&mut Option<Optimizer>, u32, &[Sizes]),
) -> Result<(), PlanError> {
    passes.sizes = sizes.to_vec();
    passes.run(torch, plan, engine, step)?;
    update(torch, plan, engine, (optimizer, step));
    Ok(())
}

/// A model of few layers, to be loaded.
pub(super) struct Shallow<'a> {
    pub(super) program: Arc<Program>,
    pub(super) programs: &'a Programs<'a>,
    pub(super) changes: Changes<'a>,
}

impl<'a> Shallow<'a> {
    /// Loads it and runs its first step.
    fn beside(self, whole: &mut RunningJob<'a>, longest: Sizes) -> Result<Beside<RunningJob<'a>>, PlanError> {
        let (plan, Self { program, programs, changes }) = (whole.plan, self);
        let deep = (whole.passes.ready.programs)(longest.of(&plan.batch).training_inputs())?;
        let mut torch = Torch::new(Device::of(&plan.gpu));
        torch.forced_kernel = plan.sdpa_kernel.map(Kernel::from);
        let liger = changes.liger;
        let (Loaded { parameters, wrapped, .. }, engine) =
            Alone::around(load::model(&mut torch, &program, plan, changes));
        let (settings, known) = (settings(plan), Default::default());
        let ready = Ready { programs, plan, parameters, wrapped, liger, settings, hooks: None, known };
        let mut job = RunningJob::new(torch, plan, engine, (ready, whole.passes.syncs));
        job.run_step(&[longest], 0)?;
        Ok(Beside::of(job, deep, program))
    }
}

type Key = (Vec<Sizes>, bool);

impl Few<Key> for RunningJob<'_> {
    fn step(&mut self, (sizes, empties): &Key) -> Result<StepRange, PlanError> {
        // Steps that give memory back within them have an event more.
        let ran = self.run_step(sizes, if *empties { 0 } else { 1 });
        self.passes.ready.known.clear();
        ran
    }

    fn log(&self) -> &SharedLog {
        &self.torch.log
    }
}

/// Micro-batches of their own sizes.
struct OfAllSizes<'a> {
    ready: Ready<'a>,
    /// The batch that the loop's names hold: it goes when the next is there.
    current: Option<ready::Loaded>,
    /// Those of the step.
    sizes: Vec<Sizes>,
    syncs: bool,
    held: Vec<Tensor>,
}

impl OfAllSizes<'_> {
    /// Whether cached memory is given back within a step.
    fn empties(&self, step: u32) -> bool {
        self.ready.plan.job.empty_cache_steps.is_some_and(|every| step.is_multiple_of(every.max(1)))
    }
}

impl Passes for OfAllSizes<'_> {
    fn run(&mut self, torch: &mut Torch, plan: &TrainPlan, engine: &dyn Engine, step: u32) -> Result<(), PlanError> {
        let sizes = std::mem::take(&mut self.sizes);
        for (micro, one) in sizes.iter().enumerate() {
            let next = self.ready.batch(torch, *one)?;
            let runner = Rc::clone(&next.runner);
            self.current = Some(next);
            let last = micro + 1 == sizes.len();
            let pass =
                Pass { step, micro: micro as u64, last, syncs: self.syncs, empties: self.empties(step), told: true };
            pass.run(torch, (plan, engine), &mut self.held, |torch| Ok(runner.forward(torch)))?;
        }
        Ok(())
    }
}
