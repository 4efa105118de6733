//! Mixtures of experts, with grouped or latent attention.

use super::Family;

pub mod dbrx;
pub mod deepseek_v2;
pub mod deepseek_v3;
pub mod deepseek_v32;
pub mod deepseek_v4;
pub mod ernie4_5_moe;
pub(crate) mod frame;
pub mod glm4_moe;
pub mod gpt_oss;
pub mod granitemoe;
pub(crate) mod latent;
pub mod llama4_text;
pub mod minimax_m2;
pub mod mixtral;
pub mod olmoe;
pub mod phimoe;
pub mod qwen2_moe;
pub mod qwen3_moe;
pub(crate) mod routing;

/// Every family in this folder.
pub const ALL: &[&Family] = &[
    &mixtral::FAMILY,
    &olmoe::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3_moe::FAMILY,
    &granitemoe::FAMILY,
    &phimoe::FAMILY,
    &ernie4_5_moe::FAMILY,
    &glm4_moe::FAMILY,
    &minimax_m2::FAMILY,
    &gpt_oss::FAMILY,
    &dbrx::FAMILY,
    &deepseek_v2::FAMILY,
    &deepseek_v3::FAMILY,
    &deepseek_v3::KIMI_K2,
    &deepseek_v3::GLM4_MOE_LITE,
    &deepseek_v32::FAMILY,
    &deepseek_v32::GLM,
    &deepseek_v4::FAMILY,
    &llama4_text::FAMILY,
];
