//! DeepSpeed: the parts of its configuration that decide memory.

use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::plan::{PlanError, TrainPlan};

/// DeepSpeed's engine with bf16 enabled.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DeepSpeed {
    /// `zero_optimization`.
    pub zero: ZeroConfig,
}

/// `zero_optimization`, with DeepSpeed 0.19's names and defaults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ZeroConfig {
    /// 0: nothing is sharded; 1: optimizer states; 2: gradients too; 3: parameters too.
    pub stage: u8,
    /// Gradients are copied into one buffer as they come.
    pub contiguous_gradients: bool,
    /// Reductions run beside the backward pass; absent: on for stage 3 only.
    pub overlap_comm: Option<bool>,
    /// Elements of a reduction bucket.
    pub reduce_bucket_size: u64,
    /// Elements gathered at once after a step.
    pub allgather_bucket_size: u64,
    /// Elements prefetched ahead (stage 3).
    #[serde(alias = "prefetch_bucket_size")]
    pub stage3_prefetch_bucket_size: u64,
    /// Elements gathered at most (stage 3).
    #[serde(alias = "max_live_parameters")]
    pub stage3_max_live_parameters: u64,
    /// Parameters used again within so many elements stay gathered (stage 3).
    #[serde(alias = "max_reuse_distance")]
    pub stage3_max_reuse_distance: u64,
    /// Smaller parameters are not sharded (stage 3).
    #[serde(alias = "param_persistence_threshold")]
    pub stage3_param_persistence_threshold: u64,
    /// Elements of an optimizer sub-group (stage 3).
    pub sub_group_size: u64,
}

impl Default for ZeroConfig {
    fn default() -> Self {
        Self {
            stage: 0,
            contiguous_gradients: true,
            overlap_comm: None,
            reduce_bucket_size: 500_000_000,
            allgather_bucket_size: 500_000_000,
            stage3_prefetch_bucket_size: 50_000_000,
            stage3_max_live_parameters: 1_000_000_000,
            stage3_max_reuse_distance: 1_000_000_000,
            stage3_param_persistence_threshold: 100_000,
            sub_group_size: 1_000_000_000,
        }
    }
}

impl DeepSpeed {
    /// Refuses what is not simulated.
    pub fn check(&self, plan: &TrainPlan, dp_replicate: u64) -> Result<(), PlanError> {
        let unsupported = |what: &str, hint: &str| {
            Err(PlanError::Unsupported { what: format!("deepspeed {what}"), hint: hint.into() })
        };
        match self.zero.stage {
            0..=3 => {}
            stage => {
                return Err(PlanError::BadValue {
                    key: "zero".into(),
                    value: stage.to_string(),
                    expected: "0, 1, 2 or 3".into(),
                });
            }
        }
        if plan.adapter.is_some() || plan.quantization.is_some() {
            return unsupported("with adapters or quantised weights", "fsdp2 has them");
        }
        if dp_replicate > 1 {
            return unsupported("with hpZ or MiCS (dp_replicate over 1)", "shard over all GPUs");
        }
        if plan.weights != DType::BF16 || plan.autocast.is_some() {
            return unsupported("without bf16 weights", "use bf16 weights and no autocast");
        }
        if plan.gradient_accumulation > 1 {
            return unsupported("with gradient accumulation", "set it to 1");
        }
        if !self.zero.contiguous_gradients {
            return unsupported("with contiguous_gradients off", "leave it on");
        }
        Ok(())
    }
}
