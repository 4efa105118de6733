//! Image encoders and image-text towers.

use super::Family;

pub mod clip;
pub mod dinov2;
mod patches;
pub mod siglip;
pub mod vit;

pub(crate) use patches::Patches;

/// Every family in this folder.
pub const ALL: &[&Family] =
    &[&vit::FAMILY, &dinov2::FAMILY, &clip::FAMILY, &clip::TOWERS, &siglip::FAMILY, &siglip::TOWERS];
