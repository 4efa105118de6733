//! Text encoders: BERT and its relatives.

use super::Family;

/// Every family in this folder.
pub const ALL: &[&Family] = &[];
