//! What was measured beside what was predicted, and which part of the prediction a difference points to.

use serde::Serialize;
use serde_json::Value;
use vramcast_core::memory::log::Category;
use vramcast_core::verify::ledger::{self, LedgerRow, Measure, Scored};
use vramcast_core::verify::residual;

/// A measured run beside its prediction.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// The measured row, as the ledger keeps it.
    pub row: Value,
    /// The scores, where there is a prediction.
    pub scored: Option<Box<Scored>>,
    /// Why there is none.
    pub unscored: Option<String>,
    /// Where the two differ most, in words.
    pub difference: Option<String>,
    /// What a run on a CPU and the prediction for a GPU have in common: tensors that live on.
    pub comparable: Vec<(&'static str, Measure)>,
}

/// Compares a measured row with its simulation.
pub fn compare(row: Value) -> Comparison {
    match ledger::score(&row) {
        LedgerRow::Scored(scored) => {
            let largest = residual::largest(&scored).filter(|residual| residual.bytes.unsigned_abs() > 1 << 20);
            let difference = largest.map(|residual| residual.to_string());
            Comparison { row, scored: Some(scored), unscored: None, difference, comparable: Vec::new() }
        }
        LedgerRow::Skipped { skipped, .. } => {
            let comparable = if row["gpu"] == "cpu" { on_cpu(&row) } else { Vec::new() };
            Comparison { row, scored: None, unscored: Some(skipped), difference: None, comparable }
        }
    }
}

/// Parameters, and what lives between steps: the same tensors on any device. Peaks are not: a CPU has other kernels, other
/// temporaries and no workspaces.
fn on_cpu(row: &Value) -> Vec<(&'static str, Measure)> {
    let Ok((simulation, _)) = ledger::simulate(row) else { return Vec::new() };
    let log = &simulation.log;
    let workspaces = log.storages.iter().filter(|storage| storage.category == Category::Workspace);
    let workspaces: u64 = workspaces.map(|storage| storage.bytes).sum();
    let parameters = simulation.program.parameters.iter().map(|parameter| parameter.shape.elements()).sum();
    let measured = &row["measured"];
    let mut list = vec![(
        "parameters of the model",
        Measure { predicted: Some(parameters), measured: measured["params"].as_u64() },
    )];
    let last = measured["phases"]
        .as_array()
        .into_iter()
        .flatten()
        .rfind(|phase| phase["phase"].as_str().is_some_and(|name| name.ends_with(".zero")));
    if let Some(last) = last {
        let known = last["phase"].as_str().and_then(|name| name.parse().ok());
        let place = log.phases.iter().position(|phase| Some(*phase) == known);
        let after = place.and_then(|place| simulation.replay.phases.get(place)).map(|phase| phase.after);
        let predicted = after.map(|bytes| bytes.saturating_sub(workspaces));
        list.push(("bytes between steps", Measure { predicted, measured: last["after"].as_u64() }));
    }
    list
}
