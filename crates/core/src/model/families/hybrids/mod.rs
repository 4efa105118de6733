//! State-space models, linear attention, and hybrids of them with attention.

use super::Family;

mod gated_delta;
pub mod granite_hybrid;
pub mod jamba;
pub mod lfm2;
pub mod mamba;
pub mod mamba2;
mod mamba2_mixer;
mod mamba_mixer;
pub mod nemotron_h;
pub mod qwen3_next;
pub mod recurrent_gemma;
pub mod rwkv;
mod state;
pub mod zamba2;

/// Every family in this folder.
pub const ALL: &[&Family] = &[
    &mamba::FAMILY,
    &mamba2::FAMILY,
    &jamba::FAMILY,
    &zamba2::FAMILY,
    &granite_hybrid::FAMILY,
    &nemotron_h::FAMILY,
    &lfm2::FAMILY,
    &qwen3_next::FAMILY,
    &recurrent_gemma::FAMILY,
    &rwkv::FAMILY,
];
