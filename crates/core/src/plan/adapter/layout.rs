//! The tensors that LoRA makes on a model.

use super::targets::{self, Resolved, View};
use super::{LoraBias, LoraPlan, PlanError, bad};
use crate::model::op::{ModuleId, Parameter, ParameterId};
use crate::model::{Inventory, Module, ModuleKind, Program, Shape};

/// Everything that is trained, and where it sits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdapterLayout {
    /// Adapted modules and parameters, in the model's order.
    pub adapted: Vec<AdaptedModule>,
    /// Modules trained whole, as copies: their path and the shapes of their parameters.
    pub saved: Vec<SavedModule>,
    /// Biases of the model that are trained where they lie.
    pub biases: Vec<ParameterId>,
    /// Elements of those biases.
    bias_elements: u64,
}

/// A module trained whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedModule {
    /// Its path.
    pub path: String,
    /// The parameters that are copied, with the shapes of the copies.
    pub parameters: Vec<(ParameterId, Shape)>,
}

/// One adapted module or parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdaptedModule {
    /// The module that is wrapped; `None` for a parameter whose module is not listed on its own.
    pub module: Option<ModuleId>,
    /// The name of the module, or of the parameter.
    pub name: String,
    /// What it is.
    pub kind: AdaptedKind,
    /// The rank.
    pub rank: u64,
    /// What is trained, in the order PEFT makes it.
    pub tensors: Vec<TrainableTensor>,
}

/// What is adapted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdaptedKind {
    /// A linear, or GPT-2's `Conv1D`.
    Linear,
    /// An embedding.
    Embedding,
    /// A convolution.
    Convolution,
    /// A parameter: fused experts or a router's matrix.
    Parameter {
        /// Which.
        parameter: ParameterId,
        /// How many experts it holds.
        experts: u64,
    },
}

/// A trained tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainableTensor {
    /// Its name in PEFT.
    pub name: &'static str,
    /// Its sizes.
    pub shape: Shape,
}

impl AdapterLayout {
    /// What a plan trains on a model, or why PEFT refuses. `model_type` decides defaults and special cases.
    pub fn of_inventory(plan: &LoraPlan, model_type: &str, inventory: &Inventory) -> Result<Self, PlanError> {
        Self::of(plan, model_type, &inventory.modules, &inventory.parameters)
    }

    /// The same over the modules of a program.
    pub fn of_program(plan: &LoraPlan, model_type: &str, program: &Program) -> Result<Self, PlanError> {
        Self::of(plan, model_type, &program.modules, &program.parameters)
    }

    /// Names among the plan's targets that no module of a program goes by.
    pub fn passed_over<'a>(plan: &'a LoraPlan, model_type: &str, program: &Program) -> Vec<&'a str> {
        let view = View { model_type, modules: &program.modules, parameters: &program.parameters };
        targets::passed_over(plan, view)
    }

    fn of(plan: &LoraPlan, model_type: &str, modules: &[Module], parameters: &[Parameter]) -> Result<Self, PlanError> {
        plan.check()?;
        let view = View { model_type, modules, parameters };
        let resolved = targets::resolve(plan, view)?;
        let mut layout = Self::default();
        for id in &resolved.modules {
            layout.adapted.push(adapt_module(plan, &resolved, view, *id)?);
        }
        for id in &resolved.parameters {
            layout.adapted.push(adapt_parameter(plan, &resolved, view, *id)?);
        }
        layout.saved = saved_modules(plan, view);
        layout.biases = biases(plan, &resolved, view);
        let elements = |id: &ParameterId| parameters[id.0 as usize].shape.elements();
        layout.bias_elements = layout.biases.iter().map(elements).fold(0, u64::saturating_add);
        Ok(layout)
    }

    /// Refuses what is counted but not simulated; `liger`: whether Liger fuses the head with the loss.
    pub fn check_simulated(&self, plan: &LoraPlan, program: &Program, fused_loss: bool) -> Result<(), PlanError> {
        let unsupported = |what: String, hint: &str| Err(PlanError::Unsupported { what, hint: hint.into() });
        let head = |path: &str| super::defaults::OUTPUT_EMBEDDINGS.contains(&path);
        for adapted in &self.adapted {
            match adapted.kind {
                AdaptedKind::Convolution => {
                    let what = format!("the memory of an adapter on the convolution {}", adapted.name);
                    return unsupported(what, "target linears and embeddings only");
                }
                AdaptedKind::Embedding if plan.dora => {
                    return unsupported(format!("the memory of DoRA on {}", adapted.name), "target linears only");
                }
                _ if fused_loss && head(&adapted.name) => {
                    return unsupported(format!("an adapter on {} with a fused loss", adapted.name), "leave one out");
                }
                _ => {}
            }
        }
        for saved in &self.saved {
            if fused_loss && head(&saved.path) {
                return unsupported(format!("{} under modules_to_save with a fused loss", saved.path), "leave one out");
            }
            let under = |path: &str| {
                path == saved.path || path.strip_prefix(&saved.path).is_some_and(|rest| rest.starts_with('.'))
            };
            for (id, _) in &saved.parameters {
                let simulated = program.modules.iter().any(|module| {
                    let kind = !matches!(module.kind, ModuleKind::Convolution | ModuleKind::Experts);
                    kind && under(&module.path) && module.parameters.contains(id)
                });
                if !simulated {
                    let name = &program.parameters[id.0 as usize].name;
                    let what = format!("the memory of a trained copy of {name}");
                    return unsupported(what, "save linears, norms and embeddings only");
                }
            }
        }
        Ok(())
    }

    /// Elements that are trained.
    pub fn trainable(&self) -> u64 {
        let adapters = self.adapted.iter().flat_map(|module| &module.tensors).map(|tensor| tensor.shape.elements());
        let saved = self.saved.iter().flat_map(|module| &module.parameters).map(|(_, shape)| shape.elements());
        adapters.chain(saved).fold(self.bias_elements, u64::saturating_add)
    }

    /// Tensors that are trained.
    pub fn trainable_tensors(&self) -> u64 {
        let adapters: usize = self.adapted.iter().map(|module| module.tensors.len()).sum();
        let saved: usize = self.saved.iter().map(|module| module.parameters.len()).sum();
        (adapters + saved + self.biases.len()) as u64
    }

    /// Elements that are added to the model: adapters and copies, not biases trained where they lie.
    pub fn added(&self) -> u64 {
        self.trainable().saturating_sub(self.bias_elements)
    }
}

fn adapt_module(
    plan: &LoraPlan,
    resolved: &Resolved,
    view: View<'_>,
    id: ModuleId,
) -> Result<AdaptedModule, PlanError> {
    let module = &view.modules[id.0 as usize];
    let rank = targets::rank_of(plan, &resolved.ranks, &module.path)?;
    let tensor = |name: &'static str, sizes: &[u64]| TrainableTensor { name, shape: Shape::new(sizes) };
    let weight = module.parameters.first().map(|id| view.parameters[id.0 as usize].shape);
    let (kind, mut tensors, outputs) = match module.kind {
        ModuleKind::Embedding { rows, width } => {
            let pair = vec![tensor("lora_embedding_A", &[rank, rows]), tensor("lora_embedding_B", &[width, rank])];
            (AdaptedKind::Embedding, pair, width)
        }
        ModuleKind::Linear { inputs, outputs } | ModuleKind::Conv1d { inputs, outputs } => {
            let pair = vec![tensor("lora_A", &[rank, inputs]), tensor("lora_B", &[outputs, rank])];
            (AdaptedKind::Linear, pair, outputs)
        }
        _ => {
            // The first keeps the kernel's window over all input channels, the second is one element wide; groups of
            // the base apply to the second only.
            let shape = weight.ok_or_else(|| bad("target_modules", &module.path, "a module with a weight"))?;
            let outputs = shape.size(0);
            let groups = channel_groups(module, view);
            if !rank.is_multiple_of(groups) || !outputs.is_multiple_of(groups) {
                return Err(bad("lora rank", rank, &format!("a multiple of the {groups} groups of {}", module.path)));
            }
            let mut first = shape.sizes().to_vec();
            first[0] = rank;
            first[1] = shape.size(1).saturating_mul(groups);
            let mut second = vec![1; shape.rank()];
            second[0] = outputs;
            second[1] = rank / groups;
            (AdaptedKind::Convolution, vec![tensor("lora_A", &first), tensor("lora_B", &second)], outputs)
        }
    };
    if plan.lora_bias && kind != AdaptedKind::Embedding {
        tensors.push(tensor("lora_B.bias", &[outputs]));
    }
    if plan.dora {
        tensors.push(tensor("lora_magnitude_vector", &[outputs]));
    }
    Ok(AdaptedModule { module: Some(id), name: module.path.clone(), kind, rank, tensors })
}

/// Groups of a convolution, from its kernel: depthwise ones hold one input channel per filter.
fn channel_groups(module: &Module, view: View<'_>) -> u64 {
    let weight = module.parameters.first().map(|id| view.parameters[id.0 as usize].shape);
    match weight {
        Some(shape) if shape.size(1) == 1 => shape.size(0),
        _ => 1,
    }
}

fn adapt_parameter(
    plan: &LoraPlan,
    resolved: &Resolved,
    view: View<'_>,
    id: ParameterId,
) -> Result<AdaptedModule, PlanError> {
    let parameter = &view.parameters[id.0 as usize];
    let name = parameter.name.as_str();
    let holder = name.rsplit_once('.').map_or("", |(holder, _)| holder);
    let conflict = |what: String, hint: &str| PlanError::Conflict { what, hint: hint.into() };
    for (wrong, option) in [(plan.dropout > 0.0, "dropout"), (plan.dora, "DoRA"), (plan.lora_bias, "lora_bias")] {
        if wrong {
            let what = format!("PEFT cannot adapt the parameter {name} with {option}");
            return Err(conflict(what, "leave it out, or target linears only"));
        }
    }
    let module = view.modules.iter().position(|module| module.path == holder);
    let is_adapted = |index: &usize| resolved.modules.contains(&ModuleId(*index as u32));
    if module.as_ref().is_some_and(is_adapted) {
        let what = format!("{holder} is targeted as a module and {name} as a parameter");
        return Err(conflict(what, "target one of them"));
    }
    let shape = parameter.shape;
    let (experts, inputs, outputs) = match shape.rank() {
        2 => (1, shape.size(1), shape.size(0)),
        3 => (shape.size(0), shape.size(2), shape.size(1)),
        dims => {
            return Err(bad("target_parameters", name, &format!("a matrix or a stack of them ({dims} dimensions)")));
        }
    };
    let rank = targets::rank_of(plan, &resolved.ranks, name)?;
    let wide = rank.saturating_mul(experts);
    let tensors = vec![
        TrainableTensor { name: "lora_A", shape: Shape::new(&[wide, inputs]) },
        TrainableTensor { name: "lora_B", shape: Shape::new(&[outputs, wide]) },
    ];
    Ok(AdaptedModule {
        module: module.map(|index| ModuleId(index as u32)),
        name: name.to_owned(),
        kind: AdaptedKind::Parameter { parameter: id, experts },
        rank,
        tensors,
    })
}

/// Modules whose path ends in a name of `modules_to_save` (no dot needed, as in PEFT), with all they hold.
fn saved_modules(plan: &LoraPlan, view: View<'_>) -> Vec<SavedModule> {
    let names = targets::saved_names(plan);
    let mut saved: Vec<SavedModule> = Vec::new();
    for module in view.modules.iter().filter(|module| !module.path.is_empty()) {
        let inside = |known: &SavedModule| module.path.strip_prefix(&known.path).is_some_and(|r| r.starts_with('.'));
        if !names.iter().any(|name| module.path.ends_with(name.as_str())) || saved.iter().any(inside) {
            continue;
        }
        let mut parameters: Vec<(ParameterId, Shape)> = Vec::new();
        let under =
            |path: &str| path == module.path || path.strip_prefix(&module.path).is_some_and(|r| r.starts_with('.'));
        for held in view.modules.iter().filter(|other| under(&other.path)) {
            for id in &held.parameters {
                if !parameters.iter().any(|(known, _)| known == id) {
                    parameters.push((*id, view.parameters[id.0 as usize].shape));
                }
            }
        }
        for (index, parameter) in view.parameters.iter().enumerate() {
            let id = ParameterId(index as u32);
            if under(parameter.name.rsplit_once('.').map_or("", |(holder, _)| holder))
                && !parameters.iter().any(|(known, _)| *known == id)
            {
                parameters.push((id, parameter.shape));
            }
        }
        if !saved.iter().any(|known| known.path == module.path) {
            saved.push(SavedModule { path: module.path.clone(), parameters });
        }
    }
    saved
}

fn biases(plan: &LoraPlan, resolved: &Resolved, view: View<'_>) -> Vec<ParameterId> {
    let ids = (0..view.parameters.len() as u32).map(ParameterId);
    let is_bias = |id: &ParameterId| {
        let name = view.parameters[id.0 as usize].name.as_str();
        name == "bias" || name.ends_with(".bias")
    };
    match plan.bias {
        LoraBias::None => Vec::new(),
        LoraBias::All => ids.filter(is_bias).collect(),
        LoraBias::LoraOnly => {
            let adapted = resolved.modules.iter().flat_map(|id| &view.modules[id.0 as usize].parameters);
            let mut own: Vec<ParameterId> = adapted.copied().filter(is_bias).collect();
            crate::order::sort(&mut own);
            own.dedup();
            own
        }
        LoraBias::Others => {
            let adapted = resolved.modules.iter().flat_map(|id| &view.modules[id.0 as usize].parameters);
            let weights: Vec<ParameterId> = adapted.copied().filter(|id| !is_bias(id)).collect();
            ids.filter(|id| !weights.contains(id)).collect()
        }
    }
}
