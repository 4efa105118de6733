//! Optimizers: the state they keep and what a step needs for a moment.

mod adafactor;
mod adam;
mod other;

use std::rc::Rc;

use super::autograd::Leaf;
use super::log::Category;
use super::tensor::Tensor;
use super::torch::Torch;

/// Which optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the names are the optimizers' own")]
pub enum OptimizerKind {
    AdamW,
    Adam,
    Amsgrad,
    Nadam,
    Sgd,
    SgdMomentum,
    Nesterov,
    Adagrad,
    Rmsprop,
    Adafactor,
    TorchAdafactor,
    AdamW8bit,
    PagedAdamW8bit,
    AdamWBnb32,
    Lion8bit,
    Lion,
    Muon,
}

/// How a step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Implementation {
    /// All parameters at once, by lists (torch's default on CUDA).
    Foreach,
    /// One fused kernel.
    Fused,
    /// One parameter after the other.
    Forloop,
}

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
    pub fn new(torch: &mut Torch, kind: OptimizerKind, implementation: Implementation, parameters: &[Trained]) -> Self {
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
        self.states = torch.in_category(Category::OptimizerState, |torch| {
            parameters.iter().map(|parameter| other::states(torch, kind, fused, &parameter.tensor)).collect()
        });
    }
}
