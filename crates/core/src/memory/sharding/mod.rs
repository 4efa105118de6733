//! One card of many: what each engine keeps on it, and what it gathers and reduces when.
//!
//! | module | engine |
//! |---|---|
//! | [`shares`] | how much of a tensor each rank has |
//! | `members`, `units` | the parameters of a model, and which of them are wrapped together |
//! | `buffers` | gathered parameters and buffers of collectives |
//! | `alone` | no engine: tensor parallel by itself |
//! | `ddp` | `DistributedDataParallel` |
//! | `deepspeed`, `zero0`, `zero1_wide`, `zero12`, `zero3`, `coordinator`, `leaf_modules` | DeepSpeed's loop, and what ZeRO does in it |
//! | `fsdp1`, `flat_parameter` | `FullyShardedDataParallel` |
//! | `fsdp2` | `fully_shard` |
//! | `pipeline` | one rank of a pipeline: its stages, and the schedule they run by |
//! | `host` | what is kept in the host's memory instead |
//!
//! The card is rank 0 of the data-parallel ranks: where a size does not divide, it has the largest share.

mod alone;
mod buffers;
mod coordinator;
mod ddp;
pub(super) mod deepspeed;
mod flat_parameter;
mod fsdp1;
mod fsdp2;
mod host;
mod leaf_modules;
mod members;
mod pipeline;
pub mod shares;
mod units;
mod zero0;
mod zero12;
mod zero1_wide;
mod zero3;

use std::rc::Rc;

use super::adapters::{self, Loaded};
use super::autograd;
use super::device::Device;
use super::log::{Event, Log};
use super::lower::Runner;
use super::lower::hooks::Hooks;
use super::lower::liger::Liger;
use super::lower::tensor_parallel::Split;
use super::optimizer::Optimizer;
use super::tensor::Tensor;
use super::tensor_parallel;
use super::torch::Torch;
use super::torch::ring::Ring;
use super::train;
use crate::dtype::DType;
use crate::model::{Program, Shape};
use crate::plan::liger::LigerPatch;
use crate::plan::parallel::{ContextParallel, Engine, Mesh, Parallel, Place};
use crate::plan::{AdapterLayout, PlanError, TrainPlan};

/// A model under an engine.
struct Wrapped {
    /// What the forward pass reads and the optimizer steps on.
    loaded: Loaded,
    /// What the optimizer steps on in the host's memory.
    on_host: Vec<(Shape, DType)>,
    /// What runs around modules and passes.
    engine: Rc<dyn Wrapper>,
}

/// What an engine does around passes and modules.
trait Wrapper: Hooks {
    /// Before the forward pass; `syncs`: whether gradients are reduced after it.
    fn before_forward(&self, torch: &mut Torch, syncs: bool);
    /// After it, with what it returns.
    fn after_forward(&self, torch: &mut Torch, outputs: &[Tensor]);
    /// After the backward pass.
    fn after_backward(&self, torch: &mut Torch);
    /// Itself as hooks of modules.
    fn hooks(self: Rc<Self>) -> Rc<dyn Hooks>;
    /// Itself around a stage of a pipeline, where it can be.
    fn staged(self: Rc<Self>) -> Option<Rc<dyn Staged>> {
        None
    }
}

/// What an engine does around a stage of a pipeline.
trait Staged: Wrapper {
    /// Which of a rank's stages it is.
    fn be_stage(&self, place: u8);
    /// Before a micro-batch goes forward.
    fn before_stage(&self, torch: &mut Torch);
    /// Before one goes back: nothing is reduced, and what is gathered stays.
    fn begin_backward(&self);
    /// After one went back.
    fn after_stage_backward(&self, torch: &mut Torch);
    /// After the last: gradients are reduced.
    fn reduce(&self, torch: &mut Torch);
    /// Begins to gather all there is.
    fn gather_all(&self, torch: &mut Torch);
    /// Waits for that.
    fn wait_for_all(&self, torch: &mut Torch);
    /// Lets go of all that is gathered.
    fn scatter_all(&self);
}

/// Runs a program on one card of many and returns what happened to its memory.
pub fn simulate(
    program: Rc<Program>,
    plan: &TrainPlan,
    parallel: &Parallel,
    layout: Option<&AdapterLayout>,
    (liger, split): (Option<LigerPatch>, Option<Split>),
    place: Place,
) -> Result<Log, PlanError> {
    let mut torch = Torch::new(Device::of(&plan.gpu));
    if let Engine::Fsdp2(options) = &parallel.engine {
        let Mesh { pp, cp, .. } = parallel.mesh;
        let ContextParallel { rotate, load_balance } = options.context;
        torch.ring = (cp > 1).then_some(Ring { ranks: cp, rank: place.cp, rotate, balanced: load_balance });
        if pp > 1 {
            return pipeline::simulate(torch, &program, (plan, parallel, options), split, place.pp);
        }
    }
    let mut loaded = match layout {
        Some(layout) => adapters::load(&mut torch, &program, plan, layout, None),
        None => {
            let (parameters, trained) = match &split {
                Some(split) => tensor_parallel::load(&mut torch, &program, split, plan),
                None => train::load(&mut torch, &program, plan),
            };
            Loaded { parameters, trained, wrapped: Default::default() }
        }
    };
    loaded.wrapped.liger = liger.map(|patch| Liger::new(&program, patch));
    loaded.wrapped.checkpoints = plan.checkpoints;
    loaded.wrapped.split = split;
    let (world, replicas) = (parallel.sharded_over(), parallel.mesh.dp_replicate);
    let wrapped = match &parallel.engine {
        Engine::Deepspeed(options) => return Ok(deepspeed::simulate(torch, program, plan, loaded, options, world)),
        Engine::Ddp(options) => ddp::wrap(&mut torch, &program, loaded, options),
        Engine::Fsdp1(options) => fsdp1::wrap(&mut torch, &program, loaded, options, (world, replicas)),
        Engine::Fsdp2(options) => fsdp2::wrap(&mut torch, &program, loaded, options, (world, replicas)),
        Engine::Tp(_) => Wrapped { loaded, on_host: Vec::new(), engine: Rc::new(alone::Alone) },
        // Has a runtime of its own.
        Engine::Megatron(_) => return Ok(Log::default()),
    };
    Ok(run(torch, program, (plan, parallel), wrapped))
}

fn run(mut torch: Torch, program: Rc<Program>, (plan, parallel): (&TrainPlan, &Parallel), wrapped: Wrapped) -> Log {
    let Wrapped { loaded: Loaded { parameters, trained, wrapped }, on_host, engine } = wrapped;
    if !on_host.is_empty() {
        let states = host::state_bytes(plan, &on_host);
        torch.log.borrow_mut().on_host("optimizer states", states, false);
    }
    let inputs = match parallel.mesh.cp {
        1 => train::batch(&mut torch, &program, plan),
        cp => pipeline::batch(&mut torch, &program, (1, cp), true),
    };
    let mut settings = train::settings(plan);
    settings.weights = parallel.compute_type().unwrap_or(settings.weights);
    // FSDP2 gathers parameters in another type and leaves buffers alone; FSDP1 is given a type for both.
    if matches!(parallel.engine, Engine::Fsdp1(_)) {
        settings.buffers = settings.weights;
    }
    let runner = Runner::with(Rc::clone(&program), parameters, inputs, settings, Rc::new(wrapped), None)
        .hooked(Rc::clone(&engine).hooks());
    let mut optimizer = Optimizer::new(&mut torch, plan.optimizer, &trained);
    torch.log.borrow_mut().events.push(Event::EmptyCache);
    for step in 0..train::STEPS {
        let micro_batches = plan.gradient_accumulation.clamp(1, train::MOST_MICRO_BATCHES);
        for micro in 0..micro_batches {
            let syncs = !parallel.no_sync || micro + 1 == micro_batches;
            let (loss, outputs) = train::phase(&mut torch, format!("{step}.{micro}.fwd"), |torch| {
                engine.before_forward(torch, syncs);
                let mut outputs = runner.forward(torch);
                engine.after_forward(torch, &outputs);
                let loss = outputs.first().cloned();
                if !plan.keep_outputs {
                    outputs.clear();
                }
                (loss, outputs)
            });
            train::phase(&mut torch, format!("{step}.{micro}.bwd"), |torch| {
                if let Some(loss) = &loss {
                    autograd::backward(torch, loss);
                }
                engine.after_backward(torch);
            });
            drop((loss, outputs));
            torch.drop_graph(0);
        }
        if plan.clip {
            train::phase(&mut torch, format!("{step}.clip"), |torch| train::clip(torch, &trained));
        }
        train::phase(&mut torch, format!("{step}.opt"), |torch| optimizer.step(torch, &trained));
        train::phase(&mut torch, format!("{step}.zero"), |_| {
            trained.iter().for_each(|parameter| drop(parameter.leaf.grad.take()));
        });
    }
    finish(torch, (optimizer, runner, trained, engine))
}

/// The log, once everything that writes to it is gone.
fn finish<T>(torch: Torch, holders: T) -> Log {
    let log = Rc::clone(&torch.log);
    drop((holders, torch));
    Rc::try_unwrap(log).map(std::cell::RefCell::into_inner).unwrap_or_default()
}
