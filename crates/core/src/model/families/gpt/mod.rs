//! Decoders of the GPT generation: LayerNorm, learned positions, ALiBi or early rotary, plain MLPs.

use super::Family;

mod alibi;
pub mod bloom;
pub mod codegen;
mod early;
pub mod falcon;
pub mod gpt2;
pub mod gpt_bigcode;
pub mod gpt_neo;
pub mod gpt_neox;
pub mod gptj;
pub mod mpt;
pub mod opt;

/// Every family in this folder.
pub const ALL: &[&Family] = &[
    &gpt2::FAMILY,
    &gpt_neo::FAMILY,
    &gptj::FAMILY,
    &codegen::FAMILY,
    &gpt_neox::FAMILY,
    &gpt_bigcode::FAMILY,
    &opt::FAMILY,
    &bloom::FAMILY,
    &falcon::FAMILY,
    &mpt::FAMILY,
];
