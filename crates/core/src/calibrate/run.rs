//! Measured rows beside their simulation.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{CalibrateError, Chosen};
use crate::memory::process::Fact;
use crate::model::Model;
use crate::plan::{Gpu, Machine, RunPlan};
use crate::verify::ledger::{self, Scored};

/// One measured run.
pub struct Run {
    /// The row.
    pub id: String,
    /// How it compares, with the facts of the machine it was simulated on.
    pub scored: Scored,
    /// What its process holds besides torch, and how many times.
    pub parts: Vec<(Fact, u64)>,
    /// What the context took, where it was measured.
    pub context: Option<u64>,
    reserved_at_end: Option<u64>,
    own_settings: bool,
    row: Value,
    model: Model,
    plan: RunPlan,
}

/// The card and the torch of all rows, which must be one.
pub fn one_machine(rows: &[Value]) -> Result<(String, String), CalibrateError> {
    let mut known: BTreeMap<(String, String), usize> = BTreeMap::new();
    for row in rows {
        let versions = if row["versions"].is_object() { &row["versions"] } else { &row["software"] };
        let text = |value: &Value| value.as_str().unwrap_or("unknown").to_owned();
        // 2.11.0+cu130 is the build of 2.11.0 that a registry has.
        let torch = text(&versions["torch"]).split('+').next().unwrap_or_default().to_owned();
        *known.entry((text(&row["gpu"]), torch)).or_default() += 1;
    }
    let named =
        |((card, torch), count): (&(String, String), &usize)| format!("{card} with torch {torch} ({count} rows)");
    match known.len() {
        0 => Err(CalibrateError::Nothing("there is none".into())),
        1 => Ok(known.into_keys().next().unwrap_or_default()),
        _ => Err(CalibrateError::Mixed(known.iter().map(named).collect())),
    }
}

/// The rows that ran and can be simulated, and why the others cannot be used.
pub fn all(rows: &[Value]) -> (Vec<Run>, Vec<(String, String)>) {
    let (mut runs, mut skipped) = (Vec::new(), Vec::new());
    for row in rows {
        match Run::of(row) {
            Ok(run) => runs.push(run),
            Err(why) => skipped.push((row["id"].as_str().unwrap_or("(no id)").to_owned(), why)),
        }
    }
    (runs, skipped)
}

impl Run {
    fn of(row: &Value) -> Result<Self, String> {
        if row["oom"] == true || row["error"].is_string() {
            return Err("the run stopped half-way".into());
        }
        let (model, plan) = (ledger::model_of(row)?, ledger::run_plan(row)?);
        let (scored, parts) = simulated(row, &model, &plan)?;
        let measured = &row["measured"];
        let last = measured["phases"].as_array().and_then(|phases| phases.last());
        Ok(Self {
            id: scored.id.clone(),
            scored,
            parts,
            context: measured["context"].as_u64().filter(|bytes| *bytes > 0),
            reserved_at_end: last.and_then(|phase| phase["reserved"].as_u64()).or(measured["peak_reserved"].as_u64()),
            own_settings: row["run"]["alloc_conf"].is_string(),
            row: row.clone(),
            model,
            plan,
        })
    }

    /// What the process held besides torch's segments.
    pub fn outside(&self) -> Option<u64> {
        self.scored.process.measured?.checked_sub(self.reserved_at_end?)
    }

    /// The comparison with other facts; torch's own levels do not change.
    pub fn scored_with(&self, machine: &Machine) -> Scored {
        let outside: u64 = self.parts.iter().map(|(fact, times)| fact.of(machine).saturating_mul(*times)).sum();
        let mut scored = self.scored.clone();
        scored.process.predicted = scored.reserved.predicted.map(|reserved| reserved.saturating_add(outside));
        scored
    }

    /// The comparison on a machine that chooses otherwise; absent where torch refuses.
    pub fn chosen(&self, chosen: &Chosen) -> Option<(Scored, Vec<(Fact, u64)>)> {
        // Whether the row's communicator has anyone to connect to is the row's, not the machine's.
        let nccl_channels = self.plan.gpu().machine.nccl_channels;
        let machine = Machine { nccl_channels, ..chosen.machine };
        let gpu = Gpu { machine, ..self.plan.gpu().clone() };
        let mut plan = self.plan.clone();
        let settings = chosen.allocator.filter(|_| !self.own_settings);
        match &mut plan {
            RunPlan::Train(plan) => {
                plan.gpu = gpu;
                plan.allocator = settings.unwrap_or(plan.allocator);
            }
            RunPlan::Infer(plan) => {
                plan.gpu = gpu;
                plan.allocator = settings.unwrap_or(plan.allocator);
            }
            RunPlan::Serve(plan) => plan.gpu = gpu,
        }
        simulated(&self.row, &self.model, &plan).ok()
    }
}

fn simulated(row: &Value, model: &Model, plan: &RunPlan) -> Result<(Scored, Vec<(Fact, u64)>), String> {
    let simulation = ledger::simulate_plan(model, plan)?;
    let mut parts: BTreeMap<Fact, u64> = BTreeMap::new();
    for (fact, times) in simulation.process.iter().map(|part| part.fact) {
        *parts.entry(fact).or_default() += times;
    }
    let parts = parts.into_iter().collect();
    Ok((ledger::compare(row, &simulation, plan.gpu()), parts))
}
