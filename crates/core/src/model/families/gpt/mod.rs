//! Decoders of the GPT generation: LayerNorm, learned positions, ALiBi or early rotary, plain MLPs.

use super::Family;

pub mod gpt2;

/// Every family in this folder.
pub const ALL: &[&Family] = &[&gpt2::FAMILY];
