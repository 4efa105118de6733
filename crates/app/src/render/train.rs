//! A report as text.

use vramcast_core::plan::parallel::{Engine, Parallel};
use vramcast_core::plan::{
    AdapterPlan, AttentionKind, CacheImplementation, CheckpointOptions, Checkpointing, InferPlan, Kernels, LossKind,
    RunPlan, Selective, ServePlan, ServingEngine, TaskKind, TrainPlan,
};
use vramcast_core::report::{Level, Report, Totals, Verdict};
use vramcast_core::units::{several, show_count};

use super::page::wrapped;
use super::table::Table;
use super::{bar, gib, width};

/// The whole page.
pub fn text(report: &Report, explain: bool, timeline: bool) -> String {
    super::showing(report, || whole(report, explain, timeline))
}

fn whole(report: &Report, explain: bool, timeline: bool) -> String {
    let mut page = head(report);
    page += &totals(report);
    page += &super::serving::account(report);
    page += &breakdown(report);
    page += &report.run.as_ref().map(super::run::text).unwrap_or_default();
    if explain {
        page += &explained(report);
    }
    if timeline {
        page += &plot(report);
    }
    page += &report.job.as_ref().map(super::job::text).unwrap_or_default();
    page += &super::serving::short(report).unwrap_or_else(|| verdicts(&report.verdicts));
    page += &defaults(report);
    for note in &report.notes {
        page += &(wrapped(&format!("note: {note}"), width()) + "\n");
    }
    page
}

/// Which values a framework's defaults decided; where from is told with everything else that is explained.
fn defaults(report: &Report) -> String {
    let chosen = || report.provenance.iter().filter_map(|origin| Some((origin, origin.framework.as_deref()?)));
    let Some((_, framework)) = chosen().next() else { return String::new() };
    let list: Vec<String> = chosen().map(|(origin, _)| format!("{} {}", origin.key, origin.value)).collect();
    wrapped(&format!("defaults of {framework}: {}", list.join(", ")), width()) + "\n"
}

/// The plan in words, on one line.
pub fn plan(report: &Report) -> String {
    planned(report).lines().collect::<Vec<_>>().join(" ").trim().to_owned()
}

fn head(report: &Report) -> String {
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

fn totals(report: &Report) -> String {
    let sure = wrapped(&format!("confidence: {}", report.confidence.words), width());
    match report.confidence.level {
        Level::Guess => {
            let Totals { allocated, reserved, process, .. } = &report.totals;
            let [allocated, reserved, process] = [*allocated, *reserved, *process].map(gib);
            format!(
                "peak, a guess: about {process} GiB process, {reserved} reserved, {allocated} allocated\n{sure}\n\n"
            )
        }
        _ => {
            let ggml = [ServingEngine::LlamaCpp, ServingEngine::Ollama];
            let words = match &report.plan {
                RunPlan::Serve(plan) if ggml.contains(&plan.engine) => GGML,
                _ => TORCH,
            };
            format!("{}{sure}\n\n", levels(&report.totals, words).trim_end_matches('\n').to_owned() + "\n")
        }
    }
}

/// What allocated and reserved are called where torch runs.
pub(super) const TORCH: [&str; 2] =
    ["tensors: torch.cuda.max_memory_allocated()", "torch from the driver: max_memory_reserved()"];
/// And where ggml does, which has no cache of its own.
const GGML: [&str; 2] = ["buffers, as its log names them", "the same: nothing else is kept"];

/// The answer at its three levels.
pub(super) fn levels(totals: &Totals, [allocated, reserved]: [&str; 2]) -> String {
    let mut table = Table::new(&["peak", "GiB", "which number"]);
    table.row(vec!["allocated".into(), gib(totals.allocated), allocated.into()]);
    table.row(vec!["reserved".into(), gib(totals.reserved), reserved.into()]);
    table.row(vec!["process".into(), gib(totals.process), "everything: what nvidia-smi shows".into()]);
    table.to_string() + "\n"
}

fn breakdown(report: &Report) -> String {
    let whole = report.totals.process;
    let room = width().saturating_sub(40).clamp(10, 40);
    let mut page = format!("at the peak ({})\n", phase_name(&report.peak_phase));
    let names = report.breakdown.iter().map(|part| part.name.chars().count()).max().unwrap_or(0).max(23) + 1;
    for part in &report.breakdown {
        page += &format!("  {:<names$}{:>7}  {}\n", part.name, gib(part.bytes), bar(part.bytes, whole, room));
    }
    page += &format!("  {:<names$}{:>7}\n\n", "= process", gib(whole));
    page
}

/// `1.0.bwd` as people say it.
pub fn phase_name(phase: &str) -> String {
    let parts: Vec<&str> = phase.split('.').collect();
    let what = match parts.last().copied().unwrap_or_default() {
        "fwd" => "forward",
        "bwd" => "backward",
        "opt" => "optimizer step",
        "clip" => "gradient clipping",
        "zero" => "zero_grad",
        "eval" => return "evaluation".to_owned(),
        "load" => return "loading".to_owned(),
        "merge" => return "merging".to_owned(),
        "resume" => return "reading a checkpoint back".to_owned(),
        other => return other.to_owned(),
    };
    match parts.first().and_then(|step| step.parse::<u32>().ok()) {
        Some(0) => format!("{what} of the first step"),
        _ => format!("{what} of a later step"),
    }
}

fn explained(report: &Report) -> String {
    let mut page = String::from("each term and its tensors\n");
    let mut table = Table::new(&["GiB", "n", "what", "module", "operation", "shape"]);
    for term in &report.terms {
        let blank = String::new;
        table.row(vec![gib(term.bytes), blank(), term.component.clone(), blank(), blank(), blank()]);
        for tensor in &term.tensors {
            let shape = tensor.shape.iter().map(u64::to_string).collect::<Vec<_>>().join("×");
            table.row(vec![
                gib(tensor.bytes * tensor.count),
                tensor.count.to_string(),
                "·".into(),
                tensor.module.clone(),
                tensor.operation.clone(),
                format!("{shape} {}", tensor.dtype),
            ]);
        }
        if term.others > 0 {
            table.row(vec![gib(term.others), blank(), "·".into(), "smaller ones".into(), blank(), blank()]);
        }
    }
    page += &table.to_string();
    page += "\nby module\n";
    let mut table = Table::new(&["module", "GiB"]);
    for module in report.modules.iter().take(16) {
        table.row(vec![module.path.clone(), gib(module.bytes)]);
    }
    page += &table.to_string();
    page += "\nby phase: GiB allocated before it, at its peak and after it, and reserved\n";
    page += "(0.1.fwd is the forward pass of micro-batch 1 of step 0)\n";
    let mut table = Table::new(&["phase", "before", "peak", "after", "reserved"]);
    for phase in &report.phases {
        table.row(vec![
            phase.name.clone(),
            gib(phase.before),
            gib(phase.peak),
            gib(phase.after),
            gib(phase.peak_reserved),
        ]);
    }
    page += &table.to_string();
    let told = || report.provenance.iter().filter(|origin| origin.from != "off unless asked for");
    if told().next().is_some() {
        page += "\nsettings and where they come from\n";
        let mut table = Table::new(&["setting", "value", "from"]);
        for origin in told() {
            table.row(vec![origin.key.clone(), origin.value.clone(), origin.from.clone()]);
        }
        page += &table.to_string();
    }
    page + "\n"
}

/// Memory over the run, a column a stretch.
fn plot(report: &Report) -> String {
    const ROWS: u64 = 12;
    let columns = width().saturating_sub(12);
    let highest = report.timeline.iter().map(|sample| sample.bytes).max().unwrap_or(0).max(1);
    let step = report.timeline.len().div_ceil(columns).max(1);
    let heights: Vec<u64> = report
        .timeline
        .chunks(step)
        .map(|chunk| {
            chunk.iter().map(|sample| sample.bytes).max().unwrap_or(0) as u128 * u128::from(ROWS * 8)
                / u128::from(highest)
        })
        .map(|height| height as u64)
        .collect();
    let mut page = String::from("allocated over the run (GiB in tensors, before blocks are rounded up)\n");
    for row in (0..ROWS).rev() {
        let label = if (row + 1).is_multiple_of(4) { gib(highest / ROWS * (row + 1)) } else { String::new() };
        let cells: String = heights
            .iter()
            .map(|height| [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][height.saturating_sub(row * 8).min(8) as usize])
            .collect();
        page += &format!("{label:>8} │{}\n", cells.trim_end());
    }
    page += &format!("{:>8} └{}\n", "", "─".repeat(heights.len()));
    let phases: Vec<&str> = report.timeline.chunks(step).map(|chunk| word_of_phase(&chunk[0].phase)).collect();
    page += &format!("{:>8}  {}\n\n", "", beneath(&phases).trim_end());
    page
}

fn word_of_phase(name: &str) -> &str {
    match name.rsplit('.').next().unwrap_or(name) {
        "fwd" => "forward",
        "bwd" => "backward",
        "opt" => "step",
        other => other,
    }
}

/// The names of columns, each where its run begins, as far as there is room.
fn beneath(names: &[&str]) -> String {
    let mut line = String::new();
    for run in names.chunk_by(|a, b| a == b) {
        let name: String = run[0].chars().take(run.len().saturating_sub(1)).collect();
        line += &format!("{name:<width$}", width = run.len());
    }
    line
}

pub(super) fn verdicts(verdicts: &[Verdict]) -> String {
    if let [verdict] = verdicts {
        let (memory, left) = (gib(verdict.memory), gib(verdict.headroom.unsigned_abs()));
        let card = format!("{} {} ({memory} GiB)", super::fits(verdict.fits), verdict.gpu);
        return match (verdict.fits, super::guessing()) {
            (true, false) => format!("{card}: {} % full, {left} GiB left\n", verdict.utilization),
            (true, true) => format!("{card}, {left} GiB left\n"),
            // A limit of its own stops the run before the card is full.
            (false, _) if verdict.headroom >= 0 => {
                format!("{card} under the run's own limit of memory; {left} GiB of the card would be left\n")
            }
            (false, false) => format!("{card}: {left} GiB too much\n"),
            (false, true) => format!("{card}, {left} GiB too much\n"),
        };
    }
    let mut table = Table::new(&["card", "GiB", "fits", "full %", "left GiB"]);
    for verdict in verdicts {
        let sign = if verdict.headroom < 0 { "-" } else { "" };
        table.row(vec![
            verdict.gpu.clone(),
            gib(verdict.memory),
            if verdict.fits { "yes" } else { "no" }.to_owned() + if super::guessing() { "?" } else { "" },
            if super::guessing() {
                format!("{:.0}", verdict.utilization)
            } else {
                format!("{:.1}", verdict.utilization)
            },
            format!("{sign}{}", gib(verdict.headroom.unsigned_abs())),
        ]);
    }
    table.to_string()
}
