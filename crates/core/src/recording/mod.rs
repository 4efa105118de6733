//! What a real run recorded of its memory: torch's snapshots and its profiler's files. The peak, and what lived then.
//!
//! | module | what is in it |
//! |---|---|
//! | [`pickle`] | Python's pickles, plain data only |
//! | [`snapshot`] | `torch.cuda.memory._dump_snapshot`: the history of the allocator |
//! | [`place`] | which part of a program a stack of Python is in, and what a block is for |
//! | [`profiler`] | `export_chrome_trace` and `export_memory_timeline` of torch.profiler |

pub mod pickle;
pub mod place;
pub mod profiler;
pub mod snapshot;

use serde::Serialize;

use crate::memory::log::Category;
use crate::report::{Report, category_name};

/// What was recorded.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Recording {
    /// What kind of file it was.
    pub kind: &'static str,
    /// Most allocated, in bytes.
    pub peak_allocated: u64,
    /// Most reserved, where the file tells.
    pub peak_reserved: Option<u64>,
    /// Where the program was at the peak, where the file tells.
    pub peak_in: Option<&'static str>,
    /// What lived at the peak; empty where the file does not tell.
    pub parts: Vec<Part>,
    /// The lines of source that made most of it.
    pub sites: Vec<Site>,
    /// How much of the history there is.
    pub events: usize,
    /// Where it ran out of memory, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
    /// What was allocated between steps, one after the other.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub floors: Vec<u64>,
    /// What a reader should know.
    pub notes: Vec<String>,
}

/// A request that was not granted, and what there was then; bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ended {
    /// What was asked for.
    pub asked: u64,
    /// What the driver had free.
    pub free: Option<u64>,
    /// What tensors held.
    pub allocated: u64,
    /// What the allocator held beside that.
    pub idle: u64,
    /// Where the program was.
    pub place: &'static str,
    /// The line of source that asked.
    pub line: Option<String>,
}

/// What lived at the peak for one purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Part {
    /// The purpose; absent where the file does not show it.
    pub purpose: Option<Purpose>,
    /// Bytes.
    pub bytes: u64,
}

/// A line of source and what it made that lived at the peak.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Site {
    /// `file:line function`.
    pub source: String,
    /// Bytes.
    pub bytes: u64,
    /// How many blocks.
    pub blocks: u64,
}

/// Why a file says nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// Not a pickle of plain data.
    #[error(transparent)]
    Pickle(#[from] pickle::PickleError),
    /// Not JSON.
    #[error("not JSON from line {line}, column {column} on")]
    #[allow(missing_docs, reason = "a place")]
    Json { line: usize, column: usize },
    /// JSON, but not of a profiler.
    #[error("not a profiler's JSON: {0} was expected")]
    Unlike(&'static str),
    /// It is what it says, but holds nothing of use.
    #[error("{0}")]
    Empty(&'static str),
}

/// What memory is for, as far as a stack of Python tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Parameters and buffers of the model and of adapters.
    Weights,
    /// Gradients of parameters.
    Gradients,
    /// State of the optimizer.
    OptimizerState,
    /// What forward keeps for backward, logits, and what lives for a moment. Apart in the file, together in a
    /// comparison: when a tensor is the one and when the other depends on where the peak is.
    Activations,
    /// What lives for a moment.
    Temporaries,
    /// Keys and values of generation.
    Cache,
    /// The batch, and whatever the program itself makes.
    Batch,
    /// Buffers of collectives.
    Communication,
    /// Workspaces of cuBLAS.
    Workspace,
}

impl Purpose {
    /// How a report calls it.
    pub fn name(self) -> &'static str {
        category_name(match self {
            Self::Weights => Category::Weights,
            Self::Gradients => Category::Gradients,
            Self::OptimizerState => Category::OptimizerState,
            Self::Activations => Category::Activations,
            Self::Temporaries => Category::Temporaries,
            Self::Cache => Category::Cache,
            Self::Batch => Category::Batch,
            Self::Communication => Category::Communication,
            Self::Workspace => Category::Workspace,
        })
    }
}

/// Names of a report's components that are one line of a comparison.
const LINES: [(&str, &[&str], &[Purpose]); 7] = [
    ("weights", &["weights", "buffers", "adapters"], &[Purpose::Weights]),
    ("gradients", &["gradients"], &[Purpose::Gradients]),
    ("optimizer state", &["optimizer state"], &[Purpose::OptimizerState]),
    (
        "activations, logits and temporaries",
        &["activations", "logits and loss", "temporaries", "batch"],
        &[Purpose::Activations, Purpose::Temporaries, Purpose::Batch],
    ),
    ("cache", &["cache"], &[Purpose::Cache]),
    ("communication", &["communication"], &[Purpose::Communication]),
    ("workspace", &["workspace"], &[Purpose::Workspace]),
];

/// One line of a recording beside its prediction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reconciled {
    /// What it is.
    pub name: &'static str,
    /// Recorded, in bytes; absent where the file does not tell.
    pub recorded: Option<u64>,
    /// Predicted.
    pub predicted: u64,
}

/// A recording beside a prediction, line by line; the last is all that is allocated.
pub fn reconcile(recording: &Recording, report: &Report) -> Vec<Reconciled> {
    let predicted = |names: &[&str]| {
        report.breakdown.iter().filter(|it| names.contains(&it.name.as_str())).map(|it| it.bytes).sum()
    };
    let known = !recording.parts.is_empty();
    let recorded = |purposes: &[Purpose]| {
        let these = recording.parts.iter().filter(|part| part.purpose.is_some_and(|it| purposes.contains(&it)));
        known.then(|| these.map(|part| part.bytes).sum())
    };
    let mut lines: Vec<Reconciled> = LINES
        .iter()
        .map(|(name, names, purposes)| Reconciled { name, recorded: recorded(purposes), predicted: predicted(names) })
        .filter(|line| line.predicted > 0 || line.recorded.is_some_and(|bytes| bytes > 0))
        .collect();
    let unknown: u64 = recording.parts.iter().filter(|part| part.purpose.is_none()).map(|part| part.bytes).sum();
    if unknown > 0 {
        lines.push(Reconciled { name: "made before the history began", recorded: Some(unknown), predicted: 0 });
    }
    let allocated =
        Reconciled { name: "allocated", recorded: Some(recording.peak_allocated), predicted: report.totals.allocated };
    lines.push(allocated);
    lines
}
