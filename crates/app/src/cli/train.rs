//! `vramcast train`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde_json::Value;
use vramcast_core::dtype::DType;
use vramcast_core::lens::Question;
use vramcast_core::plan::{AllocatorOptions, Gpus, Implementation, Kernels, OptimizerKind, TrainPlan};
use vramcast_core::report::Report;

use super::adapter::AdapterArguments;
use super::attention::AttentionArguments;
use super::context::{Context, Format, headroom};
use super::framework::StartArguments;
use super::hardware::HardwareArguments;
use super::lens::{self, LensArguments};
use super::media::MediaArguments;
use super::model::{Found, ModelArguments};
use super::parallel::ParallelArguments;
use super::train_options::StepArguments;
use super::{Answer, Failure};
use crate::estimate::run::{self as estimate, Estimate, Options};
use crate::estimate::start::Start;
use crate::exit::Exit;
use crate::render;

/// What to train, and how.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    start: StartArguments,

    /// Samples per card [default: 1].
    #[arg(long, short, value_name = "N", visible_alias = "per-device-batch", help_heading = "Batch")]
    batch_size: Option<u64>,
    /// Tokens per sample [default: 2048].
    #[arg(long, short, value_name = "N", visible_alias = "sequence-length", help_heading = "Batch")]
    seq_len: Option<u64>,
    /// Tokens per sample of the decoder, for encoder-decoder models [default: as --seq-len].
    #[arg(long, value_name = "N", help_heading = "Batch")]
    target_len: Option<u64>,
    #[command(flatten)]
    media: MediaArguments,
    /// Pass an attention mask of ones.
    #[arg(long, help_heading = "Batch")]
    mask: bool,
    /// Samples are padded, so the mask really masks.
    #[arg(long, help_heading = "Batch")]
    padded: bool,
    /// Tokens of the whole batch that are no padding; flash attention computes on those alone [default: all].
    #[arg(long, value_name = "N", requires = "padded", help_heading = "Batch")]
    real_tokens: Option<u64>,
    /// Micro-batches per optimizer step [default: 1].
    #[arg(long, value_name = "N", visible_alias = "grad-accum", help_heading = "Batch")]
    gradient_accumulation: Option<u32>,

    /// The usual combinations: pure bf16, fp16 or fp32, or fp32 weights under autocast [default: bf16].
    #[arg(long, value_name = "PRECISION", help_heading = "Precision")]
    precision: Option<Precision>,

    /// The optimizer [default: adamw]; see `vramcast list optimizers`.
    #[arg(long, value_name = "NAME", help_heading = "Optimizer")]
    optimizer: Option<String>,
    /// How the optimizer steps [default: foreach].
    #[arg(long, value_name = "HOW", help_heading = "Optimizer")]
    optimizer_implementation: Option<Stepping>,
    /// Clip gradients by their norm.
    #[arg(long, help_heading = "Optimizer")]
    clip: bool,
    /// The largest norm of gradients; 0: they are not clipped.
    #[arg(long, value_name = "NORM", conflicts_with = "clip", help_heading = "Optimizer")]
    max_grad_norm: Option<f64>,

    #[command(flatten)]
    step: StepArguments,
    #[command(flatten)]
    adapter: AdapterArguments,

    #[command(flatten)]
    attention: AttentionArguments,
    /// Liger's fused norms, rope, SwiGLU and linear cross entropy.
    #[arg(long, help_heading = "Kernels")]
    liger: bool,
    /// The training loop lets go of the model's output before backward, as transformers' Trainer does.
    #[arg(long, help_heading = "Kernels")]
    drop_outputs: bool,
    /// The training loop does not delete the loss: it is alive, with its graph, until the next one is there.
    #[arg(long, help_heading = "Kernels")]
    keep_loss: bool,
    /// Do not train these: embeddings, vision, first-N-layers, or parameters whose name starts so (may be given several
    /// times).
    #[arg(long, value_name = "PART", help_heading = "Kernels")]
    freeze: Vec<String>,

    #[command(flatten)]
    parallel: ParallelArguments,
    #[command(flatten)]
    pub(super) lens: LensArguments,

    /// The card [default: this machine's, else H200]; see `vramcast list gpus`.
    #[arg(long, value_name = "NAME", help_heading = "Hardware")]
    gpu: Option<String>,
    #[command(flatten)]
    hardware: HardwareArguments,
    /// A TOML file with cards of your own.
    #[arg(long, value_name = "FILE", help_heading = "Hardware")]
    gpu_file: Option<PathBuf>,
    /// Say which of all known cards hold it.
    #[arg(long, help_heading = "Hardware")]
    all_gpus: bool,
    /// PYTORCH_ALLOC_CONF of the run.
    #[arg(long, value_name = "OPTIONS", help_heading = "Hardware")]
    alloc_conf: Option<String>,

    /// End with 1 when less than this stays free: 10% or 8GiB.
    #[arg(long, value_name = "SIZE", help_heading = "Output")]
    fail_under_headroom: Option<String>,
    /// Do not look for changes that would make it fit.
    #[arg(long, help_heading = "Output")]
    no_suggestions: bool,
    /// Show what is alive at the peak, tensor by tensor, and by module.
    #[arg(long, help_heading = "Output")]
    explain: bool,
    /// Plot memory over the run.
    #[arg(long, help_heading = "Output")]
    timeline: bool,
    /// Write the timeline as SVG.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    svg: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Precision {
    Fp32,
    Bf16,
    Fp16,
    /// fp32 weights, bf16 autocast (`bf16=True` of the Trainer on an fp32 model).
    #[value(alias = "amp-bf16")]
    Bf16Mixed,
    /// fp32 weights, fp16 autocast with a GradScaler.
    #[value(alias = "amp-fp16")]
    Fp16Mixed,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Stepping {
    Foreach,
    Fused,
    Forloop,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let (found, mut plan, mut start) = arguments.unsettled(context)?;
    // A stated length is checked by the simulation, which has the model's tables at hand.
    let simulated = arguments.lens.method.lens().is_none() && plan.parallel.is_none();
    if !(simulated && arguments.states_length(&start)) {
        start.settle(&mut plan, &found, arguments.seq_len.is_some())?;
    }
    let mut question = Question::of_train(&plan);
    arguments.lens.apply(&mut question, context)?;
    if arguments.step.master_weights && arguments.lens.method.lens().is_some() {
        arguments.lens.only_for_factors("--master-weights")?;
        question.coefficients.master_weights = true;
    }
    if let Some(method) = arguments.lens.method.lens() {
        return lens::answer(method, &found, &question, &plan.gpu, context);
    }
    let kept = |memory: u64| arguments.fail_under_headroom.as_deref().map_or(Ok(0), |text| headroom(text, memory));
    let options = Options {
        kept: &kept,
        suggest: !arguments.no_suggestions,
        all_cards: arguments.all_gpus,
        cards: &|| arguments.cards(context),
    };
    let estimate = estimate::train(&found, plan, start, &options)?;
    if let Some(path) = &arguments.svg {
        write_svg(path, &estimate.report)?;
    }
    present(&estimate, (arguments.explain, arguments.timeline), context)
}

/// How long the simulation and its report take.
pub(super) fn time_of_estimate(arguments: &Arguments, context: &Context) -> Result<std::time::Duration, Failure> {
    let (found, plan, start) = arguments.resolve(context)?;
    let options = Options { kept: &|_| Ok(0), suggest: true, all_cards: false, cards: &|| arguments.cards(context) };
    let began = std::time::Instant::now();
    estimate::train(&found, plan, start, &options)?;
    Ok(began.elapsed())
}

/// A report in the form that is wanted; shared with `infer`.
pub(super) fn present(
    estimate: &Estimate,
    (explain, timeline): (bool, bool),
    context: &Context,
) -> Result<Answer, Failure> {
    let (report, suggestions) = (&estimate.report, &estimate.suggestions);
    let exit = if estimate.fits { Exit::Success } else { Exit::No };
    match context.format {
        Format::Table => {
            let text = render::train::text(report, explain, timeline)
                + &render::report::cards_needed(report.totals.process, &context.cards())
                + &render::report::suggestions_text(suggestions);
            Ok(Answer::text(text, exit))
        }
        Format::Svg => Ok(Answer::text(render::svg::timeline(report), exit)),
        Format::Json => Ok(Answer::document(estimate.document()?, exit)),
        _ => context.answer(&render::report::page(report, suggestions), estimate.document()?, exit),
    }
}

fn write_svg(path: &std::path::Path, report: &Report) -> Result<(), Failure> {
    let text = render::svg::timeline(report);
    // Written beside and moved over, so that no half file is left.
    let beside = path.with_extension("svg.part");
    let write = std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, path));
    write.map_err(|e| {
        let _ = std::fs::remove_file(&beside);
        Failure::bad_input(format!("--svg {}: {e}", path.display()))
    })
}

impl Arguments {
    /// The model and the plan, for commands that run it elsewhere.
    pub(super) fn found_and_plan(&self, context: &Context) -> Result<(Found, TrainPlan), Failure> {
        let (found, plan, _) = self.resolve(context)?;
        plan.check()?;
        Ok((found, plan))
    }

    /// The table of cards; reading it takes longer than one estimate, so only who needs it asks.
    fn cards(&self, context: &Context) -> Result<Gpus, Failure> {
        let cards = context.cards();
        let Some(path) = &self.gpu_file else { return Ok(cards) };
        let text = std::fs::read_to_string(path)
            .map_err(|e| Failure::bad_input(format!("--gpu-file {}: {e}", path.display())))?;
        Ok(cards.with(&text)?)
    }

    /// The model and the plan, and what it started from. A plan is checked where it is simulated: formulas take any.
    pub(super) fn resolve(&self, context: &Context) -> Result<(Found, TrainPlan, Start), Failure> {
        let (found, mut plan, mut start) = self.unsettled(context)?;
        start.settle(&mut plan, &found, self.seq_len.is_some())?;
        Ok((found, plan, start))
    }

    fn states_length(&self, start: &Start) -> bool {
        self.seq_len.is_some() || start.states_length
    }

    /// The same before the plan is fitted to the model's positions.
    fn unsettled(&self, context: &Context) -> Result<(Found, TrainPlan, Start), Failure> {
        let (mut plan, mut start) = self.plan(context)?;
        let mut model = self.model.clone();
        model.model = model.model.or(start.model.clone());
        let found = model.find(false)?;
        start.notes.extend(self.media.apply(&mut plan.batch, found.model.as_ref())?);
        let hidden = found.model.as_ref().and_then(|model| model.config()["hidden_size"].as_u64());
        start.notes.extend(self.parallel.apply(&mut plan, hidden)?);
        Ok((found, plan, start))
    }

    /// The plan of the framework and the file, overridden by flags; and what it started from.
    fn plan(&self, context: &Context) -> Result<(TrainPlan, Start), Failure> {
        let mut start = self.start.read(self.adapter.situation(), || self.cards(context))?;
        let mut plan = start.plan.clone();
        let batch = &mut plan.batch;
        batch.batch_size = self.batch_size.unwrap_or(batch.batch_size);
        batch.seq_len = self.seq_len.unwrap_or(batch.seq_len);
        batch.target_len = self.target_len.or(batch.target_len);
        batch.padded |= self.padded;
        batch.real_tokens = self.real_tokens.or(batch.real_tokens);
        batch.mask |= self.mask || batch.padded;
        plan.gradient_accumulation = self.gradient_accumulation.unwrap_or(plan.gradient_accumulation);
        if let Some(precision) = self.precision {
            (plan.weights, plan.autocast) = match precision {
                Precision::Fp32 => (DType::F32, None),
                Precision::Bf16 => (DType::BF16, None),
                Precision::Fp16 => (DType::F16, None),
                Precision::Bf16Mixed => (DType::F32, Some(DType::BF16)),
                Precision::Fp16Mixed => (DType::F32, Some(DType::F16)),
            };
        }
        if let Some(name) = &self.optimizer {
            plan.optimizer.kind = optimizer(name)?;
        }
        let kind = plan.optimizer.kind;
        if self.optimizer_implementation.is_some() && !kind.has_implementations() {
            return Err(Failure::bad_input(format!(
                "--optimizer-implementation: {} steps in one way only",
                kind.name()
            ))
            .hint("leave it out"));
        }
        // What a framework chose was for its own optimizer.
        if self.optimizer.is_some() && !kind.has_fused() {
            plan.optimizer.implementation = Implementation::Foreach;
        }
        if let Some(stepping) = self.optimizer_implementation {
            plan.optimizer.implementation = match stepping {
                Stepping::Foreach => Implementation::Foreach,
                Stepping::Fused => Implementation::Fused,
                Stepping::Forloop => Implementation::Forloop,
            };
        }
        if let Some(norm) = self.max_grad_norm.filter(|norm| !(0.0..=f64::MAX).contains(norm)) {
            return Err(Failure::bad_input(format!("--max-grad-norm: {norm} is not a number from 0 (no clipping) up")));
        }
        plan.clip = self.max_grad_norm.map_or(plan.clip || self.clip, |norm| norm > 0.0);
        let mut notes = self.adapter.apply(&mut plan)?;
        self.attention.apply(&mut plan);
        self.step.apply(&mut plan)?;
        if self.liger {
            plan.kernels = Kernels::Liger;
        }
        plan.keep_outputs &= !self.drop_outputs;
        plan.keep_loss |= self.keep_loss;
        plan.frozen.extend(self.freeze.iter().cloned());
        let named = match &self.gpu {
            Some(name) => Some(self.cards(context)?.find(name)?),
            None => start.names_card.then(|| plan.gpu.clone()),
        };
        let card = self.hardware.card(named, || self.cards(context))?;
        (plan.gpu, start.card_from) = (card.gpu, card.from);
        plan.allocator = card.allocator.unwrap_or(plan.allocator);
        notes.extend(card.notes);
        if let Some(text) = &self.alloc_conf {
            let (options, ignored) = AllocatorOptions::parse(text)?;
            plan.allocator = options;
            notes.extend(ignored.iter().map(|key| format!("PYTORCH_ALLOC_CONF: {key} has no effect on these levels")));
        }
        start.notes.extend(notes);
        Ok((plan, start))
    }
}

fn optimizer(name: &str) -> Result<OptimizerKind, Failure> {
    serde_json::from_value(Value::String(name.to_lowercase().replace('_', "-"))).map_err(|error| {
        Failure::bad_input(format!("--optimizer: {name} is not an optimizer vramcast knows")).hint(error.to_string())
    })
}
