//! Optimizers: the state they keep and what a step needs for a moment.

mod adafactor;
mod adam;
mod other;

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
    kind: OptimizerKind,
    implementation: Implementation,
    states: Vec<Vec<Tensor>>,
}

impl Optimizer {
    /// Builds it; some allocate their state at once.
    pub fn new(torch: &mut Torch, plan: plan::Optimizer, parameters: &[Trained]) -> Self {
        let plan::Optimizer { kind, implementation } = plan;
        let mut optimizer = Self { kind, implementation, states: Vec::new() };
        if kind == OptimizerKind::Adagrad {
            optimizer.make_states(torch, parameters);
        }
        optimizer
    }

    /// One step.
    pub fn step(&mut self, torch: &mut Torch, parameters: &[Trained]) {
        if self.states.is_empty() {
            self.make_states(torch, parameters);
        }
        torch.in_category(Category::Temporaries, |torch| match self.kind {
            OptimizerKind::Adafactor | OptimizerKind::TorchAdafactor => adafactor::step(torch, self.kind, parameters),
            OptimizerKind::Muon => other::muon_step(torch, parameters),
            _ => adam::step(torch, self.kind, self.implementation, parameters),
        });
    }

    fn make_states(&mut self, torch: &mut Torch, parameters: &[Trained]) {
        let (kind, fused) = (self.kind, self.implementation == Implementation::Fused);
        // What got no gradient (a tower that did not run) has no state either; Adagrad makes all of its own at once.
        let has_state = |p: &&Trained| kind == OptimizerKind::Adagrad || p.leaf.grad.borrow().is_some();
        self.states = torch.in_category(Category::OptimizerState, |torch| {
            let stepped = parameters.iter().filter(has_state);
            stepped.map(|parameter| other::states(torch, kind, fused, &parameter.tensor)).collect()
        });
    }
}
