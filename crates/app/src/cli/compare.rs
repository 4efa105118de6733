//! `vramcast compare`: every published formula beside the simulation, and beside what was measured.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use vramcast_core::lens::{self, Facts, Method, Question};
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::TrainPlan;
use vramcast_core::source::json as python_json;
use vramcast_core::verify::ledger;

use super::context::Context;
use super::model::Found;
use super::{Answer, Failure, train};
use crate::exit::Exit;
use crate::render::gib;
use crate::render::page::{Block, Page};
use crate::render::table::Table;

/// What to compare: a training run, or a recorded one.
#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct Arguments {
    #[command(flatten)]
    run: train::Arguments,
    /// A ledger of measured runs; needs --row.
    #[arg(long, value_name = "FILE", requires = "row", help_heading = "A measured run")]
    ledger: Option<PathBuf>,
    /// The row of the ledger.
    #[arg(long, value_name = "ID", requires = "ledger", help_heading = "A measured run")]
    row: Option<String>,
}

/// One way to a number.
struct Line {
    name: String,
    bytes: Result<u64, String>,
}

/// Ways to a number, side by side.
pub(crate) struct Comparison {
    title: String,
    against: &'static str,
    baseline: Option<u64>,
    lines: Vec<Line>,
    notes: Vec<String>,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    match (&arguments.ledger, &arguments.row) {
        (Some(file), Some(row)) => measured(file, row, context),
        _ => planned(&arguments.run, context),
    }
}

fn planned(arguments: &train::Arguments, context: &Context) -> Result<Answer, Failure> {
    let (found, plan, start) = arguments.resolve(context)?;
    let mut question = Question::of_train(&plan);
    arguments.lens.apply(&mut question, context)?;
    let compared = beside_the_simulation(&found, &plan, &question, start.notes)?;
    context.answer(&compared.page(), compared.document(), Exit::Success)
}

/// Every formula beside the simulation of a plan.
pub(crate) fn beside_the_simulation(
    found: &Found,
    plan: &TrainPlan,
    question: &Question,
    mut notes: Vec<String>,
) -> Result<Comparison, Failure> {
    let model = found.require_model()?;
    let mut lines = Vec::new();
    let baseline = match simulation::train(model, plan) {
        Ok(run) => {
            let (allocated, reserved) = (run.replay.peak_allocated(), run.replay.peak_reserved());
            lines.push(Line { name: "simulate: process".into(), bytes: Ok(run.process_bytes()) });
            lines.push(Line { name: "simulate: reserved".into(), bytes: Ok(reserved) });
            lines.push(Line { name: "simulate: allocated".into(), bytes: Ok(allocated) });
            Some(run.process_bytes())
        }
        Err(error) => {
            notes.push(format!("the simulation refuses this run: {error}"));
            None
        }
    };
    lines.extend(lens_lines(model, question)?);
    let title = format!("{}: formulas beside the simulation", found.name);
    Ok(Comparison { title, against: "process", baseline, lines, notes })
}

fn measured(file: &Path, id: &str, context: &Context) -> Result<Answer, Failure> {
    let text = std::fs::read_to_string(file).map_err(|e| Failure::bad_input(format!("{}: {e}", file.display())))?;
    let row = text
        .lines()
        .filter(|line| line.contains(id))
        .filter_map(|line| python_json::parse(line.as_bytes()).ok())
        .find(|row: &Value| row["id"] == id)
        .ok_or_else(|| Failure::bad_input(format!("{}: no row {id}", file.display())))?;
    let bad = |error: String| Failure::bad_input(format!("{}: row {id}: {error}", file.display()));
    let model = ledger::model_of(&row).map_err(bad)?;
    let question = ledger::question(&row).map_err(bad)?;
    let (run, gpu) = ledger::simulate(&row).map_err(bad)?;
    let was = |key: &str| row["measured"][key].as_u64();
    let mut lines = Vec::new();
    for (level, key, ours) in [
        ("allocated", "peak_allocated", run.replay.peak_allocated()),
        ("reserved", "peak_reserved", run.replay.peak_reserved()),
        ("process", "nvml_used_end", run.process_bytes()),
    ] {
        if let Some(bytes) = was(key) {
            lines.push(Line { name: format!("measured: {level}"), bytes: Ok(bytes) });
        }
        lines.push(Line { name: format!("simulate: {level}"), bytes: Ok(ours) });
    }
    lines.extend(lens_lines(&model, &question)?);
    let name = row["model"].as_str().unwrap_or_default();
    let title = format!("{name}, row {id} of {} on {}", file.display(), gpu.name);
    let mut notes = vec!["differences are against the measured peak of allocated memory".to_owned()];
    if row["oom"] == true {
        notes = vec!["the run ran out of memory: there is no peak to compare with".to_owned()];
    }
    let baseline = was("peak_allocated").filter(|_| row["oom"] != true);
    let compared = Comparison { title, against: "measured", baseline, lines, notes };
    context.answer(&compared.page(), compared.document(), Exit::Success)
}

fn lens_lines(model: &Model, question: &Question) -> Result<Vec<Line>, Failure> {
    let facts = Facts::of(model);
    let line = |method: Method| {
        let estimate = facts.clone().and_then(|facts| lens::estimate(method, &facts, question));
        let bytes = estimate.map(|estimate| estimate.total().round() as u64).map_err(|silent| silent.to_string());
        Line { name: method.name().to_owned(), bytes }
    };
    Ok(Method::ALL.into_iter().map(line).collect())
}

impl Comparison {
    fn difference(&self, bytes: u64) -> Option<f64> {
        let baseline = self.baseline.filter(|baseline| *baseline > 0)? as f64;
        Some(100.0 * (bytes as f64 - baseline) / baseline)
    }

    fn page(&self) -> Page {
        let mut page = Page::new(&self.title);
        let heading = format!("% of {}", self.against);
        let mut table = Table::new(&["method", "GiB", &heading, "says"]);
        let mut bars = Vec::new();
        for line in &self.lines {
            let says = Method::ALL.iter().find(|method| method.name() == line.name).map_or("", |method| method.about());
            match &line.bytes {
                Ok(bytes) => {
                    let shown = self.difference(*bytes).map_or_else(String::new, |percent| format!("{percent:+.1}"));
                    table.row(vec![line.name.clone(), gib(*bytes), shown, shorten(says)]);
                    bars.push((line.name.clone(), *bytes));
                }
                Err(why) => table.row(vec![line.name.clone(), String::new(), String::new(), shorten(why)]),
            }
        }
        page.add(Block::Table(table));
        page.add(Block::Picture(bars));
        self.notes.iter().for_each(|note| page.add(Block::Note(note.clone())));
        page
    }

    /// The document of `--json`.
    pub(crate) fn document(&self) -> Value {
        let row = |line: &Line| match &line.bytes {
            Ok(bytes) => {
                json!({"method": line.name, "bytes": bytes, "difference_percent": self.difference(*bytes)})
            }
            Err(why) => json!({"method": line.name, "bytes": null, "why": why}),
        };
        let rows: Vec<Value> = self.lines.iter().map(row).collect();
        json!({"schema": 1, "title": self.title, "baseline": self.baseline, "methods": rows, "notes": self.notes})
    }
}

/// Cut to what is left of the line.
fn shorten(text: &str) -> String {
    let room = crate::render::width().saturating_sub(44).max(20);
    if text.chars().count() <= room {
        return text.to_owned();
    }
    text.chars().take(room - 1).collect::<String>().trim_end().to_owned() + "…"
}
