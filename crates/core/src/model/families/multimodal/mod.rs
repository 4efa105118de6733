//! Language models that also see or hear.
//!
//! A batch without images or audio runs the language model alone, as transformers does; the towers are then declared
//! but not run.

use super::Family;

pub mod blip2;
pub mod gemma3;
pub mod gemma3n;
mod gemma3n_audio;
mod gemma3n_text;
pub mod gemma4;
mod gemma4_audio;
mod gemma4_text;
mod gemma4_vision;
pub mod idefics3;
pub mod internvl;
pub mod lfm2_vl;
pub mod llama4;
pub mod llava;
pub mod mistral3;
pub mod mllama;
mod mllama_vision;
mod mobilenet_v5;
pub mod paligemma;
mod parts;
mod phi4_audio;
pub mod phi4_multimodal;
mod pixtral;
pub mod qwen2_5_vl;
pub mod qwen2_vl;
pub mod qwen3_5;
pub mod qwen3_vl;
mod qwen_text;
mod qwen_vision;
pub mod voxtral;

/// Every family in this folder.
pub const ALL: &[&Family] = &[
    &qwen2_5_vl::FAMILY,
    &qwen2_vl::FAMILY,
    &qwen3_vl::FAMILY,
    &llava::FAMILY,
    &mistral3::FAMILY,
    &internvl::FAMILY,
    &paligemma::FAMILY,
    &idefics3::FAMILY,
    &voxtral::FAMILY,
    &gemma3::FAMILY,
    &gemma3n::FAMILY,
    &gemma4::FAMILY,
    &mllama::FAMILY,
    &blip2::FAMILY,
    &phi4_multimodal::FAMILY,
    &qwen3_5::FAMILY,
    &lfm2_vl::FAMILY,
    &llama4::FAMILY,
];
