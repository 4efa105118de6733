//! Options of Megatron-Core: what its arguments of the same names say.

mod checks;
mod deepspeed;
mod fp8;
mod fsdp;
mod lora;
mod pipeline;

pub use fp8::{Fp8, Fp8Recipe};
pub use fsdp::{MegatronFsdp, ShardingStrategy};
pub use lora::{LoraTarget, MegatronLora};
pub use pipeline::{PipelineSchedule, PipelineSplit};

use serde::{Deserialize, Serialize};

use super::DeepSpeed;
use crate::dtype::DType;
use crate::plan::{Package, Stack, Version};

/// A run of Megatron-LM or Megatron-Bridge with Transformer Engine's layers. Names are those of Megatron's arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Megatron {
    /// `virtual_pipeline_model_parallel_size`: chunks of layers a pipeline rank holds (the interleaved schedule).
    pub virtual_pipeline: u64,
    /// Which layers go to which stage.
    pub split: PipelineSplit,
    /// In which order micro-batches go through the stages.
    #[serde(skip_serializing_if = "PipelineSchedule::is_default")]
    pub schedule: PipelineSchedule,
    /// `mtp_num_layers`: layers of multi-token prediction behind the last.
    pub mtp_layers: u64,
    /// `use_distributed_optimizer`: states are shared by the data-parallel ranks.
    pub distributed_optimizer: bool,
    /// The type gradients are summed and reduced in (`accumulate_allreduce_grads_in_fp32`).
    pub main_gradients: DType,
    /// `overlap_grad_reduce`: gradients lie in buckets.
    pub overlap_grad_reduce: bool,
    /// `use_precision_aware_optimizer`: the types of the states.
    pub precision_aware: Option<PrecisionAware>,
    /// `optimizer_cpu_offload` with `optimizer_offload_fraction`, in hundredths: so many of the states are on the host.
    pub optimizer_cpu_offload_percent: u64,
    /// `gradient_accumulation_fusion`: weight gradients are added to the main gradients by the product itself.
    pub gradient_accumulation_fusion: bool,
    /// What is computed again in backward.
    pub recompute: Recompute,
    /// Who computes the loss.
    pub cross_entropy: CrossEntropy,
    /// `make_vocab_size_divisible_by`.
    pub make_vocab_size_divisible_by: u64,
    /// `cp_comm_type`: how context-parallel ranks exchange.
    pub cp_comm: ContextExchange,
    /// Mixtures of experts.
    pub moe: Experts,
    /// Products in fp8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fp8: Option<Fp8>,
    /// Megatron-FSDP, which takes the place of the distributed optimizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fsdp: Option<MegatronFsdp>,
    /// `cpu_offloading_num_layers`: what so many of the first layers keep for backward goes to the host.
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_offloading_layers: u64,
    /// Adapters beside frozen linears.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<MegatronLora>,
    /// Megatron-DeepSpeed: its layers under DeepSpeed's engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deepspeed: Option<Box<DeepSpeed>>,
    /// `partition_activations` of DeepSpeed's checkpoints: tensor-parallel ranks share what is kept for recompute.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partition_activations: bool,
    /// The minor version of Megatron-Core 0: another way to name it in the plan's `stack`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core: Option<u32>,
    /// The minor version of Transformer Engine 2: another way to name it in the plan's `stack`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transformer_engine: Option<u32>,
    /// The minor version of torch 2: another way to name it in the plan's `stack`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch: Option<u32>,
}

impl Default for Megatron {
    fn default() -> Self {
        Self {
            virtual_pipeline: 1,
            split: PipelineSplit::Even,
            schedule: PipelineSchedule::default(),
            mtp_layers: 0,
            distributed_optimizer: true,
            main_gradients: DType::F32,
            overlap_grad_reduce: false,
            precision_aware: None,
            optimizer_cpu_offload_percent: 0,
            gradient_accumulation_fusion: true,
            recompute: Recompute::None,
            cross_entropy: CrossEntropy::Unfused,
            make_vocab_size_divisible_by: 128,
            cp_comm: ContextExchange::P2p,
            moe: Experts::default(),
            fp8: None,
            fsdp: None,
            cpu_offloading_layers: 0,
            lora: None,
            deepspeed: None,
            partition_activations: false,
            core: None,
            transformer_engine: None,
            torch: None,
        }
    }
}

impl Megatron {
    /// A stack with the versions that are named here; its own come first.
    pub fn older_spelling(&self, stack: Stack) -> Stack {
        let minors = [
            (Package::MegatronCore, 0, self.core),
            (Package::TransformerEngine, 2, self.transformer_engine),
            (Package::Torch, 2, self.torch),
        ];
        minors.into_iter().fold(stack, |stack, (package, major, minor)| match minor {
            Some(minor) if stack.named(package).is_none() => stack.with(package, Version::new(major, minor, 0)),
            _ => stack,
        })
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Types of the precision-aware optimizer's states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionAware {
    /// `exp_avg_dtype`.
    pub exp_avg: DType,
    /// `exp_avg_sq_dtype`.
    pub exp_avg_sq: DType,
    /// `store_param_remainders`: of fp32 main parameters only the 16 bits that bf16 lacks are kept.
    pub store_param_remainders: bool,
    /// Whether an fp8 recipe other than `delayed` is set, even if nothing runs in fp8 (Megatron-Bridge's
    /// `MixedPrecisionConfig` always sets one): main parameters and gradients are then Megatron's own, in fp32.
    pub fp8_recipe: bool,
}

impl Default for PrecisionAware {
    fn default() -> Self {
        Self { exp_avg: DType::F32, exp_avg_sq: DType::F32, store_param_remainders: true, fp8_recipe: false }
    }
}

/// `recompute_granularity` and what belongs to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// `selective`: parts of every layer.
    Selective(Vec<RecomputeModule>),
    /// `full` with `recompute_method uniform`: every group of so many layers keeps only its input.
    Uniform(u64),
    /// `full` with `recompute_method block`: the first so many layers of a stage keep only their input.
    Block(u64),
}

/// `recompute_modules`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeModule {
    /// The attention kernel.
    CoreAttn,
    /// The norms that stand alone.
    Layernorm,
    /// The activation of routed experts.
    MoeAct,
    /// The whole mixture.
    Moe,
    /// Dense feed-forwards.
    Mlp,
    /// The shared experts.
    SharedExperts,
    /// The up-projections and rotary embedding of latent attention.
    MlaUpProj,
}

/// How context-parallel ranks exchange.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ContextExchange {
    /// A ring of keys and values, Megatron's default.
    #[default]
    P2p,
    /// All-to-all: from parts of the sequence to parts of the heads.
    A2a,
}

/// Who computes the loss.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CrossEntropy {
    /// Megatron's vocabulary-parallel cross entropy.
    #[default]
    Unfused,
    /// `cross_entropy_loss_fusion` with Transformer Engine's kernel, which writes gradients over the logits.
    Te,
}

/// Options of mixtures.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Experts {
    /// `moe_expert_capacity_factor` in hundredths, with `moe_pad_expert_input_to_capacity`; absent: no token is dropped,
    /// and routing is taken as even.
    pub capacity_percent: Option<u64>,
    /// `moe_router_dtype` is fp32.
    pub router_fp32: bool,
    /// `moe_shared_expert_overlap`.
    pub shared_expert_overlap: bool,
    /// `moe_token_dispatcher_type`, and the backend of the flexible one.
    pub dispatcher: Dispatcher,
}

/// Who brings tokens to their experts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Dispatcher {
    /// `alltoall`: permuted here, exchanged, sorted there.
    #[default]
    Alltoall,
    /// `flex` with HybridEP: one kernel permutes and exchanges, through buffers of its own outside torch.
    Hybridep,
}

impl Megatron {
    /// Rows of the embedding: the vocabulary rounded up to what every tensor-parallel rank can share.
    pub fn padded_vocabulary(&self, vocabulary: u64, tp: u64) -> u64 {
        vocabulary.next_multiple_of(self.make_vocab_size_divisible_by.saturating_mul(tp).max(1))
    }

    /// Whether the optimizer itself holds the main parameters.
    pub fn optimizer_holds_main_parameters(&self) -> bool {
        self.precision_aware.is_some_and(|types| !types.fp8_recipe)
    }
}
