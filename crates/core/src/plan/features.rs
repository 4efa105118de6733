//! The features of a plan by name: what a recorded run vouches for, and what a report says was never measured.

use super::parallel::Parallel;
use super::{
    AdapterPlan, AllocatorOptions, Checkpointing, Gpu, InferPlan, Kernels, LossKind, ModelCode, Quantization, RunPlan,
    ServePlan, ServingEngine, TrainPlan,
};
use crate::dtype::DType;

impl RunPlan {
    /// Every feature the plan uses.
    pub fn features(&self) -> Vec<String> {
        match self {
            Self::Train(plan) => plan.features(),
            Self::Infer(plan) => plan.features(),
            Self::Serve(plan) => plan.features(),
        }
    }
}

/// A value as plans and flags spell it.
fn spelled<T: serde::Serialize>(value: T) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

impl TrainPlan {
    /// Every feature the plan uses.
    pub fn features(&self) -> Vec<String> {
        let mut names = vec![
            match self.autocast {
                Some(narrow) => format!("{} weights under {} autocast", self.weights.name(), narrow.name()),
                None => format!("{} weights", self.weights.name()),
            },
            format!("optimizer {}", self.optimizer.kind.name()),
            format!("{} steps", spelled(self.optimizer.implementation)),
            format!("{} attention", spelled(self.attention)),
        ];
        let mut add = |used: bool, name: &str| {
            if used {
                names.push(name.to_owned());
            }
        };
        let (recomputed, how) = (self.checkpointing == Checkpointing::Full, self.checkpoints);
        add(recomputed && !how.runs_nested() && how.selective.is_none(), "gradient checkpointing");
        add(recomputed && how.reentrant, "reentrant gradient checkpointing");
        add(recomputed && how.offload, "offloaded gradient checkpointing");
        add(recomputed && how.selective.is_some(), "selective gradient checkpointing");
        add(recomputed && how.every > 1, "gradient checkpointing of every n-th layer");
        add(self.save_on_cpu, "saved tensors on the host");
        add(self.kernels == Kernels::Liger, "Liger kernels");
        add(self.loss.kind == LossKind::Chunked, "chunked loss");
        add(self.loss.kind == LossKind::CutCrossEntropy, "cut cross entropy");
        add(self.optimizer_in_backward, "optimizer in backward");
        add(self.optimizer.master_weights, "master weights");
        add(self.gradients.is_some_and(|dtype| dtype != self.weights), "gradients of another type than the weights");
        add(self.gradient_accumulation > 1, "gradient accumulation");
        add(self.clip, "gradient clipping");
        add(!self.frozen.is_empty(), "frozen parameters");
        add(self.batch.padded, "padded batches");
        add(!self.keep_outputs, "outputs dropped before backward");
        add(self.keep_loss, "loss kept until the next");
        add(self.keeps_inputs(), "bitsandbytes up to 0.43.1");
        match &self.adapter {
            Some(AdapterPlan::Lora(lora)) if lora.dora => add(true, "DoRA"),
            Some(AdapterPlan::Lora(_)) => add(true, "LoRA"),
            _ => {}
        }
        add(self.parallel.as_ref().is_some_and(Parallel::runs_mics), "MiCS");
        if !self.objective.is_plain() {
            add(true, &format!("task {}", self.objective.kind.name()));
            add(self.objective.vllm.is_some(), "vLLM beside the trainer");
        }
        add(self.job.lengths.is_some(), "batches of many lengths");
        add(self.job.packing.is_some(), "packed samples");
        add(self.job.is_flat() && self.job.packing.is_none(), "batches without padding");
        add(self.compile.is_some(), "torch.compile");
        add(self.float8.is_some(), "float8 training");
        add(self.job.resume, "resuming");
        add(self.job.evaluation.is_some(), "evaluation between steps");
        add(self.job.evaluation.as_ref().is_some_and(|how| how.metrics), "predictions kept for metrics");
        add(self.job.evaluation.as_ref().is_some_and(|how| how.skip_logits), "evaluation without logits");
        let spread = self.parallel.is_some();
        add(spread && !self.objective.is_plain(), "tasks over several cards");
        add(spread && self.job.evaluation.is_some(), "evaluation over several cards");
        add(spread && self.job.saving.is_some(), "checkpoints written by several cards");
        add(self.job.empty_cache_steps.is_some(), "empty_cache between passes");
        add(self.job.from_pretrained, "loading from a checkpoint");
        add(self.job.merge, "merging an adapter");
        add(self.job.memory_limit.is_some(), "a limit on memory");
        if self.model_code != ModelCode::Transformers {
            names.push(format!("{} model code", spelled(self.model_code)));
        }
        if let Some(kernel) = self.sdpa_kernel {
            names.push(format!("forced {} kernel", spelled(kernel)));
        }
        names.extend(self.quantization.as_ref().map(base));
        names.extend(self.parallel.as_ref().map(|parallel| format!("{} over several cards", parallel.engine.name())));
        names.extend(allocator(self.allocator));
        names.extend(card(&self.gpu));
        names.extend(emulated(&self.gpu, self.uses(DType::BF16)));
        names
    }
}

impl InferPlan {
    /// Every feature the plan uses.
    pub fn features(&self) -> Vec<String> {
        let mut names = vec![
            format!("{} weights", self.weights.name()),
            format!("{} attention", spelled(self.attention)),
            format!("{} cache", self.cache.name()),
        ];
        if self.beams > 1 {
            names.push("beam search".to_owned());
        }
        names.extend(self.device_map.as_ref().map(|_| "device maps".to_owned()));
        names.extend(self.quantization.as_ref().map(base));
        names.extend(allocator(self.allocator));
        names.extend(card(&self.gpu));
        names.extend(emulated(&self.gpu, self.uses(DType::BF16)));
        names
    }
}

impl ServePlan {
    /// Every feature of the engine that the plan uses, where runs of it are recorded (truth/engines). What of a model decides its
    /// graph and its weights' types is read from the model, so it is no feature.
    pub fn features(&self) -> Vec<String> {
        let several = |cards: Option<u64>| cards.is_some_and(|cards| cards > 1);
        // Where none is named it is the newest, which runs are made of.
        let version = |version: &String| version.split('.').take(2).collect::<Vec<_>>().join(".");
        let mut names: Vec<String> = self.version.iter().map(|named| format!("version {}", version(named))).collect();
        let graphs = self.engine == ServingEngine::Vllm && !self.enforce_eager;
        let used = [
            (graphs, "CUDA graphs"),
            (several(self.tensor_parallel_size) || self.tensor_split.len() > 1, "several cards"),
            (several(self.decode_context_parallel_size), "shared caches of sequences"),
            (several(self.pipeline_parallel_size), "pipeline stages"),
            (several(self.data_parallel_size), "replicas"),
            (self.dp_attention, "attention in replicas"),
            (self.expert_parallel, "whole experts on each card"),
            (self.kv_cache_memory_bytes.is_some(), "a pool of a given size"),
            (self.cpu_offload_gb.is_some_and(|size| size > 0.0), "weights on the host"),
            (self.enable_lora, "room for adapters"),
            (self.speculative_model.is_some(), "tokens guessed ahead"),
            (self.mmproj.is_some(), "an image encoder"),
            (self.split_mode.as_ref().is_some_and(|mode| mode != "layer"), "layers split over cards"),
            (self.n_gpu_layers.is_some(), "a number of layers on the card"),
            (self.cpu_moe || several(self.n_cpu_moe.map(|layers| layers + 1)), "experts on the host"),
            (self.override_tensor.is_some(), "tensors placed by name"),
            (self.no_kv_offload, "the cache on the host"),
        ];
        names.extend(used.into_iter().filter(|(used, _)| *used).map(|(_, name)| name.to_owned()));
        let caches = [&self.kv_cache_dtype, &self.cache_type_k, &self.cache_type_v].into_iter().flatten();
        let narrow =
            caches.filter(|dtype| !["auto", "f16", "bf16", "fp16", "bfloat16", "float16"].contains(&dtype.as_str()));
        names.extend(narrow.take(1).map(|dtype| format!("{dtype} cache")));
        names
    }
}

fn base(quantization: &Quantization) -> String {
    let experts = if quantization.experts { " with packed experts" } else { "" };
    format!("{} base{experts}", spelled(quantization.scheme))
}

fn allocator(options: AllocatorOptions) -> Vec<String> {
    let AllocatorOptions { expandable_segments, max_split_size, roundup_power2_divisions, .. } = options;
    let by_size = options.roundup_power2_divisions_by_size;
    [
        (expandable_segments, "expandable_segments"),
        (max_split_size.is_some(), "max_split_size_mb"),
        (roundup_power2_divisions.is_some() || by_size.is_some(), "roundup_power2_divisions"),
    ]
    .into_iter()
    .filter(|(used, _)| *used)
    .map(|(_, name)| name.to_owned())
    .collect()
}

/// What torch computes in fp32 takes another way.
fn emulated(gpu: &Gpu, uses_bf16: bool) -> Option<String> {
    let older = gpu.capability.is_some_and(|capability| capability < 80);
    (older && uses_bf16).then(|| "bf16 on cards without it".to_owned())
}

/// Kernels and workspaces follow the compute capability.
fn card(gpu: &Gpu) -> Option<String> {
    gpu.capability.map(|capability| format!("cards of compute capability {}.{}", capability / 10, capability % 10))
}
