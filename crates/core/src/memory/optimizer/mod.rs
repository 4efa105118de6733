//! Optimizers: the state they keep and what a step needs for a moment.

//!
//! | module | optimizers |
//! |---|---|
//! | `adam`, `other` | those of torch |
//! | `adafactor` | transformers' and torch's Adafactor |
//! | `bitsandbytes` | 8-bit, 32-bit and paged ones, LAMB, Lion, AdEMAMix |
//! | `adabelief`, `adam_mini`, `shampoo` | the packages of these names |
//! | `low_rank` | GaLore and APOLLO |
//! | `any_precision` | torchdistx's AnyPrecisionAdamW |
//! | `masters` | fp32 copies that are stepped instead of the weights |
//! | [`in_backward`] | stepping each parameter as soon as its gradient is there |

mod adabelief;
mod adafactor;
mod adam;
mod adam_mini;
mod any_precision;
mod bitsandbytes;
pub mod in_backward;
mod low_rank;
mod masters;
mod other;
mod shampoo;

use std::collections::BTreeSet;
use std::rc::Rc;

use super::autograd::Leaf;
use super::log::Category;
use super::tensor::Tensor;
use super::torch::Torch;
use crate::model::op::ParameterId;
use crate::model::{Module, ModuleKind, Program};
use crate::plan::{self, Implementation, OptimizerKind};

/// A trainable parameter, or a card's part of it.
#[derive(Clone)]
pub struct Trained {
    /// The parameter.
    pub tensor: Tensor,
    /// Where its gradient is.
    pub leaf: Rc<Leaf>,
    /// Whether the optimizer treats it apart.
    pub apart: Apart,
}

impl Trained {
    /// One like all others.
    pub fn new(tensor: Tensor, leaf: Rc<Leaf>) -> Self {
        Self { tensor, leaf, apart: Apart::default() }
    }
}

/// What some optimizers treat a parameter apart for; engines hand it on to the parts that they make of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Apart {
    /// An 8-bit optimizer keeps its state in fp32: a table of `nn.Embedding`.
    pub wide: bool,
    /// It is not projected to a lower rank: an embedding or an output head, by name.
    pub whole: bool,
}

/// Which parameters of a program an optimizer treats apart.
pub struct Sorted<'a> {
    program: &'a Program,
    tables: BTreeSet<ParameterId>,
    by_name: bool,
}

impl<'a> Sorted<'a> {
    /// As the optimizer of a plan does.
    pub fn by(optimizer: plan::Optimizer, program: &'a Program) -> Self {
        let is_table = |module: &&Module| matches!(module.kind, ModuleKind::Embedding { .. });
        let by_name = matches!(optimizer.kind, OptimizerKind::GaLoreAdamW | OptimizerKind::ApolloAdamW);
        let tables = program.modules.iter().filter(|_| optimizer.wide_embeddings).filter(is_table);
        let tables = tables.flat_map(|module| module.parameters.iter().copied()).collect();
        Self { program, tables, by_name }
    }

    /// Whether and how a parameter is one.
    pub fn apart(&self, id: ParameterId) -> Apart {
        let name = &self.program.parameters[id.0 as usize].name;
        let whole = self.by_name && ["embed", "embd", "wte", "lm_head"].iter().any(|part| name.contains(part));
        Apart { wide: self.tables.contains(&id), whole }
    }
}

/// An optimizer over parameters.
pub struct Optimizer {
    plan: plan::Optimizer,
    states: Vec<Vec<Tensor>>,
    /// What is stepped, where it is not the parameters themselves.
    masters: Option<Vec<Trained>>,
}

impl Optimizer {
    /// Builds it; some allocate their state at once.
    pub fn new(torch: &mut Torch, plan: plan::Optimizer, parameters: &[Trained]) -> Self {
        let masters = plan.master_weights.then(|| masters::make(torch, parameters));
        let mut optimizer = Self { plan, states: Vec::new(), masters };
        if plan.kind == OptimizerKind::Adagrad {
            optimizer.on_masters(parameters, |optimizer, parameters| optimizer.make_states(torch, parameters));
        }
        optimizer
    }

    /// One step.
    pub fn step(&mut self, torch: &mut Torch, parameters: &[Trained]) {
        if let Some(masters) = &self.masters {
            masters::take_gradients(torch, parameters, masters);
        }
        self.on_masters(parameters, |optimizer, parameters| optimizer.step_on(torch, parameters));
    }

    /// The state of every parameter comes from a checkpoint (`load_state_dict`).
    pub fn read_back(&mut self, torch: &mut Torch, parameters: &[Trained]) {
        self.on_masters(parameters, |optimizer, parameters| {
            let read = |torch: &mut Torch| parameters.iter().map(|one| state(torch, optimizer.plan, one)).collect();
            optimizer.states = torch.in_category(Category::OptimizerState, read);
        });
    }

    /// The gradients of master weights go.
    pub fn zero_masters(&self) {
        self.masters.iter().flatten().for_each(|master| drop(master.leaf.grad.take()));
    }

    /// Runs something on what is really stepped.
    fn on_masters(&mut self, parameters: &[Trained], body: impl FnOnce(&mut Self, &[Trained])) {
        let masters = self.masters.take();
        body(self, masters.as_deref().unwrap_or(parameters));
        self.masters = masters;
    }

    fn step_on(&mut self, torch: &mut Torch, parameters: &[Trained]) {
        let first = self.states.is_empty();
        let plan::Optimizer { kind, implementation, rank, .. } = self.plan;
        if first && !makes_state_on_the_way(self.plan) {
            self.make_states(torch, parameters);
        }
        let mut made = Vec::new();
        let prepare = |torch: &mut Torch, index: usize| {
            if first && let Some(parameter) = parameters.get(index) {
                made.push(torch.in_category(Category::OptimizerState, |torch| state(torch, self.plan, parameter)));
            }
        };
        torch.in_category(Category::Temporaries, |torch| match kind {
            OptimizerKind::Adafactor => adafactor::transformers_step(torch, parameters, &mut self.states),
            OptimizerKind::TorchAdafactor => adafactor::torch_step(torch, parameters),
            OptimizerKind::Muon => other::muon_step(torch, parameters),
            OptimizerKind::AdaBelief => adabelief::step(torch, parameters, prepare),
            OptimizerKind::AnyPrecision => any_precision::step(torch, self.plan, parameters, prepare),
            OptimizerKind::AdamMini => adam_mini::step(torch, parameters, prepare),
            OptimizerKind::Shampoo => shampoo::step(torch, parameters),
            OptimizerKind::GaLoreAdamW | OptimizerKind::ApolloAdamW => {
                low_rank::step(torch, kind, parameters, rank, first, prepare);
            }
            _ => adam::step(torch, kind, implementation, parameters, prepare),
        });
        self.states.append(&mut made);
    }

    fn make_states(&mut self, torch: &mut Torch, parameters: &[Trained]) {
        let kind = self.plan.kind;
        // What got no gradient (a tower that did not run) has no state either; Adagrad makes all of its own at once.
        let has_state = |p: &Trained| kind == OptimizerKind::Adagrad || p.leaf.grad.borrow().is_some();
        self.states = torch.in_category(Category::OptimizerState, |torch| {
            let stepped = parameters.iter().filter(|parameter| has_state(parameter));
            stepped.map(|parameter| state(torch, self.plan, parameter)).collect()
        });
    }
}

/// Whether the state of a parameter is made when it is first stepped, after the steps of those before it; else the states
/// of all are made before any is stepped.
fn makes_state_on_the_way(plan: plan::Optimizer) -> bool {
    match plan.kind {
        OptimizerKind::Adafactor | OptimizerKind::AdaBelief | OptimizerKind::AdamMini | OptimizerKind::Lamb => true,
        OptimizerKind::GaLoreAdamW | OptimizerKind::ApolloAdamW | OptimizerKind::AnyPrecision => true,
        OptimizerKind::Nesterov => plan.implementation == Implementation::Forloop,
        _ => false,
    }
}

/// The state of one parameter, which belongs to the module that the parameter does.
fn state(torch: &mut Torch, plan: plan::Optimizer, parameter: &Trained) -> Vec<Tensor> {
    let Apart { wide, whole } = parameter.apart;
    let plan = plan::Optimizer { kind: if wide { plan.kind.in_32_bits() } else { plan.kind }, ..plan };
    let before = torch.enter_module_of(&parameter.tensor);
    let states = states(torch, plan, &parameter.tensor, whole);
    torch.set_module(before);
    states
}

fn states(torch: &mut Torch, plan: plan::Optimizer, tensor: &Tensor, whole: bool) -> Vec<Tensor> {
    let fused = plan.implementation == Implementation::Fused;
    match plan.kind {
        OptimizerKind::AdaBelief => adabelief::states(torch, tensor),
        OptimizerKind::AnyPrecision => any_precision::states(torch, plan, tensor),
        OptimizerKind::AdamMini => adam_mini::states(torch, tensor),
        OptimizerKind::Shampoo => shampoo::states(torch, tensor),
        OptimizerKind::GaLoreAdamW | OptimizerKind::ApolloAdamW => {
            low_rank::states(torch, plan.kind, tensor, whole, plan.rank)
        }
        kind => other::states(torch, kind, fused, tensor),
    }
}
