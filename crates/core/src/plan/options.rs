//! Options of training that exclude each other, and what a report should say about the others.

use super::parallel::Engine;
use super::{
    AttentionKind, CheckpointOptions, Checkpointing, Kernels, LossKind, OptimizerKind, PlanError, RunPlan, TrainPlan,
};
use crate::dtype::DType;

impl TrainPlan {
    pub(super) fn check_options(&self) -> Result<(), PlanError> {
        let conflict = |what: &str, hint: &str| Err(PlanError::Conflict { what: what.into(), hint: hint.into() });
        match self {
            _ if self.optimizer_in_backward && self.gradient_accumulation > 1 => conflict(
                "the optimizer in backward leaves no gradients to accumulate",
                "drop --gradient-accumulation or --optimizer-in-backward",
            ),
            _ if self.optimizer_in_backward && self.clip => conflict(
                "the optimizer in backward leaves no gradients to clip",
                "drop --clip or --optimizer-in-backward",
            ),
            _ if self.optimizer_in_backward && self.optimizer.master_weights => conflict(
                "the optimizer in backward steps the weights themselves",
                "drop --master-weights or --optimizer-in-backward",
            ),
            _ if self.keep_loss && self.parallel.is_some() => Err(PlanError::Unsupported {
                what: "a loss that is kept until the next, on several cards".into(),
                hint: "drop --keep-loss".into(),
            }),
            _ if self.gradients.is_some_and(|dtype| !matches!(dtype, DType::F32 | DType::BF16 | DType::F16)) => {
                Err(PlanError::BadValue {
                    key: "gradient-dtype".into(),
                    value: self.gradients.map_or("", DType::name).into(),
                    expected: "fp32, bf16 or fp16".into(),
                })
            }
            _ if self.gradients.is_some() && self.adapter.is_some() => {
                conflict("gradients of adapters have the adapters' type", "drop --gradient-dtype")
            }
            _ if self.gradients.is_some_and(|dtype| dtype != self.weights) && !self.optimizer.master_weights => {
                conflict(
                    "torch's optimizers take gradients in the type of the weights only",
                    "step fp32 copies (--master-weights), or drop --gradient-dtype",
                )
            }
            _ if self.batch.real_tokens.is_some_and(|real| real > self.batch.tokens()) => Err(PlanError::BadValue {
                key: "real-tokens".into(),
                value: self.batch.real_tokens.unwrap_or_default().to_string(),
                expected: format!("at most the {} tokens of the batch", self.batch.tokens()),
            }),
            _ if self.checkpoints.every == 0 => Err(PlanError::BadValue {
                key: "gradient-checkpointing".into(),
                value: "every-0".into(),
                expected: "every-1 or more".into(),
            }),
            _ if self.checkpoints.selective.is_some() && self.checkpoints.runs_nested() => conflict(
                "a selective checkpoint is not reentrant and not offloaded",
                "choose one kind of gradient checkpointing",
            ),
            _ if self.attention.is_flash() && self.weights == DType::F32 && self.autocast.is_none() => conflict(
                "flash attention computes in fp16 and bf16 only",
                "use --precision bf16 or bf16-mixed, or --attention sdpa",
            ),
            _ if self.attention.is_flash() && self.gpu.capability.is_some_and(|capability| capability < 80) => {
                conflict("flash attention needs an Ampere card or a newer one", "use --attention sdpa")
            }
            _ if self.sdpa_kernel.is_some() && self.attention != AttentionKind::Sdpa => {
                conflict("a kernel of SDPA is forced, but attention is not SDPA's", "use --attention sdpa")
            }
            _ if self.loss.kind == LossKind::CutCrossEntropy && self.weights == DType::F32 => conflict(
                "cut cross entropy takes hidden states in fp16 or bf16 only, and those of fp32 weights are fp32",
                "use --precision bf16, or --loss chunked",
            ),
            _ if self.loss.kind != LossKind::Standard && self.kernels == Kernels::Liger => {
                conflict("Liger brings a loss of its own", "drop --liger or --loss")
            }
            _ if self.loss.kind == LossKind::Chunked && !(1..=1 << 20).contains(&self.loss.chunks) => {
                Err(PlanError::BadValue {
                    key: "loss-chunks".into(),
                    value: self.loss.chunks.to_string(),
                    expected: "from 1 to 1048576".into(),
                })
            }
            _ if self.parallel.is_some() => self.check_on_many_cards(),
            _ => Ok(()),
        }
    }

    fn is_fully_sharded(&self) -> bool {
        let engine = self.parallel.as_ref().map(|parallel| &parallel.engine);
        matches!(engine, Some(Engine::Fsdp1(_) | Engine::Fsdp2(_)))
    }

    fn check_on_many_cards(&self) -> Result<(), PlanError> {
        use OptimizerKind as K;
        let what = match self.optimizer.kind {
            _ if self.optimizer_in_backward => "the optimizer in backward".to_owned(),
            _ if self.optimizer.master_weights => "master weights (DeepSpeed and Megatron bring their own)".to_owned(),
            _ if self.gradients.is_some() => "a type for gradients".to_owned(),
            _ if self.checkpoints.runs_nested() => "reentrant or offloaded gradient checkpointing".to_owned(),
            _ if self.checkpoints != CheckpointOptions::default() && !self.is_fully_sharded() => {
                "this kind of gradient checkpointing without FSDP".to_owned()
            }
            _ if self.loss.kind != LossKind::Standard => "a loss other than transformers' own".to_owned(),
            _ if self.save_on_cpu => "saving activations on the host".to_owned(),
            _ if self.sdpa_kernel.is_some() => "a forced kernel of SDPA".to_owned(),
            K::AdamMini | K::AnyPrecision | K::Shampoo | K::GaLoreAdamW | K::ApolloAdamW => {
                format!("optimizer {}", self.optimizer.kind.name())
            }
            _ => return Ok(()),
        };
        let hint = "predict it on one card".into();
        Err(PlanError::Unsupported { what: format!("{what} on several cards"), hint })
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.optimizer.notes();
        notes.extend(self.versions().unknown());
        if self.checkpointing != Checkpointing::Off && self.checkpoints.offload {
            notes.push("offloaded checkpoints: copies are taken to be done when needed".into());
        }
        if self.attention == AttentionKind::Flex {
            notes.push("flex attention: memory while it is compiled is not counted".into());
        }
        if self.attention.is_flash() && self.batch.padded && self.batch.real_tokens.is_none() {
            notes.push("padding: every token is taken to be a real one; --real-tokens says how many are".into());
        }
        let megatron = self.parallel.as_ref().is_some_and(|p| matches!(p.engine, Engine::Megatron(_)));
        if megatron && self.clip {
            notes.push("clipping is left out: what Megatron's own takes is not simulated".into());
        }
        notes
    }
}

impl RunPlan {
    /// What a report should say about the plan's options.
    pub fn notes(&self) -> Vec<String> {
        match self {
            Self::Train(plan) => plan.notes(),
            Self::Infer(plan) => plan.stack.unknown(),
        }
    }
}
