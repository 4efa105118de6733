//! Options of `vramcast train` that change how a step runs: checkpoints, the optimizer's habits, and what is refused.

use clap::Args;
use vramcast_core::plan::{CheckpointOptions, Checkpointing, LossKind, PlanError, TrainPlan};

use super::Failure;

/// How a step runs.
#[derive(Debug, Args)]
pub(super) struct StepArguments {
    /// The rank that galore-adamw and apollo-adamw project gradients to [default: 128].
    #[arg(long, value_name = "N", help_heading = "Optimizer")]
    optimizer_rank: Option<u64>,
    /// Step each parameter and free its gradient as soon as the gradient is complete.
    #[arg(long, help_heading = "Optimizer")]
    optimizer_in_backward: bool,
    /// Recompute layers in backward: full, every-N (every N-th layer), reentrant or offload (inputs wait on the host)
    /// [without a value: full].
    #[arg(
        long,
        visible_alias = "grad-checkpoint",
        value_name = "HOW",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "full",
        help_heading = "Kernels"
    )]
    gradient_checkpointing: Option<String>,
    /// Refused: a compiled graph keeps what its compiler decides.
    #[arg(long, help_heading = "Kernels")]
    torch_compile: bool,
    /// The loss: standard (transformers' own), liger or trl-fused; others are refused by name [default: standard].
    #[arg(long, value_name = "NAME", help_heading = "Kernels")]
    loss: Option<String>,
}

impl StepArguments {
    /// Writes them into a plan.
    pub(super) fn apply(&self, plan: &mut TrainPlan) -> Result<(), Failure> {
        plan.optimizer.rank = self.optimizer_rank.unwrap_or(plan.optimizer.rank);
        plan.optimizer_in_backward |= self.optimizer_in_backward;
        if let Some(how) = &self.gradient_checkpointing {
            (plan.checkpointing, plan.checkpoints) = checkpoints(how)?;
        }
        if self.torch_compile {
            return Err(unsupported("torch.compile", "predict the eager run, which it may go below or above"));
        }
        match self.loss.as_deref() {
            None => Ok(()),
            Some("standard" | "transformers") => {
                plan.loss = LossKind::Transformers;
                Ok(())
            }
            Some("trl-fused") => {
                plan.loss = LossKind::TrlFused;
                Ok(())
            }
            Some("liger" | "fused-linear") => {
                plan.kernels = vramcast_core::plan::Kernels::Liger;
                plan.loss = LossKind::Transformers;
                Ok(())
            }
            Some(name @ ("chunked" | "cut-cross-entropy" | "cce")) => {
                Err(unsupported(&format!("--loss {name}"), "--liger has a fused linear cross entropy"))
            }
            Some(name) => Err(Failure::bad_input(format!("--loss: {name} is not a loss vramcast knows"))),
        }
    }
}

fn unsupported(what: &str, hint: &str) -> Failure {
    PlanError::Unsupported { what: what.into(), hint: hint.into() }.into()
}

fn checkpoints(how: &str) -> Result<(Checkpointing, CheckpointOptions), Failure> {
    let plain = CheckpointOptions::default();
    let options = match how {
        "off" | "none" => return Ok((Checkpointing::Off, plain)),
        "full" => plain,
        "reentrant" => CheckpointOptions { reentrant: true, ..plain },
        "offload" => CheckpointOptions { offload: true, ..plain },
        _ => match how.strip_prefix("every-").map(str::parse) {
            Some(Ok(every)) => CheckpointOptions { every, ..plain },
            _ if how == "selective" => {
                return Err(unsupported(
                    "--gradient-checkpointing=selective (operation by operation)",
                    "every-N recomputes whole layers",
                ));
            }
            _ => {
                return Err(Failure::bad_input(format!(
                    "--gradient-checkpointing: {how} is not full, every-N, reentrant, offload or off"
                )));
            }
        },
    };
    Ok((Checkpointing::Full, options))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_are_read() {
        let read = |how: &str| checkpoints(how).ok();
        let plain = CheckpointOptions::default();
        assert_eq!(read("full"), Some((Checkpointing::Full, plain)));
        assert_eq!(read("every-3"), Some((Checkpointing::Full, CheckpointOptions { every: 3, ..plain })));
        assert_eq!(read("reentrant"), Some((Checkpointing::Full, CheckpointOptions { reentrant: true, ..plain })));
        assert_eq!(read("off"), Some((Checkpointing::Off, plain)));
        assert_eq!(read("every-x"), None);
        assert_eq!(read("selective"), None);
    }
}
