//! Gemma 4: a text model with per-layer embeddings, shared keys and values, wider heads in its full layers and, in one
//! size, experts beside the MLP; a vision tower, and in the small sizes an audio tower.

use super::gemma4_audio::Audio;
use super::gemma4_text::Gemma4Text;
use super::gemma4_vision::Vision;
use super::parts::{images, tied, tower};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::head::causal_lm_head_named;
use crate::model::facts::{Facts, ImageTokens, Liger, VllmFacts};
use crate::model::families::decoders::gemma3::soft_cap;
use crate::model::op::{Binary, Input, Norm, Op, Reduction, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Gemma 4.
pub const FAMILY: Family = Family {
    name: "Gemma 4",
    model_types: &["gemma4"],
    facts: Facts {
        liger: Liger::NotSimulated,
        lora: &[r".*language_model\..*\.(q_proj|v_proj)"],
        scaled_embedding: true,
        registration: &[
            &["ffw_layer_1", "ffw_layer_2", "pre_layer_norm", "post_layer_norm"],
            &["linear_start", "linear_end", "depthwise_conv1d", "pre_layer_norm", "conv_norm"],
            &["q_proj", "q_norm", "k_norm", "k_proj", "v_proj", "o_proj"],
        ],
        tasks: super::ALSO_CAUSAL,
        image_tokens: Some(ImageTokens::Alone),
        vllm: VllmFacts { plain_towers: true, all_keys: true, gelu_experts: true, ..VllmFacts::TRITON },
        ..Facts::DEFAULT
    },
    build,
};

/// Its text model on its own.
pub const TEXT: Family = Family {
    name: "Gemma 4 (text)",
    model_types: &["gemma4_text"],
    facts: Facts { lora: &[], tasks: super::ONLY_CAUSAL, ..FAMILY.facts },
    ..FAMILY
};

struct Gemma4 {
    text: Gemma4Text,
    vision: Option<Vision>,
    audio: Option<Audio>,
}

impl Gemma4 {
    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let (image_mask, video_mask, audio_mask) = (g.compare(&ids), g.compare(&ids), g.compare(&ids));
        let mut any = g.binary(Binary::Max, &image_mask, &video_mask);
        any = g.binary(Binary::Max, &any, &audio_mask);
        let padded = {
            let copy = g.unary(Unary::Clone, &ids);
            g.run(Op::Where, &[&any, &copy, &copy], ids.shape())
        };
        let mut embeddings = g.module("language_model", |g| self.text.embed(g, &padded));
        // The embeddings with padding where pictures and sounds stand are made for a case that does not occur.
        let _padded_embeddings = self.text.has_layer_inputs().then(|| {
            let mask = g.unsqueeze(&any, -1);
            g.run(Op::Where, &[&mask, &embeddings, &embeddings], embeddings.shape())
        });
        let layer_inputs = g.module("language_model", |g| self.text.embed_per_layer(g, &padded));
        let seen = self.see(g, &image_mask, &mut embeddings);
        let heard = self.hear(g, &audio_mask, &mut embeddings);
        let masks = self.text.masks(g, seen.is_some());
        let hidden = g.module("language_model", |g| self.text.model(g, &embeddings, layer_inputs.as_ref(), &masks));
        let kept: Vec<&Value> = seen.iter().chain(&heard).collect();
        if !kept.is_empty() {
            g.run(Op::Return, &kept, []);
        }
        hidden
    }

    fn see(&self, g: &mut Graph, mask: &Value, embeddings: &mut Value) -> Option<Value> {
        let vision = self.vision.as_ref()?;
        let given = g.inputs.images.is_some();
        let features = tower(g, given, |g| {
            let patches = g.module("vision_tower", |g| vision.model(g));
            g.module("embed_vision", |g| self.project(g, &patches))
        })?;
        let images = images(g);
        let parts = g.split(&features, 0, &vec![features.size(0) / images; images.min(1 << 16) as usize]);
        let mut joined = g.cat(&parts.iter().collect::<Vec<_>>(), 0);
        joined = g.type_as(&joined, embeddings);
        place(g, mask, embeddings, &joined);
        Some(joined)
    }

    fn hear(&self, g: &mut Graph, mask: &Value, embeddings: &mut Value) -> Option<Value> {
        let audio = self.audio.as_ref()?;
        let given = g.inputs.audio_frames.is_some();
        let features = tower(g, given, |g| {
            let frames = g.module("audio_tower", |g| audio.model(g));
            let projected = g.module("embed_audio", |g| self.project(g, &frames));
            // Frames that are padding are left out, which copies the others.
            let rows = [projected.size(0) * projected.size(1), projected.size(2)];
            let valid = g.fill(DType::Bool, [projected.size(0), projected.size(1)]);
            g.run(Op::Index, &[&projected, &valid], rows)
        })?;
        let cast = g.type_as(&features, embeddings);
        place(g, mask, embeddings, &cast);
        Some(features)
    }

    fn project(&self, g: &mut Graph, x: &Value) -> Value {
        let normed = g.norm("embedding_pre_projection_norm", x, Norm::RmsBare, false);
        g.linear("embedding_projection", &normed, self.text.vocabulary.width, false)
    }
}

/// Features put where their tokens stand; the code first reads those places to compare lengths.
fn place(g: &mut Graph, mask: &Value, embeddings: &mut Value, features: &Value) {
    let _count = g.reduce_all(Reduction::Sum, mask);
    let mask = g.unsqueeze(mask, -1);
    let mask = g.expand(&mask, embeddings.shape());
    let picked = g.run(Op::Index, &[embeddings, &mask], [features.shape().elements()]);
    drop(picked);
    *embeddings = g.masked_scatter(embeddings, &mask, features);
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    if c.model_type() == "gemma4_text" {
        let text = Gemma4Text::read(c)?;
        let head = Head { vocab: text.vocabulary.rows, tied: text.vocabulary.tied, softcap: text.softcap };
        head.run(g, task, "embed_tokens", |g| {
            let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
            let embeddings = text.embed(g, &ids);
            let layer_inputs = text.embed_per_layer(g, &ids);
            let masks = text.masks(g, false);
            text.model(g, &embeddings, layer_inputs.as_ref(), &masks)
        });
        return Ok(());
    }
    let text = Gemma4Text::read(&c.section("text_config"))?;
    let head = Head { vocab: text.vocabulary.rows, tied: tied(c, true)?, softcap: text.softcap };
    let vision = if c.has("vision_config") { Some(Vision::read(&c.section("vision_config"))?) } else { None };
    let audio = if c.has("audio_config") { Some(Audio::read(&c.section("audio_config"))?) } else { None };
    let gemma = Gemma4 { text, vision, audio };
    head.run(g, task, "language_model.embed_tokens", |g| gemma.model(g));
    Ok(())
}

struct Head {
    vocab: u64,
    tied: bool,
    softcap: bool,
}

impl Head {
    fn run(&self, g: &mut Graph, task: Task, table: &str, body: impl FnOnce(&mut Graph) -> Value) {
        if task == Task::Base {
            let hidden = body(g);
            g.run(Op::Return, &[&hidden], []);
            return;
        }
        let hidden = g.module("model", body);
        let tied = if self.tied { g.find(&format!("model.{table}.weight")) } else { None };
        let finish = |g: &mut Graph, logits| if self.softcap { soft_cap(g, logits) } else { logits };
        causal_lm_head_named(g, "lm_head", hidden, self.vocab, tied, false, finish);
    }
}
