//! Gemma 3 with images: SigLIP, averaged to fewer tokens and projected, and the Gemma 3 text model.

use super::parts::{Head, dimension, placeholder_mask, resized_pixels, tied, tower, with_head};
use crate::model::Family;
use crate::model::facts::{Facts, ImageTokens, Liger, VllmFacts};
use crate::model::families::decoders::decoder::Decoder;
use crate::model::families::decoders::gemma3::Gemma3;
use crate::model::families::vision::siglip::SiglipVision;
use crate::model::op::{Input, Norm, Op, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Gemma 3.
pub const FAMILY: Family = Family {
    name: "Gemma 3",
    model_types: &["gemma3"],
    facts: Facts {
        liger: Liger::NotSimulated,
        image_tokens: Some(ImageTokens::Pooled(256)),
        scaled_embedding: true,
        positions: Some(131_072),
        scaled_positions: true,
        turns_windows: true,
        registration: &[&["layer_norm1", "self_attn", "layer_norm2", "mlp"]],
        tasks: super::ALSO_CAUSAL,
        vllm: VllmFacts::TRITON,
        ..Facts::DEFAULT
    },
    build,
};

struct Features {
    vision: SiglipVision,
    /// Tokens on each side of an image.
    side: u64,
    width: u64,
}

impl Features {
    /// `[images, tokens, width]`.
    fn model(&self, g: &mut Graph) -> Value {
        let pixels = resized_pixels(g, &self.vision.patches);
        let last = g.module("vision_tower", |g| self.vision.model(g, &pixels, false)).last;
        g.module("multi_modal_projector", |g| self.project(g, &last))
    }

    fn project(&self, g: &mut Graph, patches: &Value) -> Value {
        let (images, width) = (patches.size(0), patches.size(2));
        let weight = g.parameter("mm_input_projection_weight", [width, self.width], Role::Other);
        let [height, across] = [0, 1].map(|i| self.vision.patches.image[i] / self.vision.patches.patch[i]);
        let mut maps = g.transpose(patches, 1, 2);
        maps = g.reshape(&maps, [images, width, height, across]);
        maps = g.contiguous(&maps);
        let mut pooled = g.run(Op::AveragePool, &[&maps], [images, width, self.side, self.side]);
        pooled = g.view(&pooled, [images, width, self.side * self.side]);
        pooled = g.transpose(&pooled, 1, 2);
        let normed = g.norm("mm_soft_emb_norm", &pooled, Norm::RmsGemma, false);
        let weight = g.read(weight, [width, self.width]);
        let projected = g.matmul(&normed, &weight);
        g.type_as(&projected, patches)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let text = Gemma3::read(&c.section("text_config"))?;
    let vocabulary = text.vocabulary();
    let features = Features {
        vision: SiglipVision::read(&c.section("vision_config"))?,
        side: dimension(c, &["mm_tokens_per_image"], 256)?.isqrt(),
        width: vocabulary.width,
    };
    let head = Head { vocab: vocabulary.rows, tied: tied(c, true)? };
    with_head(g, task, head, |g| {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let mut embeddings = g.module("language_model", |g| text.embed(g, &ids));
        let given = g.inputs.images.is_some();
        let seen = tower(g, given, |g| features.model(g)).map(|seen| {
            let seen = g.type_as(&seen, &embeddings);
            let mask = placeholder_mask(g, &ids);
            embeddings = g.masked_scatter(&embeddings, &mask, &seen);
            seen
        });
        let masks = if seen.is_some() { text.image_masks(g) } else { text.masks(g) };
        let hidden = g.module("language_model", |g| text.model_with(g, embeddings.clone(), &masks));
        if let Some(seen) = &seen {
            g.run(Op::Return, &[seen], []);
        }
        hidden
    });
    Ok(())
}
