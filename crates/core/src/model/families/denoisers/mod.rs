//! Models that take noise out of pictures, as diffusers has them. A config of diffusers has no `model_type`: its class is its type.

mod parts;
mod unet;
mod vae;

use super::Family;

/// All of them.
pub const ALL: &[&Family] = &[&unet::FAMILY, &vae::FAMILY];
