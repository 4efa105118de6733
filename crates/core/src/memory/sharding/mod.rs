//! One card of many: what each engine keeps on it, and what it gathers and reduces when.
//!
//! | module | engine |
//! |---|---|
//! | [`shares`] | how much of a tensor each rank has |
//! | [`units`] | what is wrapped: which parameters go together |
//! | `ddp` | `DistributedDataParallel` |
//! | `deepspeed`, `zero0`, `zero12`, `zero3`, `coordinator` | DeepSpeed's loop, and what ZeRO does in it |
//! | `fsdp1` | `FullyShardedDataParallel` |
//! | `fsdp2` | `fully_shard` |
//!
//! The card is rank 0 of the data-parallel ranks: where a size does not divide, it has the largest share.

mod coordinator;
mod ddp;
mod deepspeed;
mod fsdp1;
mod fsdp2;
pub mod shares;
pub mod units;
mod zero0;
mod zero12;
mod zero3;

use std::rc::Rc;

use super::autograd;
use super::device::Device;
use super::log::{Event, Log};
use super::lower::hooks::Hooks;
use super::lower::liger::Liger;
use super::lower::{self, Runner};
use super::optimizer::{Optimizer, Trained};
use super::tensor::Tensor;
use super::torch::Torch;
use super::train;
use crate::model::Program;
use crate::plan::TrainPlan;
use crate::plan::liger::LigerPatch;
use crate::plan::parallel::{Engine, Parallel};

/// A model under an engine.
struct Wrapped {
    /// What the forward pass reads: parameters, then buffers.
    parameters: Vec<Tensor>,
    /// What the optimizer steps on.
    trained: Vec<Trained>,
    /// What runs around modules and passes.
    engine: Rc<dyn Wrapper>,
}

/// What an engine does around passes and modules.
trait Wrapper: Hooks {
    /// Before the forward pass.
    fn before_forward(&self, torch: &mut Torch);
    /// After it, with what it returns.
    fn after_forward(&self, torch: &mut Torch, outputs: &[Tensor]);
    /// After the backward pass.
    fn after_backward(&self, torch: &mut Torch);
    /// Itself as hooks of modules.
    fn hooks(self: Rc<Self>) -> Rc<dyn Hooks>;
}

/// Runs a program on one card of many and returns what happened to its memory.
pub fn simulate(program: Rc<Program>, plan: &TrainPlan, parallel: &Parallel, liger: Option<LigerPatch>) -> Log {
    let kernels = lower::Wrapped { liger: liger.map(|patch| Liger::new(&program, patch)), ..Default::default() };
    if let Engine::Deepspeed(options) = &parallel.engine {
        return deepspeed::simulate(program, plan, options, parallel.mesh.dp_shard, kernels);
    }
    let mut torch = Torch::new(Device::of(&plan.gpu));
    let (parameters, trained) = train::load(&mut torch, &program, plan);
    let wrapped = match &parallel.engine {
        Engine::Ddp(options) => ddp::wrap(&mut torch, &program, (parameters, trained), options),
        Engine::Fsdp1(options) => {
            fsdp1::wrap(&mut torch, &program, (parameters, trained), options, parallel.mesh.dp_shard)
        }
        Engine::Fsdp2(options) => {
            fsdp2::wrap(&mut torch, &program, (parameters, trained), options, parallel.mesh.dp_shard)
        }
        Engine::Deepspeed(_) | Engine::Megatron(_) => return Log::default(),
    };
    run(torch, program, (plan, parallel), wrapped, kernels)
}

fn run(
    mut torch: Torch,
    program: Rc<Program>,
    (plan, parallel): (&TrainPlan, &Parallel),
    wrapped: Wrapped,
    kernels: lower::Wrapped,
) -> Log {
    let Wrapped { parameters, trained, engine } = wrapped;
    let inputs = train::batch(&mut torch, &program, plan);
    let mut settings = train::settings(plan);
    settings.weights = parallel.compute_type().unwrap_or(plan.weights);
    let runner = Runner::with(Rc::clone(&program), parameters, inputs, settings, Rc::new(kernels), None)
        .hooked(Rc::clone(&engine).hooks());
    let mut optimizer = Optimizer::new(&mut torch, plan.optimizer, &trained);
    torch.log.borrow_mut().events.push(Event::EmptyCache);
    for step in 0..train::STEPS {
        for micro in 0..plan.gradient_accumulation.max(1) {
            let (loss, outputs) = train::phase(&mut torch, format!("{step}.{micro}.fwd"), |torch| {
                engine.before_forward(torch);
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
