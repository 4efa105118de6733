//! Adapters: which few parameters are trained beside a frozen model, and where PEFT puts them.
//!
//! | module | what is in it |
//! |---|---|
//! | [`lora`] | LoRA's options, and reading them from `adapter_config.json` |
//! | [`targets`] | which modules and parameters a list, a regular expression or a default picks |
//! | [`layout`] | the tensors that PEFT makes for them |
//! | [`others`] | IA³, OFT, VeRA, prompt and prefix tuning: their trainable parameters |
//! | [`defaults`] | PEFT's defaults per `model_type` |
//!
//! The rules are those of PEFT 0.21.2 on transformers 5.

pub mod defaults;
pub mod layout;
pub mod lora;
pub mod others;
pub mod targets;

pub use layout::{AdaptedKind, AdaptedModule, AdapterLayout, TrainableTensor};
pub use lora::{LoraBias, LoraPlan, TaskType};
pub use others::{Ia3Plan, OftPlan, OtherAdapter, PrefixPlan, PromptPlan, VeraPlan};
pub use targets::Targets;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Fault, PlanError};
use crate::dtype::DType;

/// An adapter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(tag = "method", rename_all = "kebab-case")]
pub enum AdapterPlan {
    /// LoRA and its variants.
    Lora(LoraPlan),
    /// One of the other methods: counted, not simulated.
    Other(OtherAdapter),
}

impl AdapterPlan {
    /// Reads PEFT's `adapter_config.json`; keys without effect on memory are returned by name.
    pub fn from_adapter_config(config: &Value) -> Result<(Self, Vec<String>), PlanError> {
        let kind = config.get("peft_type").filter(|kind| !kind.is_null());
        let Some(kind) = kind else {
            return Err(Fault::new("adapter", "it is no adapter_config.json: it has no peft_type")
                .or("give the file that PEFT's save_pretrained writes")
                .into());
        };
        match kind.as_str() {
            None => Err(bad("peft_type", kind, "a name such as LORA")),
            Some("LORA") => {
                let (plan, ignored) = LoraPlan::from_adapter_config(config)?;
                Ok((Self::Lora(plan), ignored))
            }
            Some(_) => Ok((Self::Other(OtherAdapter::from_adapter_config(config)?), Vec::new())),
        }
    }
}

/// The type adapters are held in when the plan leaves it to PEFT: fp32 for 16-bit and 8-bit models, else the model's
/// (`autocast_adapter_dtype=True`).
pub fn default_adapter_dtype(weights: DType) -> DType {
    if weights.size() < 4 { DType::F32 } else { weights }
}

fn bad(key: &str, value: impl std::fmt::Display, expected: &str) -> PlanError {
    Fault::value(key, value, expected).into()
}
