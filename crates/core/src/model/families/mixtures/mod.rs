//! Mixtures of experts, with grouped or latent attention.

use super::Family;

pub mod deepseek_v2;
pub(crate) mod frame;
pub(crate) mod latent;
pub mod mixtral;
pub mod olmoe;
pub(crate) mod routing;

/// Every family in this folder.
pub const ALL: &[&Family] = &[&mixtral::FAMILY, &olmoe::FAMILY, &deepseek_v2::FAMILY];
