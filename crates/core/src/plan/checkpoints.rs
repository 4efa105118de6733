//! Which layers are recomputed in backward, and how.

use serde::{Deserialize, Serialize};

/// How layers are recomputed, where they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointOptions {
    /// Every how many layers one is recomputed; the others keep what they saved.
    pub every: u32,
    /// Whether a backward pass runs inside the backward pass (`use_reentrant=True`).
    pub reentrant: bool,
    /// Whether the input of a recomputed layer waits on the host.
    pub offload: bool,
    /// Which results are kept instead of being recomputed.
    pub selective: Option<Selective>,
}

/// What a selective checkpoint keeps (torch's `create_selective_checkpoint_contexts`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Selective {
    /// Every matrix product and every fused attention.
    Matmuls,
    /// Every second `mm` and every fused attention: torchtitan's choice.
    AlternateMatmuls,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        Self { every: 1, reentrant: false, offload: false, selective: None }
    }
}

impl CheckpointOptions {
    /// Whether layers run without a graph first, and backward runs them again as a whole.
    pub fn runs_nested(&self) -> bool {
        self.reentrant || self.offload
    }
}
