//! `--method`: a published formula instead of the simulation.

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use vramcast_core::ask::Given;
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

/// How a number is found: by a published formula, or without one by running the job on tensors without data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MethodName(pub(super) Option<Method>);

impl MethodName {
    fn name(self) -> &'static str {
        self.0.map_or("simulate", Method::name)
    }
}

impl ValueEnum for MethodName {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [MethodName; Method::ALL.len() + 1] = {
            let mut all = [MethodName(None); Method::ALL.len() + 1];
            let mut at = 0;
            while at < Method::ALL.len() {
                all[at + 1] = MethodName(Some(Method::ALL[at]));
                at += 1;
            }
            all
        };
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()))
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
    #[command(flatten)]
    coefficients: CoefficientFlags,
    /// Weights in a type that is not trained itself (int8, nf4, fp8, yours), for a formula.
    #[arg(long, value_name = "TYPE", hide_short_help = true, help_heading = "Method")]
    lens_dtype: Option<String>,
}

/// Coefficients of the formula `factors`, one flag each.
#[derive(Debug, Clone, Default)]
struct CoefficientFlags {
    given: Vec<(&'static str, f64)>,
}

impl clap::Args for CoefficientFlags {
    fn augment_args(command: clap::Command) -> clap::Command {
        let one = |flag: &'static str, help: &str| {
            clap::Arg::new(flag)
                .long(flag)
                .value_name("X")
                .help(format!("factors: {help}"))
                .hide_short_help(true)
                .help_heading("Method")
                .value_parser(clap::value_parser!(f64))
        };
        formula::COEFFICIENTS.iter().fold(command, |command, (flag, help, _)| command.arg(one(flag, help)))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for CoefficientFlags {
    fn from_arg_matches(matches: &clap::ArgMatches) -> Result<Self, clap::Error> {
        let value = |flag: &'static str| Some((flag, *matches.get_one::<f64>(flag)?));
        Ok(Self { given: formula::COEFFICIENTS.iter().filter_map(|(flag, ..)| value(flag)).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &clap::ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl LensArguments {
    /// Puts the options into a question; refuses those without effect.
    pub(super) fn apply(&self, question: &mut Question, settings: &Settings) -> Result<(), Failure> {
        for (flag, value) in &self.coefficients.given {
            self.only_for_factors(&format!("--{flag}"))?;
            formula::set(question, Method::Factors, flag, *value)?;
        }
        if let Some(text) = &self.lens_dtype {
            if self.method.0.is_none() {
                return Err(Failure::bad_input(format!("weights in {text} are not trained"))
                    .hint("--qlora or --quantization holds a frozen base in few bits; formulas take any type"));
            }
            question.weight_bytes = formula::bytes_of(settings, text)?;
        }
        Ok(())
    }

    /// Refuses an option of one formula on another.
    pub(super) fn only_for_factors(&self, name: &str) -> Result<(), Failure> {
        if self.method.0 == Some(Method::Factors) {
            return Ok(());
        }
        Err(Failure::bad_input(format!("{name} has no effect on --method {}", self.method.name()))
            .hint("it belongs to --method factors"))
    }
}

/// Flags that a formula does not look at: without each of them it says the same.
pub(super) fn idle(
    method: Method,
    found: &Found,
    named: &[(String, Given)],
    asked: impl Fn(Vec<(String, Given)>) -> Option<Question>,
) -> Vec<String> {
    let estimate = |named: Vec<(String, Given)>| {
        let facts = Facts::of(found.model.as_ref()?).ok()?;
        let terms = lens::estimate(method, &facts, &asked(named)?).ok()?.terms;
        Some(terms.iter().map(|term| (term.name, term.bytes)).collect::<Vec<_>>())
    };
    let Some(whole) = estimate(named.to_vec()) else { return Vec::new() };
    let without =
        |at: usize| named.iter().enumerate().filter(move |(index, _)| *index != at).map(|(_, one)| one.clone());
    let idle = |(at, (name, _)): (usize, &(String, Given))| {
        // A card decides the verdict.
        let said = name != "gpu" && estimate(without(at).collect()).is_some_and(|fewer| fewer == whole);
        said.then(|| format!("--{name}"))
    };
    named.iter().enumerate().filter_map(idle).collect()
}

/// What a formula says about a model, as an answer.
pub(super) fn answer(
    method: Method,
    found: &Found,
    question: &Question,
    gpu: &Gpu,
    idle: &[String],
    context: &Context,
) -> Result<Answer, Failure> {
    let mut facts = Facts::of(found.require_model()?).map_err(|silent| Failure::bad_input(silent.to_string()))?;
    facts.parameters = found.stated.unwrap_or(facts.parameters);
    let mut estimate = lens::estimate(method, &facts, question)
        .map_err(|silent| Failure::bad_input(format!("--method {} {silent}", method.name())))?;
    if !idle.is_empty() {
        estimate.notes.push(format!("the formula {} does not look at {}", method.name(), idle.join(", ")));
    }
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
