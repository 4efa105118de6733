//! Gemma 3n: MobileNet-v5 for images, a conformer for sound, and a text model with parallel streams.

use super::gemma3n_audio::Audio;
use super::gemma3n_text::Gemma3nText;
use super::mobilenet_v5;
use super::parts::{dimension, placeholder_mask, tied, tower};
use crate::model::Family;
use crate::model::blocks::head::causal_lm_head_named;
use crate::model::facts::Facts;
use crate::model::families::decoders::gemma3::soft_cap;
use crate::model::op::{Binary, Input, Norm, Op};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Gemma 3n.
pub const FAMILY: Family = Family {
    name: "Gemma 3n",
    model_types: &["gemma3n"],
    facts: Facts {
        scaled_embedding: true,
        positions: Some(32_768),
        scaled_positions: true,
        turns_windows: true,
        registration: &[&["q_proj", "q_norm", "k_proj", "v_proj", "k_norm", "o_proj"]],
        tasks: super::ALSO_CAUSAL,
        ..Facts::DEFAULT
    },
    build,
};

/// Its text model on its own.
pub const TEXT: Family = Family {
    name: "Gemma 3n (text)",
    model_types: &["gemma3n_text"],
    facts: Facts { tasks: super::ONLY_CAUSAL, ..FAMILY.facts },
    ..FAMILY
};

/// The way of one modality into the text model: tokens of its own, and features of its tower.
struct Embedder {
    name: &'static str,
    rows: u64,
    hidden: u64,
    width: u64,
}

impl Embedder {
    /// Tokens of this modality.
    fn tokens(&self, g: &mut Graph, ids: &Value) -> Value {
        g.module(self.name, |g| {
            let shifted = g.scalar(Binary::Sub, ids);
            let rows = g.embedding("embedding", &shifted, self.rows, self.hidden);
            let normed = g.norm("hard_embedding_norm", &rows, Norm::RmsWeightFirst, false);
            self.project(g, &normed)
        })
    }

    /// Features of the tower.
    fn features(&self, g: &mut Graph, x: &Value) -> Value {
        g.module(self.name, |g| {
            let normed = g.norm("soft_embedding_norm", x, Norm::RmsWeightFirst, false);
            self.project(g, &normed)
        })
    }

    fn project(&self, g: &mut Graph, normed: &Value) -> Value {
        let projected = g.linear("embedding_projection", normed, self.width, false);
        g.norm("embedding_post_projection_norm", &projected, Norm::RmsBare, false)
    }
}

struct Gemma3n {
    text: Gemma3nText,
    audio: Audio,
    see: Embedder,
    hear: Embedder,
    sound_tokens: u64,
}

impl Gemma3n {
    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let mut embeddings = g.module("language_model", |g| self.text.embed(g, &ids));
        let known = g.compare(&ids);
        let kept = g.run(Op::Where, &[&known, &ids, &ids], ids.shape());
        let layer_inputs = g.module("language_model", |g| self.text.embed_per_layer(g, &kept));
        let [_seen_tokens, _heard_tokens] = [&self.see, &self.hear].map(|embedder| {
            let mask = g.compare(&ids);
            let own = g.run(Op::Where, &[&mask, &ids, &ids], ids.shape());
            let tokens = embedder.tokens(g, &own);
            let tokens = g.type_as(&tokens, &embeddings);
            let mask = g.unsqueeze(&mask, -1);
            embeddings = g.run(Op::Where, &[&mask, &tokens, &embeddings], embeddings.shape());
            tokens
        });
        let (sees, hears) = (g.inputs.images.is_some(), g.inputs.audio_frames.is_some());
        let seen = tower(g, sees, |g| self.look(g)).map(|seen| self.place(g, &ids, &mut embeddings, seen));
        let heard = tower(g, hears, |g| self.listen(g)).map(|heard| self.place(g, &ids, &mut embeddings, heard));
        let hidden = g.module("language_model", |g| self.text.model(g, &embeddings, &layer_inputs));
        let kept: Vec<&Value> = seen.iter().chain(&heard).collect();
        if !kept.is_empty() {
            g.run(Op::Return, &kept, []);
        }
        hidden
    }

    fn look(&self, g: &mut Graph) -> Value {
        let maps = g.module("vision_tower", mobilenet_v5::run);
        let images = maps.size(0);
        let rows = g.reshape(&maps, [images, mobilenet_v5::WIDTH, mobilenet_v5::OUTPUT * mobilenet_v5::OUTPUT]);
        let rows = g.permute(&rows, &[0, 2, 1]);
        let factor = g.fill_like(&rows, []);
        let scaled = g.in_place(Binary::Mul, &rows, &factor);
        self.see.features(g, &scaled)
    }

    fn listen(&self, g: &mut Graph) -> Value {
        let heard = g.module("audio_tower", |g| self.audio.model(g));
        let mut features = self.hear.features(g, &heard);
        let (clips, count, width) = (features.size(0), features.size(1), features.size(2));
        let token = g.fill(crate::dtype::DType::I64, [1, 1]);
        let padding = self.hear.tokens(g, &token);
        let mask = g.fill(crate::dtype::DType::Bool, [clips, count, 1]);
        features = g.run(Op::Where, &[&mask, &padding, &features], features.shape());
        if self.sound_tokens > count {
            let rest = g.expand(&padding, [clips, self.sound_tokens - count, width]);
            features = g.cat(&[&features, &rest], 1);
        }
        features
    }

    fn place(&self, g: &mut Graph, ids: &Value, embeddings: &mut Value, features: Value) -> Value {
        let features = g.type_as(&features, embeddings);
        let mask = placeholder_mask(g, ids);
        let _other = placeholder_mask(g, ids);
        *embeddings = g.masked_scatter(embeddings, &mask, &features);
        features
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    if c.model_type() == "gemma3n_text" {
        let text = Gemma3nText::read(c)?;
        let head = (text.vocabulary.rows, text.vocabulary.tied, text.softcap);
        finish(g, task, head, "embed_tokens", |g| {
            let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
            let embeddings = text.embed(g, &ids);
            let layer_inputs = text.embed_per_layer(g, &ids);
            text.model(g, &embeddings, &layer_inputs)
        });
        return Ok(());
    }
    let text = Gemma3nText::read(&c.section("text_config"))?;
    let vision = c.section("vision_config");
    let name = vision.str_or("architecture", "mobilenetv5_300m_enc");
    if name != "mobilenetv5_300m_enc" || vision.size_or(&["hidden_size"], 2048)? != mobilenet_v5::WIDTH {
        return Err(vision.refuse("architecture", "mobilenetv5_300m_enc, the tower of Gemma 3n"));
    }
    let sound = c.section("audio_config");
    let audio = Audio::read(&sound)?;
    let width = text.vocabulary.width;
    let embedder = |name, section: &Config<'_>, hidden| {
        Ok::<_, ModelError>(Embedder { name, rows: dimension(section, &["vocab_size"], 128)?, hidden, width })
    };
    let head = (text.vocabulary.rows, tied(c, true)?, text.softcap);
    let gemma = Gemma3n {
        see: embedder("embed_vision", &vision, mobilenet_v5::WIDTH)?,
        hear: embedder("embed_audio", &sound, audio.hidden)?,
        sound_tokens: c.size_or(&["audio_soft_tokens_per_image"], 188)?,
        text,
        audio,
    };
    finish(g, task, head, "language_model.embed_tokens", |g| gemma.model(g));
    Ok(())
}

fn finish(
    g: &mut Graph,
    task: Task,
    (vocab, tied, softcap): (u64, bool, bool),
    table: &str,
    body: impl FnOnce(&mut Graph) -> Value,
) {
    if task == Task::Base {
        let hidden = body(g);
        g.run(Op::Return, &[&hidden], []);
        return;
    }
    let hidden = g.module("model", body);
    let tied = if tied { g.find(&format!("model.{table}.weight")) } else { None };
    let finish = |g: &mut Graph, logits| if softcap { soft_cap(g, logits) } else { logits };
    causal_lm_head_named(g, "lm_head", hidden, vocab, tied, false, finish);
}
