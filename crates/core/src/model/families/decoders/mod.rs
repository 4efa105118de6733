//! Dense decoders of the Llama generation: RMSNorm, rotary positions, gated MLPs, grouped heads.

use super::Family;
use crate::model::{Config, ModelError};
use decoder::Decoder;

pub(crate) mod decoder;
pub mod gemma;
pub mod gemma3;
pub mod llama;

/// Every family in this folder.
pub const ALL: &[&Family] =
    &[&llama::FAMILY, &llama::MISTRAL, &llama::QWEN2, &llama::QWEN3, &gemma::FAMILY, &gemma3::FAMILY];

/// The text model that a multimodal model holds, by the `model_type` of its text config.
#[allow(dead_code)]
pub(crate) fn text_model(c: &Config<'_>, model_type: &str) -> Result<Box<dyn Decoder>, ModelError> {
    Ok(match model_type {
        "llama" => Box::new(llama::Llama::read(c)?),
        "mistral" => Box::new(llama::Llama::read_mistral(c)?),
        "qwen2" => Box::new(llama::Llama::read_qwen2(c)?),
        "qwen3" => Box::new(llama::Llama::read_qwen3(c)?),
        "gemma" => Box::new(gemma::Gemma::read(c)?),
        "gemma3_text" => Box::new(gemma3::Gemma3::read(c)?),
        _ => return Err(c.refuse("model_type", "a text model vramcast knows (llama, mistral, qwen2, gemma, …)")),
    })
}
