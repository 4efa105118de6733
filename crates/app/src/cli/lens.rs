//! `--method`: a published formula instead of the simulation.

use clap::{Args, ValueEnum};
use vramcast_core::lens::{self, Estimate, Facts, GIB, Method, Question, components};
use vramcast_core::plan::Gpu;

use super::Answer;
use super::context::Context;
use crate::ask::formula;
use crate::ask::found::Found;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render::page::{Block, Level, Page};
use crate::render::table::Table;
use crate::settings::Settings;

/// How a number is found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum MethodName {
    /// Run the job on tensors without data.
    #[default]
    Simulate,
    /// Weights × 1.2 or × 4 × 1.3.
    RuleOfThumb,
    /// One multiplier per component.
    Components,
    /// Bytes per parameter, by engine.
    Engines,
    /// Activation factors and cushions.
    Factors,
    /// 34 + 5as/h.
    Korthikanti,
    /// DeepSpeed's estimators.
    Deepspeed,
    /// Megatron-LM's report.
    Megatron,
    /// `accelerate estimate-memory`.
    Accelerate,
}

impl MethodName {
    /// The formula; none for the simulation.
    pub(super) fn lens(self) -> Option<Method> {
        Some(match self {
            Self::Simulate => return None,
            Self::RuleOfThumb => Method::RuleOfThumb,
            Self::Components => Method::Components,
            Self::Engines => Method::Engines,
            Self::Factors => Method::Factors,
            Self::Korthikanti => Method::Korthikanti,
            Self::Deepspeed => Method::Deepspeed,
            Self::Megatron => Method::Megatron,
            Self::Accelerate => Method::Accelerate,
        })
    }
}

/// Which formula, and what it may be told.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct LensArguments {
    /// How to find the number: by simulation, or by a published formula (`vramcast list methods`).
    #[arg(
        long,
        value_name = "METHOD",
        default_value = "simulate",
        hide_possible_values = true,
        help_heading = "Method"
    )]
    pub method: MethodName,
    /// factors: activations retained under gradient checkpointing [default: 0.35].
    #[arg(long, value_name = "X", hide_short_help = true, help_heading = "Method")]
    grad_ckpt_reduction: Option<f64>,
    /// factors: attention factor without FlashAttention [default: 4].
    #[arg(long, value_name = "X", hide_short_help = true, help_heading = "Method")]
    attn_act_factor_no_fa: Option<f64>,
    /// factors: attention factor with FlashAttention [default: 0.8].
    #[arg(long, value_name = "X", hide_short_help = true, help_heading = "Method")]
    attn_act_factor_fa: Option<f64>,
    /// factors: MLP factor [default: 6].
    #[arg(long, value_name = "X", hide_short_help = true, help_heading = "Method")]
    mlp_act_factor: Option<f64>,
    /// factors: logits factor [default: 1].
    #[arg(long, value_name = "X", hide_short_help = true, help_heading = "Method")]
    logits_factor: Option<f64>,
    /// factors: fragmentation reserve in GiB [default: 5].
    #[arg(long, value_name = "GIB", hide_short_help = true, help_heading = "Method")]
    fragmentation_gib: Option<f64>,
    /// factors: other overhead in GiB [default: 3].
    #[arg(long, value_name = "GIB", hide_short_help = true, help_heading = "Method")]
    misc_overhead_gib: Option<f64>,
    /// factors: CUDA and cuBLAS in GiB [default: 2.5].
    #[arg(long, value_name = "GIB", hide_short_help = true, help_heading = "Method")]
    cuda_libs_gib: Option<f64>,
    /// Weights in a type that is not trained itself (int8, nf4, fp8, yours), for a formula.
    #[arg(long, value_name = "TYPE", hide_short_help = true, help_heading = "Method")]
    lens_dtype: Option<String>,
}

impl LensArguments {
    /// Puts the options into a question; refuses those without effect.
    pub(super) fn apply(&self, question: &mut Question, settings: &Settings) -> Result<(), Failure> {
        let at = &mut question.coefficients;
        let given = [
            ("--grad-ckpt-reduction", self.grad_ckpt_reduction, &mut at.checkpoint_retention),
            ("--attn-act-factor-no-fa", self.attn_act_factor_no_fa, &mut at.attention),
            ("--attn-act-factor-fa", self.attn_act_factor_fa, &mut at.flash_attention),
            ("--mlp-act-factor", self.mlp_act_factor, &mut at.mlp),
            ("--logits-factor", self.logits_factor, &mut at.logits),
            ("--fragmentation-gib", self.fragmentation_gib, &mut at.fragmentation_gib),
            ("--misc-overhead-gib", self.misc_overhead_gib, &mut at.misc_gib),
            ("--cuda-libs-gib", self.cuda_libs_gib, &mut at.cuda_gib),
        ];
        for (name, value, target) in given {
            let Some(value) = value else { continue };
            self.only_for_factors(name)?;
            if !(value.is_finite() && value >= 0.0) {
                return Err(Failure::bad_input(format!("{name}: {value} is not 0 or more")));
            }
            *target = value;
        }
        if let Some(text) = &self.lens_dtype {
            if self.method.lens().is_none() {
                return Err(Failure::bad_input(format!("weights in {text} are not trained"))
                    .hint("--qlora or --quantization holds a frozen base in few bits; formulas take any type"));
            }
            let format = settings.storage_format(text)?;
            let (bits, weights) = format
                .bits_per_weight()
                .ok_or_else(|| Failure::bad_input(format!("--dtype: {text} has no size per weight")))?;
            question.weight_bytes = bits as f64 / weights as f64 / 8.0;
        }
        Ok(())
    }

    /// Refuses an option of one formula on another.
    pub(super) fn only_for_factors(&self, name: &str) -> Result<(), Failure> {
        if self.method == MethodName::Factors {
            return Ok(());
        }
        Err(Failure::bad_input(format!("{name} has no effect on --method {}", method_name(self.method)))
            .hint("it belongs to --method factors"))
    }
}

fn method_name(method: MethodName) -> &'static str {
    method.lens().map_or("simulate", Method::name)
}

/// What a formula says about a model, as an answer.
pub(super) fn answer(
    method: Method,
    found: &Found,
    question: &Question,
    gpu: &Gpu,
    context: &Context,
) -> Result<Answer, Failure> {
    let mut facts = Facts::of(found.require_model()?).map_err(|silent| Failure::bad_input(silent.to_string()))?;
    facts.parameters = found.stated.unwrap_or(facts.parameters);
    let estimate = lens::estimate(method, &facts, question)
        .map_err(|silent| Failure::bad_input(format!("--method {} {silent}", method.name())))?;
    let mut page = Page::new(format!("{} by the formula {}", found.name, method.name()));
    page.add(Block::Text(format!("{}\nsource: {}", method.about(), method.source())));
    page.add(Block::Heading("Memory Breakdown".into()));
    add_terms(&mut page, &estimate);
    let total = estimate.total();
    let percent = 100.0 * total / gpu.memory as f64;
    let verdict = if percent <= 100.0 { "would fit" } else { "would not fit" };
    let level = Level::of(percent);
    page.add(Block::Verdict(
        level,
        format!("{verdict} {} ({:.2} GiB): {percent:.1} % full", gpu.name, gpu.memory as f64 / GIB),
    ));
    if method == Method::Components {
        for (card, needed) in components::cards_needed(total) {
            page.add(Block::Text(format!("Estimated GPUs needed ({card}): {needed:.1}")));
        }
    }
    for note in found.notes.iter().chain(&estimate.notes) {
        page.add(Block::Note(note.clone()));
    }
    page.add(Block::Note("a published formula, not the simulation; `vramcast compare` shows both".into()));
    let document = formula::document(&found.name, method, &estimate, gpu);
    let exit = if percent <= 100.0 { Exit::Success } else { Exit::No };
    context.answer(&page, document, exit)
}

/// The terms of an estimate and their sum. Two digits as GiB and as decimal GB, as documents print either.
pub(super) fn add_terms(page: &mut Page, estimate: &Estimate) {
    let mut table = Table::new(&["term", "GiB", "GB"]);
    let mut row = |name: &str, bytes: f64| {
        table.row(vec![name.into(), format!("{:.2}", bytes / GIB), format!("{:.2}", bytes / 1e9)]);
    };
    for term in &estimate.terms {
        row(term.name, term.bytes);
    }
    row("= total", estimate.total());
    page.add(Block::Table(table));
    page.add(Block::Picture(estimate.terms.iter().map(|term| (term.name.to_owned(), term.bytes as u64)).collect()));
}
