//! Encoder-decoder models for text.

use super::Family;

/// Every family in this folder.
pub const ALL: &[&Family] = &[];
