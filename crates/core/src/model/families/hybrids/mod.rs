//! State-space models, linear attention, and hybrids of them with attention.

use super::Family;

/// Every family in this folder.
pub const ALL: &[&Family] = &[];
