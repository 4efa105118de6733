//! A training run on one card: load, forward, backward, step.

use std::rc::Rc;

use super::autograd::{self, Leaf};
use super::device::Device;
use super::log::{Category, Event, Log};
use super::lower::{Runner, Settings};
use super::optimizer::{Implementation, Optimizer, OptimizerKind, Trained};
use super::tensor::Tensor;
use super::torch::Torch;
use crate::dtype::DType;
use crate::model::op::{Input, Op, ValueId};
use crate::model::{Program, Shape, Step};

/// What is trained, and how.
#[derive(Debug, Clone)]
pub struct TrainRun {
    /// The card.
    pub device: Device,
    /// Attention, autocast, checkpointing.
    pub settings: Settings,
    /// The optimizer.
    pub optimizer: OptimizerKind,
    /// How it steps.
    pub implementation: Implementation,
    /// Micro-batches per step.
    pub accumulation: u32,
    /// Whether gradients are clipped by their norm.
    pub clip: bool,
    /// Whether the batch brings an all-ones mask.
    pub mask: bool,
    /// Steps to run.
    pub steps: u32,
    /// Whether the caller keeps the model's output until backward is over.
    pub keep_outputs: bool,
}

/// Runs it and returns what happened to memory.
pub fn simulate(program: Program, run: &TrainRun) -> Log {
    let mut torch = Torch::new(run.device);
    let program = Rc::new(program);
    let (parameters, trained) = load(&mut torch, &program, run.settings.weights);
    let inputs = batch(&mut torch, &program, run);
    let runner = Runner::new(Rc::clone(&program), parameters, inputs, run.settings);
    let mut optimizer = Optimizer::new(&mut torch, run.optimizer, run.implementation, &trained);
    torch.log.borrow_mut().events.push(Event::EmptyCache);
    for step in 0..run.steps {
        for micro in 0..run.accumulation.max(1) {
            phase(&torch, format!("{step}.{micro}.fwd"));
            let mut outputs = runner.forward(&mut torch);
            let loss = outputs.first().cloned();
            if !run.keep_outputs {
                outputs.clear();
            }
            phase(&torch, format!("{step}.{micro}.bwd"));
            if let Some(loss) = loss {
                autograd::backward(&mut torch, &loss);
            }
        }
        if run.clip {
            phase(&torch, format!("{step}.clip"));
            clip(&mut torch, &trained);
        }
        phase(&torch, format!("{step}.opt"));
        optimizer.step(&mut torch, &trained);
        phase(&torch, format!("{step}.zero"));
        trained.iter().for_each(|parameter| drop(parameter.leaf.grad.take()));
    }
    let log = Rc::clone(&torch.log);
    phase(&torch, "end".to_owned());
    drop((optimizer, runner, trained, torch));
    Rc::try_unwrap(log).map(std::cell::RefCell::into_inner).unwrap_or_default()
}

fn phase(torch: &Torch, name: String) {
    torch.log.borrow_mut().phase(name);
}

/// Parameters and buffers onto the card, one by one.
fn load(torch: &mut Torch, program: &Program, weights: DType) -> (Vec<Tensor>, Vec<Trained>) {
    let mut trained = Vec::new();
    let mut parameters = Vec::new();
    for parameter in &program.parameters {
        let tensor = torch.in_category(Category::Weights, |torch| torch.fresh("parameter", parameter.shape, weights));
        let (tensor, leaf): (Tensor, Rc<Leaf>) = torch.leaf(tensor);
        trained.push(Trained { tensor: tensor.clone(), leaf });
        parameters.push(tensor);
    }
    torch.in_category(Category::Buffers, |torch| {
        for buffer in &program.buffers {
            // Buffers live as long as the run; their handle is kept by forgetting it in the parameter list.
            parameters.push(torch.fresh("buffer", buffer.shape, buffer.dtype));
        }
    });
    (parameters, trained)
}

/// The tensors of the batch, made on the host and copied over.
fn batch(torch: &mut Torch, program: &Program, run: &TrainRun) -> Vec<(ValueId, Tensor)> {
    let mut inputs = Vec::new();
    torch.in_category(Category::Batch, |torch| {
        for step in &program.steps {
            let Step::Run { op: Op::Input(kind), outputs, .. } = step else { continue };
            let shape = program.values[outputs[0].0 as usize];
            let dtype = match kind {
                Input::Pixels | Input::Audio => run.settings.weights,
                Input::Other(dtype) => *dtype,
                _ => DType::I64,
            };
            inputs.push((outputs[0], torch.fresh("batch", shape, dtype)));
        }
        if run.mask {
            let shape = inputs.first().map_or(Shape::new(&[]), |(_, tensor)| tensor.shape);
            inputs.push((ValueId(u32::MAX), torch.fresh("batch", shape, DType::I64)));
        }
    });
    inputs
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
