//! Megatron-FSDP: Megatron's arguments `use_megatron_fsdp` and what belongs to it.

use serde::{Deserialize, Serialize};

use super::Megatron;
use super::checks::at;
use crate::plan::parallel::mesh::{Mesh, PP};
use crate::plan::{Fault, Faults};

/// Megatron-FSDP (version 1) in place of the distributed optimizer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MegatronFsdp {
    /// `data_parallel_sharding_strategy`.
    pub strategy: ShardingStrategy,
    /// `fsdp_double_buffer`: layers are gathered and their gradients summed in two buffers each, which stay.
    pub double_buffer: bool,
    /// `suggested_communication_unit_size`: elements of gradients that may wait; half as many are gathered ahead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub communication_unit: Option<u64>,
}

/// What the data-parallel ranks share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ShardingStrategy {
    /// Nothing.
    NoShard,
    /// Main parameters and states.
    Optim,
    /// Gradients too.
    OptimGrads,
    /// Parameters too.
    #[default]
    OptimGradsParams,
}

impl ShardingStrategy {
    /// Whether main parameters and states are shared.
    pub fn shards_states(self) -> bool {
        self != Self::NoShard
    }

    /// Whether gradients are.
    pub fn shards_gradients(self) -> bool {
        matches!(self, Self::OptimGrads | Self::OptimGradsParams)
    }

    /// Whether parameters are.
    pub fn shards_parameters(self) -> bool {
        self == Self::OptimGradsParams
    }
}

impl MegatronFsdp {
    /// Refuses what is not simulated, and what Megatron refuses.
    pub(super) fn check(self, options: &Megatron, mesh: &Mesh, faults: &mut Faults) {
        let refused = [
            (mesh.pp > 1, PP.to_owned(), "a pipeline"),
            (options.mtp_layers > 0, at("mtp_layers"), "multi-token prediction"),
            (options.fp8.is_some_and(|fp8| fp8.param_gather), at("fp8.param_gather"), "fp8 weights"),
            (options.optimizer_cpu_offload_percent > 0, at("optimizer_cpu_offload_percent"), "states on the host"),
            (options.precision_aware.is_some(), at("precision_aware"), "the precision-aware optimizer"),
        ];
        for (_, path, what) in refused.into_iter().filter(|(used, ..)| *used) {
            faults
                .add(Fault::unsupported(&path, format!("Megatron-FSDP with {what}")).or_drop(path).or_drop(at("fsdp")));
        }
        faults.when(self.double_buffer && !self.strategy.shards_parameters(), || {
            Fault::no_effect(at("fsdp.double_buffer"), "without shared parameters")
                .or_set(at("fsdp.strategy"), "optim_grads_params")
        });
    }
}
