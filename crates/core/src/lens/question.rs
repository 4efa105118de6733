//! What a published formula is asked: a run, in the few words that formulas know.

use super::factors::Coefficients;
use crate::plan::parallel::{Engine, Fsdp1, Offload, Strategy};
use crate::plan::{
    AdapterPlan, AttentionKind, CacheImplementation, Checkpointing, InferPlan, Kernels, OptimizerKind,
    QuantizationScheme, Targets, TrainPlan,
};

/// Training or generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A training step.
    Train,
    /// Generation.
    Infer,
}

/// Who spreads a model over cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// PyTorch DDP, or one card.
    Ddp,
    /// DeepSpeed ZeRO.
    Deepspeed,
    /// PyTorch FSDP.
    Fsdp,
    /// Megatron-LM.
    Megatron,
    /// Megatron-LM's model parallel with DeepSpeed's ZeRO.
    MegatronDeepspeed,
}

/// LoRA in the words of a formula.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// The rank.
    pub rank: u64,
    /// The modules adapted; a formula's own choice when absent.
    pub targets: Option<Vec<String>>,
    /// Whether the base is held in 4 bits.
    pub four_bit: bool,
}

/// A run.
#[derive(Debug, Clone, PartialEq)]
pub struct Question {
    /// Training or generation.
    pub purpose: Purpose,
    /// Bytes of a weight.
    pub weight_bytes: f64,
    /// Whether fp32 weights compute in 16 bits (autocast).
    pub mixed: bool,
    /// Samples on a card.
    pub batch: u64,
    /// Tokens of a sample.
    pub seq: u64,
    /// The optimizer.
    pub optimizer: OptimizerKind,
    /// Whether layers are recomputed.
    pub checkpointing: bool,
    /// Whether attention keeps no scores.
    pub flash: bool,
    /// Whether the loss is fused with the head.
    pub fused_loss: bool,
    /// Whether keys and values are kept.
    pub kv_cache: bool,
    /// What is trained instead of all parameters.
    pub adapter: Option<Adapter>,
    /// Who spreads the model.
    pub engine: EngineKind,
    /// The ZeRO stage, or what an engine's sharding comes to.
    pub zero: u8,
    /// Data-parallel cards.
    pub dp: u64,
    /// Tensor-parallel cards.
    pub tp: u64,
    /// Pipeline stages.
    pub pp: u64,
    /// Expert-parallel cards.
    pub ep: u64,
    /// Whether activations between tensor-parallel parts are split too.
    pub sequence_parallel: bool,
    /// Whether optimizer states wait on the host.
    pub offload_optimizer: bool,
    /// Whether parameters wait on the host.
    pub offload_parameters: bool,
    /// Whether Megatron's optimizer is distributed.
    pub distributed_optimizer: bool,
    /// The coefficients of the factor lens.
    pub coefficients: Coefficients,
}

impl Default for Question {
    fn default() -> Self {
        Self {
            purpose: Purpose::Train,
            weight_bytes: 2.0,
            mixed: false,
            batch: 1,
            seq: 2048,
            optimizer: OptimizerKind::AdamW,
            checkpointing: false,
            flash: true,
            fused_loss: false,
            kv_cache: true,
            adapter: None,
            engine: EngineKind::Ddp,
            zero: 0,
            dp: 1,
            tp: 1,
            pp: 1,
            ep: 1,
            sequence_parallel: false,
            offload_optimizer: false,
            offload_parameters: false,
            distributed_optimizer: false,
            coefficients: Coefficients::default(),
        }
    }
}

impl Question {
    /// A training plan, as far as formulas know its options.
    pub fn of_train(plan: &TrainPlan) -> Self {
        let adapter = match &plan.adapter {
            Some(AdapterPlan::Lora(lora)) => Some(Adapter {
                rank: lora.rank,
                targets: match &lora.targets {
                    Targets::Names(names) => Some(names.clone()),
                    _ => None,
                },
                four_bit: plan.quantization.as_ref().is_some_and(|q| q.scheme != QuantizationScheme::Int8),
            }),
            _ => None,
        };
        let int8 = plan.quantization.as_ref().is_some_and(|q| q.scheme == QuantizationScheme::Int8);
        let mut question = Self {
            weight_bytes: if int8 { 1.0 } else { plan.weights.size() as f64 },
            mixed: plan.autocast.is_some(),
            batch: plan.batch.batch_size,
            seq: plan.batch.seq_len,
            optimizer: plan.optimizer.kind,
            checkpointing: plan.checkpointing != Checkpointing::Off,
            flash: plan.attention != AttentionKind::Eager,
            fused_loss: plan.kernels == Kernels::Liger,
            adapter,
            ..Self::default()
        };
        if let Some(parallel) = &plan.parallel {
            let mesh = &parallel.mesh;
            question.dp = mesh.dp_replicate.saturating_mul(mesh.dp_shard);
            (question.tp, question.pp, question.ep) = (mesh.tp, mesh.pp, mesh.ep);
            question.sequence_parallel = mesh.sequence_parallel;
            (question.engine, question.zero) = match &parallel.engine {
                Engine::Deepspeed(deepspeed) => {
                    let on = |offload: &Option<Offload>| offload.as_ref().is_some_and(Offload::is_on);
                    question.offload_optimizer = on(&deepspeed.zero.offload_optimizer);
                    question.offload_parameters = on(&deepspeed.zero.offload_param);
                    (EngineKind::Deepspeed, deepspeed.zero.stage)
                }
                Engine::Fsdp1(Fsdp1 { strategy: Strategy::GradOp, .. }) => (EngineKind::Fsdp, 2),
                Engine::Fsdp1(_) | Engine::Fsdp2(_) => (EngineKind::Fsdp, 3),
                Engine::Megatron(_) => (EngineKind::Megatron, 0),
                Engine::Ddp(_) | Engine::Tp(_) => (EngineKind::Ddp, 0),
            };
        }
        question
    }

    /// A plan of generation: the sequence is the prompt and what is generated.
    pub fn of_infer(plan: &InferPlan) -> Self {
        Self {
            purpose: Purpose::Infer,
            weight_bytes: match plan.quantization.as_ref().map(|q| q.scheme) {
                Some(QuantizationScheme::Int8) => 1.0,
                Some(_) => 0.5,
                None => plan.weights.size() as f64,
            },
            batch: plan.sequences(),
            seq: plan.batch.seq_len.saturating_add(plan.new_tokens),
            flash: plan.attention != AttentionKind::Eager,
            kv_cache: plan.cache != CacheImplementation::None,
            ..Self::default()
        }
    }

    /// Data-, tensor- and pipeline-parallel cards.
    pub fn cards(&self) -> u64 {
        self.dp.saturating_mul(self.tp).saturating_mul(self.pp)
    }
}
