//! Models that take noise out of pictures and videos, as diffusers has them. A config of diffusers has no `model_type`: its class is its type.

mod adaptive;
mod cogvideox;
mod flux;
mod flux2;
mod hunyuan;
mod hunyuan_vae;
mod ltx;
mod ltx_vae;
mod parts;
mod pipeline;
mod qwen_image;
mod sd3;
mod tiles;
mod unet;
mod vae;
mod wan;
mod wan_vae;

pub(crate) use pipeline::{encodes_nothing, has_autoencoder, has_unet, widens_half};
use serde_json::Value;

use super::Family;
use crate::model::Graph;

/// What a model is fed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pictures {
    /// Latents along height and width where the config does not say: what the pipeline's `__call__` has (diffusers 0.36).
    sides: [u64; 2],
    /// Pixels of a latent's side.
    pub(crate) pixels: u64,
    /// Pictures of a sample: one, or those of a video.
    pub(crate) frames: u64,
    /// Pictures from one latent to the next; the first one has its own.
    pub(crate) between: u64,
}

impl Pictures {
    /// Stills of so many latents a side.
    const fn stills(side: u64, pixels: u64) -> Self {
        Self { sides: [side, side], pixels, frames: 1, between: 1 }
    }

    /// Pixels along height and width that the model was made for.
    pub(crate) fn sides(&self, config: &Value) -> [u64; 2] {
        let both = config["sample_size"].as_u64();
        let [high, wide] = ["sample_height", "sample_width"].map(|key| config[key].as_u64().or(both));
        [high.unwrap_or(self.sides[0]), wide.unwrap_or(self.sides[1])].map(|side| side.saturating_mul(self.pixels))
    }

    /// Latents of a sample along time, height and width.
    fn latents(&self, g: &Graph) -> [u64; 3] {
        let [high, wide] = self.sides.map(|side| side.saturating_mul(self.pixels));
        let [count, height, width] = match g.inputs.images {
            Some(images) => [images.count / g.inputs.batch.max(1), images.height, images.width],
            None => [self.frames, high, wide],
        };
        [count.saturating_sub(1) / self.between + 1, (height / self.pixels).max(1), (width / self.pixels).max(1)]
    }
}

/// All of them, with what they are fed with.
const FED: &[(&Family, Pictures)] = &[
    (&cogvideox::FAMILY, cogvideox::PICTURES),
    (&flux::FAMILY, flux::PICTURES),
    (&flux2::FAMILY, flux2::PICTURES),
    (&hunyuan::FAMILY, hunyuan::PICTURES),
    (&hunyuan_vae::FAMILY, hunyuan_vae::PICTURES),
    (&ltx::FAMILY, ltx::PICTURES),
    (&ltx_vae::FAMILY, ltx_vae::PICTURES),
    (&qwen_image::FAMILY, qwen_image::PICTURES),
    (&sd3::FAMILY, sd3::PICTURES),
    (&unet::FAMILY, unet::PICTURES),
    (&vae::FAMILY, vae::PICTURES),
    (&wan::FAMILY, wan::PICTURES),
    (&wan_vae::FAMILY, wan_vae::PICTURES),
    (&wan_vae::QWEN, wan_vae::STILL),
];

/// All of them.
pub const ALL: &[&Family] = &{
    let mut all = [&pipeline::FAMILY; FED.len() + 1];
    let mut at = 0;
    while at < FED.len() {
        all[at] = FED[at].0;
        at += 1;
    }
    all
};

fn known(class: &str) -> Option<&'static (&'static Family, Pictures)> {
    FED.iter().find(|(family, _)| family.model_types.contains(&class))
}

/// Writes the class of a config of diffusers as its type, where it is one of these.
pub(crate) fn name(config: &mut Value) {
    let is_pipeline = pipeline::is_one(&config["_class_name"]);
    let class = config["_class_name"].as_str().filter(|class| is_pipeline || known(class).is_some()).map(str::to_owned);
    let (Some(class), Some(object)) = (class, config.as_object_mut()) else { return };
    object.entry("model_type").or_insert(class.into());
    if is_pipeline {
        object.values_mut().filter(|part| part.is_object()).for_each(name);
    }
}

/// Whether a config is of a whole pipeline.
pub(crate) fn is_pipeline(config: &Value) -> bool {
    pipeline::is_one(&config["model_type"])
}

/// The part of a pipeline that takes noise out; a part is itself.
pub(crate) fn denoiser(config: &Value) -> &Value {
    let part = ["unet", "transformer"].iter().map(|name| &config[*name]).find(|part| part.is_object());
    part.filter(|_| is_pipeline(config)).unwrap_or(config)
}

/// What a model of these is fed with.
pub(crate) fn pictures(config: &Value) -> Option<Pictures> {
    known(config["model_type"].as_str()?).map(|(_, pictures)| *pictures)
}
