//! DeepSpeed: the parts of its configuration that decide memory.

use serde::{Deserialize, Serialize};

use super::mesh::divides;
use crate::dtype::DType;
use crate::plan::{Package, PlanError, Stack, TrainPlan, Version};

/// DeepSpeed's engine with bf16 enabled.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DeepSpeed {
    /// `zero_optimization`.
    pub zero: ZeroConfig,
    /// What gradients are accumulated in over micro-batches (`data_types.grad_accum_dtype`); absent: the weights' type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_accum_dtype: Option<DType>,
}

/// `zero_optimization`, with DeepSpeed 0.19's names and defaults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ZeroConfig {
    /// 0: nothing is sharded; 1: optimizer states; 2: gradients too; 3: parameters too.
    pub stage: u8,
    /// Gradients are copied into one buffer as they come.
    pub contiguous_gradients: bool,
    /// Neighbouring parameters belong to different cards (stages 1 and 2).
    pub round_robin_gradients: bool,
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
    /// Cards that share one copy of everything (MiCS, which DeepSpeed has up to 0.18); -1: all.
    pub mics_shard_size: i64,
}

/// `offload_optimizer` or `offload_param`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Offload {
    /// Where to.
    pub device: OffloadDevice,
    /// Whether pages are pinned.
    pub pin_memory: bool,
    /// Pinned buffers on the way to a disk; DeepSpeed's default is 4 for the optimizer, 5 for parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub buffer_count: Option<u64>,
    /// Elements of such a buffer for parameters.
    pub buffer_size: u64,
    /// Elements of parameters that stay in the host's memory although the rest goes to a disk.
    pub max_in_cpu: u64,
}

impl Default for Offload {
    fn default() -> Self {
        Self {
            device: OffloadDevice::None,
            pin_memory: true,
            buffer_count: None,
            buffer_size: 100_000_000,
            max_in_cpu: 1_000_000_000,
        }
    }
}

impl Offload {
    /// To the host.
    pub fn cpu() -> Self {
        Self { device: OffloadDevice::Cpu, ..Self::default() }
    }

    /// Whether it goes to a disk.
    pub fn is_to_disk(&self) -> bool {
        self.device == OffloadDevice::Nvme
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
            round_robin_gradients: false,
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

impl ZeroConfig {
    /// Cards that share one copy of everything, where they are not all (`mics_shard_size`).
    pub fn mics_ranks(&self) -> Option<u64> {
        u64::try_from(self.mics_shard_size).ok().filter(|ranks| *ranks > 0)
    }
}

impl DeepSpeed {
    /// Whether gradients are accumulated in fp32 although they are computed in `weights`.
    pub fn accumulates_wide(&self, weights: DType) -> bool {
        self.grad_accum_dtype == Some(DType::F32) && weights != DType::F32
    }

    /// Refuses what is not simulated.
    pub fn check(&self, plan: &TrainPlan, (dp_shard, dp_replicate): (u64, u64)) -> Result<(), PlanError> {
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
        self.check_accumulation(plan)?;
        self.check_second_partition(dp_shard)?;
        self.check_mics(dp_shard, &plan.stack)?;
        let conflict = |what: String, hint: &str| Err(PlanError::Conflict { what, hint: hint.into() });
        if self.zero.round_robin_gradients && !matches!(self.zero.stage, 1 | 2) {
            return conflict(
                format!("round_robin_gradients has no effect with ZeRO {}", self.zero.stage),
                "drop it, or use stage 1 or 2",
            );
        }
        Ok(())
    }

    fn check_accumulation(&self, plan: &TrainPlan) -> Result<(), PlanError> {
        let Some(dtype) = self.grad_accum_dtype.filter(|dtype| *dtype != plan.weights) else { return Ok(()) };
        let refused = |what: String, hint: &str| {
            Err(PlanError::Unsupported { what: format!("deepspeed grad_accum_dtype {what}"), hint: hint.into() })
        };
        if dtype != DType::F32 {
            return refused(
                format!("{} with {} weights", dtype.name(), plan.weights.name()),
                "use fp32, or leave it out",
            );
        }
        match self.zero.stage {
            0 => Err(PlanError::Conflict {
                what: "grad_accum_dtype fp32 with ZeRO 0".into(),
                hint: "DeepSpeed itself refuses it: use stage 1, 2 or 3, or leave it out".into(),
            }),
            1 if plan.weights != DType::BF16 => refused("fp32 with ZeRO 1 and fp16".into(), "use bf16, or ZeRO 2"),
            _ if self.zero.offload_optimizer.as_ref().is_some_and(Offload::is_on) => {
                refused("fp32 with offload_optimizer".into(), "leave one of them out")
            }
            _ => Ok(()),
        }
    }

    fn check_second_partition(&self, world: u64) -> Result<(), PlanError> {
        let ranks = self.zero.zero_hpz_partition_size;
        if ranks < 2 {
            return Ok(());
        }
        if self.zero.stage < 3 {
            return Err(PlanError::Conflict {
                what: format!("zero_hpz_partition_size {ranks} with ZeRO {}", self.zero.stage),
                hint: "it needs stage 3".into(),
            });
        }
        if self.zero.offload_param.as_ref().is_some_and(Offload::is_on) {
            return Err(PlanError::Unsupported {
                what: "deepspeed zero_hpz_partition_size with offload_param".into(),
                hint: "leave one of them out".into(),
            });
        }
        divides("zero_hpz_partition_size", ranks, "GPUs", Some(world))
    }

    fn check_mics(&self, world: u64, stack: &Stack) -> Result<(), PlanError> {
        let zero = &self.zero;
        if zero.mics_shard_size == 0 || zero.mics_shard_size < -1 {
            return Err(PlanError::BadValue {
                key: "mics_shard_size".into(),
                value: zero.mics_shard_size.to_string(),
                expected: "-1, or a number of GPUs".into(),
            });
        }
        let Some(ranks) = zero.mics_ranks() else { return Ok(()) };
        let conflict = |what: String, hint: &str| Err(PlanError::Conflict { what, hint: hint.into() });
        // A plan that names no version means one that has it.
        if let Some(version) = stack.named(Package::Deepspeed).filter(|version| *version >= Version::new(0, 19, 0)) {
            return conflict(
                format!("mics_shard_size {ranks} with DeepSpeed {version}"),
                "MiCS is in DeepSpeed up to 0.18",
            );
        }
        if zero.stage != 3 {
            return conflict(format!("mics_shard_size {ranks} with ZeRO {}", zero.stage), "it needs stage 3");
        }
        if [&zero.offload_optimizer, &zero.offload_param].into_iter().flatten().any(Offload::is_on) {
            return conflict("mics_shard_size with offload, which MiCS refuses".into(), "leave one of them out");
        }
        if zero.zero_hpz_partition_size > 1 {
            return conflict("mics_shard_size with zero_hpz_partition_size".into(), "leave one of them out");
        }
        if ranks > world {
            return conflict(format!("mics_shard_size {ranks} is more than {world} GPUs"), "take fewer");
        }
        divides("mics_shard_size", ranks, "GPUs", Some(world))
    }

    fn check_offload(&self) -> Result<(), PlanError> {
        let zero = &self.zero;
        for (key, offload, least) in
            [("offload_optimizer", &zero.offload_optimizer, 1), ("offload_param", &zero.offload_param, 3)]
        {
            if !offload.as_ref().is_some_and(Offload::is_on) {
                continue;
            }
            if zero.stage < least {
                return Err(PlanError::Conflict {
                    what: format!("{key} with ZeRO {}", zero.stage),
                    hint: format!("it needs stage {least} or more"),
                });
            }
        }
        Ok(())
    }
}
