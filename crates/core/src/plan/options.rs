//! Options of training that exclude each other, and what a report should say about the others.

use super::{CheckpointOptions, Checkpointing, OptimizerKind, PlanError, RunPlan, TrainPlan};

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
            _ if self.parallel.is_some() => self.check_on_many_cards(),
            _ => Ok(()),
        }
    }

    fn check_on_many_cards(&self) -> Result<(), PlanError> {
        use OptimizerKind as K;
        let what = match self.optimizer.kind {
            _ if self.optimizer_in_backward => "the optimizer in backward".to_owned(),
            _ if self.checkpoints != CheckpointOptions::default() => "this kind of gradient checkpointing".to_owned(),
            K::AdamMini | K::Shampoo | K::GaLoreAdamW | K::ApolloAdamW => {
                format!("optimizer {}", self.optimizer.kind.name())
            }
            _ => return Ok(()),
        };
        let hint = "predict it on one card".into();
        Err(PlanError::Unsupported { what: format!("{what} on several cards"), hint })
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
