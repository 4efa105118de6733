//! Options of training that exclude each other, and what a report should say about the others.

use super::parallel::{Ddp, Engine};
use super::{
    AttentionKind, CheckpointOptions, Checkpointing, Fault, Faults, Gpu, InferPlan, Kernels, LossKind, LossOptions,
    OptimizerKind, Parallel, RunPlan, TrainPlan,
};
use crate::dtype::DType;

impl TrainPlan {
    pub(super) fn check_options(&self, faults: &mut Faults) {
        if self.optimizer_in_backward {
            let path = "optimizer_in_backward";
            let refused = [
                (
                    self.gradient_accumulation > 1,
                    "gradient_accumulation",
                    "{optimizer_in_backward} leaves no gradients to accumulate",
                ),
                (self.clip, "clip", "{optimizer_in_backward} leaves no gradients to clip"),
                (
                    self.optimizer.master_weights,
                    "optimizer.master_weights",
                    "{optimizer_in_backward} steps the weights themselves, not {optimizer.master_weights}",
                ),
            ];
            for (_, other, problem) in refused.into_iter().filter(|(used, ..)| *used) {
                faults.add(Fault::new(other, problem).or_drop(other).or_drop(path));
            }
        }
        if let Some(dtype) = self.gradients {
            faults.float("gradients", dtype);
            faults.when(self.adapter.is_some(), || {
                Fault::new("gradients", "gradients of adapters have the adapters' type").or_drop("gradients")
            });
            faults.when(dtype != self.weights && !self.optimizer.master_weights, || {
                Fault::new("gradients", "torch's optimizers take gradients in the type of the weights only")
                    .or_set("optimizer.master_weights", true)
                    .or_drop("gradients")
            });
        }
        faults.range("checkpoints.every", self.checkpoints.every.into(), 1..=u32::MAX.into());
        for (key, used) in [("reentrant", self.checkpoints.reentrant), ("offload", self.checkpoints.offload)] {
            let (path, selective) = (format!("checkpoints.{key}"), "checkpoints.selective");
            faults.when(used && self.checkpoints.selective.is_some(), || {
                Fault::new(selective, format!("{{{selective}}} with {{{path}}}: it is neither reentrant nor offloaded"))
                    .or_drop(selective)
                    .or_drop(path)
            });
        }
        self.check_attention(faults);
        self.check_loss(faults);
    }

    fn check_attention(&self, faults: &mut Faults) {
        let (path, flash) = ("attention", self.attention.is_flash());
        // FSDP's policy computes in another type than it shards.
        let computes = self.parallel.as_ref().and_then(|parallel| match &parallel.engine {
            Engine::Fsdp1(options) => options.mixed_precision,
            Engine::Fsdp2(options) => options.mixed_precision,
            _ => None,
        });
        let narrow = computes.is_some_and(|types| types.parameters != DType::F32);
        faults.when(flash && self.weights == DType::F32 && self.autocast.is_none() && !narrow, || {
            Fault::new(path, "flash attention computes in fp16 and bf16 only")
                .or_set("weights", "bf16")
                .or_set("autocast", "bf16")
                .or_set(path, "sdpa")
        });
        let Gpu { name, vendor, capability, .. } = &self.gpu;
        match capability {
            _ if !flash => {}
            None => faults.when(!vendor.is_empty() && vendor != "NVIDIA", || {
                Fault::unsupported(path, format!("flash attention on cards of {vendor} ({name})")).or_set(path, "sdpa")
            }),
            Some(capability @ ..80) => faults.add(
                Fault::new(
                    path,
                    format!("flash attention needs an Ampere card (80) or a newer one, and {name} has {capability}"),
                )
                .or_set(path, "sdpa"),
            ),
            Some(90) => {}
            Some(capability) => faults.when(self.attention == AttentionKind::Flash3, || {
                Fault::new(
                    path,
                    format!("FlashAttention 3 is for Hopper (compute capability 90), and {name} has {capability}"),
                )
                .or_set(path, "flash2")
                .or_set(path, "sdpa")
            }),
        }
        self.check_compile(faults);
        faults.when(self.sdpa_kernel.is_some() && self.attention != AttentionKind::Sdpa, || {
            Fault::new("sdpa_kernel", "a kernel of SDPA is forced, but {attention} is not SDPA's")
                .or_set(path, "sdpa")
                .or_drop("sdpa_kernel")
        });
    }

    fn check_loss(&self, faults: &mut Faults) {
        let (kind, chunks) = ("loss.kind", "loss.chunks");
        faults.when(self.loss.kind == LossKind::CutCrossEntropy && self.weights == DType::F32, || {
            let problem =
                "cut cross entropy takes hidden states in fp16 or bf16 only, and those of fp32 weights are fp32";
            Fault::new(kind, problem).or_set("weights", "bf16").or_set(kind, "chunked")
        });
        let keeps_own = matches!(self.loss.kind, LossKind::Standard | LossKind::TrlFused);
        faults.when(!keeps_own && self.kernels == Kernels::Liger, || {
            Fault::new(kind, "Liger brings a loss of its own").or_drop("kernels").or_drop(kind)
        });
        let evaluation = self.job.evaluation.as_ref();
        let (metrics, skip) = ("job.evaluation.metrics", "job.evaluation.skip_logits");
        let kept = evaluation.is_some_and(|how| how.metrics && how.generation.is_none());
        let skips = evaluation.is_some_and(|how| how.skip_logits);
        faults.when(kept && self.loss.kind != LossKind::Standard, || {
            Fault::new(metrics, "this {loss.kind} returns no logits, so there are no predictions to keep")
                .or_set(kind, "standard")
                .or_drop(metrics)
        });
        faults.when(kept && skips, || {
            Fault::new(skip, "predictions are kept of logits that are not made").or_drop(skip).or_drop(metrics)
        });
        let fuses = self.kernels == Kernels::Liger && self.loss.kind == LossKind::Standard;
        faults.when(skips && !fuses, || Fault::no_effect(skip, "without Liger's loss"));
        if self.loss.kind == LossKind::Chunked {
            faults.range(chunks, self.loss.chunks, 1..=1 << 20);
        } else {
            faults.when(self.loss.chunks != LossOptions::default().chunks, || {
                Fault::no_effect(chunks, "without a chunked loss").or_set(kind, "chunked")
            });
        }
    }

    /// What is simulated on one card only. Megatron has no transformers' options at all, and says so itself.
    pub(super) fn check_on_many_cards(&self, parallel: &Parallel, faults: &mut Faults) {
        use OptimizerKind as K;
        if matches!(parallel.engine, Engine::Megatron(_)) {
            return;
        }
        let kind = self.optimizer.kind;
        let optimizer = format!("optimizer {}", kind.name());
        let sharded = matches!(parallel.engine, Engine::Fsdp1(_) | Engine::Fsdp2(_));
        let nested = self.checkpoints.runs_nested();
        let mesh = &parallel.mesh;
        let split = mesh.cp.max(mesh.sp).max(mesh.pp).max(mesh.tp) > 1;
        let varies = self.job.lengths.is_some() || self.job.is_flat() || self.job.packing.is_some();
        // Splits otherwise than by data leave transformers' own; a pipeline says so itself.
        let whole = matches!(parallel.engine, Engine::Ddp(_)) || !split;
        let loss = whole && self.loss.kind.runs_under(parallel.engine.name());
        let rolls_out = self.objective.kind.rolls_out() && matches!(parallel.engine, Engine::Fsdp1(_));
        let refused = [
            (varies && split, "job.lengths", "batches of many lengths, split over cards,"),
            (split && !self.job.is_one_step() && !varies, "job", "what surrounds the step, split over cards,"),
            (self.keep_loss, "keep_loss", "a loss that is kept until the next,"),
            (self.optimizer_in_backward, "optimizer_in_backward", "the optimizer in backward"),
            (
                self.optimizer.master_weights,
                "optimizer.master_weights",
                "master weights (DeepSpeed and Megatron bring their own)",
            ),
            (self.gradients.is_some(), "gradients", "a type for gradients"),
            (self.checkpoints.reentrant, "checkpoints.reentrant", "reentrant gradient checkpointing"),
            (self.checkpoints.offload, "checkpoints.offload", "offloaded gradient checkpointing"),
            (
                self.checkpoints != CheckpointOptions::default() && !sharded && !nested,
                "checkpoints",
                "this kind of gradient checkpointing without FSDP",
            ),
            (
                self.loss.kind != LossKind::Standard && parallel.mesh.pp < 2 && !loss,
                "loss.kind",
                "a loss other than transformers' own",
            ),
            (!self.objective.is_plain() && split, "objective.kind", "tasks, split over cards otherwise than by data,"),
            (rolls_out, "objective.kind", "rollouts under FSDP1 (FSDP2 is simulated)"),
            (self.save_on_cpu, "save_on_cpu", "saving activations on the host"),
            (self.sdpa_kernel.is_some(), "sdpa_kernel", "a forced kernel of SDPA"),
            (
                matches!(kind, K::AdamMini | K::AnyPrecision | K::Shampoo | K::GaLoreAdamW | K::ApolloAdamW),
                "optimizer.kind",
                &optimizer,
            ),
        ];
        for (_, path, what) in refused.into_iter().filter(|(used, ..)| *used) {
            let fault = Fault::unsupported(path, format!("{what} on several cards"));
            // A framework may have said it: only another value mends that.
            let fault = match path {
                "loss.kind" => fault.or_set(path, "standard"),
                "checkpoints.reentrant" | "checkpoints.offload" => fault.or_set(path, false),
                _ => fault.or_drop(path),
            };
            faults.add(fault.or("run on one card"));
        }
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.optimizer.notes();
        notes.extend(self.compile_notes());
        notes.extend(self.job.note());
        notes.extend(self.versions().unknown());
        if self.checkpointing != Checkpointing::Off && self.checkpoints.offload {
            notes.push("offloaded checkpoints: copies are taken to be done when needed".into());
        }
        if self.attention == AttentionKind::Flex {
            notes.push("flex attention: memory while it is compiled is not counted".into());
        }
        if self.attention.is_flash() && self.batch.padded && self.batch.real_tokens.is_none() {
            notes.push("padding: every token is taken to be a real one; batch.real_tokens says how many are".into());
        }
        match self.parallel.as_ref().map(|parallel| (&parallel.engine, &parallel.mesh)) {
            Some((Engine::Megatron(options), mesh)) => {
                if self.clip {
                    notes.push("clipping is left out: what Megatron's own takes is not simulated".into());
                }
                notes.extend(options.notes(mesh));
            }
            Some((Engine::Deepspeed(_), _)) if self.clip => {
                notes.push("clipping changes nothing: DeepSpeed takes the norms of gradients anyway".into());
            }
            Some((Engine::Ddp(Ddp { static_graph: true, .. }), _)) => {
                notes.push("static_graph changes when the first step's gradients are reduced, not memory".into());
            }
            _ => {}
        }
        notes
    }

    pub(super) fn uses(&self, dtype: DType) -> bool {
        let engine = self.parallel.as_ref().and_then(Parallel::compute_type);
        let computes = self.quantization.as_ref().map(|quantization| quantization.compute);
        self.weights == dtype || [self.autocast, engine, computes].contains(&Some(dtype))
    }
}

impl InferPlan {
    fn notes(&self) -> Vec<String> {
        let mut notes = self.stack.unknown();
        if self.batch.mask && self.new_tokens > 0 {
            notes.push("batch.mask changes nothing: generate makes a mask of ones itself".into());
        }
        notes
    }

    pub(super) fn uses(&self, dtype: DType) -> bool {
        self.weights == dtype || self.quantization.as_ref().is_some_and(|quantization| quantization.compute == dtype)
    }
}

/// What torch does with bf16 on a card that has none. It multiplies in fp32 (`torch.cuda.is_bf16_supported` counts that as
/// support); before Volta cuBLAS has no such products at all (pytorch issue 57773).
fn emulated(gpu: &Gpu) -> Option<String> {
    let capability = gpu.capability.filter(|capability| *capability < 80)?;
    let what = match capability {
        ..70 => "cuBLAS has no products of it there, and torch fails",
        _ => "torch computes it in fp32, slowly, and flash kernels are missing; fp16 is what the card has",
    };
    Some(format!("{} has no bf16 (compute capability {capability}; it begins with 80): {what}", gpu.name))
}

impl RunPlan {
    /// What a report should say about the plan's options.
    pub fn notes(&self) -> Vec<String> {
        let (mut notes, bf16) = match self {
            Self::Train(plan) => (plan.notes(), plan.uses(DType::BF16)),
            Self::Infer(plan) => (plan.notes(), plan.uses(DType::BF16)),
            Self::Serve(_) => (Vec::new(), false),
        };
        notes.extend(emulated(self.gpu()).filter(|_| bf16));
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Batch, Gpus, Implementation, Optimizer};

    fn paths(plan: &TrainPlan) -> Vec<String> {
        plan.check().err().into_iter().flatten().map(|fault| fault.path).collect()
    }

    fn on(card: &str, attention: AttentionKind) -> TrainPlan {
        TrainPlan { gpu: Gpus::embedded().find(card).unwrap(), attention, ..TrainPlan::default() }
    }

    #[test]
    fn all_that_is_wrong_is_said_at_once() {
        let plan = TrainPlan {
            batch: Batch { batch_size: 0, ..Batch::default() },
            optimizer_in_backward: true,
            clip: true,
            gradient_accumulation: 2,
            optimizer: Optimizer {
                kind: OptimizerKind::Lion,
                implementation: Implementation::Fused,
                ..Optimizer::default()
            },
            loss: LossOptions { chunks: 4, ..LossOptions::default() },
            ..TrainPlan::default()
        };
        let expected = ["batch.batch_size", "optimizer.implementation", "gradient_accumulation", "clip", "loss.chunks"];
        assert_eq!(paths(&plan), expected);
        for fault in plan.check().unwrap_err() {
            assert!(!fault.remedies.is_empty() && !fault.to_string().contains("--"), "{fault}");
        }
    }

    #[test]
    fn flash_attention_asks_for_its_cards() {
        for (card, attention, fits) in [
            ("H100", AttentionKind::Flash3, true),
            ("A100 80GB", AttentionKind::Flash3, false),
            ("RTX 4090", AttentionKind::Flash3, false),
            ("A100 80GB", AttentionKind::Flash2, true),
            ("T4", AttentionKind::Flash2, false),
            ("MI300X", AttentionKind::Flash2, false),
            ("MI300X", AttentionKind::Sdpa, true),
        ] {
            assert_eq!(paths(&on(card, attention)).is_empty(), fits, "{card} {attention:?}");
        }
    }

    #[test]
    fn bf16_on_a_card_without_it_is_noted() {
        let plan =
            |card: &str, weights| RunPlan::Train(Box::new(TrainPlan { weights, ..on(card, AttentionKind::Sdpa) }));
        let notes = |card: &str, weights| plan(card, weights).notes();
        // Nor is it measured by runs in fp16.
        let emulated = |weights| plan("T4", weights).features().contains(&"bf16 on cards without it".to_owned());
        assert!(emulated(DType::BF16) && !emulated(DType::F16));
        assert!(notes("T4", DType::BF16)[0].contains("T4 has no bf16 (compute capability 75"));
        assert!(notes("T4", DType::F16).is_empty() && notes("A100 80GB", DType::BF16).is_empty());
    }
}
