//! DeepSpeed's training loop: `engine(**batch)`, `engine.backward`, `engine.step`.

use std::rc::Rc;

use super::{finish, zero0, zero3, zero12};
use crate::memory::adapters::Loaded;
use crate::memory::autograd;
use crate::memory::log::{Event, Log};
use crate::memory::lower::hooks::Hooks;
use crate::memory::lower::Runner;
use crate::memory::optimizer::{Optimizer, Trained};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::train;
use crate::model::Program;
use crate::plan::parallel::DeepSpeed;
use crate::plan::{self, TrainPlan};

/// What a stage of ZeRO does around passes.
pub(super) trait Stage {
    /// What the optimizer steps on.
    fn trained(&self) -> &[Trained];
    /// Once everything is loaded.
    fn prepare(&self, _torch: &mut Torch, _optimizer: &mut Optimizer, _plan: plan::Optimizer) {}
    /// After the forward pass, with what it returns.
    fn after_forward(&self, _torch: &mut Torch, _outputs: &[Tensor]) {}
    /// Before the forward pass.
    fn before_forward(&self, _torch: &mut Torch) {}
    /// After the backward pass.
    fn after_backward(&self, torch: &mut Torch);
    /// One step.
    fn step(&self, torch: &mut Torch, optimizer: &mut Optimizer);
    /// What runs around modules.
    fn hooks(self: Rc<Self>) -> Option<Rc<dyn Hooks>> {
        None
    }
}

/// Runs a program on one card of a DeepSpeed world.
pub(super) fn simulate(
    mut torch: Torch,
    program: Rc<Program>,
    plan: &TrainPlan,
    loaded: Loaded,
    options: &DeepSpeed,
    world: u64,
) -> Log {
    let Loaded { mut parameters, trained, wrapped } = loaded;
    let stage = match options.zero.stage {
        0 => zero0::wrap(&mut torch, trained),
        3 => zero3::wrap(&mut torch, &program, &mut parameters, trained, &options.zero, world),
        1 | 2 => zero12::wrap(&mut torch, &mut parameters, trained, &options.zero, world),
        _ => return Log::default(),
    };
    let inputs = train::batch(&mut torch, &program, plan);
    let wrapped = Rc::new(wrapped);
    let mut runner = Runner::with(Rc::clone(&program), parameters, inputs, train::settings(plan), wrapped, None);
    if let Some(hooks) = Rc::clone(&stage).hooks() {
        runner = runner.hooked(hooks);
    }
    let mut optimizer = Optimizer::new(&mut torch, plan.optimizer, stage.trained());
    stage.prepare(&mut torch, &mut optimizer, plan.optimizer);
    torch.log.borrow_mut().events.push(Event::EmptyCache);
    for step in 0..train::STEPS {
        let outputs = train::phase(&mut torch, format!("{step}.0.fwd"), |torch| {
            stage.before_forward(torch);
            let mut outputs = runner.forward(torch);
            stage.after_forward(torch, &outputs);
            if !plan.keep_outputs {
                outputs.truncate(1);
            }
            outputs
        });
        train::phase(&mut torch, format!("{step}.0.bwd"), |torch| {
            if let Some(loss) = outputs.first() {
                autograd::backward(torch, loss);
            }
            stage.after_backward(torch);
        });
        drop(outputs);
        torch.drop_graph(0);
        train::phase(&mut torch, format!("{step}.opt"), |torch| stage.step(torch, &mut optimizer));
    }
    finish(torch, (optimizer, runner, stage))
}
