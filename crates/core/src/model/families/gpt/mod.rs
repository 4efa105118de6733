//! Decoders of the GPT generation: LayerNorm, learned positions, ALiBi or early rotary, plain MLPs.

use super::Family;

mod alibi;
pub mod bloom;
pub mod falcon;
pub mod gpt2;
pub mod gpt_neox;

/// Every family in this folder.
pub const ALL: &[&Family] = &[&gpt2::FAMILY, &gpt_neox::FAMILY, &bloom::FAMILY, &falcon::FAMILY];
