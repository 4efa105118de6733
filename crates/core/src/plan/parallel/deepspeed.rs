//! DeepSpeed: the parts of its configuration that decide memory.

use serde::{Deserialize, Serialize};

use super::mesh::divides;
use crate::dtype::DType;
use crate::plan::{Fault, Faults, Package, Stack, TrainPlan, Version};

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

    /// Refuses what DeepSpeed refuses and what is not simulated; `at` is the engine's place in a plan.
    pub(super) fn check(&self, plan: &TrainPlan, (dp_shard, dp_replicate): (u64, u64), at: &str, faults: &mut Faults) {
        let stage = format!("{at}.zero.stage");
        if self.zero.stage > 3 {
            faults.add(Fault::value(&stage, self.zero.stage, "0, 1, 2 or 3").or_set(&stage, 3));
            return;
        }
        faults.when(plan.quantization.is_some() && self.zero.stage == 3, || {
            Fault::unsupported("quantization", "deepspeed ZeRO 3 with quantised weights")
                .or_set(&stage, 2)
                .or_set("parallel.engine", super::named("fsdp2"))
        });
        faults.when(dp_replicate > 1, || {
            let path = "parallel.mesh.dp_replicate";
            Fault::unsupported(path, format!("deepspeed over copies ({{{path}}} {dp_replicate})")).or_set(path, 1)
        });
        faults.when(!matches!(plan.weights, DType::BF16 | DType::F16), || {
            Fault::unsupported("weights", "deepspeed without 16-bit weights").or_set("weights", "bf16")
        });
        faults.when(plan.autocast.is_some(), || {
            Fault::unsupported("autocast", "deepspeed with {autocast}").or_drop("autocast")
        });
        self.check_offload(at, faults);
        self.check_accumulation(plan, at, faults);
        self.check_second_partition(dp_shard, at, faults);
        self.check_mics(dp_shard, &plan.stack, (at, faults));
        faults.when(self.zero.round_robin_gradients && !matches!(self.zero.stage, 1 | 2), || {
            Fault::no_effect(format!("{at}.zero.round_robin_gradients"), format!("with ZeRO {}", self.zero.stage))
                .or_set(&stage, 2)
        });
    }

    fn check_accumulation(&self, plan: &TrainPlan, at: &str, faults: &mut Faults) {
        let Some(dtype) = self.grad_accum_dtype.filter(|dtype| *dtype != plan.weights) else { return };
        let (path, stage, offload) =
            (format!("{at}.grad_accum_dtype"), format!("{at}.zero.stage"), format!("{at}.zero.offload_optimizer"));
        let refused = |what: String| Fault::unsupported(&path, format!("deepspeed {{{path}}} {what}"));
        if dtype != DType::F32 {
            let what = format!("{} with {} weights", dtype.name(), plan.weights.name());
            return faults.add(refused(what).or_set(&path, "fp32").or_drop(&path));
        }
        match self.zero.stage {
            0 => {
                let problem = format!("{{{path}}} fp32 with ZeRO 0: DeepSpeed itself refuses it");
                faults.add(Fault::new(&path, problem).or_set(&stage, 1).or_drop(&path));
            }
            1 if plan.weights == DType::F16 => {
                faults.add(refused("fp32 with ZeRO 1 and fp16".into()).or_set("weights", "bf16").or_set(&stage, 2));
            }
            _ => faults.when(self.zero.offload_optimizer.as_ref().is_some_and(Offload::is_on), || {
                refused(format!("fp32 with {{{offload}}}")).or_drop(&path).or_drop(&offload)
            }),
        }
    }

    fn check_second_partition(&self, world: u64, at: &str, faults: &mut Faults) {
        let ranks = self.zero.zero_hpz_partition_size;
        if ranks < 2 {
            return;
        }
        let (path, stage, offload) = (
            format!("{at}.zero.zero_hpz_partition_size"),
            format!("{at}.zero.stage"),
            format!("{at}.zero.offload_param"),
        );
        if self.zero.stage < 3 {
            return faults.add(needs(&path, format!("{{{path}}} {ranks}"), (self.zero.stage, 3), &stage));
        }
        faults.when(self.zero.offload_param.as_ref().is_some_and(Offload::is_on), || {
            Fault::unsupported(&path, format!("deepspeed {{{path}}} with {{{offload}}}"))
                .or_drop(&path)
                .or_drop(&offload)
        });
        divides(faults, &path, ranks, "GPUs", Some(world));
    }

    fn check_mics(&self, world: u64, stack: &Stack, (at, faults): (&str, &mut Faults)) {
        let (zero, path) = (&self.zero, format!("{at}.zero.mics_shard_size"));
        if zero.mics_shard_size == 0 || zero.mics_shard_size < -1 {
            let fault = Fault::value(&path, zero.mics_shard_size, "-1, or a number of GPUs");
            return faults.add(fault.or_set(&path, -1));
        }
        let Some(ranks) = zero.mics_ranks() else { return };
        // A plan that names no version means one that has it.
        faults.when(stack.named(Package::Deepspeed).is_some_and(|version| version >= Version::new(0, 19, 0)), || {
            Fault::new(
                &path,
                format!(
                    "{{{path}}} with DeepSpeed {}: MiCS is in DeepSpeed up to 0.18",
                    stack.version(Package::Deepspeed)
                ),
            )
            .or_drop(&path)
        });
        if zero.stage != 3 {
            let stage = format!("{at}.zero.stage");
            faults.add(needs(&path, format!("{{{path}}} {ranks}"), (zero.stage, 3), &stage));
        }
        let on = |offload: &Option<Offload>| offload.as_ref().is_some_and(Offload::is_on);
        for (key, used, why) in [
            ("offload_optimizer", on(&zero.offload_optimizer), ", which MiCS refuses"),
            ("offload_param", on(&zero.offload_param), ", which MiCS refuses"),
            ("zero_hpz_partition_size", zero.zero_hpz_partition_size > 1, ""),
        ] {
            let other = format!("{at}.zero.{key}");
            faults.when(used, || {
                Fault::new(&path, format!("{{{path}}} with {{{other}}}{why}")).or_drop(&path).or_drop(&other)
            });
        }
        if ranks > world {
            let problem = format!("{{{path}}} {ranks} is more than {world} GPUs");
            return faults.add(Fault::new(&path, problem).or_set(&path, world));
        }
        divides(faults, &path, ranks, "GPUs", Some(world));
    }

    fn check_offload(&self, at: &str, faults: &mut Faults) {
        let zero = &self.zero;
        for (key, offload, least) in
            [("offload_optimizer", &zero.offload_optimizer, 1), ("offload_param", &zero.offload_param, 3)]
        {
            let path = format!("{at}.zero.{key}");
            faults.when(offload.as_ref().is_some_and(Offload::is_on) && zero.stage < least, || {
                needs(&path, format!("{{{path}}}"), (zero.stage, least), &format!("{at}.zero.stage"))
            });
        }
    }
}

/// What a lower stage of ZeRO does not have.
fn needs(path: &str, what: String, (stage, least): (u8, u8), at: &str) -> Fault {
    let more = if least < 3 { " or more" } else { "" };
    Fault::new(path, format!("{what} with ZeRO {stage}: it needs stage {least}{more}")).or_set(at, least).or_drop(path)
}
