//! Stage 3: what shall run, and on what.
//!
//! | module | what is in it |
//! |---|---|
//! | [`adapter`] | LoRA and its relatives: what they train, where |
//! | [`draft`] | assisted and prompt-lookup decoding |
//! | [`infer`] | a run of `generate`: prompt, new tokens, cache |
//! | [`serve`] | what a serving engine is started with |
//! | [`train`] | a training run: batch, precision, checkpointing, optimizer |
//! | [`batch`] | the sizes of what goes in |
//! | [`liger`] | what Liger patches |
//! | [`quantization`] | weights in 4 and 8 bits |
//! | [`optimizer`] | which optimizer, stepping how |
//! | [`attention`], [`loss`] | how attention and the loss are computed |
//! | [`checkpoints`] | which layers are recomputed, and how |
//! | [`fault`] | what is wrong with a plan, as data |
//! | `features` | what a plan uses, by name |
//! | `options` | options that exclude each other, and what a report says about them |
//! | [`objective`] | what is trained for: preferences, rewards, rollouts, pairs |
//! | [`framework`] | defaults of training frameworks, as data |
//! | [`import`] | plans of other tools |
//! | [`hardware`] | cards |
//! | [`model_code`] | whose code the model is: transformers', or a training library's own |
//! | [`machine`] | what driver, libraries and settings of a machine take |
//! | [`parallel`] | many cards: the mesh and the engine |
//! | [`provenance`] | where every setting comes from |
//! | [`allocator`] | options of torch's caching allocator |
//! | [`stack`] | versions of the software |

pub mod adapter;
pub mod allocator;
pub mod attention;
pub mod batch;
pub mod checkpoints;
pub mod compile;
pub mod device_map;
pub mod diffusion;
pub mod draft;
pub mod fault;
mod features;
pub mod framework;
mod frozen;
pub mod hardware;
pub mod import;
pub mod infer;
pub mod job;
pub mod liger;
pub mod loss;
pub mod machine;
pub mod model_code;
pub mod objective;
pub mod optimizer;
mod options;
pub mod parallel;
pub mod placement;
pub mod provenance;
pub mod quantization;
pub mod serve;
pub mod stack;
pub mod train;

pub use adapter::{AdapterLayout, AdapterPlan, LoraPlan, Targets};
pub use allocator::{Addresses, AllocatorOptions};
pub use attention::{AttentionKind, SdpaKernel};
pub use batch::Batch;
pub use checkpoints::{CheckpointOptions, Selective};
pub use compile::{Compile, Float8};
pub use diffusion::{Diffusion, Offload};
pub use draft::{Accepted, Assistant, Draft, Schedule};
pub use fault::{Fault, Faults, Remedy, Words};
pub use framework::{Framework, Provenance, Situation};
pub use hardware::{Gpu, Gpus};
pub use infer::{CacheBackend, CacheImplementation, Choice, InferPlan, QuantizedCache};
pub use job::Job;
pub use loss::{LossKind, LossOptions};
pub use machine::Machine;
pub use model_code::ModelCode;
pub use objective::{Objective, OtherModel, TaskKind};
pub use optimizer::{Implementation, Optimizer, OptimizerKind};
pub use parallel::{Mesh, ModelSizes, Parallel};
pub use provenance::Origin;
pub use quantization::{Outliers, Quantization, QuantizationScheme};
pub use serve::{ServePlan, ServingEngine};
pub use stack::{Package, Stack, Version};
pub use train::{Checkpointing, Kernels, TrainPlan};

/// A plan of any kind.
#[derive(Debug, Clone, PartialEq, serde::Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunPlan {
    /// Training.
    Train(Box<TrainPlan>),
    /// Generation.
    Infer(Box<InferPlan>),
    /// A serving engine.
    Serve(Box<ServePlan>),
}

impl RunPlan {
    /// The card.
    pub fn gpu(&self) -> &Gpu {
        match self {
            Self::Train(plan) => &plan.gpu,
            Self::Infer(plan) => &plan.gpu,
            Self::Serve(plan) => &plan.gpu,
        }
    }
}

/// Why a plan cannot be.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A value that is out of range or unknown.
    #[error("{key}: {value} is not {expected}")]
    BadValue {
        /// The option.
        key: String,
        /// What was given.
        value: String,
        /// What was expected.
        expected: String,
    },
    /// Options that exclude each other.
    #[error("{what}; {hint}")]
    Conflict {
        /// Which.
        what: String,
        /// What to do instead.
        hint: String,
    },
    /// Something this version does not model.
    #[error("{what} is not supported yet; {hint}")]
    Unsupported {
        /// What was asked.
        what: String,
        /// What to do instead.
        hint: String,
    },
    /// All that is wrong.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Faults(Vec<Fault>),
    /// The program itself is at fault, not the plan.
    #[error("{what}: a fault of vramcast, please report it")]
    Internal {
        /// What cannot be.
        what: String,
    },
    /// The model's config is at fault.
    #[error(transparent)]
    Model(#[from] crate::model::ModelError),
}

impl From<Fault> for PlanError {
    fn from(fault: Fault) -> Self {
        Self::Faults(vec![fault])
    }
}

impl From<Vec<Fault>> for PlanError {
    fn from(faults: Vec<Fault>) -> Self {
        Self::Faults(faults)
    }
}
