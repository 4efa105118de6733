//! The ledger: recorded runs against their simulation.

use serde::Serialize;
use serde_json::Value;

use super::kinds::{Kind, Score};
use super::{keys, run};
use crate::dtype::DType;
use crate::lens::Question;
use crate::memory::phase::Phase;
use crate::memory::simulation::{self, Simulation};
use crate::model::Model;
use crate::plan::{Gpu, RunPlan};

pub use super::run::plan as run_plan;

/// Files of recorded runs: one a line.
pub(super) const KIND: Kind = Kind {
    name: "ledger",
    noun: "runs",
    looks: "recorded runs, one JSON object a line, with `run` and `config` (truth/ledger/FORMAT.md)",
    levels: &["allocated", "reserved", "process"],
    joined: false,
    rows: |file| {
        let of_runs = !file.documents.is_empty() && file.documents.iter().all(|row| row["run"].is_object());
        of_runs.then(|| file.documents.clone())
    },
    score: |_, row| {
        vec![match score(row) {
            LedgerRow::Skipped { id, skipped } => Score::skipped(&id, &skipped),
            LedgerRow::Scored(row) => Score {
                group: row.group.clone(),
                levels: row.levels(),
                ..Score::exact(&row.id, (!row.ok).then(|| row.said()), &row)
            },
        }]
    },
};

/// How one run compares with its simulation.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum LedgerRow {
    /// Both figures exist.
    Scored(Box<Scored>),
    /// There is no prediction, and why.
    Skipped {
        /// The row.
        id: String,
        /// Why.
        skipped: String,
    },
}

/// A row with both figures.
#[derive(Debug, Clone, Serialize)]
pub struct Scored {
    /// The row.
    pub id: String,
    /// The model.
    pub model: String,
    /// What kind of run: `train`, `lora`, `infer`, ….
    pub group: String,
    /// Whether it is close enough: peak allocated within 3 % or the row's own `residual`, or predicted not to fit where it did not.
    pub ok: bool,
    /// Peak allocated.
    pub allocated: Measure,
    /// Peak reserved.
    pub reserved: Measure,
    /// What the whole process held.
    pub process: Measure,
    /// Phase by phase.
    pub phases: Vec<PhaseRow>,
    /// Whether the run ran out of memory, and whether that was predicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out_of_memory: Option<bool>,
}

impl Scored {
    /// Peak allocated, peak reserved, and what the process held.
    pub fn levels(&self) -> [Measure; 3] {
        [self.allocated, self.reserved, self.process]
    }

    fn said(&self) -> String {
        let error = self.allocated.error().map_or_else(|| "not compared".into(), |error| format!("{error:+.3} %"));
        format!("{} ({}): peak allocated {error}", self.model, self.group)
    }
}

/// A predicted and a measured number of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Measure {
    /// Ours.
    pub predicted: Option<u64>,
    /// The run's.
    pub measured: Option<u64>,
}

impl Measure {
    /// The relative error in percent, where both exist.
    pub fn error(&self) -> Option<f64> {
        let (predicted, measured) = (self.predicted? as f64, self.measured? as f64);
        (measured > 0.0).then(|| 100.0 * (predicted - measured) / measured)
    }
}

/// One phase.
#[derive(Debug, Clone, Serialize)]
pub struct PhaseRow {
    /// Its name.
    pub phase: String,
    /// Allocated at its end.
    pub after: Measure,
    /// Most allocated in it.
    pub peak: Measure,
    /// Most reserved in it.
    pub peak_reserved: Measure,
}

/// Scores one row.
pub fn score(row: &Value) -> LedgerRow {
    let id = row["id"].as_str().unwrap_or("(no id)").to_owned();
    // What is special about how a row was measured, the row says itself.
    let beside_the_point = match row["not_comparable"].as_str() {
        None if row["gpu"] == "cpu" => Some("measured on a CPU, whose kernels and allocator are others"),
        said => said,
    };
    let simulated = beside_the_point.map_or_else(|| simulate(row), |why| Err(why.into()));
    match simulated {
        Ok((simulation, gpu)) => LedgerRow::Scored(Box::new(compare(row, &simulation, &gpu))),
        Err(skipped) => LedgerRow::Skipped { id, skipped },
    }
}

/// A row beside its simulation on a card.
pub fn compare(row: &Value, simulation: &Simulation, gpu: &Gpu) -> Scored {
    let (log, replay) = (&simulation.log, &simulation.replay);
    let measured = &row["measured"];
    let mut scored = Scored {
        id: row["id"].as_str().unwrap_or_default().to_owned(),
        model: row["model"].as_str().unwrap_or_default().to_owned(),
        group: group(&row["run"]).into(),
        ok: false,
        allocated: Measure { predicted: Some(replay.peak_allocated()), measured: measured["peak_allocated"].as_u64() },
        reserved: Measure { predicted: Some(replay.peak_reserved()), measured: measured["peak_reserved"].as_u64() },
        process: Measure { predicted: Some(simulation.process_bytes()), measured: measured["nvml_used_end"].as_u64() },
        phases: Vec::new(),
        out_of_memory: None,
    };
    if row["oom"] == true {
        // measure.py builds the whole model on the card before an engine shards it.
        let weights: DType = crate::typed::read(row["run"]["weights"].clone()).unwrap_or(DType::BF16);
        let built: u64 = simulation.program.parameters.iter().map(|p| p.shape.elements()).sum::<u64>() * weights.size();
        let outside: u64 = simulation.process.iter().map(|part| part.bytes).sum();
        let fits = simulation.process_bytes().max(built + outside) <= gpu.memory;
        scored.out_of_memory = Some(!fits);
        scored.ok = !fits;
        // What was measured stopped half-way: there is nothing to compare with.
        for measure in [&mut scored.allocated, &mut scored.reserved, &mut scored.process] {
            measure.measured = None;
        }
        return scored;
    }
    // Three percent, or what the row names as unexplained of it.
    let limit = row["residual"]["percent"].as_f64().map_or(3.0, |known| known.abs().max(3.0));
    scored.ok = scored.allocated.error().is_some_and(|error| error.abs() <= limit);
    for phase in measured["phases"].as_array().into_iter().flatten() {
        let name = phase["phase"].as_str().unwrap_or_default();
        let known = name.parse::<Phase>().ok();
        let at = log.phases.iter().position(|phase| Some(*phase) == known);
        let Some(ours) = at.and_then(|at| replay.phases.get(at)) else {
            continue;
        };
        let pair = |predicted: u64, key: &str| Measure { predicted: Some(predicted), measured: phase[key].as_u64() };
        scored.phases.push(PhaseRow {
            phase: name.to_owned(),
            after: pair(ours.after, "after"),
            peak: pair(ours.peak, "peak"),
            peak_reserved: pair(ours.peak_reserved, "peak_reserved"),
        });
    }
    scored
}

/// The run of a row, simulated.
pub fn simulate(row: &Value) -> Result<(Simulation, Gpu), String> {
    let plan = run::plan(row)?;
    Ok((simulate_plan(&model_of(row)?, &plan)?, plan.gpu().clone()))
}

/// A plan that was read off a row, simulated.
pub fn simulate_plan(model: &Model, plan: &RunPlan) -> Result<Simulation, String> {
    crate::work::fresh();
    let run = match plan {
        RunPlan::Train(plan) => simulation::train(model, plan),
        RunPlan::Infer(plan) => simulation::infer(model, plan),
        RunPlan::Serve(_) => return Err("an engine's own rules are no simulation".into()),
    };
    run.map_err(|error| error.to_string())
}

/// The run of a row, as a published formula is asked.
pub fn question(row: &Value) -> Result<Question, String> {
    Ok(match run::plan(row)? {
        RunPlan::Train(plan) => Question::of_train(&plan),
        RunPlan::Infer(plan) => Question::of_infer(&plan),
        RunPlan::Serve(_) => return Err("no formula is asked about a serving engine".into()),
    })
}

/// What kind of run a row is, as the targets of accuracy group them.
fn group(run: &Value) -> &'static str {
    match run["quant"].as_str() {
        Some(_) if run["task"] == "infer" => "infer-quant",
        None if run["task"] == "infer" => "infer",
        _ if run["task"] == "trainer" => "trainer",
        _ if run["task"] == "sft" => "sft",
        _ if !run["dist"].is_null() => super::distributed::group(&run["dist"]),
        Some("int8") => "qlora-int8",
        Some(_) => "qlora-4bit",
        None if !run["lora"].is_null() => "lora",
        None if !run["peft"].is_null() => "peft",
        None if run["liger"] == true => "liger",
        None => "train",
    }
}

/// The model of a row, with the keys the run changed.
pub fn model_of(row: &Value) -> Result<Model, String> {
    let mut config = row["config"].clone();
    for (path, value) in row["run"]["overrides"].as_object().into_iter().flatten() {
        keys::put(&mut config, path, value.clone());
    }
    // Rows are built with random weights in full, whatever the checkpoint holds.
    if let Some(object) = config.as_object_mut() {
        object.remove("quantization_config");
        if let Some(section) = row["run"]["quant"].as_str().and_then(run::stored) {
            object.insert("quantization_config".into(), section);
        }
    }
    // As measure.py cuts them when a run has fewer layers.
    if let Some(layers) = config.get("num_hidden_layers").and_then(Value::as_u64) {
        for key in ["layer_types", "no_rope_layers"] {
            if let Some(list) = config.get_mut(key).and_then(Value::as_array_mut) {
                list.truncate(usize::try_from(layers).unwrap_or(usize::MAX));
            }
        }
    }
    let model = Model::new(config, row["auto_class"].as_str()).map_err(|e| e.to_string())?;
    match model.notes().first() {
        Some(note) => Err(note.clone()),
        None => Ok(model),
    }
}
