//! Many cards: the mesh they form, and the engine that spreads a model over it.
//!
//! | module | what is in it |
//! |---|---|
//! | `checks` | what an engine can run, and what is simulated |
//! | [`mesh`] | the axes, their names and the rules on their sizes |
//! | [`deepspeed`], [`deepspeed_file`] | DeepSpeed's `zero_optimization` section, and its file |
//! | [`tensor`] | tensor parallel through DTensor |
//! | [`pipeline`] | pipelines and contexts under `fully_shard` |
//! | [`megatron`] | Megatron-Core's arguments |

mod checks;
pub mod deepspeed;
pub mod deepspeed_file;
pub mod megatron;
pub mod mesh;
pub mod pipeline;
pub mod tensor;

pub use deepspeed::{DeepSpeed, Offload, OffloadDevice, ZeroConfig};
pub use deepspeed_file::DeepSpeedFile;
pub use megatron::Megatron;
pub use mesh::{Mesh, ModelSizes};
pub use pipeline::{ContextParallel, Pipeline, Place, Rotate, Schedule};
pub use tensor::{TensorForm, TensorParallel};

use serde::{Deserialize, Serialize};

use super::{Fault, Faults, TrainPlan};
use crate::dtype::DType;

/// How a run is spread over cards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(from = "Written")]
pub struct Parallel {
    /// How many cards along which axis.
    pub mesh: Mesh,
    /// Who spreads the model.
    pub engine: Engine,
    /// Whether gradients are reduced only after the last micro-batch of a step (`no_sync`, `set_requires_gradient_sync`).
    pub no_sync: bool,
}

/// How a plan file writes it.
#[derive(Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Parallel")]
struct Written {
    /// How many cards along which axis.
    #[serde(default)]
    mesh: Mesh,
    /// Who spreads the model.
    engine: Engine,
    /// Whether gradients are reduced only after the last micro-batch of a step (`no_sync`, `set_requires_gradient_sync`).
    #[serde(default)]
    no_sync: bool,
    /// In older plans; it follows from the mesh.
    #[serde(default, rename = "communicators")]
    #[schemars(skip)]
    _communicators: serde::de::IgnoredAny,
}

impl From<Written> for Parallel {
    fn from(written: Written) -> Self {
        Self { mesh: written.mesh, engine: written.engine, no_sync: written.no_sync }
    }
}

/// An engine with its defaults, as a plan spells it.
fn named(engine: &str) -> serde_json::Value {
    serde_json::json!({ engine: {} })
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
    /// Tensor parallel only, through DTensor.
    Tp(TensorParallel),
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
            Self::Tp(_) => "tp",
            Self::Megatron(Megatron { deepspeed: Some(_), .. }) => "megatron-deepspeed",
            Self::Megatron(Megatron { fsdp: Some(_), .. }) => "megatron-fsdp",
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
    /// Every layer, the embedding, and the last norm with the head: torchtitan's way, and accelerate's from 1.14 on.
    Ends,
    /// PEFT's `fsdp_auto_wrap_policy`: every layer, and in it every trained weight by itself.
    Peft,
}

/// `reshard_after_forward`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(untagged)]
pub enum Reshard {
    /// Back to shards, or not at all.
    Flag(bool),
    /// To parts on this many cards.
    To(u64),
}

/// Types that differ from the shards'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MixedPrecision {
    /// What parameters are gathered and computed in.
    pub parameters: DType,
    /// What gradients are reduced in.
    pub reduce: DType,
    /// Whether what is trained is held in fp32, whatever it was loaded in: accelerate's way.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub upcast: bool,
}

impl MixedPrecision {
    /// The type of a shard of what was loaded in a type.
    pub fn held(types: Option<Self>, loaded: DType, trained: bool) -> DType {
        if trained && types.is_some_and(|types| types.upcast) { DType::F32 } else { loaded }
    }
}

/// Options of `fully_shard`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fsdp2 {
    /// `reshard_after_forward` of the layers.
    pub reshard_after_forward: Reshard,
    /// `reshard_after_forward` of the root; torch's default leaves it gathered from forward to backward.
    pub reshard_root: Reshard,
    /// `mp_policy`.
    pub mixed_precision: Option<MixedPrecision>,
    /// What is wrapped.
    pub wrap: Wrap,
    /// `CPUOffloadPolicy`: shards, gradients and the optimizer are on the host.
    pub offload: bool,
    /// torchao's `enable_fsdp_float8_all_gather`: linears of layers are gathered as bytes.
    pub float8_gather: bool,
    /// `ignored_params`: those whose name holds one of these stay whole on every card.
    pub ignored: Vec<String>,
    /// How layers are split where the mesh has tensor-parallel cards.
    pub tensor: TensorParallel,
    /// How stages are run where the mesh has a pipeline.
    pub pipeline: Pipeline,
    /// How attention goes round where the mesh has context-parallel cards, over which parameters are sharded too.
    pub context: ContextParallel,
    /// The one card to look at; all that differ when absent.
    pub rank: Option<Place>,
}

impl Default for Fsdp2 {
    fn default() -> Self {
        Self {
            reshard_after_forward: Reshard::Flag(true),
            reshard_root: Reshard::Flag(false),
            mixed_precision: None,
            wrap: Wrap::EveryLayer,
            offload: false,
            float8_gather: false,
            ignored: Vec::new(),
            tensor: TensorParallel::default(),
            pipeline: Pipeline::default(),
            context: ContextParallel::default(),
            rank: None,
        }
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

/// `backward_prefetch` of FSDP1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BackwardPrefetch {
    /// `BACKWARD_PRE`: the next unit is gathered before this one's gradients are computed.
    #[default]
    Pre,
    /// `BACKWARD_POST`: after that.
    Post,
    /// Not ahead.
    None,
}

/// Options of `FullyShardedDataParallel`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fsdp1 {
    /// `sharding_strategy`.
    pub strategy: Strategy,
    /// `mixed_precision`.
    pub mixed_precision: Option<MixedPrecision>,
    /// What is wrapped.
    pub wrap: Wrap,
    /// `cpu_offload`: shards, gradients and the optimizer are on the host.
    pub offload: bool,
    /// `ignored_states`: parameters whose name holds one of these stay whole on every card.
    pub ignored: Vec<String>,
    /// `backward_prefetch`.
    pub backward_prefetch: BackwardPrefetch,
    /// `forward_prefetch`.
    pub forward_prefetch: bool,
    /// `use_orig_params=False`: the optimizer sees flat parameters.
    pub flat_params: bool,
}

impl Parallel {
    /// Refuses meshes that cannot be and combinations that are not simulated.
    pub fn check(&self, plan: &TrainPlan, sizes: &ModelSizes) -> Result<(), Vec<Fault>> {
        let mut faults = Faults::default();
        self.check_into(plan, sizes, &mut faults);
        faults.end()
    }

    pub(super) fn check_into(&self, plan: &TrainPlan, sizes: &ModelSizes, faults: &mut Faults) {
        // Stages of these need not be alike: how layers are dealt out is checked with their options.
        let uneven = matches!(self.engine, Engine::Megatron(_) | Engine::Fsdp2(_));
        self.mesh.check(&ModelSizes { layers: sizes.layers.filter(|_| !uneven), ..*sizes }, faults);
        if self.mesh.has_empty_axis() {
            return;
        }
        if let Engine::Megatron(megatron) = &self.engine {
            return megatron.check(plan, self, sizes, faults);
        }
        if let Engine::Fsdp2(options) = &self.engine {
            options.check_mesh(self, plan, sizes, faults);
        }
        tensor::check(self, plan, sizes, faults);
        for (ranks, path) in self.mesh.model_axes() {
            let taken = match path {
                mesh::TP => self.tensor().is_some(),
                mesh::PP | mesh::CP => matches!(self.engine, Engine::Fsdp2(_)),
                _ => false,
            };
            faults.when(ranks > 1 && !taken, || {
                let fault = Fault::unsupported(path, format!("{{{path}}} {ranks} under {}", self.engine.name()));
                let fault = match path {
                    mesh::TP => fault.or_set("parallel.engine", named("tp")).or_set("parallel.engine", named("fsdp2")),
                    mesh::PP | mesh::CP => fault.or_set("parallel.engine", named("fsdp2")),
                    _ => fault,
                };
                fault.or_set("parallel.engine", named("megatron")).or_drop(path)
            });
        }
        faults.when(self.mesh.sequence_parallel, || {
            let path = "parallel.mesh.sequence_parallel";
            Fault::unsupported(path, "sequence parallel outside Megatron-Core (transformers' plans do not split it)")
                .or_drop(path)
                .or_set("parallel.engine", named("megatron"))
        });
        checks::engine(self, plan, faults);
    }

    /// Cards that share one copy of the parameters: `fully_shard` shards over those of a sequence too.
    pub fn sharded_over(&self) -> u64 {
        match self.engine {
            Engine::Fsdp2(_) => self.mesh.dp_shard.saturating_mul(self.mesh.cp),
            _ => self.mesh.dp_shard,
        }
    }

    /// Tensor parallel through DTensor, where the engine can have it.
    pub fn tensor(&self) -> Option<TensorParallel> {
        match &self.engine {
            Engine::Tp(tensor) => Some(*tensor),
            Engine::Fsdp2(options) => Some(options.tensor),
            _ => None,
        }
    }

    /// Whether layers are wrapped one by one, and so hold shards of their own of all they use.
    pub fn wraps_layers(&self) -> bool {
        match &self.engine {
            Engine::Fsdp1(Fsdp1 { wrap, .. }) | Engine::Fsdp2(Fsdp2 { wrap, .. }) => {
                *wrap != Wrap::Root && self.mesh.world() > 1
            }
            _ => false,
        }
    }

    /// Whether the engine keeps something in the host's memory.
    pub fn offloads(&self) -> bool {
        match &self.engine {
            Engine::Fsdp1(options) => options.offload,
            Engine::Fsdp2(options) => options.offload,
            Engine::Deepspeed(DeepSpeed { zero, .. }) => {
                [&zero.offload_optimizer, &zero.offload_param].into_iter().flatten().any(Offload::is_on)
            }
            Engine::Megatron(Megatron { deepspeed: Some(deepspeed), .. }) => {
                deepspeed.zero.offload_optimizer.as_ref().is_some_and(Offload::is_on)
            }
            Engine::Ddp(_) | Engine::Tp(_) | Engine::Megatron(_) => false,
        }
    }

    /// Whether DeepSpeed shards over a part of the cards only (MiCS).
    pub fn runs_mics(&self) -> bool {
        matches!(&self.engine, Engine::Deepspeed(DeepSpeed { zero, .. }) if zero.mics_ranks().is_some())
    }

    /// Whether the engine makes streams of its own.
    pub fn has_streams(&self) -> bool {
        match &self.engine {
            Engine::Ddp(_) | Engine::Tp(_) | Engine::Megatron(_) => false,
            Engine::Fsdp1(_) | Engine::Fsdp2(_) => true,
            Engine::Deepspeed(DeepSpeed { zero, .. }) => match zero.stage {
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
