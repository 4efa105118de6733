//! `vramcast calculate --config FILE` and `vramcast quick 7 --gpus 8 --engine deepspeed`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde_json::json;
use vramcast_core::ask::{Kept, Wanted};
use vramcast_core::lens::{self, EngineKind, GIB, Method};
use vramcast_core::plan::OptimizerKind;
use vramcast_core::units::parse_count;

use super::Answer;
use super::context::Context;
use super::lens::{MethodName, add_terms};
use crate::ask::formula;
use crate::ask::found::shape_near;
use crate::ask::job::{self, Job, Problem, check, read};
use crate::ask::question::Prepared;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render::page::{Block, Level, Page};
use crate::render::report::suggested;

/// How to find the number.
#[derive(Debug, Args)]
struct How {
    /// simulate, or a published formula (`vramcast list methods`).
    #[arg(long, value_name = "METHOD", default_value = "simulate", hide_possible_values = true)]
    method: MethodName,
    /// End with 1 when less than this stays free: 10% or 8GiB.
    #[arg(long, value_name = "SIZE")]
    fail_under_headroom: Option<String>,
}

/// A job from a file.
#[derive(Debug, Args)]
pub(super) struct Calculate {
    /// A job file, or the name of a preset (`vramcast list presets`).
    #[arg(long, value_name = "FILE", visible_alias = "preset")]
    config: PathBuf,
    #[command(flatten)]
    how: How,
}

/// A job from a size.
#[derive(Debug, Args)]
pub(super) struct Quick {
    /// Parameters, in billions (7) or with a unit (350M).
    #[arg(value_name = "SIZE")]
    size: String,
    /// Cards.
    #[arg(long, value_name = "N", default_value_t = 1)]
    gpus: u64,
    /// Memory of a card in GB.
    #[arg(long, value_name = "GB", default_value_t = 80.0)]
    gpu_mem: f64,
    /// Who spreads the model.
    #[arg(long, value_name = "ENGINE", default_value = "deepspeed")]
    engine: EngineName,
    /// The ZeRO stage of DeepSpeed [default: 3].
    #[arg(long, value_name = "STAGE", alias = "zero")]
    zero_stage: Option<u8>,
    /// Samples per card.
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch_size: u64,
    /// Tokens of a sample.
    #[arg(long, value_name = "N", default_value_t = 2048, alias = "seq-length")]
    seq_len: u64,
    /// The type of the weights: bf16, fp16 or fp32.
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = ["bf16", "fp16", "fp32"])]
    dtype: String,
    #[command(flatten)]
    how: How,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum EngineName {
    #[value(alias = "pytorch", alias = "pytorch-ddp", alias = "pytorch_ddp")]
    Ddp,
    Deepspeed,
    #[value(alias = "megatron-lm")]
    Megatron,
    #[value(alias = "megatron_deepspeed")]
    MegatronDeepspeed,
    #[value(alias = "pytorch-fsdp")]
    Fsdp,
}

pub(super) fn run(arguments: &Calculate, context: &Context) -> Result<Answer, Failure> {
    let text = read(&arguments.config)?;
    let (job, problems) = check(&text);
    let Some(job) = job else {
        return Err(refusal(&arguments.config, &problems));
    };
    answer(&job, &arguments.how, context)
}

fn refusal(file: &std::path::Path, problems: &[Problem]) -> Failure {
    let line = |problem: &Problem| {
        let place = problem.place.map_or_else(String::new, |place| format!("line {}: ", place.line));
        format!("{place}{}", format!("{} {}", problem.path, problem.message).trim_start())
    };
    let first = problems.first().map(line).unwrap_or_default();
    let failure = Failure::bad_input(format!("{}: {first}", file.display()));
    failure.hint(format!("`vramcast validate {}` lists every problem ({})", file.display(), problems.len()))
}

pub(super) fn quick(arguments: &Quick, context: &Context) -> Result<Answer, Failure> {
    let text = arguments.size.trim();
    let text = if text.ends_with(|c: char| c.is_ascii_digit()) { format!("{text}B") } else { text.to_owned() };
    let parameters = parse_count(&text).map_err(|e| Failure::bad_input(format!("SIZE: {e}")))?;
    let within = |name: &str, value: u64, low: u64, high: u64| {
        if (low..=high).contains(&value) {
            return Ok(());
        }
        Err(Failure::bad_input(format!("{name}: {value} is not from {low} to {high}")))
    };
    within("SIZE", parameters, 1_000_000, 100_000_000_000_000)?;
    within("--gpus", arguments.gpus, 1, 1 << 20)?;
    within("--zero-stage", u64::from(arguments.zero_stage.unwrap_or(3)), 0, 3)?;
    if arguments.zero_stage.is_some() && !matches!(arguments.engine, EngineName::Deepspeed) {
        return Err(Failure::bad_input("--zero-stage has no effect on this engine")
            .hint("drop --zero-stage, or use --engine deepspeed"));
    }
    within("--batch-size", arguments.batch_size, 1, 1 << 20)?;
    within("--seq-len", arguments.seq_len, 1, 1 << 24)?;
    if !(arguments.gpu_mem > 0.0 && arguments.gpu_mem <= 65_536.0) {
        return Err(Failure::bad_input(format!("--gpu-mem: {} is not above 0", arguments.gpu_mem)));
    }
    let (layers, hidden) = round_shape(parameters);
    let heads = (hidden / 128).max(1);
    let (engine, zero) = match arguments.engine {
        EngineName::Ddp => (EngineKind::Ddp, 0),
        EngineName::Deepspeed => (EngineKind::Deepspeed, arguments.zero_stage.unwrap_or(3)),
        EngineName::Megatron => (EngineKind::Megatron, 0),
        EngineName::MegatronDeepspeed => (EngineKind::MegatronDeepspeed, 1),
        EngineName::Fsdp => (EngineKind::Fsdp, 3),
    };
    // Tensor parallel within a node of eight, as far as it divides heads and cards.
    let fits = |tp: &u64| heads.is_multiple_of(*tp) && arguments.gpus.is_multiple_of(*tp);
    let split = matches!(engine, EngineKind::Megatron | EngineKind::MegatronDeepspeed);
    let tp = if split { (1..=8).rev().find(fits).unwrap_or(1) } else { 1 };
    let job = Job {
        name: format!("{} parameters", vramcast_core::units::show_count(parameters)),
        parameters,
        layers,
        hidden,
        heads,
        kv_heads: heads,
        vocab: 32_000,
        seq_len: arguments.seq_len,
        batch_size: arguments.batch_size,
        accumulation: 1,
        optimizer: OptimizerKind::AdamW,
        dtype: arguments.dtype.clone(),
        checkpointing: true,
        tp,
        pp: 1,
        dp: arguments.gpus / tp,
        sequence_parallel: tp > 1,
        engine,
        zero,
        offload_optimizer: "none".into(),
        offload_parameters: "none".into(),
        gpus: arguments.gpus,
        gpu_memory: (arguments.gpu_mem * f64::from(1 << 30)) as u64,
    };
    answer(&job, &arguments.how, context)
}

/// A hidden size as large models have them, a multiple of 1024, and the depth that then comes nearest.
fn round_shape(parameters: u64) -> (u64, u64) {
    let (_, near) = shape_near(parameters, 32_000, None, None);
    let step = if near >= 2048 { 1024 } else { 256 };
    let hidden = ((near + step / 2) / step * step).max(step);
    shape_near(parameters, 32_000, None, Some(hidden))
}

fn answer(job: &Job, how: &How, context: &Context) -> Result<Answer, Failure> {
    let gpu = job.gpu();
    let kept = how.fail_under_headroom.as_deref().map_or(Ok(Kept::Nothing), formula::kept)?;
    let method = how.method.0;
    let simulate = |prepared: &Prepared| prepared.answer(Wanted { kept, suggestions: true, ..Wanted::default() });
    let outcome = job::outcome(job, method.map_or("simulate", Method::name), &context.settings, simulate)?;
    let percent = 100.0 * outcome.total as f64 / gpu.memory as f64;
    let fits = outcome.fits && outcome.total.saturating_add(kept.of(gpu.memory)) <= gpu.memory;
    let mut page = Page::new(format!("{} on {} × {} GB", job.name, job.gpus, gpu.memory as f64 / GIB));
    page.add(Block::Text(format!("method: {}", outcome.method)));
    page.add(Block::Heading("Memory per GPU (GiB)".into()));
    page.add(Block::Bars(outcome.parts.clone()));
    let mut notes = outcome.notes.clone();
    if let Some(method) = method {
        page.add(Block::Heading(format!("Terms of {}", method.name())));
        if let Ok(estimate) = lens::estimate(method, &job.facts(), &job.question()) {
            add_terms(&mut page, &estimate);
            notes.extend(estimate.notes);
        }
    }
    page.add(Block::Text(format!(
        "\nMemory per GPU: {:.2} GiB\nFits on GPU: {}\nUtilization: {percent:.1}%",
        outcome.total as f64 / GIB,
        if fits { "yes" } else { "no" }
    )));
    let level = if fits { Level::of(percent) } else { Level::Bad };
    page.add(Block::Verdict(level, verdict(fits, percent, kept.of(gpu.memory))));
    if let Some(answer) = outcome.answer.as_ref().filter(|answer| !answer.suggestions.is_empty()) {
        let heading = "Single changes (flags of vramcast train) that would make it fit, cheapest first";
        page.table(heading, suggested(&answer.suggestions));
    }
    notes.iter().for_each(|note| page.add(Block::Note(note.clone())));
    let mut document = outcome.document;
    document["fits_on_gpu"] = json!(fits);
    context.answer(&page, document, if fits { Exit::Success } else { Exit::No })
}

fn verdict(fits: bool, percent: f64, kept: u64) -> String {
    match (fits, percent <= 100.0) {
        (true, _) if percent > 90.0 => "feasible, but tight".into(),
        (true, _) => "feasible".into(),
        (false, true) => format!("fits, but leaves less than {:.2} GiB", kept as f64 / GIB),
        (false, false) => "not feasible".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_shapes_of_published_models() {
        assert_eq!(round_shape(7_000_000_000), (33, 4096));
        let (layers, hidden) = round_shape(70_000_000_000);
        assert_eq!(hidden % 1024, 0);
        assert!((60..=110).contains(&layers), "{layers} x {hidden}");
    }
}
