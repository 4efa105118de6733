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
    /// Where fp32 weights, gradients and states are (stages 1 to 3).
    pub offload_optimizer: Option<Offload>,
    /// Where shards of parameters are (stage 3).
    pub offload_param: Option<Offload>,
    /// Cards of a node that share a second copy of the shards (stage 3, ZeRO++).
    pub zero_hpz_partition_size: u64,
    /// Cards that share one copy of everything (MiCS); -1: all.
    pub mics_shard_size: i64,
}

/// `offload_optimizer` or `offload_param`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Offload {
    /// Where to.
    pub device: OffloadDevice,
    /// Whether pages are pinned.
    pub pin_memory: bool,
}

impl Offload {
    /// To the host, unpinned.
    pub fn cpu() -> Self {
        Self { device: OffloadDevice::Cpu, pin_memory: false }
    }

    /// Whether anything is offloaded.
    pub fn is_on(&self) -> bool {
        self.device != OffloadDevice::None
    }
}

/// Where to offload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OffloadDevice {
    /// Nowhere.
    #[default]
    None,
    /// The host's memory.
    Cpu,
    /// A disk.
    Nvme,
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
            offload_optimizer: None,
            offload_param: None,
            zero_hpz_partition_size: 1,
            mics_shard_size: -1,
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
        if plan.quantization.is_some() && self.zero.stage == 3 {
            return unsupported("ZeRO 3 with quantised weights", "use ZeRO 2, or fsdp2");
        }
        if dp_replicate > 1 {
            return unsupported("over copies (dp_replicate over 1)", "shard over all GPUs");
        }
        if !matches!(plan.weights, DType::BF16 | DType::F16) || plan.autocast.is_some() {
            return unsupported("without 16-bit weights", "use bf16 or fp16 weights and no autocast");
        }
        self.check_offload()?;
        if !self.zero.contiguous_gradients && matches!(self.zero.stage, 1 | 2) {
            return unsupported("ZeRO 1 or 2 with contiguous_gradients off", "leave it on, or use ZeRO 3");
        }
        Ok(())
    }

    fn check_offload(&self) -> Result<(), PlanError> {
        let zero = &self.zero;
        let unsupported = |what: String, hint: &str| {
            Err(PlanError::Unsupported { what: format!("deepspeed {what}"), hint: hint.into() })
        };
        for (key, offload, least) in
            [("offload_optimizer", &zero.offload_optimizer, 1), ("offload_param", &zero.offload_param, 3)]
        {
            let Some(offload) = offload.as_ref().filter(|offload| offload.is_on()) else { continue };
            if zero.stage < least {
                return Err(PlanError::Conflict {
                    what: format!("{key} with ZeRO {}", zero.stage),
                    hint: format!("it needs stage {least} or more"),
                });
            }
            if offload.device == OffloadDevice::Nvme {
                return unsupported(format!("with {key} to nvme"), "cpu is simulated");
            }
        }
        if zero.zero_hpz_partition_size > 1 {
            return unsupported("with zero_hpz_partition_size (ZeRO++)".into(), "leave it at 1");
        }
        if zero.mics_shard_size > 0 {
            return unsupported("with mics_shard_size (MiCS)".into(), "leave it out: DeepSpeed has removed it");
        }
        Ok(())
    }
}
