//! Mixtures of experts, with grouped or latent attention.

use super::Family;

/// Every family in this folder.
pub const ALL: &[&Family] = &[];
