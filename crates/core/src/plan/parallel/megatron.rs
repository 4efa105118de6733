//! Options of Megatron-Core: what its arguments of the same names say.

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
use super::mesh::{Mesh, ModelSizes, divides};
use crate::dtype::DType;
use crate::plan::{OptimizerKind, Package, PlanError, Stack, TrainPlan, Version};

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

    /// Refuses what Megatron refuses, and what is not simulated.
    pub fn check(&self, plan: &TrainPlan, mesh: &Mesh, sizes: &ModelSizes) -> Result<(), PlanError> {
        let unsupported = |what: &str, hint: &str| Err(PlanError::Unsupported { what: what.into(), hint: hint.into() });
        if plan.adapter.is_some() || plan.quantization.is_some() {
            return unsupported(
                "PEFT's adapters or quantised weights under Megatron",
                "Megatron-Bridge's own LoRA is --megatron-lora",
            );
        }
        if !matches!(plan.optimizer.kind, OptimizerKind::AdamW | OptimizerKind::Adam) {
            return unsupported("an optimizer other than Adam under Megatron", "use adamw");
        }
        if plan.weights == DType::F32 {
            return unsupported("Megatron with fp32 weights", "use bf16");
        }
        if mesh.sp > 1 {
            return unsupported("sp (Ulysses) with Megatron", "cp with its all-to-all is the same thing there");
        }
        if mesh.dp_replicate > 1 {
            return unsupported("several copies of the distributed optimizer", "use dp_shard for data parallel");
        }
        if let Some(fsdp) = self.fsdp {
            fsdp.check(self, mesh)?;
        }
        if let Some(lora) = &self.lora {
            lora.check(self, mesh, sizes)?;
        }
        self.check_deepspeed(plan, mesh, sizes)?;
        self.schedule.check(mesh.pp, self.virtual_pipeline, &self.recompute)?;
        if self.virtual_pipeline > 1 {
            if mesh.pp == 1 {
                return Err(PlanError::Conflict {
                    what: format!("virtual_pipeline {} without pipeline parallel", self.virtual_pipeline),
                    hint: "set pp to 2 or more".into(),
                });
            }
            let micro = u64::from(plan.gradient_accumulation);
            if micro % mesh.pp != 0 {
                return Err(PlanError::Conflict {
                    what: format!("{micro} micro-batches are not a multiple of pp {}", mesh.pp),
                    hint: format!("the interleaved schedule takes {}", micro.next_multiple_of(mesh.pp)),
                });
            }
        }
        self.check_split(mesh, sizes)?;
        if plan.weights == DType::F16 && self.main_gradients != DType::F32 {
            return unsupported("fp16 main gradients", "main_gradients fp32");
        }
        if !matches!(self.main_gradients, DType::F32 | DType::BF16) {
            return Err(PlanError::BadValue {
                key: "main_gradients".into(),
                value: self.main_gradients.name().into(),
                expected: "fp32 or bf16".into(),
            });
        }
        if self.precision_aware.is_some() && !self.distributed_optimizer {
            return Err(PlanError::Conflict {
                what: "the precision-aware optimizer needs the distributed optimizer".into(),
                hint: "set distributed_optimizer".into(),
            });
        }
        if self.make_vocab_size_divisible_by == 0 {
            return Err(PlanError::BadValue {
                key: "make_vocab_size_divisible_by".into(),
                value: "0".into(),
                expected: "at least 1".into(),
            });
        }
        if let Some(fp8) = &self.fp8 {
            fp8.check(plan)?;
        }
        if self.cp_comm == ContextExchange::A2a {
            let heads = sizes.kv_heads.map(|heads| (heads / mesh.tp.max(1)).max(1));
            divides("cp (a2a)", mesh.cp, "key and value heads of a tensor-parallel rank", heads)?;
        }
        self.check_recompute(mesh, sizes)?;
        self.check_offloading(mesh, sizes)?;
        self.check_rest(plan)
    }

    fn check_split(&self, mesh: &Mesh, sizes: &ModelSizes) -> Result<(), PlanError> {
        if let Some(layers) = sizes.layers {
            self.split.chunks(layers, mesh.pp, self.virtual_pipeline, self.mtp_layers)?;
        }
        if self.mtp_layers > 16 {
            return Err(PlanError::BadValue {
                key: "mtp_layers".into(),
                value: self.mtp_layers.to_string(),
                expected: "up to 16".into(),
            });
        }
        let ends = |fp8: &Fp8| fp8.layers_at_start_in_bf16 + fp8.layers_at_end_in_bf16 > 0;
        if self.mtp_layers > 0 && self.fp8.as_ref().is_some_and(ends) {
            return Err(PlanError::Unsupported {
                what: "multi-token prediction with fp8 that leaves layers in bf16".into(),
                hint: "put all layers into fp8, or none".into(),
            });
        }
        if self.optimizer_cpu_offload_percent > 100 {
            return Err(PlanError::BadValue {
                key: "optimizer_cpu_offload_percent".into(),
                value: self.optimizer_cpu_offload_percent.to_string(),
                expected: "up to 100".into(),
            });
        }
        if self.optimizer_cpu_offload_percent > 0 && !self.distributed_optimizer {
            return Err(PlanError::Conflict {
                what: "optimizer_cpu_offload without the distributed optimizer".into(),
                hint: "set distributed_optimizer".into(),
            });
        }
        Ok(())
    }

    /// Megatron's own refusals (`TransformerConfig.__post_init__`), and layers of other engines.
    fn check_offloading(&self, mesh: &Mesh, sizes: &ModelSizes) -> Result<(), PlanError> {
        let layers = self.cpu_offloading_layers;
        if layers == 0 {
            return Ok(());
        }
        let refused = [
            (mesh.pp > 1, "a pipeline"),
            (!matches!(&self.recompute, Recompute::None), "recompute"),
            (self.deepspeed.is_some(), "Megatron-DeepSpeed"),
        ];
        if let Some((_, what)) = refused.into_iter().find(|(used, _)| *used) {
            return Err(PlanError::Conflict {
                what: format!("cpu_offloading_num_layers {layers} with {what}, which Megatron refuses"),
                hint: "drop one of them".into(),
            });
        }
        match sizes.layers.filter(|all| layers >= *all) {
            Some(all) => Err(PlanError::BadValue {
                key: "cpu_offloading_num_layers".into(),
                value: layers.to_string(),
                expected: format!("fewer than {all}, the layers there are"),
            }),
            None => Ok(()),
        }
    }

    fn check_recompute(&self, mesh: &Mesh, sizes: &ModelSizes) -> Result<(), PlanError> {
        let chunks = |layers| self.split.chunks(layers, mesh.pp, self.virtual_pipeline, self.mtp_layers).ok();
        let stage = sizes.layers.and_then(chunks).and_then(|chunks| chunks.into_iter().max());
        match (&self.recompute, stage) {
            (Recompute::Uniform(0), _) => Err(PlanError::BadValue {
                key: "recompute.uniform".into(),
                value: "0".into(),
                expected: "at least 1 layer".into(),
            }),
            (Recompute::Block(count) | Recompute::Uniform(count), Some(stage)) if *count > stage => {
                Err(PlanError::BadValue {
                    key: "recompute_num_layers".into(),
                    value: count.to_string(),
                    expected: format!("up to {stage}, the layers of a stage"),
                })
            }
            (Recompute::Selective(modules), _)
                if modules.contains(&RecomputeModule::Moe) && modules.contains(&RecomputeModule::MoeAct) =>
            {
                Err(PlanError::Conflict {
                    what: "recompute of moe and of moe_act".into(),
                    hint: "moe covers moe_act; name one".into(),
                })
            }
            _ => Ok(()),
        }
    }

    fn check_rest(&self, plan: &TrainPlan) -> Result<(), PlanError> {
        use crate::plan::{AttentionKind, Checkpointing, Kernels, LossOptions};
        let conflict = |what: &str, hint: &str| Err(PlanError::Conflict { what: what.into(), hint: hint.into() });
        if plan.checkpointing != Checkpointing::Off {
            return conflict("gradient checkpointing is transformers'", "Megatron has recompute");
        }
        if plan.kernels != Kernels::Transformers {
            return conflict("Liger's kernels are for transformers' models", "drop them");
        }
        if plan.loss != LossOptions::default() {
            return conflict("losses of transformers' models have no place in Megatron", "it has cross_entropy");
        }
        if plan.attention != AttentionKind::Sdpa {
            return conflict("eager attention is transformers'", "drop it: Transformer Engine's kernels run");
        }
        if plan.autocast.is_some() || plan.optimizer_in_backward || !plan.frozen.is_empty() {
            return conflict(
                "autocast, optimizers in backward and frozen parameters have no place in Megatron",
                "drop them",
            );
        }
        Ok(())
    }
}
