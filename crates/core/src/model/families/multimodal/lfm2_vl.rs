//! LFM2-VL: SigLIP 2 over patches of any shape, squares of patches joined, the LFM2 text model.

use super::parts::{Host, dimension, tied};
use crate::model::Family;
use crate::model::blocks::{encoder, read};
use crate::model::facts::Facts;
use crate::model::families::decoders::decoder::Decoder;
use crate::model::families::hybrids::lfm2::Lfm2;
use crate::model::families::vision::clip::Tower;
use crate::model::op::{Activation, Input, Norm, Op, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// LFM2-VL.
pub const FAMILY: Family = Family {
    name: "LFM2-VL",
    model_types: &["lfm2_vl"],
    facts: Facts { registration: &[&["layer_norm1", "self_attn", "layer_norm2", "mlp"]], ..Facts::DEFAULT },
    build,
};

struct Features {
    tower: Tower,
    patch: u64,
    channels: u64,
    /// Learned positions, a square.
    positions: u64,
    /// Patches an image is padded to.
    most: u64,
    /// Patches on each side of the square that becomes one token.
    factor: u64,
    norm: bool,
    activation: Activation,
    bias: bool,
    middle: u64,
    width: u64,
}

impl Features {
    /// Patches down and across of each image.
    fn grid(&self, g: &Graph) -> (u64, [u64; 2]) {
        let whole = |pixels: u64| (pixels / self.patch / self.factor).max(1) * self.factor;
        let side = self.most.isqrt() / self.factor * self.factor;
        let own = [side.max(self.factor); 2];
        match g.inputs.images {
            Some(images) if images.height > 0 && images.width > 0 => {
                (images.count.max(1), [whole(images.height), whole(images.width)])
            }
            given => (given.map_or(1, |images| images.count.max(1)), own),
        }
    }

    /// `[tokens, width]` of all images.
    fn model(&self, g: &mut Graph) -> Value {
        let (images, [height, width]) = self.grid(g);
        let most = self.most.max(height.saturating_mul(width));
        let last = g.module("vision_tower", |g| self.vision(g, images, [height, width], most));
        let mut tokens = Vec::new();
        for image in 0..images.min(1 << 16) {
            let mut rows = g.slice(&last, 0, image, 1);
            rows = g.slice(&rows, 1, 0, height * width);
            rows = g.reshape(&rows, [1, height, width, self.tower.hidden]);
            let projected = g.module("multi_modal_projector", |g| self.project(g, &rows));
            let count = projected.size(1) * projected.size(2);
            tokens.push(g.reshape(&projected, [count, self.width]));
        }
        g.cat(&tokens.iter().collect::<Vec<_>>(), 0)
    }

    fn vision(&self, g: &mut Graph, images: u64, [height, width]: [u64; 2], most: u64) -> Value {
        let hidden = g.module("embeddings", |g| {
            let pixels = g.input(Input::Pixels, [images, most, self.channels * self.patch * self.patch]);
            let pixels = g.to_model_type(&pixels);
            let patches = g.linear("patch_embedding", &pixels, self.tower.hidden, true);
            let positions = self.positions(g, images, [height, width], most);
            g.add(&patches, &positions)
        });
        let mask = encoder::full_mask(g, &hidden);
        let last = self.tower.encode(g, &hidden, Some(&mask), |_| ());
        g.norm("post_layernorm", &last, Norm::Layer, true)
    }

    /// The learned square resampled to each image, in one padded tensor.
    fn positions(&self, g: &mut Graph, images: u64, [height, width]: [u64; 2], most: u64) -> Value {
        let (side, channels) = (self.positions.isqrt(), self.tower.hidden);
        let table = g.parameter("position_embedding.weight", [self.positions, channels], Role::Embedding);
        let mut table = g.read(table, [self.positions, channels]);
        let all = g.fill_like(&table, [images, most, channels]);
        if side * side != self.positions {
            g.fail(format!("{} positions are no square", self.positions));
            return all;
        }
        table = g.reshape(&table, [side, side, channels]);
        table = g.permute(&table, &[2, 0, 1]);
        table = g.unsqueeze(&table, 0);
        for image in 0..images.min(1 << 16) {
            let mut resized = g.run(Op::Interpolate, &[&table], [1, channels, height, width]);
            resized = g.reshape(&resized, [channels, height * width]);
            resized = g.transpose(&resized, 0, 1);
            let mut place = g.slice(&all, 0, image, 1);
            place = g.squeeze(&place, 0);
            g.assign(&place, 0, 0, &resized);
        }
        all
    }

    fn project(&self, g: &mut Graph, rows: &Value) -> Value {
        let (height, width, channels, factor) = (rows.size(1), rows.size(2), rows.size(3), self.factor);
        let mut x = g.reshape(rows, [1, height, width / factor, channels * factor]);
        x = g.permute(&x, &[0, 2, 1, 3]);
        x = g.reshape(&x, [1, width / factor, height / factor, channels * factor * factor]);
        x = g.permute(&x, &[0, 2, 1, 3]);
        if self.norm {
            x = g.norm("layer_norm", &x, Norm::Layer, true);
        }
        x = g.linear("linear_1", &x, self.middle, self.bias);
        x = g.activation(self.activation, &x);
        g.linear("linear_2", &x, self.width, self.bias)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let vision = c.section("vision_config");
    let text = Lfm2::read(&c.section("text_config"))?;
    let factor = dimension(c, &["downsample_factor"], 2)?;
    let tokens = dimension(c, &["max_image_tokens"], 256)?;
    let features = Features {
        tower: Tower::read(&vision, [768, 12, 3072], "gelu_pytorch_tanh")?,
        patch: dimension(&vision, &["patch_size"], 16)?,
        channels: dimension(&vision, &["num_channels"], 3)?,
        positions: dimension(&vision, &["num_patches"], 256)?,
        most: tokens.saturating_mul(factor).saturating_mul(factor),
        factor,
        norm: c.flag("projector_use_layernorm", true)?,
        activation: read::activation(c, "projector_hidden_act", "gelu")?,
        bias: c.flag("projector_bias", true)?,
        middle: dimension(c, &["projector_hidden_size"], 2560)?,
        width: text.vocabulary().width,
    };
    let shared = c.flag("tie_embedding", tied(c, true)?)?;
    let host = Host { text: &text, module: "language_model", tied: shared };
    let given = g.inputs.images.is_some();
    host.run(g, task, given, |g| features.model(g));
    Ok(())
}
