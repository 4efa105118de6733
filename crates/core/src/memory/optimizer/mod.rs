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

use std::rc::Rc;

use super::autograd::Leaf;
use super::log::Category;
use super::tensor::Tensor;
use super::torch::Torch;
use crate::plan::{self, Implementation, OptimizerKind};

/// A trainable parameter.
pub struct Trained {
    /// The parameter.
    pub tensor: Tensor,
    /// Where its gradient is.
    pub leaf: Rc<Leaf>,
}

/// An optimizer over parameters.
pub struct Optimizer {
    plan: plan::Optimizer,
    /// Which parameters are embeddings and output heads, where the optimizer treats those apart.
    whole: Vec<bool>,
    /// Which keep their state in fp32 even in 8-bit optimizers.
    wide: Vec<bool>,
    states: Vec<Vec<Tensor>>,
    /// What is stepped, where it is not the parameters themselves.
    masters: Option<Vec<Trained>>,
}

impl Optimizer {
    /// Builds it; some allocate their state at once.
    pub fn new(torch: &mut Torch, plan: plan::Optimizer, parameters: &[Trained]) -> Self {
        let masters = plan.master_weights.then(|| masters::make(torch, parameters));
        let mut optimizer = Self { plan, whole: Vec::new(), wide: Vec::new(), states: Vec::new(), masters };
        if plan.kind == OptimizerKind::Adagrad {
            optimizer.on_masters(parameters, |optimizer, parameters| optimizer.make_states(torch, parameters));
        }
        optimizer
    }

    /// Says which parameters are embeddings and output heads.
    pub fn with_whole(mut self, whole: Vec<bool>) -> Self {
        self.whole = whole;
        self
    }

    /// Says which parameters keep their state in fp32 even in 8-bit optimizers.
    pub fn with_wide(mut self, wide: Vec<bool>) -> Self {
        self.wide = wide;
        self
    }

    /// One step.
    pub fn step(&mut self, torch: &mut Torch, parameters: &[Trained]) {
        if let Some(masters) = &self.masters {
            masters::take_gradients(torch, parameters, masters);
        }
        self.on_masters(parameters, |optimizer, parameters| optimizer.step_on(torch, parameters));
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
        let (whole, mut made) = (&self.whole, Vec::new());
        let prepare =
            |torch: &mut Torch, index: usize| {
                if first && let Some(parameter) = parameters.get(index) {
                    let whole = whole.get(index).copied().unwrap_or(false);
                    made.push(torch.in_category(Category::OptimizerState, |torch| {
                        state(torch, self.plan, &parameter.tensor, whole)
                    }));
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
                low_rank::step(torch, kind, parameters, &self.whole, rank, first, prepare);
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
            let stepped = parameters.iter().enumerate().filter(|(_, parameter)| has_state(parameter));
            let state = |(index, parameter): (usize, &Trained)| {
                let whole = self.whole.get(index).copied().unwrap_or(false);
                let wide = self.wide.get(index).copied().unwrap_or(false);
                let plan = plan::Optimizer { kind: if wide { kind.in_32_bits() } else { kind }, ..self.plan };
                state(torch, plan, &parameter.tensor, whole)
            };
            stepped.map(state).collect()
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
fn state(torch: &mut Torch, plan: plan::Optimizer, tensor: &Tensor, whole: bool) -> Vec<Tensor> {
    let before = torch.enter_module_of(tensor);
    let states = states(torch, plan, tensor, whole);
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
