//! PEFT's defaults: those of a `model_type`, which its family states, and those of all models.

use crate::model::facts::NameList;
use crate::model::families::facts;

/// The targets of LoRA (and of OFT) for a model type, where PEFT has any.
pub fn lora(model_type: &str) -> Option<NameList> {
    stated(facts(model_type).lora)
}

/// The targets of VeRA.
pub fn vera(model_type: &str) -> Option<NameList> {
    facts(model_type).vera.or_else(|| lora(model_type))
}

/// The targets of IA³ for a model type, and the feed-forward ones.
pub fn ia3(model_type: &str) -> Option<(NameList, NameList)> {
    let facts = facts(model_type);
    stated(facts.ia3).map(|targets| (targets, facts.ia3_feedforward))
}

fn stated(names: NameList) -> Option<NameList> {
    (!names.is_empty()).then_some(names)
}

/// The fused parameter's name.
pub const FUSED_NAME: &str = "gate_up_proj";

pub use crate::model::op::OUTPUT_EMBEDDINGS;
