//! Load with adapters and quantised weights: what is on the card before the first step.

use std::collections::BTreeMap;

use super::loading;
use super::log::{Category, Event};
use super::lower::{LoraWeights, Wrapped};
use super::optimizer::{Sorted, Trained};
use super::other_adapters;
use super::outliers;
use super::stored;
use super::tensor::Tensor;
use super::torch::Torch;
use super::torch::quantised::QuantisedWeight;
use super::torch::stored::StoredKernel;
use crate::dtype::DType;
use crate::model::op::{Buffer, ModuleId, Op, ParameterId, Role};
use crate::model::{Module, ModuleKind, Program, Shape, Step};
use crate::plan::adapter::{self, AdaptedKind, AdaptedModule, AdapterLayout, LoraPlan};
use crate::plan::{AdapterPlan, Checkpointing, InferPlan, Quantization, TrainPlan};

/// Everything that is loaded.
pub(super) struct Loaded {
    /// The model's parameters, by id, then its buffers.
    pub(super) parameters: Vec<Tensor>,
    /// What is trained.
    pub(super) trained: Vec<Trained>,
    /// What stands in place of plain parameters.
    pub(super) wrapped: Wrapped,
}

/// How a quantised checkpoint holds a model, where it does.
type Stored<'a> = Option<(&'a crate::source::quantization::Quantization, StoredKernel)>;

/// The type hidden states have: that of embeddings and norms.
pub(super) fn hidden_dtype(plan: &TrainPlan) -> DType {
    match &plan.quantization {
        Some(quantization) if quantization.prepare && plan.weights.size() == 2 => DType::F32,
        _ => plan.weights,
    }
}

/// The model frozen, quantised and prepared as the plan says, with its adapters.
pub(super) fn load(
    torch: &mut Torch,
    program: &Program,
    plan: &TrainPlan,
    layout: &AdapterLayout,
    (base, names): (Stored<'_>, loading::Names),
) -> Loaded {
    let mut loaded = Loaded { parameters: Vec::new(), trained: Vec::new(), wrapped: Wrapped::default() };
    // A tied head is made with a matrix of its own, which goes when it is tied: what is made next moves in there.
    let untied: Vec<Tensor>;
    match base {
        Some(base) => {
            let load = |torch: &mut Torch| stored::load(torch, program, plan.weights, base);
            (loaded.parameters, loaded.wrapped.stored) = torch.in_category(Category::Weights, load);
            let tied = program.tied.iter().map(|(_, id)| program.parameters[id.0 as usize].shape);
            untied = torch.in_category(Category::Weights, |torch| {
                tied.map(|shape| torch.fresh("untied", shape, plan.weights)).collect()
            });
        }
        None if plan.job.loads_straight() => {
            let scheme = plan.quantization.as_ref();
            let load = |torch: &mut Torch| loading::from_pretrained(torch, program, plan.weights, scheme, names);
            (loaded.parameters, loaded.wrapped.quantised) = torch.in_category(Category::Weights, load);
            untied = Vec::new();
        }
        None => {
            let load = |torch: &mut Torch| dense(torch, program, Made::by(plan), plan.quantization.as_ref());
            (loaded.parameters, untied) = torch.in_category(Category::Weights, load);
        }
    }
    loaded.parameters.extend(buffers(torch, program, plan.weights));
    drop(untied);
    if let Some(quantization) = &plan.quantization {
        torch.in_category(Category::Weights, |torch| quantise(torch, program, plan, quantization, &mut loaded));
    }
    if let Some(AdapterPlan::Other(other)) = &plan.adapter {
        let hidden = hidden_dtype(plan);
        let add = |torch: &mut Torch| other_adapters::adapt(torch, program, hidden, other, layout, &mut loaded);
        torch.in_category(Category::Adapters, add);
        if plan.checkpointing == Checkpointing::Full {
            loaded.wrapped.input_embedding = input_embedding(program);
        }
    }
    if let Some(AdapterPlan::Lora(lora)) = &plan.adapter {
        torch.in_category(Category::Adapters, |torch| adapt(torch, program, plan, lora, layout, &mut loaded));
        // `gradient_checkpointing_enable` of transformers 5 does it for every model fed with token ids.
        if plan.checkpointing == Checkpointing::Full {
            loaded.wrapped.input_embedding = input_embedding(program);
            loaded.wrapped.scaled_input = loaded.wrapped.input_embedding.is_some_and(|id| scales(program, id));
        }
    }
    loaded
}

/// A model's buffers, which live as long as it does.
pub(super) fn buffers(torch: &mut Torch, program: &Program, weights: DType) -> Vec<Tensor> {
    torch.in_category(Category::Buffers, |torch| {
        let dtype = |buffer: &Buffer| if buffer.model_type { weights } else { buffer.dtype };
        program.buffers.iter().map(|buffer| torch.fresh("buffer", buffer.shape, dtype(buffer))).collect()
    })
}

/// A model whose own code holds its adapters: what it does not freeze is trained, linears are quantised as they are made.
pub(super) fn load_own(torch: &mut Torch, program: &Program, plan: &TrainPlan) -> Loaded {
    let held = plan.quantization.as_ref().map(|scheme| Quantization { stored: true, ..scheme.clone() });
    let mut loaded = Loaded { parameters: Vec::new(), trained: Vec::new(), wrapped: Wrapped::default() };
    torch.in_category(Category::Weights, |torch| {
        (loaded.parameters, _) = dense(torch, program, Made::by(plan), held.as_ref());
        if let Some(scheme) = &held {
            loaded.wrapped.quantised = quantise_linears(torch, program, plan.weights, scheme, &mut loaded.parameters);
        }
    });
    loaded.parameters.extend(buffers(torch, program, plan.weights));
    let sorted = Sorted::by(plan.optimizer, program);
    for id in &program.registration {
        if !plan.is_frozen(&program.parameters[id.0 as usize]) {
            let (tensor, leaf) = torch.leaf(loaded.parameters[id.0 as usize].clone());
            loaded.parameters[id.0 as usize] = tensor.clone();
            loaded.trained.push(Trained { tensor, leaf, apart: sorted.apart(*id) });
        }
    }
    loaded
}

/// Parameters in the type of the weights, and what goes when heads are tied; a matrix that the checkpoint holds
/// quantised takes no memory in full.
pub(super) fn dense(
    torch: &mut Torch,
    program: &Program,
    made: Made,
    quantization: Option<&Quantization>,
) -> (Vec<Tensor>, Vec<Tensor>) {
    let weights = made.weights;
    let held = quantization.filter(|quantization| quantization.stored);
    let is_held = |id: &ParameterId| {
        let mut modules = program.modules.iter().filter(|module| module.parameters.first() == Some(id));
        held.is_some_and(|scheme| modules.any(|module| is_quantised(module, scheme)))
    };
    let mut parameters: Vec<Option<Tensor>> = vec![None; program.parameters.len()];
    let mut untied = untied(torch, program, None, made);
    let mut wide = made.wide(torch, program);
    let owners = program.owners();
    for id in &program.registration {
        let shape = program.parameters[id.0 as usize].shape;
        torch.set_module(owners[id.0 as usize]);
        parameters[id.0 as usize] = Some(match is_held(id) {
            true => torch.phantom(shape, weights),
            false => torch.fresh("parameter", shape, weights),
        });
        drop(wide.get_mut(id.0 as usize).and_then(Option::take));
        if held.is_none() {
            untied.extend(self::untied(torch, program, Some(*id), made));
        }
    }
    torch.set_module(0);
    let shape = |index: usize| program.parameters[index].shape;
    let parameters = parameters.into_iter().enumerate();
    let parameters = parameters.map(|(index, tensor)| tensor.unwrap_or_else(|| torch.phantom(shape(index), weights)));
    (parameters.collect(), untied)
}

/// How a model comes onto the card.
#[derive(Clone, Copy)]
pub(super) struct Made {
    pub(super) weights: DType,
    /// Whether its heads are tied before: a checkpoint filled it on the host.
    pub(super) is_tied: bool,
    /// Whether it is made in fp32 and cast on the card.
    is_cast: bool,
}

impl Made {
    pub(super) fn by(plan: &TrainPlan) -> Self {
        Self { weights: plan.weights, is_tied: plan.job.from_pretrained, is_cast: plan.job.cast_on_card }
    }

    pub(super) fn here(weights: DType) -> Self {
        Self { weights, is_tied: false, is_cast: false }
    }

    pub(super) fn for_inference(plan: &InferPlan) -> Self {
        Self { is_cast: plan.cast_on_card, ..Self::here(plan.weights) }
    }

    /// Parameters in fp32, in the order of construction; each goes when its copy in the model's type is there.
    pub(super) fn wide(self, torch: &mut Torch, program: &Program) -> Vec<Option<Tensor>> {
        let all = program.parameters.iter().filter(|_| self.is_cast && self.weights != DType::F32);
        all.map(|parameter| Some(torch.fresh("parameter", parameter.shape, DType::F32))).collect()
    }
}

/// The tensors that modules make for themselves after this parameter, until `post_init` ties them to another's.
pub(super) fn untied(torch: &mut Torch, program: &Program, after: Option<ParameterId>, made: Made) -> Vec<Tensor> {
    let late = program.tied.iter().filter(|(before, _)| *before == after && !made.is_tied);
    late.map(|(_, id)| torch.fresh("untied", program.parameters[id.0 as usize].shape, made.weights)).collect()
}

/// Linears quantised, and everything else made fp32 where the plan prepares the model.
fn quantise(torch: &mut Torch, program: &Program, plan: &TrainPlan, scheme: &Quantization, loaded: &mut Loaded) {
    if !plan.job.loads_straight() {
        loaded.wrapped.quantised = quantise_linears(torch, program, plan.weights, scheme, &mut loaded.parameters);
    }
    if !scheme.prepare {
        return;
    }
    let wide = hidden_dtype(plan);
    for id in &program.registration {
        if !loaded.wrapped.quantised.contains_key(id) {
            let wider = torch.cast(&loaded.parameters[id.0 as usize], wide);
            loaded.parameters[id.0 as usize] = wider;
        }
    }
    torch.log.borrow_mut().events.push(Event::EmptyCache);
}

/// Linears go over to their quantised form module by module; a parent's old children die when it is done. What is left
/// in `parameters` for them takes no memory.
pub(super) fn quantise_linears(
    torch: &mut Torch,
    program: &Program,
    weights: DType,
    scheme: &Quantization,
    parameters: &mut [Tensor],
) -> BTreeMap<ParameterId, QuantisedWeight> {
    let probabilities = outliers::probabilities(program, scheme);
    let mut quantised = BTreeMap::new();
    let mut old: Vec<Tensor> = Vec::new();
    let mut parent = "";
    let mut modules: BTreeMap<ParameterId, &Module> = BTreeMap::new();
    for module in program.modules.iter().filter(|module| is_quantised(module, scheme)) {
        module.parameters.first().map(|id| modules.insert(*id, module));
    }
    for &id in &program.registration {
        let parameter = &program.parameters[id.0 as usize];
        if scheme.experts && matches!(parameter.role, Role::Experts { .. }) {
            quantised.insert(id, torch.quantise(parameter.shape, weights, scheme));
            // Each goes as soon as it is packed.
            parameters[id.0 as usize] = torch.phantom(parameter.shape, weights);
            continue;
        }
        let Some(module) = modules.get(&id) else { continue };
        let own = module.path.rsplit_once('.').map_or("", |(parent, _)| parent);
        if own != parent {
            old.clear();
            parent = own;
        }
        let shape = linear_shape(module, program.parameters[id.0 as usize].shape);
        let mut weight = torch.quantise(shape, weights, scheme);
        weight.outlier_probability = probabilities.get(&id).copied().unwrap_or(0.0);
        quantised.insert(id, weight);
        let mut others = program.modules.iter().filter(|other| other.parameters.first() == Some(&id));
        if others.any(|other| !is_quantised(other, scheme)) {
            // A head that is tied to the embedding: only the head's copy goes over.
            continue;
        }
        let stand_in = torch.phantom(shape, weights);
        old.push(std::mem::replace(&mut parameters[id.0 as usize], stand_in));
    }
    quantised
}

/// The matrix of a linear: transformers turns a `Conv1D` round when it makes a linear of it.
pub(super) fn linear_shape(module: &Module, shape: Shape) -> Shape {
    match module.kind {
        ModuleKind::Conv1d { inputs, outputs } => Shape::from([outputs, inputs]),
        _ => shape,
    }
}

/// Whether bitsandbytes takes a module over.
pub(super) fn is_quantised(module: &Module, scheme: &Quantization) -> bool {
    let kept = match &scheme.skip {
        Some(names) => names.iter().any(|name| module.path.contains(name.as_str())),
        None => adapter::defaults::OUTPUT_EMBEDDINGS.contains(&module.path.as_str()),
    };
    let conv1d = scheme.conv1d && matches!(module.kind, ModuleKind::Conv1d { .. });
    (conv1d || matches!(module.kind, ModuleKind::Linear { .. })) && !kept
}

/// Adapters are made in the type of what they adapt, then cast in a second pass.
fn adapt(
    torch: &mut Torch,
    program: &Program,
    plan: &TrainPlan,
    lora: &LoraPlan,
    layout: &AdapterLayout,
    loaded: &mut Loaded,
) {
    let hidden = hidden_dtype(plan);
    let wanted = |quantised: bool| match quantised {
        true => lora.dtype_on_quantised(hidden, plan.quantization.as_ref()),
        false => lora.dtype_on(hidden),
    };
    let adapted = registered(program, layout);
    let first: Vec<(bool, Vec<Tensor>)> = adapted
        .iter()
        .map(|adapted| {
            let quantised = weight_of(program, adapted.module).is_some_and(|id| {
                loaded.wrapped.quantised.contains_key(&id) || loaded.wrapped.stored.contains_key(&id)
            });
            let dtype = if quantised { DType::F32 } else { hidden };
            (quantised, adapted.tensors.iter().map(|tensor| torch.fresh(tensor.name, tensor.shape, dtype)).collect())
        })
        .collect();
    let mut copies = Vec::new();
    for saved in &layout.saved {
        for (id, shape) in &saved.parameters {
            copies.push((saved.path.as_str(), *id, torch.fresh("modules_to_save", *shape, hidden)));
        }
    }
    let train = |torch: &mut Torch, tensor: Tensor, trained: &mut Vec<Trained>| {
        let (tensor, leaf) = torch.leaf(tensor);
        trained.push(Trained::new(tensor.clone(), leaf));
        tensor
    };
    for (adapted, (quantised, tensors)) in adapted.into_iter().zip(first) {
        let mut tensors = tensors.into_iter().map(|tensor| {
            let cast = torch.cast(&tensor, wanted(quantised));
            drop(tensor);
            train(torch, cast, &mut loaded.trained)
        });
        let (Some(first), Some(second)) = (tensors.next(), tensors.next()) else { continue };
        let bias = if lora.lora_bias && adapted.kind != AdaptedKind::Embedding { tensors.next() } else { None };
        let weights = LoraWeights { first, second, bias, magnitude: tensors.next(), dropout: lora.dropout > 0.0 };
        match (adapted.kind, adapted.module) {
            (AdaptedKind::Parameter { parameter, .. }, _) => {
                loaded.wrapped.lora_parameters.insert(parameter, weights);
            }
            (_, Some(module)) => {
                loaded.wrapped.lora.insert(module, weights);
            }
            (_, None) => {}
        }
    }
    for (path, id, tensor) in copies {
        let tensor = train(torch, tensor, &mut loaded.trained);
        for module in users(program, path, id) {
            loaded.wrapped.copies.insert((module, id), tensor.clone());
        }
    }
    for id in &layout.biases {
        let tensor = loaded.parameters[id.0 as usize].clone();
        loaded.parameters[id.0 as usize] = train(torch, tensor, &mut loaded.trained);
    }
}

/// Adapted modules in the order of registration.
fn registered<'a>(program: &Program, layout: &'a AdapterLayout) -> Vec<&'a AdaptedModule> {
    let mut places: BTreeMap<ParameterId, usize> = BTreeMap::new();
    for (place, id) in program.registration.iter().enumerate() {
        places.insert(*id, place);
    }
    let place = |adapted: &&AdaptedModule| {
        let weight = match adapted.kind {
            AdaptedKind::Parameter { parameter, .. } => Some(parameter),
            _ => weight_of(program, adapted.module),
        };
        weight.and_then(|id| places.get(&id).copied()).unwrap_or(usize::MAX)
    };
    let mut adapted: Vec<(usize, &AdaptedModule)> = layout.adapted.iter().map(|one| (place(&one), one)).collect();
    crate::order::sort_by_key(&mut adapted, |(place, _)| *place);
    adapted.into_iter().map(|(_, one)| one).collect()
}

fn weight_of(program: &Program, module: Option<ModuleId>) -> Option<ParameterId> {
    program.modules[module?.0 as usize].parameters.first().copied()
}

/// The modules under a path that use a parameter.
fn users(program: &Program, path: &str, id: ParameterId) -> Vec<ModuleId> {
    let under = |own: &str| own == path || own.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'));
    let modules = program.modules.iter().enumerate();
    let holders = modules.filter(|(_, module)| under(&module.path) && module.parameters.contains(&id));
    holders.map(|(index, _)| ModuleId(index as u32)).collect()
}

/// Whether an embedding scales its rows in its own forward pass.
fn scales(program: &Program, embedding: ModuleId) -> bool {
    let scaled = |step: &Step| matches!(step, Step::Run { op: Op::Scalar(_), module, .. } if *module == embedding);
    program.steps.iter().any(scaled)
}

/// The first embedding that runs.
fn input_embedding(program: &Program) -> Option<ModuleId> {
    program.steps.iter().find_map(|step| match step {
        Step::Run { op: Op::Embedding { .. }, module, .. } => Some(*module),
        _ => None,
    })
}
