//! Facts of a machine learned from measured runs.
//!
//! Two kinds of thing may be learned, and nothing else: how many bytes driver and libraries hold beside torch
//! ([`facts`]), and which of torch's own alternatives the machine takes ([`choices`]). Tensors are no such thing: where
//! allocated memory is off, the difference is reported with the phase and component it points to, and left alone.
//!
//! | module | what is in it |
//! |---|---|
//! | [`run`] | measured rows beside their simulation |
//! | [`facts`] | context, kernels, libraries, communicators: medians of what processes held beside torch |
//! | [`choices`] | cuBLAS's workspace, cuDNN's attention, the allocator's settings: alternatives that torch has |
//! | [`profile`] | the file that keeps them |

pub mod choices;
pub mod facts;
pub mod profile;
pub mod run;

use serde::Serialize;
use serde_json::Value;

use crate::plan::{AllocatorOptions, Machine};
use crate::verify::ledger::Scored;
use crate::verify::residual::{self, Residual};
use crate::verify::summary::{self, Group};
use choices::ChoiceFit;
use facts::{FactFit, Stranger};
use profile::Profile;
use run::Run;

/// What was learned, and how well it holds.
#[derive(Debug, Clone, Serialize)]
pub struct Calibration {
    /// The machine, for `--profile`.
    pub profile: Profile,
    /// Bytes that driver and libraries take, one by one.
    pub facts: Vec<FactFit>,
    /// Alternatives of torch that were tried because something was off.
    pub choices: Vec<ChoiceFit>,
    /// Errors by kind of run with the built-in facts.
    pub before: Vec<Group>,
    /// Errors with what was learned.
    pub after: Vec<Group>,
    /// Errors when each row is predicted by what the others taught.
    pub left_out: Vec<Group>,
    /// Rows whose process held something that no fact explains.
    pub strangers: Vec<Stranger>,
    /// What is off and no fact of a machine: left as it is.
    pub not_bent: Vec<NotBent>,
    /// Rows that could not be used, and why.
    pub skipped: Vec<(String, String)>,
}

/// A row that is off for a reason that is no fact of a machine.
#[derive(Debug, Clone, Serialize)]
pub struct NotBent {
    /// The row.
    pub id: String,
    /// The model.
    pub model: String,
    /// By how much its peak allocated is off, in percent.
    pub allocated: Option<f64>,
    /// By how much its peak reserved is off, in percent.
    pub reserved: Option<f64>,
    /// The phase and component it points to; absent when only the allocator's segments differ.
    pub residual: Option<Residual>,
}

/// Why nothing can be learned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// Rows of several machines.
    #[error("the rows are of {}: {}", .0.len(), .0.join("; "))]
    Mixed(Vec<String>),
    /// No row that ran and can be simulated.
    #[error("no row can be used: {0}")]
    Nothing(String),
    /// No row says what its process held.
    #[error("no row says what its process held (measured.nvml_used_end): replayed rows and runs on a CPU do not")]
    NoProcess,
}

/// Allocated beyond this is off, in percent; recorded runs of known kinds stay below half of it.
const ALLOCATED_OFF: f64 = 1.0;
/// Reserved depends on fragmentation and is judged more mildly.
const RESERVED_OFF: f64 = 5.0;

/// Learns from rows of one machine.
pub fn calibrate(rows: &[Value]) -> Result<Calibration, CalibrateError> {
    let (card, torch) = run::one_machine(rows)?;
    let (mut runs, skipped) = run::all(rows);
    if runs.is_empty() {
        let why = skipped.first().map(|(id, why)| format!("{id}: {why}")).unwrap_or_else(|| "there is none".into());
        return Err(CalibrateError::Nothing(why));
    }
    if runs.iter().all(|run| run.outside().is_none()) {
        return Err(CalibrateError::NoProcess);
    }
    let before = scores(&runs, |_| Machine::default());
    let (chosen, choices) = choices::fit(&mut runs);
    let (machine, facts) = facts::fit(&runs, chosen.machine);
    let after: Vec<Scored> = runs.iter().map(|run| run.scored_with(&machine)).collect();
    let left_out = scores(&runs, |run| facts::fit_without(&runs, &run.id, chosen.machine));
    Ok(Calibration {
        profile: Profile::new(card, torch, runs.len(), machine, chosen.allocator),
        strangers: facts::strangers(&runs, &machine),
        not_bent: not_bent(&after),
        before,
        after: grouped(&after),
        left_out,
        facts,
        choices,
        skipped,
    })
}

fn scores(runs: &[Run], machine: impl Fn(&Run) -> Machine) -> Vec<Group> {
    let scored: Vec<Scored> = runs.iter().map(|run| run.scored_with(&machine(run))).collect();
    grouped(&scored)
}

fn grouped(scored: &[Scored]) -> Vec<Group> {
    summary::by_group(&scored.iter().map(|row| (row.group.as_str(), row.levels())).collect::<Vec<_>>())
}

fn not_bent(scored: &[Scored]) -> Vec<NotBent> {
    let off = |error: Option<f64>, most: f64| error.filter(|error| error.abs() > most);
    let row = |row: &Scored| {
        let (allocated, reserved) =
            (off(row.allocated.error(), ALLOCATED_OFF), off(row.reserved.error(), RESERVED_OFF));
        let residual = allocated.and_then(|_| residual::largest(row));
        (allocated.is_some() || reserved.is_some()).then(|| NotBent {
            id: row.id.clone(),
            model: row.model.clone(),
            allocated,
            reserved,
            residual,
        })
    };
    scored.iter().filter_map(row).collect()
}

/// What the machine chooses among torch's alternatives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Chosen {
    /// The machine before its facts are fitted.
    pub machine: Machine,
    /// Settings of the allocator that runs without settings of their own have.
    pub allocator: Option<AllocatorOptions>,
}
