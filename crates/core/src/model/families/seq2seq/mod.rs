//! Encoder-decoder models for text.

use super::Family;

pub mod bart;
pub(crate) mod stack;
pub mod t5;

/// Every family in this folder.
pub const ALL: &[&Family] =
    &[&t5::FAMILY, &t5::MT5, &t5::UMT5, &bart::FAMILY, &bart::MBART, &bart::M2M_100, &bart::MARIAN, &bart::PEGASUS];
