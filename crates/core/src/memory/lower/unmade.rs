//! Logits that a fused loss never makes: the head before the loss, and what is computed on its product.

use std::collections::BTreeSet;

use crate::model::op::{Loss, Op, ParameterId, ValueId};
use crate::model::{Program, Step};

/// The head of a language model whose product is never made.
#[derive(Debug, Clone)]
pub struct UnmadeHead {
    /// Its matrix.
    pub weight: ParameterId,
    /// Its bias.
    pub bias: Option<ParameterId>,
    /// The logits, and what becomes of them before the loss.
    pub values: BTreeSet<ValueId>,
}

impl UnmadeHead {
    /// Finds the loss and the linear before it; a head that is not a linear is not found.
    pub fn find(program: &Program) -> Option<Self> {
        let runs = || {
            program.steps.iter().rev().filter_map(|step| match step {
                Step::Run { op, inputs, outputs, .. } => Some((op, inputs, outputs)),
                _ => None,
            })
        };
        let mut wanted = runs().find_map(|(op, inputs, _)| match op {
            Op::Loss(Loss::CausalLm) => inputs.first().copied(),
            _ => None,
        })?;
        let mut values = BTreeSet::new();
        for (op, inputs, outputs) in runs() {
            if !outputs.contains(&wanted) {
                continue;
            }
            values.insert(wanted);
            if let Op::Linear { weight, bias, .. } = op {
                return Some(Self { weight: *weight, bias: *bias, values });
            }
            wanted = *inputs.first()?;
        }
        None
    }
}
