//! What was measured beside what was predicted, and which part of the prediction a difference points to.

use serde::Serialize;
use serde_json::Value;
use vramcast_core::verify::ledger::{self, LedgerRow, PhaseRow, Scored};

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
}

/// Compares a measured row with its simulation.
pub fn compare(row: Value) -> Comparison {
    match ledger::score(&row) {
        LedgerRow::Scored(scored) => {
            let difference = scored.phases.iter().filter_map(worst).max_by_key(|(bytes, _)| bytes.unsigned_abs());
            let difference = difference.filter(|(bytes, _)| bytes.unsigned_abs() > 1 << 20).map(|(_, words)| words);
            Comparison { row, scored: Some(scored), unscored: None, difference }
        }
        LedgerRow::Skipped { skipped, .. } => {
            Comparison { row, scored: None, unscored: Some(skipped), difference: None }
        }
    }
}

/// How far a phase is off, and what lives then.
fn worst(phase: &PhaseRow) -> Option<(i64, String)> {
    let off = |measure: &ledger::Measure| {
        let (predicted, measured) = (i64::try_from(measure.predicted?).ok()?, i64::try_from(measure.measured?).ok()?);
        Some(predicted - measured)
    };
    let (peak, after) = (off(&phase.peak)?, off(&phase.after)?);
    let kind = phase.phase.rsplit('.').next().unwrap_or_default();
    // What stays after a phase is a tensor that lives on; what only its peak shows is a moment's work.
    let component = match (kind, peak.abs() > 2 * after.abs()) {
        ("fwd", false) => "activations kept for backward",
        ("fwd", true) => "temporaries of the forward pass",
        ("bwd", false) => "gradients",
        ("bwd", true) => "temporaries of the backward pass",
        ("opt", false) => "optimizer state",
        ("opt", true) => "temporaries of the optimizer's step",
        ("generate" | "forward" | "forward2", _) => "cache, logits and temporaries of generation",
        _ => "what lives between phases",
    };
    let side = if peak > 0 { "more" } else { "less" };
    let words = format!(
        "phase {}: {:.1} MiB {side} predicted than measured: {component}",
        phase.phase,
        peak.unsigned_abs() as f64 / 1048576.0
    );
    Some((peak, words))
}
