//! DeepSpeed's training loop: `engine(**batch)`, `engine.backward`, `engine.step`.

use std::rc::Rc;

use super::members::{self, Member};
use super::{finish, zero0, zero1_wide, zero3, zero12};
use crate::dtype::DType;
use crate::memory::adapters::Loaded;
use crate::memory::autograd;
use crate::memory::autograd::Leaf;
use crate::memory::log::{Category, Event, Log};
use crate::memory::lower::hooks::Hooks;
use crate::memory::lower::{Runner, Settings};
use crate::memory::optimizer::{Optimizer, Trained};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::train;
use crate::model::{Program, Shape};
use crate::plan::parallel::DeepSpeed;
use crate::plan::{self, TrainPlan};

/// What a stage of ZeRO does around passes.
pub(in crate::memory) trait Stage {
    /// A micro-batch begins; `boundary`: whether a step follows it.
    fn begin(&self, boundary: bool);
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
    mut loaded: Loaded,
    options: &DeepSpeed,
    world: u64,
) -> Log {
    let members = narrowed(&mut torch, &program, &mut loaded, plan.weights);
    let zero = &options.zero;
    // MiCS: everything is shared as if the others were not there; gradients are summed over the copies in place.
    let world = zero.mics_ranks().unwrap_or(world);
    let stage: Rc<dyn Stage> = match zero.stage {
        0 => {
            drop(members);
            zero0::wrap(&mut torch, std::mem::take(&mut loaded.trained))
        }
        3 => zero3::wrap(&mut torch, &program, &mut loaded, members, (plan, options), world),
        1 if options.accumulates_wide(plan.weights) => zero1_wide::wrap(&mut torch, &mut loaded, members, world),
        _ => zero12::wrap(&mut torch, &mut loaded, members, (plan, options), world),
    };
    let Loaded { parameters, wrapped, .. } = loaded;
    let inputs = train::batch(&mut torch, &program, plan);
    let settings = Settings { weights: plan.weights, buffers: plan.weights, ..train::settings(plan) };
    let mut runner = Runner::with(Rc::clone(&program), parameters, inputs, settings, Rc::new(wrapped), None);
    if let Some(hooks) = Rc::clone(&stage).hooks() {
        runner = runner.hooked(hooks);
    }
    let mut optimizer = Optimizer::new(&mut torch, plan.optimizer, stage.trained());
    stage.prepare(&mut torch, &mut optimizer, plan.optimizer);
    torch.log.borrow_mut().events.push(Event::EmptyCache);
    for step in 0..train::STEPS {
        let micro_batches = plan.gradient_accumulation.clamp(1, train::MOST_MICRO_BATCHES);
        for micro in 0..micro_batches {
            stage.begin(micro + 1 == micro_batches);
            let outputs = train::phase(&mut torch, format!("{step}.{micro}.fwd"), |torch| {
                stage.before_forward(torch);
                let mut outputs = runner.forward(torch);
                stage.after_forward(torch, &outputs);
                if !plan.keep_outputs {
                    outputs.truncate(1);
                }
                outputs
            });
            train::phase(&mut torch, format!("{step}.{micro}.bwd"), |torch| {
                if let Some(loss) = outputs.first() {
                    autograd::backward(torch, loss);
                }
                stage.after_backward(torch);
            });
            drop(outputs);
            torch.drop_graph(0);
        }
        train::phase(&mut torch, format!("{step}.opt"), |torch| stage.step(torch, &mut optimizer));
    }
    finish(torch, (optimizer, runner, stage))
}

/// ZeRO 0 to 2 on parameters of these shapes, which are made here; returned are the tensors to compute with.
pub(in crate::memory) fn wrap_plain(
    torch: &mut Torch,
    shapes: &[Shape],
    (plan, options): (&TrainPlan, &DeepSpeed),
    world: u64,
) -> (Rc<dyn Stage>, Vec<Tensor>) {
    let make = |shape: &Shape| {
        let made = torch.in_category(Category::Weights, |torch| torch.fresh("parameter", *shape, plan.weights));
        torch.leaf(made)
    };
    let made: Vec<(Tensor, Rc<Leaf>)> = shapes.iter().map(make).collect();
    let members =
        made.iter().enumerate().map(|(at, (tensor, leaf))| Member::plain(at, tensor.clone(), Rc::clone(leaf)));
    let members: Vec<Member> = members.collect();
    let parameters = made.iter().map(|(tensor, _)| tensor.clone()).collect();
    let trained: Vec<Trained> = made.into_iter().map(|(tensor, leaf)| Trained { tensor, leaf }).collect();
    let mut loaded = Loaded { parameters, trained, wrapped: Default::default() };
    let stage = match options.zero.stage {
        0 => {
            drop(members);
            zero0::wrap(torch, std::mem::take(&mut loaded.trained))
        }
        1 if options.accumulates_wide(plan.weights) => zero1_wide::wrap(torch, &mut loaded, members, world),
        _ => zero12::wrap(torch, &mut loaded, members, (plan, options), world),
    };
    (stage, loaded.parameters)
}

/// `module.bfloat16()` (or `.half()`): every parameter in the model's type, adapters too.
fn narrowed(torch: &mut Torch, program: &Program, loaded: &mut Loaded, dtype: DType) -> Vec<Member> {
    for member in members::of(program, loaded) {
        if member.is_packed() || member.tensor.dtype == dtype {
            continue;
        }
        let narrow = torch.in_category(member.category(), |torch| torch.cast(&member.tensor.detached(), dtype));
        let Some(old) = &member.leaf else {
            member.replace(loaded, narrow);
            continue;
        };
        let (tensor, leaf) = torch.leaf(narrow);
        for trained in loaded.trained.iter_mut().filter(|trained| Rc::ptr_eq(&trained.leaf, old)) {
            *trained = Trained { tensor: tensor.clone(), leaf: Rc::clone(&leaf) };
        }
        member.replace(loaded, tensor);
    }
    members::of(program, loaded)
}
