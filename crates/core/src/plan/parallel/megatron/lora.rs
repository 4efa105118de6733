//! LoRA as Megatron-Bridge has it: adapters beside Megatron's linears, everything else frozen.

use serde::{Deserialize, Serialize};

use super::Megatron;
use crate::plan::PlanError;
use crate::plan::parallel::mesh::{Mesh, ModelSizes, divides};

/// Megatron-Bridge's `LoRA`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MegatronLora {
    /// `dim`: the rank.
    pub dim: u64,
    /// `target_modules`.
    pub targets: Vec<LoraTarget>,
}

/// A linear of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoraTarget {
    /// Queries, keys and values.
    LinearQkv,
    /// The output projection of attention.
    LinearProj,
    /// The first product of the feed-forward.
    LinearFc1,
    /// The second.
    LinearFc2,
}

impl Default for MegatronLora {
    fn default() -> Self {
        use LoraTarget::{LinearFc1, LinearFc2, LinearProj, LinearQkv};
        Self { dim: 32, targets: vec![LinearQkv, LinearProj, LinearFc1, LinearFc2] }
    }
}

impl MegatronLora {
    /// Whether a linear has an adapter.
    pub fn adapts(&self, target: LoraTarget) -> bool {
        self.targets.contains(&target)
    }

    /// Refuses what is not simulated.
    pub(super) fn check(&self, options: &Megatron, mesh: &Mesh, sizes: &ModelSizes) -> Result<(), PlanError> {
        if self.dim == 0 || self.targets.is_empty() {
            return Err(PlanError::BadValue {
                key: "megatron lora".into(),
                value: format!("dim {} on {} linears", self.dim, self.targets.len()),
                expected: "a rank of at least 1 and a linear".into(),
            });
        }
        divides("tp", mesh.tp, "values of the rank of LoRA", Some(self.dim))?;
        let refused = [
            (sizes.experts.is_some(), "mixtures of experts"),
            (options.fp8.is_some(), "fp8 products"),
            (options.fsdp.is_some(), "Megatron-FSDP"),
            (options.deepspeed.is_some(), "Megatron-DeepSpeed"),
            (options.mtp_layers > 0, "multi-token prediction"),
            (!options.schedule.is_default(), "zero-bubble schedules"),
        ];
        match refused.into_iter().find(|(used, _)| *used) {
            Some((_, what)) => Err(PlanError::Unsupported {
                what: format!("LoRA under Megatron with {what}"),
                hint: "drop one of them".into(),
            }),
            None => Ok(()),
        }
    }
}
