//! What Megatron refuses, what has no effect in it, and what is not simulated.

use super::{ContextExchange, Dispatcher, Experts, Megatron, PipelineSplit, Recompute, RecomputeModule};
use crate::dtype::DType;
use crate::plan::parallel::Parallel;
use crate::plan::parallel::mesh::{CP, Mesh, ModelSizes, PP, divides};
use crate::plan::{
    AttentionKind, CheckpointOptions, Checkpointing, Fault, Faults, Implementation, Kernels, LossOptions,
    OptimizerKind, Package, Stack, TrainPlan,
};

/// The place of an option in a plan.
pub(super) fn at(key: &str) -> String {
    format!("parallel.engine.megatron.{key}")
}

impl Megatron {
    /// Refuses what Megatron refuses, what it does not look at, and what is not simulated.
    pub(in crate::plan::parallel) fn check(
        &self,
        plan: &TrainPlan,
        parallel: &Parallel,
        sizes: &ModelSizes,
        faults: &mut Faults,
    ) {
        let mesh = &parallel.mesh;
        self.check_plan(plan, parallel, faults);
        for (used, path, what) in [
            (
                mesh.sp > 1,
                "parallel.mesh.sp",
                "Ulysses with Megatron, where context parallel by all-to-all is the same,",
            ),
            (mesh.dp_replicate > 1, "parallel.mesh.dp_replicate", "several copies of the distributed optimizer"),
        ] {
            faults.when(used, || Fault::unsupported(path, what).or_set(path, 1));
        }
        if let Some(fsdp) = self.fsdp {
            fsdp.check(self, mesh, faults);
        }
        if let Some(lora) = &self.lora {
            lora.check(self, mesh, sizes, faults);
        }
        self.check_deepspeed(plan, mesh, sizes, faults);
        self.schedule.check(mesh.pp, self.virtual_pipeline, &self.recompute, faults);
        self.check_split(plan, mesh, sizes, faults);
        self.check_optimizer(plan, faults);
        if let Some(fp8) = &self.fp8 {
            fp8.check(plan, faults);
        }
        if self.cp_comm == ContextExchange::A2a {
            let heads = sizes.kv_heads.map(|heads| (heads / mesh.tp.max(1)).max(1));
            divides(faults, CP, mesh.cp, "key and value heads of a tensor-parallel rank (all-to-all)", heads);
        }
        self.check_recompute(mesh, sizes, faults);
        self.check_offloading(mesh, sizes, faults);
        if sizes.is_dense() {
            self.check_experts(faults);
        }
    }

    /// Settings of transformers' runs that Megatron's do not have.
    fn check_plan(&self, plan: &TrainPlan, parallel: &Parallel, faults: &mut Faults) {
        let refused = [
            (plan.adapter.is_some(), "adapter", "PEFT's adapters under Megatron"),
            (plan.quantization.is_some(), "quantization", "quantised weights under Megatron"),
        ];
        for (_, path, what) in refused.into_iter().filter(|(used, ..)| *used) {
            let fault = Fault::unsupported(path, what).or_drop(path);
            faults.add(if path == "adapter" {
                fault.or("use Megatron-Bridge's own LoRA ({parallel.engine.megatron.lora})")
            } else {
                fault
            });
        }
        faults.when(!matches!(plan.optimizer.kind, OptimizerKind::AdamW | OptimizerKind::Adam), || {
            let path = "optimizer.kind";
            Fault::unsupported(path, "an optimizer other than Adam under Megatron").or_set(path, "adamw")
        });
        faults.when(plan.weights == DType::F32, || {
            Fault::unsupported("weights", "Megatron with fp32 weights").or_set("weights", "bf16")
        });
        let (batch, optimizer) = (&plan.batch, &plan.optimizer);
        let not_read = [
            (
                plan.checkpointing != Checkpointing::Off,
                "checkpointing",
                ": Megatron has {parallel.engine.megatron.recompute}",
            ),
            (plan.checkpoints != CheckpointOptions::default(), "checkpoints", ""),
            (plan.kernels != Kernels::Transformers, "kernels", ": Liger's are for transformers' models"),
            (plan.loss != LossOptions::default(), "loss", ": Megatron has {parallel.engine.megatron.cross_entropy}"),
            (plan.attention != AttentionKind::Sdpa, "attention", ": Transformer Engine's kernels run"),
            (plan.sdpa_kernel.is_some(), "sdpa_kernel", ": Transformer Engine's kernels run"),
            (plan.autocast.is_some(), "autocast", ""),
            (plan.gradients.is_some(), "gradients", ": Megatron has {parallel.engine.megatron.main_gradients}"),
            (plan.optimizer_in_backward, "optimizer_in_backward", ""),
            (optimizer.master_weights, "optimizer.master_weights", ": Megatron brings its own"),
            (
                optimizer.implementation == Implementation::Forloop,
                "optimizer.implementation",
                ": its Adam is one fused kernel",
            ),
            (!plan.frozen.is_empty(), "frozen", ""),
            (plan.save_on_cpu, "save_on_cpu", ": Megatron has {parallel.engine.megatron.cpu_offloading_layers}"),
            (plan.keep_loss, "keep_loss", ": its loop keeps no loss"),
            (!plan.keep_outputs, "keep_outputs", ": its loss is computed inside the model, and no output leaves it"),
            (batch.padded, "batch.padded", ": its attention is causal over packed sequences"),
            (batch.mask && !batch.padded, "batch.mask", ": its attention is causal over packed sequences"),
            (
                parallel.no_sync,
                "parallel.no_sync",
                ": gradients are added up in its own buffers and reduced at the end of a step",
            ),
        ];
        for (_, path, why) in not_read.into_iter().filter(|(used, ..)| *used) {
            faults.add(Fault::no_effect(path, format!("under Megatron{why}")));
        }
    }

    fn check_split(&self, plan: &TrainPlan, mesh: &Mesh, sizes: &ModelSizes, faults: &mut Faults) {
        let chunks = self.virtual_pipeline;
        faults.range(&at("virtual_pipeline"), chunks, 1..=1 << 16);
        if chunks > 1 && mesh.pp == 1 {
            let problem = format!("{{{}}} {chunks} without pipeline parallel", at("virtual_pipeline"));
            faults.add(Fault::new(at("virtual_pipeline"), problem).or_drop(at("virtual_pipeline")).or_set(PP, 2));
        } else if chunks > 1 {
            let micro = u64::from(plan.gradient_accumulation);
            faults.when(!micro.is_multiple_of(mesh.pp), || {
                let path = "gradient_accumulation";
                let problem = format!(
                    "{micro} micro-batches ({{{path}}}) are not a multiple of {{{PP}}} {}, as the interleaved schedule wants",
                    mesh.pp
                );
                Fault::new(path, problem).or_set(path, micro.next_multiple_of(mesh.pp))
            });
        }
        let split = sizes.layers.map(|layers| self.split.chunks(layers, mesh.pp, chunks, self.mtp_layers));
        if let Some(Err(fault)) = split.filter(|_| chunks > 0) {
            faults.add(fault);
        }
        faults.range(&at("mtp_layers"), self.mtp_layers, 0..=16);
        let ends =
            self.fp8.is_some_and(|fp8| fp8.layers_at_start_in_bf16.saturating_add(fp8.layers_at_end_in_bf16) > 0);
        faults.when(self.mtp_layers > 0 && ends, || {
            Fault::unsupported(at("mtp_layers"), "multi-token prediction with fp8 that leaves layers in bf16")
                .or("put all layers into fp8, or none")
        });
    }

    fn check_optimizer(&self, plan: &TrainPlan, faults: &mut Faults) {
        let (gradients, distributed) = (at("main_gradients"), at("distributed_optimizer"));
        match self.main_gradients {
            DType::F32 => {}
            DType::BF16 => faults.when(plan.weights == DType::F16, || {
                Fault::unsupported(&gradients, "main gradients of fp16 weights in another type than fp32")
                    .or_set(&gradients, "fp32")
            }),
            other => faults.add(Fault::value(&gradients, other.name(), "fp32 or bf16").or_set(&gradients, "fp32")),
        }
        faults.when(self.precision_aware.is_some() && !self.distributed_optimizer, || {
            Fault::new(at("precision_aware"), "the precision-aware optimizer needs the distributed optimizer")
                .or_set(&distributed, true)
                .or_drop(at("precision_aware"))
        });
        let vocabulary = at("make_vocab_size_divisible_by");
        faults.range(&vocabulary, self.make_vocab_size_divisible_by, 1..=1 << 32);
        let offload = at("optimizer_cpu_offload_percent");
        faults.range(&offload, self.optimizer_cpu_offload_percent, 0..=100);
        faults.when(self.optimizer_cpu_offload_percent > 0 && !self.distributed_optimizer, || {
            Fault::new(&offload, "states on the host without the distributed optimizer")
                .or_set(&distributed, true)
                .or_drop(&offload)
        });
    }

    /// Megatron's own refusals (`TransformerConfig.__post_init__`), and layers of other engines.
    fn check_offloading(&self, mesh: &Mesh, sizes: &ModelSizes, faults: &mut Faults) {
        let (path, layers) = (at("cpu_offloading_layers"), self.cpu_offloading_layers);
        if layers == 0 {
            return;
        }
        let refused = [
            (mesh.pp > 1, PP.to_owned(), "a pipeline"),
            (self.recompute != Recompute::None, at("recompute"), "recompute"),
            (self.deepspeed.is_some(), at("deepspeed"), "Megatron-DeepSpeed"),
        ];
        for (_, other, what) in refused.into_iter().filter(|(used, ..)| *used) {
            let problem = format!("{{{path}}} {layers} with {what}, which Megatron refuses");
            faults.add(Fault::new(&path, problem).or_drop(&path).or_drop(other));
        }
        if let Some(all) = sizes.layers.filter(|all| layers >= *all) {
            let fault = Fault::value(&path, layers, format!("fewer than {all}, the layers there are"));
            faults.add(fault.or_set(&path, all.saturating_sub(1)));
        }
    }

    fn check_recompute(&self, mesh: &Mesh, sizes: &ModelSizes, faults: &mut Faults) {
        let chunks = |layers| self.split.chunks(layers, mesh.pp, self.virtual_pipeline, self.mtp_layers).ok();
        let stage = sizes.layers.and_then(chunks).and_then(|chunks| chunks.into_iter().max());
        let path = at("recompute");
        match (&self.recompute, stage) {
            (Recompute::Uniform(0), _) => {
                let one = serde_json::json!({"uniform": 1});
                faults.add(Fault::value(path.clone(), "uniform 0", "of at least 1 layer").or_set(path, one));
            }
            (Recompute::Block(count) | Recompute::Uniform(count), Some(stage)) if *count > stage => {
                let form = if matches!(self.recompute, Recompute::Block(_)) { "block" } else { "uniform" };
                let fault =
                    Fault::value(&path, format!("{form} {count}"), format!("up to {stage}, the layers of a stage"));
                faults.add(fault.or_set(&path, serde_json::json!({form: stage})));
            }
            (Recompute::Selective(modules), _)
                if modules.contains(&RecomputeModule::Moe) && modules.contains(&RecomputeModule::MoeAct) =>
            {
                faults.add(
                    Fault::new(path, "recompute of moe and of moe_act: moe covers moe_act").or("name one of them"),
                );
            }
            _ => {}
        }
    }

    /// Options of mixtures on a model without one.
    fn check_experts(&self, faults: &mut Faults) {
        let Experts { capacity_percent, router_fp32, shared_expert_overlap, dispatcher } = &self.moe;
        let used = [
            (capacity_percent.is_some(), "capacity_percent"),
            (*router_fp32, "router_fp32"),
            (*shared_expert_overlap, "shared_expert_overlap"),
            (*dispatcher != Dispatcher::default(), "dispatcher"),
        ];
        for (_, key) in used.into_iter().filter(|(used, _)| *used) {
            faults.add(Fault::no_effect(at(&format!("moe.{key}")), "on a model without routed experts"));
        }
    }

    /// What a report says about the engine itself.
    pub(in crate::plan) fn notes(&self, mesh: &Mesh) -> Vec<String> {
        let unmeasured = [
            (self.fp8.is_some(), "fp8 products"),
            (mesh.cp > 1 && self.cp_comm == ContextExchange::P2p, "context parallel by a ring"),
            (self.mtp_layers > 0, "multi-token prediction"),
            (self.split != PipelineSplit::Even, "uneven stages"),
            (self.moe.dispatcher == Dispatcher::Hybridep, "the HybridEP dispatcher"),
            (self.optimizer_cpu_offload_percent > 0, "states on the host"),
            (!self.schedule.is_default(), "zero-bubble schedules"),
            (self.fsdp.is_some(), "Megatron-FSDP"),
            (self.cpu_offloading_layers > 0, "activations on the host"),
            (self.lora.is_some(), "LoRA beside Megatron's linears"),
            (self.deepspeed.is_some(), "Megatron-DeepSpeed's layers"),
        ];
        let named: Vec<&str> = unmeasured.into_iter().filter(|(used, _)| *used).map(|(_, name)| name).collect();
        let mut notes = Vec::new();
        if !named.is_empty() {
            notes.push(format!("{}: from the sources of Megatron, not yet measured", named.join(", ")));
        }
        notes.push(match self.deepspeed {
            Some(_) => {
                "Megatron-DeepSpeed's layers with flash-attention and Apex's norms, no dropout and no biases".into()
            }
            None => format!(
                "Megatron-Core {} with Transformer Engine's layers and attention; experts, where there are some, get \
                 equally many tokens",
                self.older_spelling(Stack::default()).version(Package::MegatronCore)
            ),
        });
        notes
    }
}
