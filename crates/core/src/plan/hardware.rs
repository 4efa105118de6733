//! Cards.

use serde::{Deserialize, Serialize};

/// A card: what it offers, and what of it decides kernels and workspaces.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Its name, as people type it.
    pub name: String,
    /// What the driver offers to programs, in bytes.
    pub memory: u64,
    /// CUDA compute capability times ten (90 for Hopper); absent for other makers.
    #[serde(default)]
    pub capability: Option<u32>,
    /// Streaming multiprocessors.
    #[serde(default)]
    pub multiprocessors: Option<u64>,
    /// Threads a multiprocessor can hold.
    #[serde(default)]
    pub threads_per_multiprocessor: Option<u64>,
}

impl Gpu {
    /// The card of the recorded runs: 143,771 MiB by its driver (truth/ledger/h200.jsonl).
    pub fn h200() -> Self {
        Self {
            name: "H200".into(),
            memory: 143_771 << 20,
            capability: Some(90),
            multiprocessors: Some(132),
            threads_per_multiprocessor: Some(2048),
        }
    }
}
