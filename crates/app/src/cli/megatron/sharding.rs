//! How Megatron's ranks share what they hold: zero-bubble schedules, Megatron-FSDP, DeepSpeed's checkpoints; and its LoRA.

use clap::{Args, ValueEnum};
use vramcast_core::plan::parallel::megatron::{
    LoraTarget, Megatron, MegatronFsdp, MegatronLora, PipelineSchedule, ShardingStrategy,
};

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
    /// Elements of gradients that may wait to be reduced; half as many are gathered ahead (Megatron-FSDP)
    /// [default: 1e9, or two layers].
    #[arg(long, value_name = "N", requires = "gpus")]
    suggested_communication_unit_size: Option<u64>,
    /// What so many of the first layers keep for backward goes to the host (cpu_offloading).
    #[arg(long, value_name = "N", requires = "gpus")]
    cpu_offloading_num_layers: Option<u64>,
    /// Tensor-parallel ranks share what is kept for recompute (Megatron-DeepSpeed).
    #[arg(long, requires = "gpus")]
    partition_activations: bool,
    /// Train adapters of this rank beside frozen linears, as Megatron-Bridge does [without a value: 32].
    #[arg(long, value_name = "DIM", num_args = 0..=1, require_equals = true, default_missing_value = "32", requires = "gpus")]
    megatron_lora: Option<u64>,
    /// Which linears have adapters, separated by commas: linear_qkv, linear_proj, linear_fc1, linear_fc2 [default: all].
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "megatron_lora")]
    megatron_lora_targets: Vec<Target>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Target {
    #[value(name = "linear_qkv")]
    Qkv,
    #[value(name = "linear_proj")]
    Proj,
    #[value(name = "linear_fc1")]
    Fc1,
    #[value(name = "linear_fc2")]
    Fc2,
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
            || self.suggested_communication_unit_size.is_some()
            || self.cpu_offloading_num_layers.is_some()
            || self.partition_activations
            || self.megatron_lora.is_some()
    }

    /// Puts them into the options; `fsdp` is whether Megatron-FSDP runs.
    pub(super) fn apply(&self, options: &mut Megatron, fsdp: bool) -> Result<(), Failure> {
        let own = self.data_parallel_sharding_strategy.is_some() || self.suggested_communication_unit_size.is_some();
        if !fsdp && (own || self.fsdp_double_buffer) {
            return Err(Failure::bad_input(
                "--data-parallel-sharding-strategy, --fsdp-double-buffer and --suggested-communication-unit-size are \
                 Megatron-FSDP's",
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
        options.fsdp = fsdp.then_some(MegatronFsdp {
            strategy,
            double_buffer: self.fsdp_double_buffer,
            communication_unit: self.suggested_communication_unit_size,
        });
        options.partition_activations = self.partition_activations;
        options.cpu_offloading_layers = self.cpu_offloading_num_layers.unwrap_or(0);
        let targets = self.megatron_lora_targets.iter().map(|target| match target {
            Target::Qkv => LoraTarget::LinearQkv,
            Target::Proj => LoraTarget::LinearProj,
            Target::Fc1 => LoraTarget::LinearFc1,
            Target::Fc2 => LoraTarget::LinearFc2,
        });
        let targets: Vec<LoraTarget> = targets.collect();
        options.lora = self.megatron_lora.map(|dim| match targets.is_empty() {
            true => MegatronLora { dim, ..MegatronLora::default() },
            false => MegatronLora { dim, targets },
        });
        Ok(())
    }
}
