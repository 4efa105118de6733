//! Which optimizer, stepping how.

use serde::{Deserialize, Serialize};

/// An optimizer and how it steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Optimizer {
    /// Which one.
    pub kind: OptimizerKind,
    /// How a step runs.
    pub implementation: Implementation,
}

impl Default for Optimizer {
    fn default() -> Self {
        Self { kind: OptimizerKind::AdamW, implementation: Implementation::Foreach }
    }
}

/// The optimizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[allow(missing_docs, reason = "the names are the optimizers' own")]
pub enum OptimizerKind {
    #[serde(rename = "adamw")]
    AdamW,
    #[serde(rename = "adam")]
    Adam,
    #[serde(rename = "amsgrad")]
    Amsgrad,
    #[serde(rename = "nadam")]
    Nadam,
    #[serde(rename = "sgd")]
    Sgd,
    #[serde(rename = "sgd-momentum")]
    SgdMomentum,
    #[serde(rename = "nesterov")]
    Nesterov,
    #[serde(rename = "adagrad")]
    Adagrad,
    #[serde(rename = "rmsprop")]
    Rmsprop,
    #[serde(rename = "adafactor")]
    Adafactor,
    #[serde(rename = "torch-adafactor")]
    TorchAdafactor,
    #[serde(rename = "adamw8bit")]
    AdamW8bit,
    #[serde(rename = "paged-adamw8bit")]
    PagedAdamW8bit,
    #[serde(rename = "adamw-bnb32")]
    AdamWBnb32,
    #[serde(rename = "lion8bit")]
    Lion8bit,
    #[serde(rename = "lion")]
    Lion,
    #[serde(rename = "muon")]
    Muon,
}

/// How a step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Implementation {
    /// All parameters at once, by lists (torch's default on CUDA).
    Foreach,
    /// One fused kernel.
    Fused,
    /// One parameter after the other.
    Forloop,
}
