//! Speech models.

use super::Family;

pub mod wav2vec2;
pub mod whisper;

/// Every family in this folder.
pub const ALL: &[&Family] = &[&whisper::FAMILY, &wav2vec2::FAMILY, &wav2vec2::HUBERT];
