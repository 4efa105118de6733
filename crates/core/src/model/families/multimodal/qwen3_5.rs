//! Qwen3.5, dense or with experts: Qwen3-VL's tower without deepstack before a text model of gated delta layers.

use super::parts::{Head, placeholder_mask, tower, with_head};
use super::qwen2_vl::join_images;
use super::qwen3_vl::Vision;
use crate::model::Family;
use crate::model::facts::{Facts, ImageTokens, Liger};
use crate::model::families::decoders::decoder::{self, Decoder};
use crate::model::families::hybrids::qwen3_next::{Generation, Qwen3Next};
use crate::model::op::Input;
use crate::model::{Config, Graph, ModelError, Task};

/// Qwen3.5.
pub const FAMILY: Family = Family {
    name: "Qwen3.5",
    model_types: &["qwen3_5", "qwen3_5_moe"],
    facts: Facts {
        liger: Liger::NotSimulated,
        patch_side: Some(16),
        image_tokens: Some(ImageTokens::QWEN3),
        tasks: super::ALSO_CAUSAL,
        ..Facts::DEFAULT
    },
    build,
};

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let sparse = c.model_type() == "qwen3_5_moe";
    let generation = if sparse { Generation::ThreeFiveSparse } else { Generation::ThreeFive };
    let section = c.section("text_config");
    let text = Qwen3Next::read(&section, generation)?;
    if task == Task::CausalLm {
        return decoder::build(&section, task, g, &text);
    }
    let vision = Vision::read(&c.section("vision_config"), &[])?;
    let head = Head { vocab: text.vocabulary().rows, tied: c.flag("tie_word_embeddings", false)? };
    with_head(g, task, head, |g| {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let mut embeddings = g.module("language_model", |g| text.embed(g, &ids));
        let given = g.inputs.images.is_some();
        let features = tower(g, given, |g| g.module("visual", |g| vision.model(g)));
        let joined = features.as_ref().map(|(_, merged, _)| join_images(g, merged, &embeddings));
        if let Some(joined) = &joined {
            let mask = placeholder_mask(g, &ids);
            let _video_mask = placeholder_mask(g, &ids);
            embeddings = g.masked_scatter(&embeddings, &mask, joined);
        }
        g.module("language_model", |g| text.model(g, embeddings))
    });
    Ok(())
}
