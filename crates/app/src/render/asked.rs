//! What was asked, in a few lines: the model, what is trained or served, and how.

use vramcast_core::plan::parallel::{Engine, Parallel};
use vramcast_core::plan::{
    AdapterPlan, AttentionKind, CacheImplementation, CheckpointOptions, Checkpointing, InferPlan, Kernels, LossKind,
    RunPlan, Selective, ServePlan, ServingEngine, TaskKind, TrainPlan,
};
use vramcast_core::report::Report;
use vramcast_core::units::{several, show_count};

use super::page::wrapped;
use super::{gib, width};

/// The plan in words, on one line.
pub fn plan(report: &Report) -> String {
    planned(report).lines().collect::<Vec<_>>().join(" ").trim().to_owned()
}

pub(super) fn head(report: &Report) -> String {
    format!("{}\n{}\n\n", wrapped(&title(report), width()), planned(report))
}

fn planned(report: &Report) -> String {
    match &report.plan {
        RunPlan::Train(plan) => settings(plan, pictures(report)),
        RunPlan::Infer(plan) => generation(plan, pictures(report)),
        RunPlan::Serve(plan) => serving(plan),
    }
}

/// The first line: the model and what is trained.
pub fn title(report: &Report) -> String {
    let model = &report.model;
    let share = || 100.0 * model.trainable as f64 / (model.parameters + model.adapter.unwrap_or(0)).max(1) as f64;
    let trained = match (&report.plan, model.adapter) {
        (RunPlan::Infer(_) | RunPlan::Serve(_), _) => String::new(),
        (_, Some(added)) => {
            format!(", {} in adapters, {} trained ({:.3} %)", show_count(added), show_count(model.trainable), share())
        }
        (_, None) if model.trainable == model.parameters => ", all trained".to_owned(),
        _ => format!(", {} trained ({:.2} %)", show_count(model.trainable), share()),
    };
    let cut = match &report.plan {
        RunPlan::Train(plan) => {
            // Megatron's count is that of the whole model.
            let own = |parallel: &&Parallel| !matches!(parallel.engine, Engine::Megatron(_));
            let parallel = plan.parallel.as_ref().filter(own);
            parallel.is_some_and(|parallel| parallel.mesh.tp > 1 || parallel.mesh.pp > 1)
        }
        _ => false,
    };
    let here = if cut { " on this card" } else { "" };
    let count = show_count(model.parameters);
    format!("{} ({}), {count} parameters{here}{trained}", model.name, model.family)
}

/// The pictures of a batch that has no tokens; some models see them smaller than they are.
fn pictures(report: &Report) -> Option<&[u64]> {
    let images = match &report.plan {
        // What generates has a prompt.
        RunPlan::Infer(plan) => {
            return plan.batch.images.as_ref().filter(|_| plan.new_tokens == 0).map(<[u64; 3]>::as_slice);
        }
        RunPlan::Train(plan) => plan.batch.images.as_ref().map(<[u64; 3]>::as_slice),
        RunPlan::Serve(_) => None,
    };
    let batch = &report.terms.iter().find(|term| term.component == "batch")?.tensors;
    let tokens = batch.iter().any(|tensor| tensor.dtype == "int64" && tensor.shape.len() > 1);
    let seen = batch.iter().map(|tensor| tensor.shape.as_slice()).find(|shape| shape.len() == 4);
    images.or(seen).filter(|_| !tokens)
}

/// A task and what goes into it.
fn task(plan: &TrainPlan) -> Vec<String> {
    let (objective, batch) = (&plan.objective, &plan.batch);
    let (rows, tokens) = (batch.batch_size, batch.seq_len);
    let runs = TaskKind::ALL.iter().find(|(kind, ..)| *kind == objective.kind).map_or("", |(_, _, runs)| runs);
    let sizes = match objective.kind {
        kind if kind.rolls_out() => {
            format!(
                "{} of {} tokens after {} of a prompt",
                several(rows, "completion"),
                objective.completion(),
                objective.prompt(tokens)
            )
        }
        TaskKind::Dpo | TaskKind::Orpo | TaskKind::Cpo | TaskKind::Reward => {
            format!("{} × {tokens} tokens", several(rows, "pair"))
        }
        _ => format!("{} × {tokens} tokens", several(rows, "sample")),
    };
    vec![format!("{} ({runs}): {sizes}", objective.kind.name())]
}

/// What a sample is: a picture, or the pictures of a video.
fn in_pixels(sizes: &[u64], samples: u64) -> String {
    match sizes {
        [count, height, width] if count / samples.max(1) > 1 => {
            format!("{} pictures of {height}×{width} pixels", count / samples.max(1))
        }
        [.., height, width] => format!("{height}×{width} pixels"),
        _ => "pictures".to_owned(),
    }
}

/// The plan in one or two lines: what was asked and what was assumed.
fn settings(plan: &TrainPlan, pictures: Option<&[u64]>) -> String {
    let batch = &plan.batch;
    let samples = match pictures {
        Some(sizes) => in_pixels(sizes, batch.batch_size),
        None => format!("{} tokens", batch.seq_len),
    };
    let mut parts = match plan.objective.is_plain() {
        true => vec![format!("batch {} × {samples}", batch.batch_size)],
        false => task(plan),
    };
    if plan.gradient_accumulation > 1 {
        parts.push(format!("{} micro-batches a step", plan.gradient_accumulation));
    }
    parts.push(match plan.autocast {
        Some(narrow) => format!("{} weights, {} autocast", plan.weights.name(), narrow.name()),
        None => format!("{} weights", plan.weights.name()),
    });
    let name = |value: &dyn erased::Name| value.name();
    parts.push(match plan.optimizer.kind.has_implementations() {
        true => format!("{} ({})", name(&plan.optimizer.kind), name(&plan.optimizer.implementation)),
        false => name(&plan.optimizer.kind),
    });
    parts.push(match plan.attention {
        AttentionKind::Sdpa => "SDPA attention".into(),
        AttentionKind::Eager => "eager attention".into(),
        AttentionKind::Flash2 => "FlashAttention 2".into(),
        AttentionKind::Flash3 => "FlashAttention 3".into(),
        AttentionKind::Flex => "flex attention".into(),
    });
    parts.push(match plan.checkpointing {
        Checkpointing::Off => "no checkpointing".into(),
        Checkpointing::Full => checkpointing(plan.checkpoints),
    });
    match plan.loss.kind {
        LossKind::Standard => {}
        LossKind::Chunked => parts.push(format!("loss in {} chunks", plan.loss.chunks)),
        LossKind::CutCrossEntropy => parts.push("cut cross entropy".into()),
        LossKind::TrlFused if plan.objective.is_plain() || plan.objective.uses_fused_head() => {
            parts.push("TRL's fused loss".into());
        }
        LossKind::TrlFused => {}
    }
    if plan.save_on_cpu {
        parts.push("saved tensors on the host".into());
    }
    if plan.optimizer.master_weights {
        parts.push("fp32 master weights".into());
    }
    if let Some(dtype) = plan.gradients {
        parts.push(format!("{} gradients", dtype.name()));
    }
    if plan.optimizer_in_backward {
        parts.push("optimizer in backward".into());
    }
    if let Some(AdapterPlan::Lora(lora)) = &plan.adapter {
        parts.push(format!("LoRA rank {}", lora.rank));
    }
    if let Some(AdapterPlan::Other(other)) = &plan.adapter {
        parts.push(other.name().into());
    }
    if let Some(quantization) = &plan.quantization {
        parts.push(format!("{} base", name(&quantization.scheme)));
    }
    if let Some(parallel) = &plan.parallel {
        parts.push(format!("one of {} cards under {}", parallel.mesh.world(), parallel.engine.name()));
    }
    if plan.kernels == Kernels::Liger {
        parts.push("Liger kernels".into());
    }
    wrapped(&parts.join(", "), width())
}

fn checkpointing(options: CheckpointOptions) -> String {
    let mut text = match options {
        CheckpointOptions { offload: true, .. } => "offloaded gradient checkpointing".to_owned(),
        CheckpointOptions { reentrant: true, .. } => "reentrant gradient checkpointing".to_owned(),
        _ => "gradient checkpointing".to_owned(),
    };
    match options.selective {
        None => {}
        Some(Selective::Matmuls) => text = format!("selective {text} (products and attention kept)"),
        Some(Selective::AlternateMatmuls) => {
            text = format!("selective {text} (every second product and attention kept)")
        }
    }
    if options.every > 1 {
        text += &format!(" of one layer in {}", options.every);
    }
    text
}

fn generation(plan: &InferPlan, pictures: Option<&[u64]>) -> String {
    let name = |value: &dyn erased::Name| value.name();
    let batch = &plan.batch;
    let mut parts = match pictures {
        Some(sizes) => vec![format!("batch {} × {}", batch.batch_size, in_pixels(sizes, batch.batch_size))],
        None => vec![
            format!("{} of {} tokens", several(batch.batch_size, "prompt"), batch.seq_len),
            match plan.stop_after {
                _ if plan.new_tokens == 0 => "one forward pass".to_owned(),
                Some(tokens) => format!("{} new tokens of which {tokens} are made", plan.new_tokens),
                None => format!("{} new tokens", plan.new_tokens),
            },
        ],
    };
    parts.push(format!("{} weights", plan.weights.name()));
    match plan.cache {
        _ if pictures.is_some() || plan.new_tokens == 0 => {}
        CacheImplementation::None => parts.push("no cache".to_owned()),
        cache => parts.push(format!("{} cache", cache.name())),
    }
    parts.push(format!("{} attention", name(&plan.attention)));
    parts.extend(plan.quantization.as_ref().map(|how| format!("{} linears", name(&how.scheme))));
    if plan.beams > 1 {
        parts.push(several(plan.beams, "beam"));
    }
    parts.extend(plan.assistant.as_ref().map(|assistant| format!("drafted by {}", assistant.model)));
    parts.extend(plan.prompt_lookup.map(|tokens| format!("{tokens} tokens drafted from the prompt")));
    parts.extend(plan.device_map.as_ref().map(|map| format!("over {}", several(map.cards, "card"))));
    wrapped(&parts.join(", "), width())
}

fn serving(plan: &ServePlan) -> String {
    let name = |value: &dyn erased::Name| value.name();
    let mut parts =
        vec![format!("served by {} on {} ({} GiB)", name(&plan.engine), plan.gpu.name, gib(plan.gpu.memory))];
    // llama.cpp's is that of all sequences, and stands with its buffers.
    let own = !matches!(plan.engine, ServingEngine::LlamaCpp | ServingEngine::Ollama);
    parts.extend(plan.context.filter(|_| own).map(|tokens| format!("sequences of {tokens} tokens")));
    parts.extend(plan.quantization.iter().map(|method| format!("{method} weights")));
    parts.extend(
        plan.tensor_parallel_size
            .filter(|ranks| *ranks > 1)
            .map(|ranks| format!("one of {ranks} tensor-parallel cards")),
    );
    parts.extend(plan.pipeline_parallel_size.filter(|stages| *stages > 1).map(|stages| format!("{stages} stages")));
    wrapped(&parts.join(", "), width())
}

/// Names of plan values as files and flags spell them.
mod erased {
    /// Something with a name.
    pub(super) trait Name {
        fn name(&self) -> String;
    }

    impl<T: serde::Serialize> Name for T {
        fn name(&self) -> String {
            serde_json::to_value(self).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
        }
    }
}
