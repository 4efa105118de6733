//! Which cards hold it.

use serde::Serialize;

use crate::plan::Gpu;

/// Whether a card is large enough.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Verdict {
    /// The card.
    pub gpu: String,
    /// What it offers, in bytes.
    pub memory: u64,
    /// Whether the process fits.
    pub fits: bool,
    /// What is left (negative: what is missing), in bytes.
    pub headroom: i64,
    /// How full it is, in percent.
    pub utilization: f64,
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Judges one card.
pub fn judge(card: &Gpu, process: u64) -> Verdict {
    Verdict {
        gpu: card.name.clone(),
        memory: card.memory,
        fits: process <= card.memory,
        headroom: signed(card.memory).saturating_sub(signed(process)),
        utilization: if card.memory == 0 { 0.0 } else { (1000.0 * process as f64 / card.memory as f64).round() / 10.0 },
    }
}
