//! Options of `vramcast train` that change how a step runs: checkpoints, the optimizer's habits, and what is refused.

use clap::Args;
use vramcast_core::dtype::DType;
use vramcast_core::plan::{CheckpointOptions, Checkpointing, Kernels, LossKind, PlanError, Selective, TrainPlan};

use super::Failure;

/// How a step runs.
#[derive(Debug, Args)]
pub(super) struct StepArguments {
    /// The rank that galore-adamw and apollo-adamw project gradients to [default: 128].
    #[arg(long, value_name = "N", help_heading = "Optimizer")]
    optimizer_rank: Option<u64>,
    /// Step fp32 copies of narrow weights, as apex and Megatron do.
    #[arg(long, help_heading = "Optimizer")]
    pub master_weights: bool,
    /// Keep gradients in this type (`Parameter.grad_dtype`): fp32, bf16 or fp16 [default: that of the weights].
    #[arg(long, value_name = "TYPE", help_heading = "Optimizer")]
    gradient_dtype: Option<String>,
    /// Keep the moments of adamw-anyprecision in this type: fp32, bf16 or fp16 [default: fp32].
    #[arg(long, value_name = "TYPE", help_heading = "Optimizer")]
    optimizer_state_dtype: Option<String>,
    /// Step each parameter and free its gradient as soon as the gradient is complete.
    #[arg(long, help_heading = "Optimizer")]
    optimizer_in_backward: bool,
    /// Recompute layers in backward: full, every-N (every N-th layer), reentrant, offload (inputs wait on the host),
    /// selective (every second product and attention are kept, as torchtitan does) or selective-matmul (all of them
    /// are) [without a value: full].
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
    /// The loss: standard (transformers' own), chunked (torchtune's), cce (cut cross entropy), trl-fused (TRL's) or liger
    /// [default: standard].
    #[arg(long, value_name = "NAME", help_heading = "Kernels")]
    loss: Option<String>,
    /// Into how many pieces the chunked loss cuts the sequence [default: 8].
    #[arg(long, value_name = "N", help_heading = "Kernels")]
    loss_chunks: Option<u64>,
}

impl StepArguments {
    /// Writes them into a plan.
    pub(super) fn apply(&self, plan: &mut TrainPlan) -> Result<(), Failure> {
        plan.optimizer.rank = self.optimizer_rank.unwrap_or(plan.optimizer.rank);
        plan.optimizer_in_backward |= self.optimizer_in_backward;
        plan.optimizer.master_weights |= self.master_weights;
        if let Some(text) = &self.gradient_dtype {
            plan.gradients = Some(float_type("--gradient-dtype", text)?);
        }
        if let Some(text) = &self.optimizer_state_dtype {
            plan.optimizer.state = Some(float_type("--optimizer-state-dtype", text)?);
        }
        if let Some(how) = &self.gradient_checkpointing {
            (plan.checkpointing, plan.checkpoints) = checkpoints(how)?;
        }
        if self.torch_compile {
            return Err(unsupported("torch.compile", "predict the eager run, which it may go below or above"));
        }
        if let Some(chunks) = self.loss_chunks {
            plan.loss.chunks = chunks;
        }
        match self.loss.as_deref() {
            None => {}
            Some("standard" | "transformers") => plan.loss.kind = LossKind::Standard,
            Some("chunked") => plan.loss.kind = LossKind::Chunked,
            Some("cce" | "cut-cross-entropy") => plan.loss.kind = LossKind::CutCrossEntropy,
            Some("trl-fused") => plan.loss.kind = LossKind::TrlFused,
            Some("liger" | "fused-linear") => {
                plan.kernels = Kernels::Liger;
                plan.loss.kind = LossKind::Standard;
            }
            Some(other) => {
                return Err(Failure::bad_input(format!(
                    "--loss: {other} is not standard, chunked, cce, trl-fused or liger"
                )));
            }
        }
        if self.loss_chunks.is_some() && plan.loss.kind != LossKind::Chunked {
            return Err(Failure::bad_input("--loss-chunks has no effect without --loss chunked".to_owned()));
        }
        Ok(())
    }
}

fn float_type(flag: &str, text: &str) -> Result<DType, Failure> {
    match text.to_lowercase().as_str() {
        "fp32" | "float32" => Ok(DType::F32),
        "bf16" | "bfloat16" => Ok(DType::BF16),
        "fp16" | "float16" => Ok(DType::F16),
        _ => Err(Failure::bad_input(format!("{flag}: {text} is not fp32, bf16 or fp16"))),
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
        "selective" => CheckpointOptions { selective: Some(Selective::AlternateMatmuls), ..plain },
        "selective-matmul" => CheckpointOptions { selective: Some(Selective::Matmuls), ..plain },
        _ => match how.strip_prefix("every-").map(str::parse) {
            Some(Ok(every)) => CheckpointOptions { every, ..plain },
            _ => {
                let known = "full, every-N, reentrant, offload, selective, selective-matmul or off";
                return Err(Failure::bad_input(format!("--gradient-checkpointing: {how} is not {known}")));
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
        let selective = CheckpointOptions { selective: Some(Selective::AlternateMatmuls), ..plain };
        assert_eq!(read("selective"), Some((Checkpointing::Full, selective)));
    }
}
