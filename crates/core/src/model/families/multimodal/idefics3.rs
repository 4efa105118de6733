//! Idefics3 and the first SmolVLM: SigLIP's layers over images of any shape, squares of patches joined, Llama.

use super::parts::{Host, dimension, images, patches, text_model, text_type, tied};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::encoder;
use crate::model::facts::{Facts, Liger};
use crate::model::families::vision::Patches;
use crate::model::families::vision::clip::Tower;
use crate::model::op::{Input, Norm, Op, Reduction};
use crate::model::{Config, Graph, Inputs, ModelError, Task, Value};

/// Idefics3.
pub const FAMILY: Family = Family { name: "Idefics3", model_types: &["idefics3"], facts: Facts::DEFAULT, build };

/// SmolVLM.
pub const SMOLVLM: Family = Family {
    name: "SmolVLM",
    model_types: &["smolvlm"],
    facts: Facts { liger: Liger::NotSimulated, ..Facts::DEFAULT },
    ..FAMILY
};

struct Features {
    patches: Patches,
    tower: Tower,
    /// Patches on each side of the square that becomes one token.
    scale: u64,
    width: u64,
}

impl Features {
    /// `[images, tokens, width]`.
    fn model(&self, g: &mut Graph) -> Value {
        let count = images(g);
        let [height, width] = self.patches.image;
        let pixels = g.input(Input::Pixels, [count, self.patches.channels, height, width]);
        let mut pixels = g.to_model_type(&pixels);
        // Images that are all padding are left out, which copies the others.
        let real = {
            let empty = g.compare(&pixels);
            let flat = g.view(&empty, [count, self.patches.channels * height * width]);
            let filled = g.reduce(Reduction::Sum, &flat, -1, false);
            g.compare(&filled)
        };
        pixels = g.run(Op::Index, &[&pixels, &real], pixels.shape());
        pixels = g.contiguous(&pixels);
        let seen = g.fill(DType::Bool, [count, height, width]);
        let hidden = g.module("vision_model", |g| self.vision(g, &pixels));
        drop(seen);
        g.module("connector", |g| {
            let shuffled = self.shuffle(g, &hidden);
            g.linear("modality_projection.proj", &shuffled, self.width, false)
        })
    }

    fn vision(&self, g: &mut Graph, pixels: &Value) -> Value {
        let hidden = g.module("embeddings", |g| {
            let rows = self.patches.project(g, "patch_embedding", pixels, self.tower.hidden, true);
            let ids = g.fill(DType::I64, [pixels.size(0), rows.size(1)]);
            let positions = g.embedding("position_embedding", &ids, self.patches.count(), self.tower.hidden);
            g.add(&rows, &positions)
        });
        let mask = encoder::full_mask(g, &hidden);
        let last = self.tower.encode(g, &hidden, Some(&mask), |_| ());
        g.norm("post_layernorm", &last, Norm::Layer, true)
    }

    /// `pixel_shuffle`: squares of patches become channels.
    fn shuffle(&self, g: &mut Graph, hidden: &Value) -> Value {
        let (batch, count, channels) = (hidden.size(0), hidden.size(1), hidden.size(2));
        let (mut side, scale) = (count.isqrt(), self.scale);
        let mut whole = hidden.clone();
        if g.inputs == Inputs::inventory() {
            // The class's own sizes cannot be shuffled; what is counted does not run.
            side = (side / scale).max(1) * scale;
            whole = g.slice(hidden, 1, 0, side * side);
        } else if side * side != count || !side.is_multiple_of(scale) {
            g.fail(format!("{count} patches cannot be shuffled by {scale}"));
            return whole;
        }
        let count = side * side;
        let mut x = g.view(&whole, [batch, side, side, channels]);
        x = g.view(&x, [batch, side, side / scale, channels * scale]);
        x = g.permute(&x, &[0, 2, 1, 3]);
        x = g.reshape(&x, [batch, side / scale, side / scale, channels * scale * scale]);
        x = g.permute(&x, &[0, 2, 1, 3]);
        g.reshape(&x, [batch, count / (scale * scale), channels * scale * scale])
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let vision = c.section("vision_config");
    let text = text_model(&c.section("text_config"), text_type(c, "llama"))?;
    let features = Features {
        patches: patches(&vision, 224, 32)?,
        tower: Tower::read(&vision, [1152, 16, 3072], "gelu_pytorch_tanh")?,
        scale: dimension(c, &["scale_factor"], 2)?,
        width: text.vocabulary().width,
    };
    let host = Host { text: text.as_ref(), module: "text_model", tied: tied(c, false)? };
    let given = g.inputs.images.is_some();
    host.run(g, task, given, |g| features.model(g));
    Ok(())
}
