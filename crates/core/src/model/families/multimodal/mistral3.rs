//! Mistral Small 3.1 and later: Pixtral's tower, squares of patches merged, a Mistral text model.

use super::parts::{FeatureLayers, Host, dimension, text_model, text_type, tied, two_linears};
use super::pixtral::Pixtral;
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Norm};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Mistral 3.
pub const FAMILY: Family = Family {
    name: "Mistral 3",
    model_types: &["mistral3"],
    facts: Facts { registration: &[&["k_proj", "v_proj", "q_proj", "o_proj"]], ..Facts::DEFAULT },
    build,
};

struct Features {
    tower: Pixtral,
    layers: FeatureLayers,
    merge: u64,
    activation: Activation,
    bias: bool,
    width: u64,
}

impl Features {
    /// One row per merged square: `[tokens, width]`.
    fn model(&self, g: &mut Graph) -> Value {
        let (images, [height, width]) = self.tower.grid(g);
        let states = g.module("vision_tower", |g| self.tower.model(g));
        let picked = self.layers.pick(g, &states, false);
        let picked = g.squeeze(&picked, 0);
        let projected = g.module("multi_modal_projector", |g| {
            let mut x = g.norm("norm", &picked, Norm::Rms, false);
            x = g.module("patch_merger", |g| self.merged(g, &x, images, [height, width]));
            two_linears(g, &x, self.width, self.activation, self.bias)
        });
        drop((states, picked));
        let tokens = projected.size(0) / images;
        let parts = g.split(&projected, 0, &vec![tokens; images as usize]);
        g.cat(&parts.iter().collect::<Vec<_>>(), 0)
    }

    /// `unfold` of every image's grid, then one linear over each square.
    fn merged(&self, g: &mut Graph, x: &Value, images: u64, [height, width]: [u64; 2]) -> Value {
        let (merge, channels) = (self.merge, x.size(1));
        let (rows, columns) = (height / merge, width / merge);
        let parts = g.split(x, 0, &vec![height * width; images as usize]);
        let mut grids = Vec::new();
        for part in &parts {
            let grid = g.view(part, [height, width, channels]);
            let grid = g.permute(&grid, &[2, 0, 1]);
            // `unfold` copies every square of patches into a column.
            let kept = g.slice(&grid, 1, 0, rows * merge);
            let kept = g.slice(&kept, 2, 0, columns * merge);
            let mut squares = g.view(&kept, [channels, rows, merge, columns, merge]);
            squares = g.permute(&squares, &[0, 2, 4, 1, 3]);
            squares = g.contiguous(&squares);
            squares = g.view(&squares, [channels * merge * merge, rows * columns]);
            grids.push(g.transpose(&squares, 0, 1));
        }
        let joined = g.cat(&grids.iter().collect::<Vec<_>>(), 0);
        g.linear("merging_layer", &joined, channels, false)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let text = text_model(&c.section("text_config"), text_type(c, "mistral"))?;
    let features = Features {
        tower: Pixtral::read(&c.section("vision_config"))?,
        layers: FeatureLayers::read(c, -1)?,
        merge: dimension(c, &["spatial_merge_size"], 2)?,
        activation: read::activation(c, "projector_hidden_act", "gelu")?,
        bias: c.flag("multimodal_projector_bias", false)?,
        width: text.vocabulary().width,
    };
    let host = Host { text: text.as_ref(), module: "language_model", tied: tied(c, true)? };
    let given = g.inputs.images.is_some();
    host.run(g, task, given, |g| features.model(g));
    Ok(())
}
