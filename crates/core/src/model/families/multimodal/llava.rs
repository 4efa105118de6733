//! LLaVA 1.5 and 1.6 (NeXT), and Pixtral as transformers stores it: a tower, two linears, a text model.

use super::parts::{FeatureLayers, Host, rejoined, resized_pixels, text_model, text_type, tied, two_linears};
use super::pixtral::Pixtral;
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::{Facts, ImageTokens, Liger};
use crate::model::families::vision::clip::ClipVision;
use crate::model::families::vision::siglip::SiglipVision;
use crate::model::op::{Activation, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// LLaVA.
pub const FAMILY: Family = Family {
    name: "LLaVA",
    model_types: &["llava"],
    facts: Facts {
        liger: Liger::NotSimulated,
        image_tokens: Some(ImageTokens::Patches),
        registration: &[&["k_proj", "v_proj", "q_proj", "o_proj"]],
        ..Facts::DEFAULT
    },
    build,
};

/// LLaVA-NeXT.
pub const NEXT: Family = Family { name: "LLaVA-NeXT", model_types: &["llava_next"], facts: Facts::DEFAULT, ..FAMILY };

/// The towers these models come with.
enum Tower {
    Clip(ClipVision),
    Siglip(SiglipVision),
    Pixtral(Pixtral),
}

impl Tower {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        Ok(match c.str_or("model_type", "clip_vision_model") {
            "clip_vision_model" => Self::Clip(ClipVision::read(c)?),
            "siglip_vision_model" => Self::Siglip(SiglipVision::read(c)?),
            "pixtral" => Self::Pixtral(Pixtral::read(c)?),
            _ => return Err(c.refuse("model_type", "clip_vision_model, siglip_vision_model or pixtral")),
        })
    }

    /// All its hidden states, which the code asks for.
    fn hidden_states(&self, g: &mut Graph) -> Vec<Value> {
        match self {
            Self::Clip(clip) => {
                let pixels = resized_pixels(g, &clip.patches);
                g.module("vision_tower", |g| clip.model(g, &pixels, true)).hidden_states
            }
            Self::Siglip(siglip) => {
                let pixels = resized_pixels(g, &siglip.patches);
                g.module("vision_tower", |g| siglip.model(g, &pixels, true)).hidden_states
            }
            Self::Pixtral(pixtral) => g.module("vision_tower", |g| pixtral.model(g)),
        }
    }
}

struct Projector {
    layers: FeatureLayers,
    without_class: bool,
    activation: Activation,
    bias: bool,
    width: u64,
}

impl Projector {
    /// `[images, patches, width]`.
    fn run(&self, g: &mut Graph, tower: &Tower) -> Value {
        let states = tower.hidden_states(g);
        let picked = self.layers.pick(g, &states, self.without_class);
        g.module("multi_modal_projector", |g| two_linears(g, &picked, self.width, self.activation, self.bias))
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let tower = Tower::read(&c.section("vision_config"))?;
    let text = text_model(&c.section("text_config"), text_type(c, "llama"))?;
    let width = text.vocabulary().width;
    let projector = Projector {
        layers: FeatureLayers::read(c, -2)?,
        without_class: c.str_or("vision_feature_select_strategy", "default") == "default",
        activation: read::activation(c, "projector_hidden_act", "gelu")?,
        bias: c.flag("multimodal_projector_bias", true)?,
        width,
    };
    let host = Host { text: text.as_ref(), module: "language_model", tied: tied(c, false)? };
    let given = g.inputs.images.is_some();
    let next = c.model_type() == "llava_next";
    host.run(g, task, given, |g| {
        let features = projector.run(g, &tower);
        if next { pack(g, &features) } else { rejoined(g, &features) }
    });
    Ok(())
}

/// NeXT: each image is a small whole and a grid of tiles; rows of the grid end in a learned newline.
///
/// The tiles of a sample are taken as the squarest grid, uncropped, because a batch does not say how an image was cut.
fn pack(g: &mut Graph, features: &Value) -> Value {
    let (count, patches, width) = (features.size(0), features.size(1), features.size(2));
    let newline = g.parameter("image_newline", [width], Role::Other);
    let newline = g.read(newline, [width]);
    let images = if count.is_multiple_of(g.inputs.batch.max(1)) { g.inputs.batch.clamp(1, count) } else { 1 };
    let (tiles, side) = (count / images, patches.isqrt());
    let parts = g.split(features, 0, &vec![tiles; images.min(1 << 16) as usize]);
    let mut packed = Vec::new();
    for part in &parts {
        let base = g.slice(part, 0, 0, 1);
        let base = g.squeeze(&base, 0);
        if tiles == 1 || side * side != patches {
            let end = g.view(&newline, [1, width]);
            packed.push(g.cat(&[&base, &end], 0));
            continue;
        }
        let rows = (1..=(tiles - 1).isqrt()).rev().find(|rows| (tiles - 1).is_multiple_of(*rows)).unwrap_or(1);
        let (height, across) = (rows * side, (tiles - 1) / rows * side);
        let mut grid = g.slice(part, 0, 1, tiles - 1);
        grid = g.view(&grid, [rows, (tiles - 1) / rows, side, side, width]);
        grid = g.permute(&grid, &[4, 0, 2, 1, 3]);
        grid = g.contiguous(&grid);
        grid = g.view(&grid, [width, height, across]);
        let ends = g.view(&newline, [width, 1, 1]);
        let ends = g.expand(&ends, [width, height, 1]);
        grid = g.cat(&[&grid, &ends], -1);
        grid = g.view(&grid, [width, height * (across + 1)]);
        grid = g.transpose(&grid, 0, 1);
        packed.push(g.cat(&[&base, &grid], 0));
    }
    g.cat(&packed.iter().collect::<Vec<_>>(), 0)
}
