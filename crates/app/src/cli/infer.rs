//! `vramcast infer`.

use clap::Args;
use vramcast_core::ask::line::{self, shell};
use vramcast_core::ask::{Asked, Given, Runner, Task};
use vramcast_core::lens::{Method, Question as Formula};
use vramcast_core::plan::InferPlan;

use super::context::Context;
use super::fit::FileArguments;
use super::lens::{self, LensArguments};
use super::model::ModelArguments;
use super::output::{MachineArguments, OutputArguments};
use super::settings::{Inference, SettingFlags};
use super::{Answer, write};
use crate::ask::found::{Found, Reach};
use crate::ask::question::{Prepared, Question};
use crate::ask::solve::{self, Wanted};
use crate::ask::table::{self, Cell};
use crate::ask::{engines, formula};
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render;
use crate::render::table::Table;

/// What to generate, and how.
#[derive(Debug, Clone, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    file: FileArguments,
    #[command(flatten)]
    settings: SettingFlags<Inference>,
    /// Flags of the engine's own program that are no settings (`words.rs` gathers them).
    #[arg(long, value_name = "LINE", hide = true)]
    own_words: Option<String>,
    /// Find what fits: batch, context, gpu, gpus, quantization, layers or share.
    #[arg(long, value_name = "WHAT", value_parser = wanted, help_heading = "Solving")]
    solve: Option<Wanted>,
    /// Sequences of full length that must fit at once, for --solve gpu, gpus and quantization.
    #[arg(long, value_name = "N", requires = "solve", help_heading = "Solving")]
    concurrency: Option<u64>,
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
    if arguments.question()?.is_to_all() {
        return arguments.all_engines(context);
    }
    if let Some(method) = arguments.lens.method.0 {
        return arguments.formula(method, context);
    }
    let prepared = arguments.prepare(context)?;
    if let Some(wanted) = arguments.solve {
        let as_json = context.text_or_json("infer --solve")?;
        let solved = solve::solve(&prepared, solve::Need { wanted, concurrency: arguments.concurrency })?;
        return Ok(Answer::solved(solved, &prepared.found.notes, as_json));
    }
    if arguments.table {
        return tabled(&[&prepared], context);
    }
    arguments.lens.apply(&mut Formula::default(), &context.settings)?;
    if let Some(tool) = &arguments.output.write {
        return write::run(&prepared, tool, arguments.output.out.as_deref(), context);
    }
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
        let mut asked = Asked {
            task: Task::Infer,
            named: self.settings.named.clone(),
            lenient: self.lens.method.0.is_some(),
            ..Asked::default()
        };
        if let (Some(line), Some(runner)) = (&self.own_words, self.engine().and_then(|name| Runner::find(&name))) {
            let words = shell::lines(line).into_iter().next().unwrap_or_default();
            asked.beneath(line::own_words(runner, &words).map_err(|faults| Failure::faults(faults, runner))?);
        }
        Ok(Question {
            subject: self.model.subject(),
            asked,
            file: self.file.content()?,
            machine: self.machine.machine(),
            ..Question::default()
        })
    }

    /// The question that they ask.
    pub(super) fn prepare(&self, context: &Context) -> Result<Prepared, Failure> {
        self.question()?.prepare(Reach::Machine, &context.settings)
    }

    fn all_engines(&self, context: &Context) -> Result<Answer, Failure> {
        let prepared = self.question()?.to_each(Reach::Machine, &context.settings)?;
        if self.table {
            return tabled(&prepared.iter().collect::<Vec<_>>(), context);
        }
        if self.solve.is_some() {
            return Err(Failure::bad_input("--solve needs one engine").hint("name it with --engine"));
        }
        let as_json = context.text_or_json("infer --engine all")?;
        let mut wanted = self.output.wanted()?;
        // Side by side there is no room for them.
        wanted.suggestions &= as_json;
        let answers = engines::answers(&prepared, wanted)?;
        let exit = if answers.iter().all(|answer| answer.fits) { Exit::Success } else { Exit::No };
        if as_json {
            return Ok(Answer::document(engines::document(&answers), exit));
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
            question.weight_bytes = formula::bytes_of(&context.settings, name)?;
        }
        let asked = |named| {
            let mut fewer = plain.clone();
            fewer.settings.named = named;
            let (plan, _) = fewer.prepare(context).ok()?.generation(true).ok()?;
            Some(Formula::of_infer(&plan))
        };
        let idle = lens::idle(method, &prepared.found, &plain.settings.named, asked);
        lens::answer(method, &prepared.found, &question, &plan.gpu, &idle, context)
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
        if self.solve.is_some() && self.table {
            return Err(Failure::bad_input("--table and --solve are two answers").hint("ask for one"));
        }
        if serves && self.lens.method.0.is_some() {
            return Err(
                Failure::bad_input("--method has no effect on a serving engine").hint("formulas are for transformers")
            );
        }
        if let Some(wanted) = self.solve {
            solve::Need { wanted, concurrency: self.concurrency }.check(serves)?;
        }
        let what = match (self.table, self.solve) {
            (true, _) => "with --table",
            (_, Some(_)) => "with --solve",
            _ => "on a serving engine",
        };
        let mut unseen: Vec<String> = Vec::new();
        if serves {
            let told = |flag: &&str| ["--explain", "--timeline"].contains(flag);
            unseen.extend(self.output.given().into_iter().filter(told).map(str::to_owned));
        }
        if self.solve.is_some() || self.table {
            unseen.extend(self.output.given().into_iter().map(str::to_owned));
        }
        let tried: &[&str] = match (self.solve, self.table, serves) {
            (Some(wanted), ..) => wanted.tries(serves),
            (None, true, false) => &["batch-size", "prompt"],
            (None, true, true) => &["context"],
            _ => &[],
        };
        unseen.extend(tried.iter().filter(|name| self.settings.gives(name)).map(|name| format!("--{name}")));
        match unseen.first() {
            Some(flag) => Err(Failure::bad_input(format!("{flag} has no effect {what}")).hint("leave it out")),
            None => Ok(()),
        }
    }
}

/// The setting of a name that an engine has.
fn wanted(text: &str) -> Result<Wanted, String> {
    Wanted::find(text).ok_or_else(|| Wanted::NAMES.into())
}

/// A table as text or as a document.
fn tabled(prepared: &[&Prepared], context: &Context) -> Result<Answer, Failure> {
    let as_json = context.text_or_json("infer --table")?;
    let tabled = table::table(prepared)?;
    if as_json {
        return Ok(Answer::document(tabled.document, Exit::Success));
    }
    let heads: Vec<&str> = std::iter::once(tabled.rows).chain(tabled.columns.iter().map(String::as_str)).collect();
    let mut table = Table::new(&heads);
    let cell = |cell: &Cell| match cell {
        Cell::Process(bytes, fits) => format!("{}{}", render::gib(*bytes), if *fits { "" } else { " !" }),
        Cell::Sequences(thousandths) => format!("{:.1}", *thousandths as f64 / 1000.0),
    };
    for (number, row) in &tabled.cells {
        table.row(std::iter::once(vramcast_core::units::grouped(*number)).chain(row.iter().map(cell)).collect());
    }
    let name = prepared.first().map_or("", |one| one.found.name.as_str());
    let title = format!("{name}: {} (!: too much)", tabled.title);
    let notes = prepared.first().map_or(&[] as &[String], |one| &one.found.notes);
    let notes: String =
        notes.iter().map(|note| render::page::wrapped(&format!("note: {note}"), render::width()) + "\n").collect();
    Ok(Answer::success(format!("{}\n\n{table}{notes}", render::page::wrapped(&title, render::width()))))
}
