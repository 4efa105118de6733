//! Public logs of serving engines against our budgets, and published training runs against our simulation.

pub mod bridge;
mod llama_cpp;
mod names;
pub mod simumax;
mod vllm;

use serde::Serialize;
use serde_json::Value;

use super::kinds::{Kind, Outcome, Score};
use super::ledger::Measure;

/// One figure of one log, or why there is none.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ExternalRow {
    /// Both figures exist.
    Scored {
        /// Which file, row and model.
        row: String,
        /// What is compared: `weights`, `cache tokens`, `cache`, `compute`, `allocated`, `reserved`.
        quantity: &'static str,
        /// Ours.
        predicted: u64,
        /// The log's.
        measured: u64,
    },
    /// Left out, by name.
    Skipped {
        /// Which file, row and model.
        row: String,
        /// Why.
        skipped: String,
    },
}

impl ExternalRow {
    fn into_score(self) -> Score {
        let document = serde_json::to_value(&self).unwrap_or_default();
        let none = Measure::default();
        match self {
            Self::Scored { row: id, quantity, predicted, measured } => {
                let compared = Measure { predicted: Some(predicted), measured: Some(measured) };
                let levels = [compared, none, none];
                Score { id, group: quantity.into(), levels, outcome: Outcome::Good, document }
            }
            Self::Skipped { row: id, skipped } => {
                Score { id, group: String::new(), levels: [none; 3], outcome: Outcome::Skipped(skipped), document }
            }
        }
    }
}

/// Files of published figures.
pub(super) const KIND: Kind = Kind {
    name: "external",
    noun: "figures",
    looks: "one document of published figures with `source`, `metric` and `rows` (truth/external)",
    levels: &["error"],
    joined: false,
    rows: |file| {
        let document = file.documents.first().filter(|document| document["metric"].is_string())?;
        let number = |(index, row): (usize, &Value)| {
            let mut row = row.clone();
            row["index"] = index.into();
            row
        };
        Some(document["rows"].as_array()?.iter().enumerate().map(number).collect())
    },
    score: |file, row| score(file, row).into_iter().map(ExternalRow::into_score).collect(),
};

/// Scores a row of a file, whose `scored_as` says by which rules.
fn score(file: &Value, row: &Value) -> Vec<ExternalRow> {
    let index = row["index"].as_u64().unwrap_or(0);
    match file["scored_as"].as_str() {
        Some("vllm log") => vllm::score(index, row),
        Some("llama.cpp log") => llama_cpp::score_log(index, row),
        Some("llama.cpp table") => llama_cpp::score_cell(index, row),
        Some("megatron-bridge") => bridge::score(index, row),
        Some("simumax") => simumax::score(file["card"].as_str().unwrap_or_default(), row),
        _ => {
            let why = file["expected_skip"].as_str().unwrap_or("the file names no rules (`scored_as`)");
            vec![ExternalRow::Skipped { row: format!("row {index}"), skipped: why.into() }]
        }
    }
}

/// Bytes of a number of MiB as logs print them.
fn mebibytes(value: &Value) -> Option<u64> {
    let number = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok())?;
    (number >= 0.0).then(|| (number * 1_048_576.0).round() as u64)
}

fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())
}
