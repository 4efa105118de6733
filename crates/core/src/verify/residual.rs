//! Where a measured run and its simulation differ, and which part of the simulation that points to.

use serde::Serialize;

use super::ledger::{Measure, PhaseRow, Scored};
use crate::memory::phase::{Phase, Work};

/// The phase in which a run and its simulation differ most.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Residual {
    /// The phase.
    pub phase: String,
    /// What lives then.
    pub component: &'static str,
    /// Predicted less measured, at the peak of the phase.
    pub bytes: i64,
}

impl std::fmt::Display for Residual {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let side = if self.bytes > 0 { "more" } else { "less" };
        let mib = self.bytes.unsigned_abs() as f64 / f64::from(1 << 20);
        write!(formatter, "phase {}: {mib:.1} MiB {side} predicted than measured: {}", self.phase, self.component)
    }
}

/// The largest difference of all phases.
pub fn largest(scored: &Scored) -> Option<Residual> {
    scored.phases.iter().filter_map(of_phase).max_by_key(|residual| residual.bytes.unsigned_abs())
}

/// Predicted less measured.
pub fn difference(measure: &Measure) -> Option<i64> {
    Some(i64::try_from(measure.predicted?).ok()? - i64::try_from(measure.measured?).ok()?)
}

fn of_phase(phase: &PhaseRow) -> Option<Residual> {
    let (bytes, after) = (difference(&phase.peak)?, difference(&phase.after)?);
    let work = phase.phase.parse::<Phase>().ok().map(|phase| phase.work);
    // What stays after a phase is a tensor that lives on; what only its peak shows is a moment's work.
    let component = match (work, bytes.unsigned_abs() > after.unsigned_abs().saturating_mul(2)) {
        (Some(Work::Forward), false) => "activations kept for backward",
        (Some(Work::Forward), true) => "temporaries of the forward pass",
        (Some(Work::Backward), false) => "gradients",
        (Some(Work::Backward), true) => "temporaries of the backward pass",
        (Some(Work::Optimizer), false) => "optimizer state",
        (Some(Work::Optimizer), true) => "temporaries of the optimizer's step",
        (Some(Work::Generate | Work::FirstPass | Work::SecondPass), _) => "cache, logits and temporaries of generation",
        _ => "what lives between phases",
    };
    Some(Residual { phase: phase.phase.clone(), component, bytes })
}
