//! Megatron-FSDP: Megatron's arguments `use_megatron_fsdp` and what belongs to it.

use serde::{Deserialize, Serialize};

use super::Megatron;
use crate::plan::PlanError;
use crate::plan::parallel::mesh::Mesh;

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
    pub(super) fn check(self, options: &Megatron, mesh: &Mesh) -> Result<(), PlanError> {
        let refused = [
            (mesh.pp > 1, "a pipeline"),
            (options.mtp_layers > 0, "multi-token prediction"),
            (options.fp8.is_some_and(|fp8| fp8.param_gather), "fp8 weights"),
            (options.optimizer_cpu_offload_percent > 0, "states on the host"),
            (options.precision_aware.is_some(), "the precision-aware optimizer"),
        ];
        if let Some((_, what)) = refused.into_iter().find(|(used, _)| *used) {
            return Err(PlanError::Unsupported {
                what: format!("Megatron-FSDP with {what}"),
                hint: "use --engine megatron, or drop it".into(),
            });
        }
        if self.double_buffer && !self.strategy.shards_parameters() {
            return Err(PlanError::Conflict {
                what: "fsdp_double_buffer without shared parameters has no effect".into(),
                hint: "use optim_grads_params, or drop it".into(),
            });
        }
        Ok(())
    }
}
