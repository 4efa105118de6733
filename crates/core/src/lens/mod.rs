//! Published formulas, each as its document states it, to be read beside the simulation.
//!
//! A lens is a small pure function that cites its source and gives its source's printed numbers; `docs/lenses.md` says
//! which printed numbers do not follow from the formula they stand beside. Lenses compute in floats as their sources do;
//! no total of the engine passes through here.
//!
//! | module | whose formula |
//! |---|---|
//! | [`rule_of_thumb`] | weights × 1.2, weights × 4 × 1.3 |
//! | [`components`] | weights, gradients, states and activations by one multiplier each |
//! | [`engines`] | DDP, ZeRO, FSDP and Megatron by bytes per parameter |
//! | [`factors`] | activation factors, cushions and overheads |
//! | [`korthikanti`] | 34 + 5as/h per layer, 16 bytes per parameter |
//! | [`deepspeed`] | DeepSpeed's own estimators |
//! | [`megatron`] | Megatron-LM's theoretical memory report |
//! | [`accelerate`] | `accelerate estimate-memory` |

pub mod accelerate;
pub mod components;
pub mod deepspeed;
pub mod engines;
pub mod factors;
mod facts;
pub mod korthikanti;
pub mod megatron;
mod question;
pub mod rule_of_thumb;

use serde::Serialize;

pub use factors::Coefficients;
pub use facts::{Experts, Facts};
pub use question::{Adapter, EngineKind, Purpose, Question};

/// A GiB, as a float.
pub const GIB: f64 = (1u64 << 30) as f64;

/// The published formulas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Factors on the weights.
    RuleOfThumb,
    /// One multiplier per component.
    Components,
    /// Bytes per parameter, by training engine.
    Engines,
    /// Activation factors and cushions.
    Factors,
    /// The activation formula of Korthikanti et al. over ZeRO's bytes per parameter.
    Korthikanti,
    /// DeepSpeed's estimators of model states.
    Deepspeed,
    /// Megatron-LM's report.
    Megatron,
    /// `accelerate estimate-memory`.
    Accelerate,
}

impl Method {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::RuleOfThumb,
        Self::Components,
        Self::Engines,
        Self::Factors,
        Self::Korthikanti,
        Self::Deepspeed,
        Self::Megatron,
        Self::Accelerate,
    ];

    /// Its name, as flags spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::RuleOfThumb => "rule-of-thumb",
            Self::Components => "components",
            Self::Engines => "engines",
            Self::Factors => "factors",
            Self::Korthikanti => "korthikanti",
            Self::Deepspeed => "deepspeed",
            Self::Megatron => "megatron",
            Self::Accelerate => "accelerate",
        }
    }

    /// The formula in a few words.
    pub fn about(self) -> &'static str {
        match self {
            Self::RuleOfThumb => "weights x 1.2 to infer, x 4 x 1.3 to train",
            Self::Components => "weights, gradients, states, activations by one multiplier each",
            Self::Engines => "bytes per parameter by engine; ZeRO-3: 4 x largest layer + 18 P / N",
            Self::Factors => "activation factors, overheads and a fragmentation cushion",
            Self::Korthikanti => "16 P by ZeRO stage + sbhL (34 + 5as/h) + 4sbv + 2 P of buffers",
            Self::Deepspeed => "model states under ZeRO-2 and ZeRO-3; no activations",
            Self::Megatron => "18 (or 6 + 12/dp) bytes per parameter + activations of the first stage",
            Self::Accelerate => "model size x 4 (fp32) or x 2 (mixed); no activations",
        }
    }

    /// Where it is published.
    pub fn source(self) -> &'static str {
        match self {
            Self::RuleOfThumb => "Model VRAM Calculator, README",
            Self::Components => "GPU Memory Calculator (gpu_memory_calculator.py), README",
            Self::Engines => "GPU Memory Calculator for LLM Training (gpu-mem-calc), README",
            Self::Factors => "LLM/VLM GPU Memory Estimator (estimate_memory_budget.py), README",
            Self::Korthikanti => "LLMGPUMemEstimator, README; arXiv 2205.05198; arXiv 1910.02054",
            Self::Deepspeed => "DeepSpeed 0.19.8, estimate_zero2/3_model_states_mem_needs",
            Self::Megatron => "Megatron-LM d98e8a64, theoretical_memory_usage.py",
            Self::Accelerate => "accelerate 1.15.0, commands/estimate.py",
        }
    }
}

/// One term of a formula.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Term {
    /// What it stands for.
    pub name: &'static str,
    /// Bytes.
    pub bytes: f64,
}

/// What a formula says about one card.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// Whose formula.
    pub method: Method,
    /// Its terms.
    pub terms: Vec<Term>,
    /// What it leaves out or takes for granted.
    pub notes: Vec<String>,
}

impl Estimate {
    fn new(method: Method, terms: Vec<(&'static str, f64)>) -> Self {
        let terms = terms.into_iter().map(|(name, bytes)| Term { name, bytes }).collect();
        Self { method, terms, notes: Vec::new() }
    }

    fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// The sum of its terms, in bytes.
    pub fn total(&self) -> f64 {
        self.terms.iter().map(|term| term.bytes).sum()
    }
}

/// Why a formula has nothing to say.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Silent(pub String);

fn silent<T>(why: &str) -> Result<T, Silent> {
    Err(Silent(why.to_owned()))
}

/// What a formula says about a model and a run.
pub fn estimate(method: Method, facts: &Facts, question: &Question) -> Result<Estimate, Silent> {
    match method {
        Method::RuleOfThumb => rule_of_thumb::estimate(facts, question),
        Method::Components => components::estimate(facts, question),
        Method::Engines => engines::estimate(facts, question),
        Method::Factors => factors::estimate(facts, question),
        Method::Korthikanti => korthikanti::estimate(facts, question),
        Method::Deepspeed => deepspeed::estimate(facts, question),
        Method::Megatron => megatron::estimate(facts, question),
        Method::Accelerate => accelerate::estimate(facts, question),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every lens answers the plainest question, and its terms are finite and not negative.
    #[test]
    fn every_lens_answers_or_says_why_not() {
        let facts = Facts::of_sizes(7_000_000_000, 32, 4096, 32, 32_000);
        let question = Question { zero: 3, dp: 8, ..Question::default() };
        for method in Method::ALL {
            let estimate = estimate(method, &facts, &question).unwrap();
            assert!(estimate.total() > 0.0, "{}", method.name());
            assert!(estimate.terms.iter().all(|term| term.bytes.is_finite() && term.bytes >= 0.0), "{estimate:?}");
        }
        let infer = Question { purpose: Purpose::Infer, ..Question::default() };
        assert!(super::estimate(Method::Deepspeed, &facts, &infer).is_err());
    }
}
