//! Which optimizer, stepping how.

mod facts;

use serde::{Deserialize, Serialize};

use crate::dtype::DType;

/// An optimizer and how it steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Optimizer {
    /// Which one.
    pub kind: OptimizerKind,
    /// How a step runs.
    pub implementation: Implementation,
    /// The rank that GaLore and APOLLO project gradients to.
    pub rank: u64,
    /// Whether 8-bit optimizers keep the state of embeddings in fp32, as transformers' Trainer tells bitsandbytes to.
    pub wide_embeddings: bool,
    /// Whether fp32 copies of the weights are stepped and copied back (apex, Megatron): they get their gradients in fp32,
    /// one by one, and the weights' own gradients go.
    pub master_weights: bool,
    /// The type adamw-anyprecision keeps its moments in [fp32]; all others follow the weights or have a type of their own.
    pub state: Option<DType>,
}

impl Default for Optimizer {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::AdamW,
            implementation: Implementation::Foreach,
            rank: 128,
            wide_embeddings: false,
            master_weights: false,
            state: None,
        }
    }
}

/// The optimizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[allow(missing_docs, reason = "the names are the optimizers' own")]
pub enum OptimizerKind {
    #[serde(rename = "adamw", alias = "adamw-torch")]
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
    #[serde(rename = "adamw8bit", alias = "adamw-8bit", alias = "adamw-bnb-8bit")]
    AdamW8bit,
    #[serde(rename = "paged-adamw8bit", alias = "paged-adamw-8bit")]
    PagedAdamW8bit,
    #[serde(rename = "adamw-bnb32")]
    AdamWBnb32,
    #[serde(rename = "paged-adamw32", alias = "paged-adamw-32bit", alias = "paged-adamw")]
    PagedAdamW32,
    #[serde(rename = "adam8bit", alias = "adam-8bit")]
    Adam8bit,
    #[serde(rename = "paged-adam8bit", alias = "paged-adam-8bit")]
    PagedAdam8bit,
    #[serde(rename = "paged-adam32", alias = "paged-adam-32bit", alias = "paged-adam")]
    PagedAdam32,
    #[serde(rename = "lion8bit", alias = "lion-8bit")]
    Lion8bit,
    #[serde(rename = "lion", alias = "lion32", alias = "lion-32bit")]
    Lion,
    #[serde(rename = "paged-lion8bit", alias = "paged-lion-8bit")]
    PagedLion8bit,
    #[serde(rename = "paged-lion32", alias = "paged-lion-32bit", alias = "paged-lion")]
    PagedLion32,
    #[serde(rename = "ademamix")]
    AdEMAMix,
    #[serde(rename = "ademamix8bit", alias = "ademamix-8bit")]
    AdEMAMix8bit,
    #[serde(rename = "paged-ademamix32", alias = "paged-ademamix-32bit")]
    PagedAdEMAMix32,
    #[serde(rename = "paged-ademamix8bit", alias = "paged-ademamix-8bit")]
    PagedAdEMAMix8bit,
    #[serde(rename = "lamb")]
    Lamb,
    #[serde(rename = "lamb8bit", alias = "lamb-8bit")]
    Lamb8bit,
    #[serde(rename = "muon")]
    Muon,
    #[serde(rename = "adabelief")]
    AdaBelief,
    #[serde(rename = "adam-mini")]
    AdamMini,
    #[serde(rename = "shampoo")]
    Shampoo,
    #[serde(rename = "galore-adamw", alias = "galore")]
    GaLoreAdamW,
    #[serde(rename = "apollo-adamw", alias = "apollo")]
    ApolloAdamW,
    #[serde(rename = "adamw-anyprecision", alias = "anyprecision")]
    AnyPrecision,
    #[serde(rename = "sparse-adam")]
    SparseAdam,
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
