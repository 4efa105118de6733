//! Dense decoders of the Llama generation: RMSNorm, rotary positions, gated MLPs, grouped heads.

use super::Family;

pub mod llama;

/// Every family in this folder.
pub const ALL: &[&Family] = &[&llama::FAMILY];
