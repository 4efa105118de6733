//! A model and a batch onto the card, before any engine has touched them.

use super::adapters::{self, Loaded, Made};
use super::loading;
use super::log::Category;
use super::lower::Wrapped;
use super::lower::head::HeadLoss;
use super::lower::liger::Liger;
use super::lower::tensor_parallel::Split;
use super::optimizer::{Sorted, Trained};
use super::tensor::Tensor;
use super::tensor_parallel;
use super::torch::Torch;
use super::torch::stored::StoredKernel;
use crate::dtype::DType;
use crate::model::op::{Input, Op, ValueId};
use crate::model::{Program, Shape, Step};
use crate::plan::liger::LigerPatch;
use crate::plan::{AdapterLayout, ModelCode, TrainPlan};
use crate::source::quantization::Quantization;

/// What of a model is not as its program says.
#[derive(Clone, Default)]
pub(super) struct Changes<'a> {
    /// What the plan's adapter comes to.
    pub(super) layout: Option<&'a AdapterLayout>,
    /// What Liger patches.
    pub(super) liger: Option<LigerPatch>,
    /// How a quantised checkpoint holds it.
    pub(super) base: Option<(&'a Quantization, StoredKernel)>,
    /// How it is split over tensor-parallel cards.
    pub(super) split: Option<Split>,
    /// What its checkpoint calls otherwise.
    pub(super) names: loading::Names,
}

/// The model of a plan on the card.
pub(super) fn model(torch: &mut Torch, program: &Program, plan: &TrainPlan, changes: Changes) -> Loaded {
    let Changes { layout, liger, base, split, names } = changes;
    let plain = |(parameters, trained)| Loaded { parameters, trained, wrapped: Default::default() };
    let mut loaded = match (layout, &split) {
        (Some(layout), _) => adapters::load(torch, program, plan, layout, (base, names)),
        (None, Some(split)) => plain(tensor_parallel::load(torch, program, split, plan)),
        (None, None) if plan.model_code != ModelCode::Transformers => adapters::load_own(torch, program, plan),
        (None, None) if plan.job.loads_straight() => pretrained(torch, program, plan, names),
        (None, None) => plain(parameters(torch, program, plan)),
    };
    loaded.wrapped.liger = liger.map(|patch| Liger::new(program, patch));
    loaded.wrapped.checkpoints = plan.checkpoints;
    loaded.wrapped.loss = HeadLoss::new(program, plan.loss);
    loaded.wrapped.split = split;
    if let Some(dtype) = plan.gradients {
        loaded.trained.iter().for_each(|parameter| parameter.leaf.grad_dtype.set(Some(dtype)));
    }
    loaded
}

/// Parameters straight from a checkpoint, then buffers.
fn pretrained(torch: &mut Torch, program: &Program, plan: &TrainPlan, names: loading::Names) -> Loaded {
    let scheme = plan.quantization.as_ref();
    let load = |torch: &mut Torch| loading::from_pretrained(torch, program, plan.weights, scheme, names);
    let (mut parameters, quantised) = torch.in_category(Category::Weights, load);
    let sorted = Sorted::by(plan.optimizer, program);
    let mut trained = Vec::new();
    for &id in program.registration.iter().filter(|id| !quantised.contains_key(id)) {
        if !plan.is_frozen(&program.parameters[id.0 as usize]) {
            let (tensor, leaf) = torch.leaf(parameters[id.0 as usize].clone());
            trained.push(Trained { tensor: tensor.clone(), leaf, apart: sorted.apart(id) });
            parameters[id.0 as usize] = tensor;
        }
    }
    parameters.extend(adapters::buffers(torch, program, plan.weights));
    Loaded { parameters, trained, wrapped: Wrapped { quantised, ..Wrapped::default() } }
}

/// Parameters and buffers onto the card, one by one.
pub(super) fn parameters(torch: &mut Torch, program: &Program, plan: &TrainPlan) -> (Vec<Tensor>, Vec<Trained>) {
    let mut trained = Vec::new();
    let mut parameters: Vec<Option<Tensor>> = vec![None; program.parameters.len()];
    let untied = |torch: &mut Torch, after| {
        torch.in_category(Category::Weights, |torch| adapters::untied(torch, program, after, Made::by(plan)))
    };
    let mut transient = untied(torch, None);
    let mut wide = torch.in_category(Category::Weights, |torch| Made::by(plan).wide(torch, program));
    let (owners, sorted) = (program.owners(), Sorted::by(plan.optimizer, program));
    for &id in &program.registration {
        let parameter = &program.parameters[id.0 as usize];
        torch.set_module(owners[id.0 as usize]);
        let mut tensor =
            torch.in_category(Category::Weights, |torch| torch.fresh("parameter", parameter.shape, plan.weights));
        drop(wide.get_mut(id.0 as usize).and_then(Option::take));
        if !plan.is_frozen(parameter) {
            let leaf;
            (tensor, leaf) = torch.leaf(tensor);
            trained.push(Trained { tensor: tensor.clone(), leaf, apart: sorted.apart(id) });
        }
        parameters[id.0 as usize] = Some(tensor);
        transient.extend(untied(torch, Some(id)));
    }
    torch.set_module(0);
    // A stage of a pipeline has not all of them.
    let absent = |torch: &mut Torch, at: usize| torch.phantom(program.parameters[at].shape, plan.weights);
    let mut parameters: Vec<Tensor> =
        (parameters.into_iter().enumerate()).map(|(at, one)| one.unwrap_or_else(|| absent(torch, at))).collect();
    parameters.extend(adapters::buffers(torch, program, plan.weights));
    drop(transient);
    (parameters, trained)
}

/// What a batch brings.
#[derive(Clone, Default)]
pub(super) struct Batch {
    /// What the program reads.
    pub(super) inputs: Vec<(ValueId, Tensor)>,
    /// What comes along and only takes memory: a mask or positions that the lowering reads no values of.
    pub(super) beside: Vec<Tensor>,
}

/// The tensors of a plan's batch, made on the host and copied over.
pub(super) fn batch(torch: &mut Torch, program: &Program, plan: &TrainPlan) -> Batch {
    batch_of(torch, program, plan.weights, Beside { mask: plan.batch.mask, documents: None })
}

/// What a batch has besides what a program reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Beside {
    /// A 2-D mask.
    pub(super) mask: bool,
    /// Where so many samples in a row begin and end.
    pub(super) documents: Option<u64>,
}

/// The tensors of a batch, media in the type of the weights.
pub(super) fn batch_of(torch: &mut Torch, program: &Program, weights: DType, beside: Beside) -> Batch {
    torch.in_category(Category::Batch, |torch| {
        let mut inputs = Vec::new();
        for step in &program.steps {
            let Step::Run { op: Op::Input(kind), outputs, .. } = step else { continue };
            let shape = program.values[outputs[0].0 as usize];
            let dtype = match kind {
                Input::Pixels | Input::Audio => weights,
                Input::Other(dtype) => *dtype,
                _ => DType::I64,
            };
            inputs.push((outputs[0], torch.fresh("batch", shape, dtype)));
        }
        let shape = inputs.first().map_or(Shape::new(&[]), |(_, tensor): &(_, Tensor)| tensor.shape);
        let mask = beside.mask.then(|| torch.fresh("batch", shape, DType::I64));
        let ends = beside.documents.into_iter().flat_map(|documents| {
            // TRL's collator: positions, the ends for queries and for keys, the number of each token's sample.
            let positions =
                !program.steps.iter().any(|s| matches!(s, Step::Run { op: Op::Input(Input::Positions), .. }));
            let ends = Shape::from([documents + 1]);
            let all = [(shape, DType::I64), (ends, DType::I32), (ends, DType::I32), (shape, DType::I32)];
            all.into_iter().skip(usize::from(!positions))
        });
        let ends: Vec<_> = ends.collect();
        let ends = ends.into_iter().map(|(shape, dtype)| torch.fresh("batch", shape, dtype));
        Batch { inputs, beside: mask.into_iter().chain(ends).collect() }
    })
}

/// The tensors of the batch of a step, of which micro-batches and context-parallel cards see parts.
pub(super) fn shared_batch(torch: &mut Torch, program: &Program, (micro, cp): (u64, u64), positions: bool) -> Batch {
    torch.in_category(Category::Batch, |torch| {
        let mut inputs = Vec::new();
        for step in &program.steps {
            let Step::Run { op: Op::Input(_), outputs, .. } = step else { continue };
            let part = program.values[outputs[0].0 as usize];
            let rows = part.with(0, part.size(0).saturating_mul(micro));
            let whole = torch.fresh("batch", rows.with(1, part.size(1).saturating_mul(cp)), DType::I64);
            inputs.push((outputs[0], whole.with_shape(part)));
        }
        let first = inputs.first().filter(|_| positions).map(|(_, first): &(_, Tensor)| first.shape);
        let beside = first.into_iter().map(|shape| {
            let whole = Shape::from([1, shape.size(1).saturating_mul(cp)]);
            torch.fresh("batch", whole, DType::I64)
        });
        let beside = beside.collect();
        Batch { inputs, beside }
    })
}
