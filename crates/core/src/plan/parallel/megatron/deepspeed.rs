//! Megatron-DeepSpeed: what of Megatron's options its layers and DeepSpeed's engine have.

use super::checks::at;
use super::{Megatron, Recompute};
use crate::plan::parallel::mesh::{CP, Mesh, ModelSizes, PP, TP};
use crate::plan::{Fault, Faults, TrainPlan};

impl Megatron {
    /// Refuses what Megatron-DeepSpeed refuses, what its layers do not know, and what is not simulated.
    pub(super) fn check_deepspeed(&self, plan: &TrainPlan, mesh: &Mesh, sizes: &ModelSizes, faults: &mut Faults) {
        let partition = at("partition_activations");
        let Some(deepspeed) = &self.deepspeed else {
            return faults.when(self.partition_activations, || {
                Fault::new(&partition, format!("{{{partition}}} is DeepSpeed's"))
                    .or("use Megatron-DeepSpeed ({parallel.engine.megatron.deepspeed})")
                    .or_drop(&partition)
            });
        };
        deepspeed.check(plan, (mesh.dp_shard, mesh.dp_replicate), &at("deepspeed"), faults);
        let default = Self::default();
        let stage = at("deepspeed.zero.stage");
        let refused = [
            (
                self.virtual_pipeline > 1,
                at("virtual_pipeline"),
                "an interleaved pipeline, which DeepSpeed's engine does not run,",
            ),
            (self.schedule != default.schedule, at("schedule"), "zero-bubble schedules"),
            (self.split != default.split, at("split"), "uneven stages"),
            (self.mtp_layers > 0, at("mtp_layers"), "multi-token prediction"),
            (self.fp8.is_some(), at("fp8"), "fp8 products"),
            (self.fsdp.is_some(), at("fsdp"), "Megatron-FSDP"),
            (self.precision_aware.is_some(), at("precision_aware"), "the precision-aware optimizer"),
            (
                self.optimizer_cpu_offload_percent > 0,
                at("optimizer_cpu_offload_percent"),
                "Megatron's states on the host (DeepSpeed has {parallel.engine.megatron.deepspeed.zero.offload_optimizer})",
            ),
            (mesh.cp > 1, CP.to_owned(), "context parallel"),
            (matches!(self.recompute, Recompute::Selective(_)), at("recompute"), "selective recompute"),
        ];
        for (_, path, what) in refused.into_iter().filter(|(used, ..)| *used) {
            faults.add(
                Fault::unsupported(&path, format!("Megatron-DeepSpeed with {what}"))
                    .or_drop(path)
                    .or_drop(at("deepspeed")),
            );
        }
        faults.when(mesh.ep > 1 || sizes.experts.is_some(), || {
            Fault::unsupported(at("deepspeed"), "Megatron-DeepSpeed with mixtures of experts").or_drop(at("deepspeed"))
        });
        faults.when(deepspeed.zero.stage == 3, || {
            Fault::unsupported(&stage, "Megatron-DeepSpeed with ZeRO 3").or_set(&stage, 2)
        });
        let not_read = [
            (self.main_gradients != default.main_gradients, "main_gradients"),
            (self.cross_entropy != default.cross_entropy, "cross_entropy"),
            (self.distributed_optimizer != default.distributed_optimizer, "distributed_optimizer"),
            (self.overlap_grad_reduce, "overlap_grad_reduce"),
            (self.gradient_accumulation_fusion != default.gradient_accumulation_fusion, "gradient_accumulation_fusion"),
            (self.cp_comm != default.cp_comm, "cp_comm"),
            (self.core != default.core, "core"),
            (self.transformer_engine != default.transformer_engine, "transformer_engine"),
        ];
        for (_, key) in not_read.into_iter().filter(|(used, _)| *used) {
            faults.add(Fault::no_effect(at(key), "on Megatron-DeepSpeed, which is not built on Megatron-Core"));
        }
        faults.when(matches!(self.recompute, Recompute::Block(_)), || {
            Fault::new(at("recompute"), "DeepSpeed's pipeline has no recompute of a block of layers")
                .or_set(at("recompute"), serde_json::json!({"uniform": 1}))
        });
        faults.when(deepspeed.zero.stage == 2 && mesh.pp > 1, || {
            Fault::new(&stage, "ZeRO 2 with a pipeline, which DeepSpeed refuses").or_set(&stage, 1).or_drop(PP)
        });
        if self.partition_activations {
            faults.when(mesh.tp == 1, || Fault::no_effect(&partition, "without tensor parallel").or_set(TP, 2));
            faults.when(self.recompute == Recompute::None, || {
                Fault::no_effect(&partition, "without recompute")
                    .or_set(at("recompute"), serde_json::json!({"uniform": 1}))
            });
        }
    }
}
