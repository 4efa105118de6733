//! Language models that also see or hear.

use super::Family;

/// Every family in this folder.
pub const ALL: &[&Family] = &[];
