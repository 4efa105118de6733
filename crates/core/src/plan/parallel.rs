//! Many cards: the mesh they form, and the engine that spreads a model over it.
//!
//! | module | what is in it |
//! |---|---|
//! | [`mesh`] | the axes, their names and the rules on their sizes |
//! | [`deepspeed`] | DeepSpeed's `zero_optimization` section |
//! | [`megatron`] | Megatron-Core's arguments |

pub mod deepspeed;
pub mod megatron;
pub mod mesh;

pub use deepspeed::{DeepSpeed, ZeroConfig};
pub use megatron::Megatron;
pub use mesh::{Mesh, ModelSizes};

use serde::{Deserialize, Serialize};

use super::{PlanError, TrainPlan};
use crate::dtype::DType;

/// How a run is spread over cards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Parallel {
    /// How many cards along which axis.
    #[serde(default)]
    pub mesh: Mesh,
    /// Who spreads the model.
    pub engine: Engine,
    /// NCCL communicators that the process makes: one for a group that everyone is in.
    #[serde(default = "one")]
    pub communicators: u32,
}

fn one() -> u32 {
    1
}

/// Who spreads the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// `DistributedDataParallel`: everything everywhere.
    Ddp(Ddp),
    /// `FullyShardedDataParallel`: flat parameters.
    Fsdp1(Fsdp1),
    /// `fully_shard`: per-parameter shards.
    Fsdp2(Fsdp2),
    /// DeepSpeed's engine with ZeRO.
    Deepspeed(DeepSpeed),
    /// Megatron-Core with Transformer Engine.
    Megatron(Megatron),
}

impl Engine {
    /// Its name, as the command line spells it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ddp(_) => "ddp",
            Self::Fsdp1(_) => "fsdp1",
            Self::Fsdp2(_) => "fsdp2",
            Self::Deepspeed(_) => "deepspeed",
            Self::Megatron(_) => "megatron",
        }
    }
}

/// Options of `DistributedDataParallel`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Ddp {
    /// `bucket_cap_mb`.
    pub bucket_cap_mb: u64,
    /// `gradient_as_bucket_view`: gradients are views of the buckets.
    pub gradient_as_bucket_view: bool,
    /// `static_graph`.
    pub static_graph: bool,
}

impl Default for Ddp {
    fn default() -> Self {
        Self { bucket_cap_mb: 25, gradient_as_bucket_view: false, static_graph: false }
    }
}

/// What is wrapped as a unit beside the root.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Wrap {
    /// Every layer of every stack.
    #[default]
    EveryLayer,
    /// The layers of the longest stack only.
    LongestStack,
    /// Nothing: the root is the only unit.
    Root,
}

/// Types that differ from the shards'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MixedPrecision {
    /// What parameters are gathered and computed in.
    pub parameters: DType,
    /// What gradients are reduced in.
    pub reduce: DType,
}

/// Options of `fully_shard`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fsdp2 {
    /// `reshard_after_forward` of the layers.
    pub reshard_after_forward: bool,
    /// `reshard_after_forward` of the root; torch's default leaves it gathered from forward to backward.
    pub reshard_root: bool,
    /// `mp_policy`.
    pub mixed_precision: Option<MixedPrecision>,
    /// What is wrapped.
    pub wrap: Wrap,
}

impl Default for Fsdp2 {
    fn default() -> Self {
        Self { reshard_after_forward: true, reshard_root: false, mixed_precision: None, wrap: Wrap::EveryLayer }
    }
}

/// `sharding_strategy` of FSDP1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// `FULL_SHARD`: parameters are freed after forward and gathered again.
    #[default]
    Full,
    /// `SHARD_GRAD_OP`: they stay from forward to backward.
    GradOp,
    /// `NO_SHARD`.
    No,
}

/// Options of `FullyShardedDataParallel` (`use_orig_params=True`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fsdp1 {
    /// `sharding_strategy`.
    pub strategy: Strategy,
    /// `mixed_precision`.
    pub mixed_precision: Option<MixedPrecision>,
    /// What is wrapped.
    pub wrap: Wrap,
}

impl Parallel {
    /// Refuses meshes that cannot be and combinations that are not simulated.
    pub fn check(&self, plan: &TrainPlan, sizes: &ModelSizes) -> Result<(), PlanError> {
        self.mesh.check(sizes)?;
        let unsupported = |what: String, hint: &str| Err(PlanError::Unsupported { what, hint: hint.into() });
        if plan.adapter.is_some() || plan.quantization.is_some() {
            return unsupported("adapters or quantised weights on several cards".into(), "train the model itself");
        }
        if let Engine::Megatron(megatron) = &self.engine {
            return megatron.check(plan, &self.mesh, sizes);
        }
        for (axis, name) in self.mesh.model_axes() {
            if axis > 1 {
                return unsupported(format!("{name} {axis}"), "data-parallel axes are simulated");
            }
        }
        if self.mesh.sequence_parallel {
            return unsupported("sequence_parallel".into(), "it needs tensor parallel, which is not simulated");
        }
        match &self.engine {
            Engine::Ddp(_) if self.mesh.dp_shard > 1 => Err(PlanError::Conflict {
                what: format!("ddp replicates, it does not shard over dp_shard {}", self.mesh.dp_shard),
                hint: format!(
                    "use dp_replicate {}, or fsdp2",
                    self.mesh.dp_shard.saturating_mul(self.mesh.dp_replicate)
                ),
            }),
            Engine::Fsdp2(fsdp) => check_types(fsdp.mixed_precision, plan),
            Engine::Fsdp1(Fsdp1 { strategy: Strategy::No, .. }) => {
                unsupported("fsdp1 with NO_SHARD".into(), "use ddp, which is what it does")
            }
            Engine::Fsdp1(_) if self.mesh.dp_shard == 1 && self.mesh.world() > 1 => Err(PlanError::Conflict {
                what: "fsdp1 with dp_shard 1 shards nothing".into(),
                hint: format!("use ddp, or dp_shard {}", self.mesh.dp_replicate),
            }),
            Engine::Fsdp1(fsdp) => check_types(fsdp.mixed_precision, plan),
            Engine::Deepspeed(deepspeed) => deepspeed.check(plan, self.mesh.dp_replicate),
            _ => Ok(()),
        }
    }

    /// Whether the engine makes streams of its own.
    pub fn has_streams(&self) -> bool {
        match &self.engine {
            Engine::Ddp(_) | Engine::Megatron(_) => false,
            Engine::Fsdp1(_) | Engine::Fsdp2(_) => true,
            Engine::Deepspeed(DeepSpeed { zero }) => match zero.stage {
                0 => false,
                3 => zero.overlap_comm != Some(false),
                _ => true,
            },
        }
    }

    /// The type the model computes in, where the engine changes it.
    pub fn compute_type(&self) -> Option<DType> {
        match &self.engine {
            Engine::Fsdp1(Fsdp1 { mixed_precision: Some(types), .. })
            | Engine::Fsdp2(Fsdp2 { mixed_precision: Some(types), .. }) => Some(types.parameters),
            _ => None,
        }
    }
}

fn check_types(types: Option<MixedPrecision>, plan: &TrainPlan) -> Result<(), PlanError> {
    let Some(types) = types else { return Ok(()) };
    for (key, dtype) in [("mixed-precision.parameters", types.parameters), ("mixed-precision.reduce", types.reduce)] {
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(PlanError::BadValue {
                key: key.into(),
                value: dtype.name().into(),
                expected: "fp32, bf16 or fp16".into(),
            });
        }
    }
    if plan.autocast.is_some() {
        return Err(PlanError::Unsupported {
            what: "autocast together with mixed precision of the engine".into(),
            hint: "drop one of them".into(),
        });
    }
    Ok(())
}
