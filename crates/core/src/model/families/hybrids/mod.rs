//! State-space models, linear attention, and hybrids of them with attention.

use super::Family;

pub mod granite_hybrid;
pub mod jamba;
pub mod lfm2;
pub mod mamba;
pub mod mamba2;
mod mamba2_mixer;
mod mamba_mixer;
pub mod nemotron_h;
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
];
