//! Image encoders and image-text towers.

use super::Family;

/// Every family in this folder.
pub const ALL: &[&Family] = &[];
