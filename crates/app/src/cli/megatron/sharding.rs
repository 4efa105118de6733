//! How Megatron's ranks share what they hold: zero-bubble schedules, Megatron-FSDP, DeepSpeed's checkpoints.

use clap::{Args, ValueEnum};
use vramcast_core::plan::parallel::megatron::{Megatron, MegatronFsdp, PipelineSchedule, ShardingStrategy};

use super::super::Failure;

/// Flags with the names of Megatron's arguments, where it has them.
#[derive(Debug, Args)]
#[command(next_help_heading = "Megatron, sharding")]
pub(in super::super) struct ShardingArguments {
    /// In which order micro-batches go through the stages: 1f1b, zb-h1 or zb-h2 (zero bubble) [default: 1f1b].
    #[arg(long, value_name = "NAME", requires = "pp")]
    pipeline_schedule: Option<Schedule>,
    /// What Megatron-FSDP shards: no_shard, optim, optim_grads or optim_grads_params [default: optim_grads_params].
    #[arg(long, value_name = "WHAT", requires = "gpus")]
    data_parallel_sharding_strategy: Option<Strategy>,
    /// Gather layers in two buffers that stay (Megatron-FSDP).
    #[arg(long, requires = "gpus")]
    fsdp_double_buffer: bool,
    /// Tensor-parallel ranks share what is kept for recompute (Megatron-DeepSpeed).
    #[arg(long, requires = "gpus")]
    partition_activations: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Schedule {
    #[value(name = "1f1b")]
    OneForwardOneBackward,
    ZbH1,
    ZbH2,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Strategy {
    NoShard,
    Optim,
    OptimGrads,
    OptimGradsParams,
}

impl ShardingArguments {
    /// Whether any of them is given.
    pub(super) fn is_used(&self) -> bool {
        self.pipeline_schedule.is_some()
            || self.data_parallel_sharding_strategy.is_some()
            || self.fsdp_double_buffer
            || self.partition_activations
    }

    /// Puts them into the options; `fsdp` is whether Megatron-FSDP runs.
    pub(super) fn apply(&self, options: &mut Megatron, fsdp: bool) -> Result<(), Failure> {
        if !fsdp && (self.data_parallel_sharding_strategy.is_some() || self.fsdp_double_buffer) {
            return Err(Failure::bad_input(
                "--data-parallel-sharding-strategy and --fsdp-double-buffer are Megatron-FSDP's",
            )
            .hint("add --engine megatron-fsdp, or drop them"));
        }
        options.schedule = match self.pipeline_schedule {
            None | Some(Schedule::OneForwardOneBackward) => PipelineSchedule::OneForwardOneBackward,
            Some(Schedule::ZbH1) => PipelineSchedule::ZeroBubbleH1,
            Some(Schedule::ZbH2) => PipelineSchedule::ZeroBubbleH2,
        };
        let strategy = match self.data_parallel_sharding_strategy {
            Some(Strategy::NoShard) => ShardingStrategy::NoShard,
            Some(Strategy::Optim) => ShardingStrategy::Optim,
            Some(Strategy::OptimGrads) => ShardingStrategy::OptimGrads,
            Some(Strategy::OptimGradsParams) | None => ShardingStrategy::OptimGradsParams,
        };
        options.fsdp = fsdp.then_some(MegatronFsdp { strategy, double_buffer: self.fsdp_double_buffer });
        options.partition_activations = self.partition_activations;
        Ok(())
    }
}
