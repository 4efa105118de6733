//! Megatron-DeepSpeed: what of Megatron's options its layers and DeepSpeed's engine have.

use super::{Megatron, Recompute};
use crate::plan::parallel::mesh::{Mesh, ModelSizes};
use crate::plan::{PlanError, TrainPlan};

impl Megatron {
    /// Refuses what Megatron-DeepSpeed refuses, what its layers do not know, and what is not simulated.
    pub(super) fn check_deepspeed(&self, plan: &TrainPlan, mesh: &Mesh, sizes: &ModelSizes) -> Result<(), PlanError> {
        let conflict = |what: String, hint: &str| Err(PlanError::Conflict { what, hint: hint.into() });
        let Some(deepspeed) = &self.deepspeed else {
            return match self.partition_activations {
                true => conflict("partition_activations is DeepSpeed's".into(), "use --engine megatron-deepspeed"),
                false => Ok(()),
            };
        };
        deepspeed.check(plan, (mesh.dp_shard, mesh.dp_replicate))?;
        let default = Self::default();
        let refused = [
            (self.virtual_pipeline > 1, "an interleaved pipeline, which DeepSpeed's engine does not run"),
            (self.schedule != default.schedule, "zero-bubble schedules"),
            (self.split != default.split, "uneven stages"),
            (self.mtp_layers > 0, "multi-token prediction"),
            (self.fp8.is_some(), "fp8 products"),
            (self.fsdp.is_some(), "Megatron-FSDP"),
            (self.precision_aware.is_some(), "the precision-aware optimizer"),
            (
                self.optimizer_cpu_offload_percent > 0,
                "Megatron's states on the host (DeepSpeed has --offload-optimizer)",
            ),
            (mesh.cp > 1, "context parallel"),
            (mesh.ep > 1 || sizes.experts.is_some(), "mixtures of experts"),
            (deepspeed.zero.stage == 3, "ZeRO 3"),
            (matches!(self.recompute, Recompute::Selective(_)), "selective recompute"),
        ];
        if let Some((_, what)) = refused.into_iter().find(|(used, _)| *used) {
            return Err(PlanError::Unsupported {
                what: format!("Megatron-DeepSpeed with {what}"),
                hint: "drop it, or use --engine megatron".into(),
            });
        }
        if matches!(self.recompute, Recompute::Block(_)) {
            return conflict(
                "DeepSpeed's pipeline has no recompute of a block of layers".into(),
                "use --recompute uniform-N",
            );
        }
        if deepspeed.zero.stage == 2 && mesh.pp > 1 {
            return conflict("ZeRO 2 with a pipeline, which DeepSpeed refuses".into(), "use ZeRO 1, or pp 1");
        }
        if self.partition_activations && (mesh.tp == 1 || self.recompute == Recompute::None) {
            return conflict(
                "partition_activations without tensor parallel or without recompute has no effect".into(),
                "drop it, or add --tp and --recompute uniform-1",
            );
        }
        Ok(())
    }
}
