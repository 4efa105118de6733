//! What Python calls: a question as a tree of values, and its answer. Everything else of the package is Python
//! (`python/vramcast`).

mod document;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use vramcast_core::lens::{self, Facts, GIB, Question};

use document::{Document, from_python};

/// The native module.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::document::Document;
    #[pymodule_export]
    use super::{answer_seconds, ask, korthikanti, main};
}

/// Answers a question and returns `(document, exit code, error, hint)`; nothing is printed.
#[pyfunction]
fn ask(py: Python<'_>, question: &Bound<'_, PyAny>) -> PyResult<Answered> {
    let question = from_python(question)?;
    let told = py.detach(|| vramcast::api::ask(question));
    Ok((told.document.map(Document), told.code, told.error, told.hint))
}

type Answered = (Option<Document>, u8, Option<String>, Option<String>);

/// How long the answer to a question about training takes by itself, in seconds.
#[pyfunction]
fn answer_seconds(py: Python<'_>, question: &Bound<'_, PyAny>) -> PyResult<f64> {
    let question = from_python(question)?;
    let time = py.detach(|| vramcast::api::time_of_answer(question));
    time.map(|time| time.as_secs_f64()).map_err(PyValueError::new_err)
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
