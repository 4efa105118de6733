//! A training run on one card: load, forward, backward, step.

use std::rc::Rc;

use super::adapters::{self, Loaded};
use super::autograd::{self, Leaf};
use super::device::Device;
use super::log::{Category, Event, Log};
use super::lower::head::HeadLoss;
use super::lower::liger::Liger;
use super::lower::{Runner, Settings, Wrapped};
use super::optimizer::{Optimizer, Trained, in_backward};
use super::repeat::{self, Start};
use super::tensor::Tensor;
use super::torch::Torch;
use super::torch::attention::Kernel;
use super::torch::stored::StoredKernel;
use crate::dtype::DType;
use crate::model::op::{Input, Op, ParameterId, ValueId};
use crate::model::{Module, ModuleKind, Program, Shape, Step};
use crate::plan::liger::LigerPatch;
use crate::plan::{AdapterLayout, Checkpointing, ModelCode, OptimizerKind, TrainPlan};

/// Steps that are run: the first makes the optimizer's state, the second is what all later ones allocate, and with the
/// third the cache of segments has settled.
pub(super) const STEPS: u32 = 3;

/// Micro-batches that are run: from the second on all are alike, and after a few the cache of segments has settled.
pub(super) const MOST_MICRO_BATCHES: u32 = 16;

/// Runs a program and returns what happened to memory.
///
/// `layout` is what the plan's adapter comes to on this program, `liger` what Liger patches in it, `base` how a quantised
/// checkpoint holds the model.
pub fn simulate(
    program: Rc<Program>,
    plan: &TrainPlan,
    layout: Option<&AdapterLayout>,
    liger: Option<LigerPatch>,
    base: Option<(&crate::source::quantization::Quantization, StoredKernel)>,
) -> Log {
    let mut torch = Torch::new(Device::of(&plan.gpu));
    torch.log.borrow_mut().reserve(program.steps.len());
    let Loaded { parameters, trained, mut wrapped } = match layout {
        Some(layout) => adapters::load(&mut torch, &program, plan, layout, base),
        None if plan.model_code != ModelCode::Transformers => adapters::load_own(&mut torch, &program, plan),
        None => {
            let (parameters, trained) = load(&mut torch, &program, plan);
            Loaded { parameters, trained, wrapped: Wrapped::default() }
        }
    };
    wrapped.liger = liger.map(|patch| Liger::new(&program, patch));
    wrapped.checkpoints = plan.checkpoints;
    wrapped.loss = HeadLoss::new(&program, plan.loss);
    if let Some(dtype) = plan.gradients {
        trained.iter().for_each(|parameter| parameter.leaf.grad_dtype.set(Some(dtype)));
    }
    torch.forced_kernel = plan.sdpa_kernel.map(Kernel::from);
    let inputs = batch(&mut torch, &program, plan);
    let runner = Runner::with(Rc::clone(&program), parameters, inputs, settings(plan), Rc::new(wrapped), None);
    let projects = matches!(plan.optimizer.kind, OptimizerKind::GaLoreAdamW | OptimizerKind::ApolloAdamW);
    let whole = if layout.is_none() && projects { whole(&program, plan) } else { Vec::new() };
    let wide = if plan.optimizer.wide_embeddings { embeddings(&program, plan, layout) } else { Vec::new() };
    let mut optimizer = match plan.optimizer_in_backward {
        true => {
            in_backward::attach(&mut torch, plan.optimizer, &trained, &whole);
            None
        }
        false => Some(Optimizer::new(&mut torch, plan.optimizer, &trained).with_whole(whole).with_wide(wide)),
    };
    torch.log.borrow_mut().events.push(Event::EmptyCache);
    let start = Start::now(&torch.log.borrow());
    let mut held = Vec::new();
    if plan.keep_loss {
        // A step begins with what the last one left behind.
        (0..STEPS)
            .for_each(|step| run_step(&mut torch, &runner, optimizer.as_mut(), &trained, (plan, step), &mut held));
        drop(held);
        torch.drop_graph(0);
    } else {
        run_step(&mut torch, &runner, optimizer.as_mut(), &trained, (plan, 0), &mut held);
        repeat::first_step(&mut torch.log.borrow_mut(), start, STEPS);
    }
    let log = Rc::clone(&torch.log);
    drop((optimizer, runner, trained, torch));
    Rc::try_unwrap(log).map(std::cell::RefCell::into_inner).unwrap_or_default()
}

/// One step; `held` is what the loop's names hold from one micro-batch to the next.
fn run_step(
    torch: &mut Torch,
    runner: &Rc<Runner>,
    mut optimizer: Option<&mut Optimizer>,
    trained: &[Trained],
    (plan, step): (&TrainPlan, u32),
    held: &mut Vec<Tensor>,
) {
    for micro in 0..plan.gradient_accumulation.clamp(1, MOST_MICRO_BATCHES) {
        // Loss and output die between the phases: the loop rebinds their names.
        torch.last = Some((std::mem::take(held), torch.graph_mark()));
        let (loss, outputs) = phase(torch, format!("{step}.{micro}.fwd"), |torch| {
            let mut outputs = runner.forward(torch);
            let loss = outputs.first().cloned();
            if !plan.keep_outputs {
                outputs.clear();
            }
            torch.let_go_of_last();
            (loss, outputs)
        });
        phase(torch, format!("{step}.{micro}.bwd"), |torch| {
            if let Some(loss) = &loss {
                autograd::backward(torch, loss);
            }
        });
        match plan.keep_loss {
            true => held.extend(loss.into_iter().chain(outputs)),
            false => {
                drop((loss, outputs));
                torch.drop_graph(0);
            }
        }
    }
    if plan.clip {
        phase(torch, format!("{step}.clip"), |torch| clip(torch, trained));
    }
    phase(torch, format!("{step}.opt"), |torch| {
        if let Some(optimizer) = optimizer.as_deref_mut() {
            optimizer.step(torch, trained);
        }
    });
    phase(torch, format!("{step}.zero"), |_| {
        if let Some(optimizer) = optimizer {
            optimizer.zero_masters();
        }
        trained.iter().for_each(|parameter| drop(parameter.leaf.grad.take()));
    });
}

pub(super) fn phase<T>(torch: &mut Torch, name: String, body: impl FnOnce(&mut Torch) -> T) -> T {
    torch.log.borrow_mut().phase(name);
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
        save_on_cpu: plan.save_on_cpu,
    }
}

/// Parameters and buffers onto the card, one by one.
pub(super) fn load(torch: &mut Torch, program: &Program, plan: &TrainPlan) -> (Vec<Tensor>, Vec<Trained>) {
    let mut trained = Vec::new();
    let mut parameters: Vec<Option<Tensor>> = vec![None; program.parameters.len()];
    let untied = |torch: &mut Torch, after| {
        torch.in_category(Category::Weights, |torch| adapters::untied(torch, program, after, plan.weights))
    };
    let mut transient = untied(torch, None);
    let owners = program.owners();
    for &id in &program.registration {
        let parameter = &program.parameters[id.0 as usize];
        torch.set_module(owners[id.0 as usize]);
        let mut tensor =
            torch.in_category(Category::Weights, |torch| torch.fresh("parameter", parameter.shape, plan.weights));
        if !plan.is_frozen(parameter) {
            let leaf: Rc<Leaf>;
            (tensor, leaf) = torch.leaf(tensor);
            trained.push(Trained { tensor: tensor.clone(), leaf });
        }
        parameters[id.0 as usize] = Some(tensor);
        transient.extend(untied(torch, Some(id)));
    }
    torch.set_module(0);
    // A stage of a pipeline has not all of them.
    let absent = |torch: &mut Torch, at: usize| torch.phantom(program.parameters[at].shape, plan.weights);
    let mut parameters: Vec<Tensor> =
        (parameters.into_iter().enumerate()).map(|(at, one)| one.unwrap_or_else(|| absent(torch, at))).collect();
    torch.in_category(Category::Buffers, |torch| {
        for buffer in &program.buffers {
            // Buffers live as long as the run; their handle is kept by forgetting it in the parameter list.
            let dtype = if buffer.model_type { plan.weights } else { buffer.dtype };
            parameters.push(torch.fresh("buffer", buffer.shape, dtype));
        }
    });
    drop(transient);
    (parameters, trained)
}

/// Which trained parameters are tables of `nn.Embedding`.
fn embeddings(program: &Program, plan: &TrainPlan, layout: Option<&AdapterLayout>) -> Vec<bool> {
    let is_table = |id: &ParameterId| {
        let of = |module: &Module| module.parameters.contains(id);
        program.modules.iter().any(|m| matches!(m.kind, ModuleKind::Embedding { .. }) && of(m))
    };
    match layout {
        Some(_) => Vec::new(),
        None => {
            let of = |id: &ParameterId| &program.parameters[id.0 as usize];
            program.registration.iter().filter(|id| !plan.is_frozen(of(id))).map(is_table).collect()
        }
    }
}

/// Which trained parameters are embeddings and output heads: some optimizers treat those apart, by name as here.
fn whole(program: &Program, plan: &TrainPlan) -> Vec<bool> {
    let all = program.registration.iter().map(|id| &program.parameters[id.0 as usize]);
    let trained = all.filter(|parameter| !plan.is_frozen(parameter));
    trained.map(|one| ["embed", "embd", "wte", "lm_head"].iter().any(|part| one.name.contains(part))).collect()
}

/// The tensors of the batch, made on the host and copied over.
pub(super) fn batch(torch: &mut Torch, program: &Program, plan: &TrainPlan) -> Vec<(ValueId, Tensor)> {
    let mut inputs = Vec::new();
    torch.in_category(Category::Batch, |torch| {
        for step in &program.steps {
            let Step::Run { op: Op::Input(kind), outputs, .. } = step else { continue };
            let shape = program.values[outputs[0].0 as usize];
            let dtype = match kind {
                Input::Pixels | Input::Audio => plan.weights,
                Input::Other(dtype) => *dtype,
                _ => DType::I64,
            };
            inputs.push((outputs[0], torch.fresh("batch", shape, dtype)));
        }
        if plan.batch.mask {
            let shape = inputs.first().map_or(Shape::new(&[]), |(_, tensor)| tensor.shape);
            inputs.push((ValueId(u32::MAX), torch.fresh("batch", shape, DType::I64)));
        }
    });
    inputs
}

/// `clip_grad_norm_`: a norm per parameter, then in place.
pub(super) fn clip(torch: &mut Torch, trained: &[Trained]) {
    torch.in_category(Category::Temporaries, |torch| {
        let with_gradient = trained.iter().filter(|parameter| parameter.leaf.grad.borrow().is_some());
        let norms: Vec<Tensor> =
            with_gradient.map(|_| torch.fresh("_foreach_norm", Shape::new(&[]), DType::F32)).collect();
        let stacked = torch.fresh("stack", Shape::from([norms.len() as u64]), DType::F32);
        drop((norms, stacked));
    });
}
