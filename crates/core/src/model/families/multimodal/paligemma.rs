//! PaliGemma 1 and 2: SigLIP, one linear, Gemma; the prefix with the image sees itself in both directions.

use super::parts::{Host, resized_pixels, text_model, text_type, tied};
use crate::model::Family;
use crate::model::facts::{Facts, Liger, VllmFacts};
use crate::model::families::vision::siglip::SiglipVision;
use crate::model::{Config, Graph, ModelError, Task};

/// PaliGemma.
pub const FAMILY: Family = Family {
    name: "PaliGemma",
    model_types: &["paligemma"],
    facts: Facts {
        liger: Liger::NotSimulated,
        positions: Some(8192),
        registration: &[&["layer_norm1", "self_attn", "layer_norm2", "mlp"]],
        vllm: VllmFacts::TRITON,
        ..Facts::DEFAULT
    },
    build,
};

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let vision = SiglipVision::read(&c.section("vision_config"))?;
    let text = text_model(&c.section("text_config"), text_type(c, "gemma"))?;
    let width = c.section("vision_config").size_or(&["projection_dim"], c.size_or(&["projection_dim"], 2048)?)?;
    let width = c.size_or(&["projection_dim"], width)?;
    let host = Host { text: text.as_ref(), module: "language_model", tied: tied(c, true)? };
    let given = g.inputs.images.is_some();
    host.run(g, task, given, |g| {
        let pixels = resized_pixels(g, &vision.patches);
        let output = g.module("vision_tower", |g| vision.model(g, &pixels, false));
        g.linear("multi_modal_projector.linear", &output.last, width, true)
    });
    Ok(())
}
