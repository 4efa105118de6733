//! Optimizers: the state they keep and what a step needs for a moment.

//!
//! | module | optimizers |
//! |---|---|
//! | `adam`, `other` | those of torch |
//! | `adafactor` | transformers' and torch's Adafactor |
//! | `bitsandbytes` | 8-bit, 32-bit and paged ones, LAMB, Lion, AdEMAMix |
//! | `adabelief`, `adam_mini`, `shampoo` | the packages of these names |
//! | `low_rank` | GaLore and APOLLO |
//! | [`in_backward`] | stepping each parameter as soon as its gradient is there |

mod adabelief;
mod adafactor;
mod adam;
mod adam_mini;
mod bitsandbytes;
pub mod in_backward;
mod low_rank;
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
    states: Vec<Vec<Tensor>>,
}

impl Optimizer {
    /// Builds it; some allocate their state at once.
    pub fn new(torch: &mut Torch, plan: plan::Optimizer, parameters: &[Trained]) -> Self {
        let mut optimizer = Self { plan, whole: Vec::new(), states: Vec::new() };
        if plan.kind == OptimizerKind::Adagrad {
            optimizer.make_states(torch, parameters);
        }
        optimizer
    }

    /// Says which parameters are embeddings and output heads.
    pub fn with_whole(mut self, whole: Vec<bool>) -> Self {
        self.whole = whole;
        self
    }

    /// One step.
    pub fn step(&mut self, torch: &mut Torch, parameters: &[Trained]) {
        let first = self.states.is_empty();
        let plan::Optimizer { kind, implementation, rank } = self.plan;
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
            let whole = |index: usize| self.whole.get(index).copied().unwrap_or(false);
            stepped.map(|(index, one)| state(torch, self.plan, &one.tensor, whole(index))).collect()
        });
    }
}

/// Whether the state of a parameter is made when it is first stepped, after the steps of those before it; else the states
/// of all are made before any is stepped.
fn makes_state_on_the_way(plan: plan::Optimizer) -> bool {
    match plan.kind {
        OptimizerKind::Adafactor | OptimizerKind::AdaBelief | OptimizerKind::AdamMini | OptimizerKind::Lamb => true,
        OptimizerKind::GaLoreAdamW | OptimizerKind::ApolloAdamW => true,
        OptimizerKind::Nesterov => plan.implementation == Implementation::Forloop,
        _ => false,
    }
}

/// The state of one parameter.
fn state(torch: &mut Torch, plan: plan::Optimizer, tensor: &Tensor, whole: bool) -> Vec<Tensor> {
    let fused = plan.implementation == Implementation::Fused;
    match plan.kind {
        OptimizerKind::AdaBelief => adabelief::states(torch, tensor),
        OptimizerKind::AdamMini => adam_mini::states(torch, tensor),
        OptimizerKind::Shampoo => shampoo::states(torch, tensor),
        OptimizerKind::GaLoreAdamW | OptimizerKind::ApolloAdamW => {
            low_rank::states(torch, plan.kind, tensor, whole, plan.rank)
        }
        kind => other::states(torch, kind, fused, tensor),
    }
}
