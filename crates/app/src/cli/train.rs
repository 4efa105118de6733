//! `vramcast train`.

use std::path::PathBuf;

use clap::Args;
use vramcast_core::ask::{Asked, Given, Kept, Task, table};
use vramcast_core::lens::Question as Formula;
use vramcast_core::plan::TrainPlan;
use vramcast_core::plan::placement::Placement;
use vramcast_core::planner::solve::Unknown;

use super::context::Context;
use super::fit::FileArguments;
use super::lens::{self, LensArguments};
use super::model::ModelArguments;
use super::output::{MachineArguments, OutputArguments};
use super::settings::{SettingFlags, Training};
use super::{Answer, write};
use crate::ask::data::Data;
use crate::ask::found::{Found, Reach};
use crate::ask::question::{Prepared, Question};
use crate::ask::{files, placement, solve};
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render::page::wrapped;
use crate::render::{self, width};

/// What to train, and how.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    file: FileArguments,
    /// Start from a framework's defaults: hf-trainer, trl, unsloth, axolotl, llama-factory, litgpt or torchtune;
    /// see `vramcast list frameworks`.
    #[arg(long, value_name = "NAME")]
    framework: Option<String>,
    #[command(flatten)]
    settings: SettingFlags<Training>,
    /// An existing adapter_config.json, or a folder with one.
    #[arg(long, value_name = "PATH", help_heading = "Adapters")]
    adapter: Option<PathBuf>,
    /// DeepSpeed's configuration file; flags override it.
    #[arg(long, value_name = "FILE", help_heading = "DeepSpeed")]
    deepspeed: Option<PathBuf>,
    /// Find what fits: batch, seq-len, lora-rank, gpu, gpus or layers.
    #[arg(long, value_name = "WHAT", value_parser = unknown, help_heading = "Solving")]
    solve: Option<Unknown>,
    /// Samples whose tokens are counted: JSON lines or a JSON list, with text, messages, or prompt and completion.
    #[arg(long, value_name = "FILE", help_heading = "The whole job")]
    data: Option<PathBuf>,
    /// The tokenizer.json that counts them, or a folder with one.
    #[arg(long, value_name = "PATH", requires = "data", help_heading = "The whole job")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    machine: MachineArguments,
    #[command(flatten)]
    pub(super) lens: LensArguments,
    #[command(flatten)]
    output: OutputArguments,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let mut question = arguments.question(arguments.settings.named.clone())?;
    if let Some(found) = question.placement() {
        return arguments.placed(&found, &question, context);
    }
    let prepared = question.prepare(Reach::Machine, &context.settings)?;
    let method = arguments.lens.method.0;
    let mut formula = Formula::default();
    if method.is_some() {
        let (plan, _) = prepared.train(true)?;
        formula = Formula::of_train(&plan);
        if plan.optimizer.master_weights {
            arguments.lens.only_for_factors("--master-weights")?;
            formula.coefficients.master_weights = true;
        }
    }
    arguments.lens.apply(&mut formula, &context.settings)?;
    if let Some(method) = method {
        let (plan, _) = prepared.train(true)?;
        let asked = |named| {
            let (plan, _) = arguments.prepare_with(named, context).ok()?.train(true).ok()?;
            Some(Formula::of_train(&plan))
        };
        let idle = lens::idle(method, &prepared.found, &arguments.settings.named, asked);
        return lens::answer(method, &prepared.found, &formula, &plan.gpu, &idle, context);
    }
    if let Some(unknown) = arguments.solve {
        return arguments.solved(&prepared, unknown, context);
    }
    if let Some(tool) = &arguments.output.write {
        return write::run(&prepared, tool, arguments.output.out.as_deref(), context);
    }
    let answer = prepared.answer(arguments.output.wanted()?)?;
    arguments.output.present(&answer, context)
}

fn unknown(text: &str) -> Result<Unknown, String> {
    Unknown::find(text).ok_or_else(Unknown::names)
}

impl Arguments {
    /// The question that they ask.
    pub(super) fn prepare(&self, context: &Context) -> Result<Prepared, Failure> {
        self.prepare_with(self.settings.named.clone(), context)
    }

    /// Roles on shared cards.
    fn placed(&self, found: &Placement, base: &Question, context: &Context) -> Result<Answer, Failure> {
        let as_json = context.text_or_json("train with several roles")?;
        let method = self.lens.method.0.map(|_| "--method");
        if let Some(flag) = self.output.given().first().copied().or(self.solve.map(|_| "--solve")).or(method) {
            return Err(placement::unread(flag));
        }
        let placed = placement::answer(found, base, Reach::Machine, &context.settings)?;
        let exit = if placed.fits() { Exit::Success } else { Exit::No };
        match as_json {
            true => Ok(Answer::document(placed.document(), exit)),
            false => Ok(Answer::text(wrapped(&render::placement::text(&placed), width()) + "\n", exit)),
        }
    }

    fn prepare_with(&self, named: Vec<(String, Given)>, context: &Context) -> Result<Prepared, Failure> {
        self.question(named)?.prepare(Reach::Machine, &context.settings)
    }

    fn question(&self, named: Vec<(String, Given)>) -> Result<Question, Failure> {
        Ok(Question {
            subject: self.model.subject(),
            asked: Asked {
                task: Task::Train,
                framework: self.framework.clone(),
                named,
                lenient: self.lens.method.0.is_some(),
                ..Asked::default()
            },
            file: self.file.content()?,
            adapter: self.adapter.as_deref().map(files::adapter).transpose()?,
            deepspeed: self.deepspeed.as_deref().map(files::deepspeed).transpose()?,
            data: self.data.clone().map(|file| Data { file, tokenizer: self.tokenizer.clone() }),
            machine: self.machine.machine(),
        })
    }

    /// What must stay free, where nothing else of a report's output is asked for.
    pub(super) fn kept(&self, what: &str) -> Result<Kept, Failure> {
        let shown = self.output.given().into_iter().find(|flag| *flag != "--fail-under-headroom");
        let other = shown.or(self.solve.map(|_| "--solve"));
        match other.or((self.lens.method.0.is_some()).then_some("--method")) {
            Some(flag) => Err(Failure::bad_input(format!("{flag} has no effect with {what}")).hint("leave it out")),
            None => Ok(self.output.wanted()?.kept),
        }
    }

    fn solved(&self, prepared: &Prepared, unknown: Unknown, context: &Context) -> Result<Answer, Failure> {
        let as_json = context.text_or_json("train --solve")?;
        let shown = self.output.given().into_iter().find(|flag| *flag != "--fail-under-headroom");
        if let Some(flag) = shown {
            return Err(Failure::bad_input(format!("{flag} has no effect with --solve")).hint("leave it out"));
        }
        let tried =
            |name: &str| table::called(name, prepared.request.runner).is_some_and(|row| row.path == unknown.path());
        if let Some((name, _)) = self.settings.named.iter().find(|(name, _)| tried(name)) {
            let what = format!("--{name} is what --solve looks for");
            return Err(Failure::bad_input(what).hint("leave one of them out"));
        }
        let kept = self.output.wanted()?.kept;
        let solved = solve::train::solve(prepared, unknown, kept)?;
        Ok(Answer::solved(solved, &prepared.found.notes, as_json))
    }

    /// The model and the plan, for commands that run it elsewhere.
    pub(super) fn found_and_plan(&self, context: &Context) -> Result<(Found, TrainPlan), Failure> {
        let prepared = self.prepare(context)?;
        let (plan, _) = prepared.train(false)?;
        Ok((prepared.found, plan))
    }
}
