//! What Python calls: a command line and its answer. Everything else of the package is Python (`python/vramcast`).

mod document;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use vramcast::cli::Body;
use vramcast_core::lens::{self, Facts, GIB, Question};

use document::Document;

/// The native module.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::document::Document;
    #[pymodule_export]
    use super::{command, estimate_seconds, korthikanti, main};
}

/// Runs a command with `--json` and returns `(document, exit code, error, hint)`; nothing is printed.
#[pyfunction]
fn command(py: Python<'_>, arguments: Vec<String>) -> PyResult<Answered> {
    let captured = py.detach(|| vramcast::cli::capture(arguments.into_iter().map(Into::into).collect()));
    let document = match captured.body {
        Some(Body::Document(document)) => Some(Document(document)),
        Some(Body::Text(text)) => {
            return Err(PyValueError::new_err(format!("the answer is no document but text: {text:.80}")));
        }
        None => None,
    };
    Ok((document, captured.code, captured.error, captured.hint))
}

type Answered = (Option<Document>, u8, Option<String>, Option<String>);

/// How long the estimate of a `train` command takes by itself, in seconds.
#[pyfunction]
fn estimate_seconds(py: Python<'_>, arguments: Vec<String>) -> PyResult<f64> {
    let words = arguments.into_iter().map(Into::into).collect();
    let time = py.detach(|| vramcast::cli::time_of_estimate(words));
    time.map(|time| time.as_secs_f64()).map_err(|failure| PyValueError::new_err(failure.message().to_owned()))
}

/// Runs the command line of the process and returns its exit code.
#[pyfunction]
fn main(py: Python<'_>, arguments: Vec<String>) -> u8 {
    py.detach(|| vramcast::cli::run(arguments.into_iter().map(Into::into).collect()).code())
}

/// Seed 004's formula, in GiB: all, model states, activations, buffers.
#[pyfunction]
fn korthikanti(
    sizes: (u64, u64, u64, u64, u64),
    zero: u8,
    cards: u64,
    seq: u64,
    batch: u64,
) -> PyResult<(f64, f64, f64, f64)> {
    let (parameters, layers, hidden, heads, vocab) = sizes;
    let facts = Facts::of_sizes(parameters, layers, hidden, heads, vocab);
    let question = Question { zero, dp: cards, seq, batch, ..Question::default() };
    let estimate = lens::korthikanti::estimate(&facts, &question).map_err(|e| PyValueError::new_err(e.to_string()))?;
    match estimate.terms.as_slice() {
        [states, activations, buffers] => {
            Ok((estimate.total() / GIB, states.bytes / GIB, activations.bytes / GIB, buffers.bytes / GIB))
        }
        _ => Err(PyValueError::new_err("the formula has three terms")),
    }
}
