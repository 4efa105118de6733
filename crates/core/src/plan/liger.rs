//! What Liger does to a model of a type: its family says it.

use super::PlanError;
use crate::model::facts::Liger;
use crate::model::families;

pub use crate::model::facts::LigerPatch;

/// What Liger does to a model of this type; `None`: nothing, it leaves the type alone.
pub fn patch(model_type: &str) -> Result<Option<LigerPatch>, PlanError> {
    match families::find(model_type).map(|family| family.facts.liger) {
        Some(Liger::Untouched) => Ok(None),
        Some(Liger::Patched(patch)) => Ok(Some(patch)),
        Some(Liger::NotSimulated) | None => Err(PlanError::Unsupported {
            what: format!("Liger on {model_type} models"),
            hint: "leave Liger out, or ask for a dense Llama, Mistral, Qwen, Gemma, Phi-3, OLMo or GLM-4".into(),
        }),
    }
}
