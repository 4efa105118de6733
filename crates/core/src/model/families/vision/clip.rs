//! CLIP: an image tower and a text tower whose summaries are compared.

use super::Patches;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::head::{Labels, classification_head};
use crate::model::blocks::{EncoderAttention, encoder, mlp, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Binary, EagerStyle, Input, Loss, Mask, Norm, Op, Reduction, Role, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// CLIP.
pub const FAMILY: Family = Family { name: "CLIP", model_types: &["clip"], facts: Facts::DEFAULT, build };

/// One of its towers on its own.
pub const TOWERS: Family = Family {
    name: "CLIP (one tower)",
    model_types: &["clip_vision_model", "clip_text_model"],
    facts: Facts { attention: AttentionKernels::FlashAndFlex, ..Facts::DEFAULT },
    ..FAMILY
};

/// The layers of a tower, image or text, CLIP's or SigLIP's.
#[derive(Debug, Clone)]
pub(crate) struct Tower {
    pub(crate) hidden: u64,
    pub(crate) layers: u64,
    pub(crate) width: u64,
    pub(crate) activation: Activation,
    pub(crate) attention: EncoderAttention,
}

impl Tower {
    /// Class defaults: hidden size, heads, width, activation.
    pub(crate) fn read(c: &Config<'_>, defaults: [u64; 3], activation: &'static str) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], defaults[0])?;
        let heads = read::positive(c, &["num_attention_heads"], defaults[1])?;
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["q_proj", "k_proj", "v_proj", "out_proj"]);
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.eager = EagerStyle::Fp32Softmax;
        Ok(Self {
            hidden,
            layers: c.layers(&["num_hidden_layers"], 12)?,
            width: c.size_or(&["intermediate_size"], defaults[2])?,
            activation: read::activation(c, "hidden_act", activation)?,
            attention,
        })
    }

    /// `encoder`: the output of every layer goes to `keep` as well (`output_hidden_states`).
    pub(crate) fn encode(
        &self,
        g: &mut Graph,
        input: &Value,
        mask: Option<&Value>,
        mut keep: impl FnMut(&Value),
    ) -> Value {
        g.module("encoder", |g| {
            let mut hidden = input.clone();
            keep(&hidden);
            for index in 0..self.layers {
                hidden = g.layer("layers", index, |g| self.layer(g, &hidden, mask));
                keep(&hidden);
            }
            hidden
        })
    }

    fn layer(&self, g: &mut Graph, input: &Value, mask: Option<&Value>) -> Value {
        let mut hidden = g.norm("layer_norm1", input, Norm::Layer, true);
        hidden = g.module("self_attn", |g| self.attention.run(g, &hidden, mask));
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("layer_norm2", &hidden, Norm::Layer, true);
        hidden = self.mlp(g, &hidden);
        g.add(&residual, &hidden)
    }

    pub(crate) fn mlp(&self, g: &mut Graph, x: &Value) -> Value {
        g.module("mlp", |g| mlp(g, x, ["fc1", "fc2"], self.width, self.activation, true))
    }
}

/// What an image tower returns.
#[allow(dead_code, reason = "multimodal families read the hidden states")]
pub(crate) struct TowerOutput {
    /// The input of the first layer and the output of each, when they were asked for.
    pub(crate) hidden_states: Vec<Value>,
    /// The last of them (after the final norm, for SigLIP).
    pub(crate) last: Value,
    /// One vector per image, where the tower makes it.
    pub(crate) pooled: Option<Value>,
}

/// `CLIPVisionModel`.
#[derive(Debug, Clone)]
pub(crate) struct ClipVision {
    pub(crate) patches: Patches,
    pub(crate) tower: Tower,
}

impl ClipVision {
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        Ok(Self { patches: Patches::read(c, 224, 32)?, tower: Tower::read(c, [768, 12, 3072], "quick_gelu")? })
    }

    /// Runs it in the current module on `[images, channels, height, width]`.
    pub(crate) fn model(&self, g: &mut Graph, pixels: &Value, output_hidden_states: bool) -> TowerOutput {
        let mut hidden = g.module("embeddings", |g| self.embeddings(g, pixels));
        hidden = g.norm("pre_layrnorm", &hidden, Norm::Layer, true);
        let mut hidden_states = Vec::new();
        let last = self.tower.encode(g, &hidden, None, |state| {
            if output_hidden_states {
                hidden_states.push(state.clone());
            }
        });
        let first = g.slice(&last, 1, 0, 1);
        let first = g.squeeze(&first, 1);
        let pooled = g.norm("post_layernorm", &first, Norm::Layer, true);
        TowerOutput { hidden_states, last, pooled: Some(pooled) }
    }

    fn embeddings(&self, g: &mut Graph, pixels: &Value) -> Value {
        let width = self.tower.hidden;
        self.patches.fixed(g, pixels);
        let class = g.parameter("class_embedding", [width], Role::Other);
        let patches = {
            let pixels = g.to_model_type(pixels);
            self.patches.project(g, "patch_embedding", &pixels, width, false)
        };
        let class = g.read(class, [width]);
        let class = g.expand(&class, [pixels.size(0), 1, width]);
        let mut embeddings = g.cat(&[&class, &patches], 1);
        let count = self.patches.count().saturating_add(1);
        let ids = g.held("position_ids", [1, count], DType::I64);
        let positions = g.embedding("position_embedding", &ids, count, width);
        embeddings = g.add(&embeddings, &positions);
        embeddings
    }
}

/// Token and position embeddings of a text tower.
pub(crate) fn text_embeddings(g: &mut Graph, ids: &Value, vocab: u64, positions: u64, width: u64) -> Value {
    g.module("embeddings", |g| {
        g.limit_positions(positions);
        let held = g.held("position_ids", [1, positions], DType::I64);
        let position_ids = g.slice(&held, 1, 0, ids.size(1));
        let embeddings = g.embedding("token_embedding", ids, vocab, width);
        let places = g.embedding("position_embedding", &position_ids, positions, width);
        g.add(&embeddings, &places)
    })
}

struct ClipText {
    vocab: u64,
    positions: u64,
    legacy_end: bool,
    tower: Tower,
}

impl ClipText {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut tower = Tower::read(c, [512, 8, 2048], "quick_gelu")?;
        tower.attention.causal = true;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 49408)?,
            positions: c.size_or(&["max_position_embeddings"], 77)?,
            legacy_end: c.size_or(&["eos_token_id"], 49407).is_ok_and(|id| id == 2),
            tower,
        })
    }

    fn model(&self, g: &mut Graph) -> (Value, Value) {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq.min(self.positions)]);
        let hidden = text_embeddings(g, &ids, self.vocab, self.positions, self.tower.hidden);
        let mask = encoder::mask_over(g, Mask::Causal, ids.size(0), ids.size(1), ids.size(1));
        let mut last = self.tower.encode(g, &hidden, Some(&mask), |_| ());
        last = g.norm("final_layer_norm", &last, Norm::Layer, true);
        // The end token's state is picked by its index in each row.
        let rows = g.fill(DType::I64, [ids.size(0)]);
        let mut ends = g.to(&ids, DType::I32);
        if !self.legacy_end {
            ends = g.compare(&ends);
            ends = g.to(&ends, DType::I32);
        }
        let ends = g.run(Op::ArgMax, &[&ends], [ids.size(0)]);
        let pooled = g.run(Op::Index, &[&last, &rows, &ends], [ids.size(0), self.tower.hidden]);
        (last, pooled)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    match c.model_type() {
        "clip_vision_model" => {
            let vision = ClipVision::read(c)?;
            let pixels = vision.patches.input(g);
            let output = vision.model(g, &pixels, false);
            let kept: Vec<&Value> = std::iter::once(&output.last).chain(&output.pooled).collect();
            g.run(Op::Return, &kept, []);
        }
        "clip_text_model"
            if c.strings("architectures")?.is_some_and(|names| names.contains(&"CLIPTextModelWithProjection")) =>
        {
            let (text, width) = (ClipText::read(c)?, c.size_or(&["projection_dim"], 512)?);
            let (last, pooled) = g.module("text_model", |g| text.model(g));
            let words = g.linear("text_projection", &pooled, width, false);
            g.run(Op::Return, &[&words, &last], []);
        }
        "clip_text_model" => {
            let (last, pooled) = ClipText::read(c)?.model(g);
            g.run(Op::Return, &[&last, &pooled], []);
        }
        _ if task == Task::ImageClassification => {
            let (vision, labels) = (ClipVision::read(&c.section("vision_config"))?, Labels::read(c)?);
            let pixels = vision.patches.input(g);
            let output = g.module("vision_model", |g| vision.model(g, &pixels, false));
            let patches = g.slice(&output.last, 1, 1, vision.patches.count());
            let mean = g.reduce(Reduction::Mean, &patches, 1, false);
            classification_head(g, "classifier", &mean, &labels);
        }
        _ => build_both(c, g)?,
    }
    Ok(())
}

fn build_both(c: &Config<'_>, g: &mut Graph) -> Result<(), ModelError> {
    let vision = ClipVision::read(&c.section("vision_config"))?;
    let text = ClipText::read(&c.section("text_config"))?;
    let projection = c.size_or(&["projection_dim"], 512)?;
    let pixels = vision.patches.input(g);
    let output = g.module("vision_model", |g| vision.model(g, &pixels, false));
    let mut image = g.linear("visual_projection", output.pooled.as_ref().unwrap_or(&output.last), projection, false);
    let image_summary = image.clone();
    let (last, pooled) = g.module("text_model", |g| text.model(g));
    let mut words = g.linear("text_projection", &pooled, projection, false);
    drop(pooled);
    let text_summary = words.clone();
    image = normalised(g, &image);
    words = normalised(g, &words);
    let turned = g.transpose(&image, 0, 1);
    let mut similarity = g.matmul(&words, &turned);
    let scale = g.parameter("logit_scale", [], Role::Other);
    let scale = g.read(scale, []);
    let scale = g.unary(Unary::Exp, &scale);
    similarity = g.mul(&similarity, &scale);
    drop(scale);
    let loss = g.inputs.labels.then(|| contrastive_loss(g, &similarity));
    let mut kept: Vec<&Value> = loss.iter().collect();
    kept.extend([&similarity, &words, &image, &last, &text_summary, &output.last, &image_summary]);
    g.run(Op::Return, &kept, []);
    Ok(())
}

/// `clip_loss`: every text shall pick its own image, and every image its own text.
fn contrastive_loss(g: &mut Graph, similarity: &Value) -> Value {
    let matched = |g: &mut Graph, logits: &Value| {
        let own = g.fill(DType::I64, [logits.size(0)]);
        g.run(Op::Loss(Loss::CrossEntropy), &[logits, &own], [])
    };
    let texts = matched(g, similarity);
    let images = {
        let turned = g.transpose(similarity, 0, 1);
        matched(g, &turned)
    };
    let sum = g.add(&texts, &images);
    g.scale(&sum)
}

/// `x / sqrt(sum(x²))`, spelled out.
fn normalised(g: &mut Graph, x: &Value) -> Value {
    let norm = {
        let square = g.scalar(Binary::Pow, x);
        let sum = g.reduce(Reduction::Sum, &square, -1, true);
        g.scalar(Binary::Pow, &sum)
    };
    g.div(x, &norm)
}
