//! `vramcast infer`.

mod solve;
mod table;

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use vramcast_core::ask::{Answer as Answered, Asked, Given, Runner, Scope, Task};
use vramcast_core::lens::{Method, Question as Formula};
use vramcast_core::plan::InferPlan;

use self::solve::Need;
use super::Answer;
use super::context::Context;
use super::lens::{self, LensArguments, MethodName};
use super::model::ModelArguments;
use super::output::{MachineArguments, OutputArguments};
use super::settings::{Inference, SettingFlags};
use crate::ask::files;
use crate::ask::found::{Found, Reach};
use crate::ask::question::{Prepared, Question};
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render;

/// What to generate, and how.
#[derive(Debug, Clone, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    /// A plan of generation or serving as JSON, TOML or YAML; flags override it.
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    #[command(flatten)]
    settings: SettingFlags<Inference>,
    #[command(flatten)]
    need: Need,
    /// A table: context x batch for hf, context x engine for the others.
    #[arg(long, help_heading = "Output")]
    table: bool,
    #[command(flatten)]
    machine: MachineArguments,
    #[command(flatten)]
    lens: LensArguments,
    #[command(flatten)]
    output: OutputArguments,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    arguments.check()?;
    if arguments.engine().as_deref() == Some("all") {
        return arguments.all_engines(context);
    }
    if let Some(method) = arguments.lens.method.lens() {
        return arguments.formula(method, context);
    }
    let prepared = arguments.prepare(context)?;
    if arguments.need.solve.is_some() {
        return solve::answer(&prepared, &arguments.need, context);
    }
    if arguments.table {
        return table::answer(&[&prepared], context);
    }
    arguments.lens.apply(&mut Formula::default(), &context.settings)?;
    let answer = prepared.answer(arguments.output.wanted()?)?;
    arguments.output.present(&answer, context)
}

impl Arguments {
    /// The engine that was named.
    fn engine(&self) -> Option<String> {
        let said = self.settings.named.iter().rev().find(|(name, _)| name == "engine");
        said.and_then(|(_, given)| if let Given::Text(text) = given { Some(text.clone()) } else { None })
    }

    fn question(&self) -> Result<Question, Failure> {
        Ok(Question {
            subject: self.model.subject(),
            asked: Asked { task: Task::Infer, named: self.settings.named.clone(), ..Asked::default() },
            file: self.plan.as_deref().map(files::plan).transpose()?,
            machine: self.machine.machine(),
            ..Question::default()
        })
    }

    /// The question that they ask.
    pub(super) fn prepare(&self, context: &Context) -> Result<Prepared, Failure> {
        self.question()?.prepare(Reach::Machine, &context.settings)
    }

    /// The same to every engine that serves, with the settings each one has.
    fn each_engine(&self, context: &Context) -> Result<Vec<Prepared>, Failure> {
        let one = |runner: Runner| {
            let mut question = self.question()?;
            question.asked.named.retain(|(name, _)| name != "engine" && honoured(name, runner));
            question.asked.named.push(("engine".into(), Given::Text(runner.name().into())));
            question.prepare(Reach::Machine, &context.settings)
        };
        Scope::SERVE.runners().map(one).collect()
    }

    fn all_engines(&self, context: &Context) -> Result<Answer, Failure> {
        let prepared = self.each_engine(context)?;
        if self.table {
            return table::answer(&prepared.iter().collect::<Vec<_>>(), context);
        }
        if self.need.solve.is_some() {
            return Err(Failure::bad_input("--solve needs one engine").hint("name it with --engine"));
        }
        let wanted = self.output.wanted()?;
        let answers: Vec<Answered> = prepared.iter().map(|one| one.answer(wanted)).collect::<Result<_, _>>()?;
        let exit = if answers.iter().all(|answer| answer.fits) { Exit::Success } else { Exit::No };
        if context.text_or_json("infer --engine all")? {
            let documents: Vec<_> = answers.iter().map(Answered::document).collect();
            let budgets: Vec<_> = answers.iter().flat_map(|answer| answer.report.budgets.clone()).collect();
            let buffers: Vec<_> = answers.iter().flat_map(|answer| answer.report.buffers.clone()).collect();
            let document = json!({"schema": 1, "engines": documents, "budgets": budgets, "buffers": buffers});
            return Ok(Answer::document(document, exit));
        }
        let reports: Vec<_> = answers.iter().map(|answer| &answer.report).collect();
        Ok(Answer::text(render::serving::side_by_side(&reports), exit))
    }

    /// A formula takes any storage format for the weights.
    fn formula(&self, method: Method, context: &Context) -> Result<Answer, Failure> {
        let mut plain = self.clone();
        let dtype = plain.settings.named.iter().position(|(name, _)| name == "dtype");
        let dtype = dtype.map(|at| plain.settings.named.remove(at).1);
        let prepared = plain.prepare(context)?;
        let (plan, _) = prepared.generation(true)?;
        let mut question = Formula::of_infer(&plan);
        self.lens.apply(&mut question, &context.settings)?;
        if let Some(Given::Text(name)) = &dtype {
            let bits = context.settings.storage_format(name)?.bits_per_weight();
            let (bits, weights) =
                bits.ok_or_else(|| Failure::bad_input(format!("--dtype: {name} has no size per weight")))?;
            question.weight_bytes = bits as f64 / weights as f64 / 8.0;
        }
        lens::answer(method, &prepared.found, &question, &plan.gpu, context)
    }

    /// The model and the plan, for commands that run it elsewhere.
    pub(super) fn found_and_plan(&self, context: &Context) -> Result<(Found, InferPlan), Failure> {
        let prepared = self.prepare(context)?;
        let (plan, _) = prepared.generation(false)?;
        Ok((prepared.found, plan))
    }

    /// Refuses options that what was asked for would not look at.
    fn check(&self) -> Result<(), Failure> {
        let serves = self.engine().is_some_and(|name| Runner::find(&name).is_some_and(Runner::serves) || name == "all");
        if self.need.solve.is_some() && self.table {
            return Err(Failure::bad_input("--table and --solve are two answers").hint("ask for one"));
        }
        if serves && self.lens.method != MethodName::Simulate {
            return Err(
                Failure::bad_input("--method has no effect on a serving engine").hint("formulas are for transformers")
            );
        }
        self.need.check(serves)?;
        let what = if self.table { "--table" } else { "--solve" };
        let mut unseen: Vec<String> = Vec::new();
        if self.need.solve.is_some() || self.table {
            unseen.extend(self.output.given().into_iter().map(str::to_owned));
        }
        let tried: &[&str] = match (self.need.solve, self.table, serves) {
            (Some(wanted), ..) => wanted.tries(serves),
            (None, true, false) => &["batch-size", "prompt"],
            (None, true, true) => &["context"],
            _ => &[],
        };
        unseen.extend(tried.iter().filter(|name| self.settings.gives(name)).map(|name| format!("--{name}")));
        match unseen.first() {
            Some(flag) => Err(Failure::bad_input(format!("{flag} has no effect with {what}")).hint("leave it out")),
            None => Ok(()),
        }
    }
}

/// Whether an engine has a setting of this name.
fn honoured(name: &str, runner: Runner) -> bool {
    vramcast_core::ask::table::called(name, runner).is_none_or(|row| row.scope.has(runner))
}
