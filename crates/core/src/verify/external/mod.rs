//! Public logs of serving engines against our budgets, and published training runs against our simulation.

pub mod bridge;
mod llama_cpp;
mod names;
pub mod simumax;
mod vllm;

use serde::Serialize;
use serde_json::Value;

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
    /// The relative error in percent.
    pub fn error(&self) -> Option<f64> {
        match self {
            Self::Scored { predicted, measured, .. } if *measured > 0 => {
                Some(100.0 * (*predicted as f64 - *measured as f64) / *measured as f64)
            }
            _ => None,
        }
    }
}

/// Scores a file of truth/external; files of other kinds give nothing.
pub fn score(name: &str, file: &Value) -> Vec<ExternalRow> {
    let rows = file["rows"].as_array().into_iter().flatten().enumerate();
    rows.flat_map(|(index, row)| match name {
        "vllm_logs" => vllm::score(index, row),
        "llamacpp_logs" => llama_cpp::score_log(index, row),
        "megatron_bridge" => bridge::score(index, row),
        "simumax_b200" | "simumax_a100" => simumax::score(name, row),
        "llamacpp_ananke" => llama_cpp::score_cell(index, row),
        _ => Vec::new(),
    })
    .collect()
}

/// Bytes of a number of MiB as logs print them.
fn mebibytes(value: &Value) -> Option<u64> {
    let number = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok())?;
    (number >= 0.0).then(|| (number * 1_048_576.0).round() as u64)
}

fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())
}
