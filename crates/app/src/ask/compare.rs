//! Published formulas beside the simulation, and beside what was measured.

use std::path::Path;

use serde_json::{Value, json};
use vramcast_core::lens::{self, Facts, Method, Question};
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::TrainPlan;
use vramcast_core::source::json as python_json;
use vramcast_core::verify::ledger;

use super::files;
use super::found::Found;
use crate::failure::Failure;

/// No ledger is larger.
const MOST_BYTES: u64 = 1 << 28;

/// One way to a number.
pub(crate) struct Line {
    /// What it is called.
    pub(crate) name: String,
    /// What it says, or why it says nothing.
    pub(crate) bytes: Result<u64, String>,
}

/// Ways to a number, side by side.
pub(crate) struct Comparison {
    /// What is compared.
    pub(crate) title: String,
    /// What differences are against.
    pub(crate) against: &'static str,
    /// That, in bytes.
    pub(crate) baseline: Option<u64>,
    /// The ways.
    pub(crate) lines: Vec<Line>,
    /// What a reader should know.
    pub(crate) notes: Vec<String>,
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
    lines.extend(lens_lines(model, question));
    let title = format!("{}: formulas beside the simulation", found.name);
    notes.splice(0..0, found.notes.clone());
    Ok(Comparison { title, against: "process", baseline, lines, notes })
}

/// Every formula beside a recorded run.
pub(crate) fn beside_a_run(file: &Path, id: &str) -> Result<Comparison, Failure> {
    let bytes = files::bytes(file, MOST_BYTES)?;
    let text = String::from_utf8_lossy(&bytes);
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
    lines.extend(lens_lines(&model, &question));
    let name = row["model"].as_str().unwrap_or_default();
    let title = format!("{name}, row {id} of {} on {}", file.display(), gpu.name);
    let mut notes = vec!["differences are against the measured peak of allocated memory".to_owned()];
    if row["oom"] == true {
        notes = vec!["the run ran out of memory: there is no peak to compare with".to_owned()];
    }
    let baseline = was("peak_allocated").filter(|_| row["oom"] != true);
    Ok(Comparison { title, against: "measured", baseline, lines, notes })
}

fn lens_lines(model: &Model, question: &Question) -> Vec<Line> {
    let facts = Facts::of(model);
    let line = |method: Method| {
        let estimate = facts.clone().and_then(|facts| lens::estimate(method, &facts, question));
        let bytes = estimate.map(|estimate| estimate.total().round() as u64).map_err(|silent| silent.to_string());
        Line { name: method.name().to_owned(), bytes }
    };
    Method::ALL.into_iter().map(line).collect()
}

impl Comparison {
    /// How far a number is from the baseline, in percent.
    pub(crate) fn difference(&self, bytes: u64) -> Option<f64> {
        let baseline = self.baseline.filter(|baseline| *baseline > 0)? as f64;
        Some(100.0 * (bytes as f64 - baseline) / baseline)
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
