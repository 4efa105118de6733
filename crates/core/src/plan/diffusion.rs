//! How a pipeline of diffusers makes pictures.

use serde::{Deserialize, Serialize};

use super::{Fault, Faults};
use crate::model::Model;
use crate::model::families::denoisers;

/// What is asked of a pipeline, or of its autoencoder alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Diffusion {
    /// Where parts are that do not run.
    pub offload: Offload,
    /// `guidance_scale` of 1 or less: the denoiser does not see every picture a second time, without its prompt.
    pub unguided: bool,
    /// `vae.enable_tiling()`.
    pub vae_tiling: bool,
    /// `vae.enable_slicing()`.
    pub vae_slicing: bool,
    /// `enable_attention_slicing()`.
    pub attention_slicing: bool,
}

/// Where the parts of a pipeline are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Offload {
    /// All of them on the card.
    #[default]
    None,
    /// `enable_model_cpu_offload()`: the one that runs is on the card, the others are on the host.
    Model,
    /// `enable_sequential_cpu_offload()`: all on the host; every module's own weights come over while it runs.
    Sequential,
}

impl Diffusion {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses what a model has no place for.
    pub(super) fn check(self, model: &Model, faults: &mut Faults) {
        let has_autoencoder = denoisers::has_autoencoder(model.config());
        let asked = [
            ("diffusion.offload", self.offload != Offload::None, model.is_pipeline(), "a whole pipeline"),
            ("diffusion.unguided", self.unguided, model.is_pipeline(), "a whole pipeline"),
            ("diffusion.vae_slicing", self.vae_slicing, has_autoencoder, "an autoencoder, or a pipeline,"),
            ("diffusion.vae_tiling", self.vae_tiling, has_autoencoder, "an autoencoder, or a pipeline,"),
            ("diffusion.attention_slicing", self.attention_slicing, denoisers::has_unet(model.config()), "a UNet"),
        ];
        for (path, _, _, needed) in asked.into_iter().filter(|(_, stated, fits, _)| *stated && !fits) {
            faults.add(Fault::no_effect(path, format!("on anything but {needed} of diffusers")));
        }
    }
}
