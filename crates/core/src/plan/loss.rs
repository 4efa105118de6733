//! Who computes the loss, and whether logits are ever made for it.

use serde::{Deserialize, Serialize};

use super::{Kernels, PlanError, TrainPlan};

/// How the loss of a causal language model is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LossKind {
    /// The model's own: all logits, in fp32.
    #[default]
    Transformers,
    /// TRL's trainers from 1.x: log-probabilities, entropy and accuracy from tiles of logits that are made again in
    /// backward (trl/kernels/chunked_logprob.py of 1.16).
    TrlFused,
}

impl TrainPlan {
    /// Refuses losses that cannot be combined with the rest.
    pub(super) fn check_loss(&self) -> Result<(), PlanError> {
        let refuse = |what: &str, hint: &str| Err(PlanError::Unsupported { what: what.into(), hint: hint.into() });
        match self.loss {
            LossKind::Transformers => Ok(()),
            _ if self.kernels == Kernels::Liger => {
                refuse("Liger's kernels with TRL's fused loss", "choose --loss standard, or leave --liger out")
            }
            _ if self.parallel.as_ref().is_some_and(|parallel| parallel.mesh.world() > 1) => {
                refuse("TRL's fused loss on several cards", "choose --loss standard for an upper bound")
            }
            _ => Ok(()),
        }
    }
}
