//! LoRA as Megatron-Bridge has it: adapters beside Megatron's linears, everything else frozen.

use serde::{Deserialize, Serialize};

use super::Megatron;
use super::checks::at;
use crate::plan::parallel::mesh::{Mesh, ModelSizes, TP, divides};
use crate::plan::{Fault, Faults};

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
    pub(super) fn check(&self, options: &Megatron, mesh: &Mesh, sizes: &ModelSizes, faults: &mut Faults) {
        faults.range(&at("lora.dim"), self.dim, 1..=1 << 20);
        faults.when(self.targets.is_empty(), || {
            Fault::value(at("lora.targets"), "nothing", "a linear of a layer").or_drop(at("lora.targets"))
        });
        divides(faults, TP, mesh.tp, "values of the rank of LoRA", Some(self.dim));
        let refused = [
            (sizes.experts.is_some(), "lora", "mixtures of experts"),
            (options.fp8.is_some(), "fp8", "fp8 products"),
            (options.fsdp.is_some(), "fsdp", "Megatron-FSDP"),
            (options.deepspeed.is_some(), "deepspeed", "Megatron-DeepSpeed"),
            (options.mtp_layers > 0, "mtp_layers", "multi-token prediction"),
            (!options.schedule.is_default(), "schedule", "zero-bubble schedules"),
        ];
        for (_, key, what) in refused.into_iter().filter(|(used, ..)| *used) {
            let fault = Fault::unsupported(at(key), format!("LoRA under Megatron with {what}")).or_drop(at("lora"));
            faults.add(if key == "lora" { fault } else { fault.or_drop(at(key)) });
        }
    }
}
