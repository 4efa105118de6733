//! Options of training that exclude each other, and what a report should say about the others.

use super::{Checkpointing, PlanError, RunPlan, TrainPlan};

impl TrainPlan {
    pub(super) fn check_options(&self) -> Result<(), PlanError> {
        let conflict = |what: &str, hint: &str| Err(PlanError::Conflict { what: what.into(), hint: hint.into() });
        match self {
            _ if self.optimizer_in_backward && self.gradient_accumulation > 1 => conflict(
                "the optimizer in backward leaves no gradients to accumulate",
                "drop --gradient-accumulation or --optimizer-in-backward",
            ),
            _ if self.optimizer_in_backward && self.clip => conflict(
                "the optimizer in backward leaves no gradients to clip",
                "drop --clip or --optimizer-in-backward",
            ),
            _ if self.checkpoints.every == 0 => Err(PlanError::BadValue {
                key: "gradient-checkpointing".into(),
                value: "every-0".into(),
                expected: "every-1 or more".into(),
            }),
            _ => Ok(()),
        }
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.optimizer.notes();
        if self.optimizer_in_backward {
            notes.push("optimizer in backward: not yet measured".into());
        }
        if self.checkpointing != Checkpointing::Off {
            if self.checkpoints.offload {
                notes.push("offloaded checkpoints: not yet measured; copies are taken to be done when needed".into());
            }
            if self.checkpoints.every > 1 {
                notes.push("checkpoints of every n-th layer: not yet measured".into());
            }
        }
        notes
    }
}

impl RunPlan {
    /// What a report should say about the plan's options.
    pub fn notes(&self) -> Vec<String> {
        match self {
            Self::Train(plan) => plan.notes(),
            Self::Infer(_) => Vec::new(),
        }
    }
}
