//! How the loss is computed.

use serde::{Deserialize, Serialize};

/// The loss of a language model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LossOptions {
    /// Which code computes it.
    pub kind: LossKind,
    /// Into how many pieces the sequence is cut, where it is.
    pub chunks: u64,
}

impl Default for LossOptions {
    fn default() -> Self {
        Self { kind: LossKind::Standard, chunks: 8 }
    }
}

/// Whose loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LossKind {
    /// transformers' own, on logits in fp32.
    Standard,
    /// Head and cross entropy a piece of the sequence at a time (torchtune's `CEWithChunkedOutputLoss`).
    Chunked,
    /// Cut cross entropy: no logits at all (cut-cross-entropy 25.1.1).
    CutCrossEntropy,
    /// TRL's trainers from 1.x: log-probabilities, entropy and accuracy from tiles of logits that are made again in
    /// backward (trl/kernels/chunked_logprob.py of 1.16).
    TrlFused,
}

impl LossKind {
    /// Whether it is simulated where an engine of this name spreads the model. Under DDP the head is the whole one, as on one
    /// card; TRL's own is known where parameters are sharded, too.
    pub fn runs_under(self, engine: &str) -> bool {
        match self {
            Self::Standard => true,
            Self::TrlFused => ["ddp", "fsdp1", "fsdp2", "deepspeed"].contains(&engine),
            Self::Chunked | Self::CutCrossEntropy => engine == "ddp",
        }
    }
}
