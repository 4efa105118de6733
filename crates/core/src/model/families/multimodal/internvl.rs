//! InternVL 3 as transformers stores it: a scaled-residual ViT, four patches shuffled into one, a text model.

use super::parts::{FeatureLayers, Host, dimension, patches, resized_pixels, text_model, text_type, two_linears};
use crate::model::Family;
use crate::model::blocks::{EncoderAttention, attention, mlp, read};
use crate::model::facts::{Facts, Liger};
use crate::model::families::vision::Patches;
use crate::model::op::{Activation, Norm, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// InternVL.
pub const FAMILY: Family = Family {
    name: "InternVL",
    model_types: &["internvl"],
    facts: Facts { liger: Liger::NotSimulated, ..Facts::DEFAULT },
    build,
};

struct Vision {
    patches: Patches,
    hidden: u64,
    layers: u64,
    width: u64,
    activation: Activation,
    norm: Norm,
    qk_norm: bool,
    positions: bool,
    mask_token: bool,
    last_norm: bool,
    dropout: f64,
    projection_dropout: f64,
    attention: EncoderAttention,
}

impl Vision {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = dimension(c, &["hidden_size"], 1024)?;
        let heads = dimension(c, &["num_attention_heads"], 16)?;
        let names = ["q_proj", "k_proj", "v_proj", "projection_layer"];
        let mut attention = EncoderAttention::new(heads, hidden / heads, names);
        let bias = c.flag("attention_bias", false)?;
        attention.bias = [bias, bias, bias, true];
        attention.dropout = c.number("attention_dropout", 0.0)?;
        Ok(Self {
            patches: patches(c, 448, 14)?,
            hidden,
            layers: c.layers(&["num_hidden_layers"], 24)?,
            width: c.size_or(&["intermediate_size"], 4096)?,
            activation: read::activation(c, "hidden_act", "gelu")?,
            norm: if c.str_or("norm_type", "layer_norm") == "rms_norm" { Norm::Rms } else { Norm::Layer },
            qk_norm: c.flag("use_qk_norm", false)?,
            positions: c.flag("use_absolute_position_embeddings", true)?,
            mask_token: c.flag("use_mask_token", false)?,
            last_norm: !c.flag("use_mean_pooling", true)?,
            dropout: c.number("hidden_dropout_prob", 0.0)?,
            projection_dropout: c.number("projection_dropout", 0.0)?,
            attention,
        })
    }

    /// The hidden states before and after every layer, and the last one normed where there is a norm.
    fn model(&self, g: &mut Graph, pixels: &Value, keep: bool) -> (Vec<Value>, Value) {
        let embeddings = g.module("embeddings", |g| self.embeddings(g, pixels));
        let mut hidden = embeddings.clone();
        let mut states = if keep { vec![hidden.clone()] } else { Vec::new() };
        g.module("encoder", |g| {
            for index in 0..self.layers {
                hidden = g.layer("layer", index, |g| self.layer(g, &hidden));
                if keep {
                    states.push(hidden.clone());
                }
            }
        });
        if self.last_norm {
            hidden = g.norm("layernorm", &hidden, Norm::Layer, true);
        }
        (states, hidden)
    }

    fn embeddings(&self, g: &mut Graph, pixels: &Value) -> Value {
        let class = g.parameter("cls_token", [1, 1, self.hidden], Role::Other);
        if self.mask_token {
            g.parameter("mask_token", [1, 1, self.hidden], Role::Other);
        }
        let mut embeddings = g.module("patch_embeddings", |g| {
            let pixels = g.to_model_type(pixels);
            self.patches.project(g, "projection", &pixels, self.hidden, true)
        });
        let class = g.read(class, [1, 1, self.hidden]);
        let class = g.expand(&class, [pixels.size(0), 1, self.hidden]);
        embeddings = g.cat(&[&class, &embeddings], 1);
        if self.positions {
            let shape = [1, self.patches.count().saturating_add(1), self.hidden];
            let positions = g.parameter("position_embeddings", shape, Role::Other);
            let positions = g.read(positions, shape);
            embeddings = g.add(&embeddings, &positions);
        }
        g.dropout(&embeddings, self.dropout)
    }

    fn layer(&self, g: &mut Graph, input: &Value) -> Value {
        let bias = self.norm == Norm::Layer;
        let mut attended = g.norm("layernorm_before", input, self.norm, bias);
        attended = g.module("attention", |g| self.attend(g, &attended));
        attended = self.scaled(g, "lambda_1", &attended);
        let hidden = g.add(&attended, input);
        let mut output = g.norm("layernorm_after", &hidden, self.norm, bias);
        output = g.module("mlp", |g| mlp(g, &output, ["fc1", "fc2"], self.width, self.activation, true));
        output = g.dropout(&output, self.dropout);
        output = self.scaled(g, "lambda_2", &output);
        g.add(&output, &hidden)
    }

    fn scaled(&self, g: &mut Graph, name: &str, x: &Value) -> Value {
        let scale = g.parameter(name, [self.hidden], Role::Other);
        let scale = g.read(scale, [self.hidden]);
        g.mul(&scale, x)
    }

    fn attend(&self, g: &mut Graph, hidden: &Value) -> Value {
        let names = self.attention.names;
        let mut query = g.linear(names[0], hidden, self.hidden, self.attention.bias[0]);
        let mut key = g.linear(names[1], hidden, self.hidden, self.attention.bias[1]);
        let value = g.linear(names[2], hidden, self.hidden, self.attention.bias[2]);
        if self.qk_norm {
            query = g.norm("q_norm", &query, Norm::Rms, false);
            key = g.norm("k_norm", &key, Norm::Rms, false);
        }
        let [query, key, value] =
            [query, key, value].map(|x| attention::split_heads(g, x, self.attention.heads, self.attention.head_dim));
        let attended = attention::attend(g, self.attention.spec(), &query, &key, &value, None);
        let attended = g.reshape(&attended, hidden.shape());
        let output = g.linear(names[3], &attended, self.hidden, true);
        g.dropout(&output, self.projection_dropout)
    }
}

struct Features {
    vision: Vision,
    layers: Option<FeatureLayers>,
    without_class: bool,
    /// Patches on each side of the square that becomes one token.
    shrink: u64,
    activation: Activation,
    width: u64,
}

impl Features {
    fn model(&self, g: &mut Graph) -> Value {
        let pixels = resized_pixels(g, &self.vision.patches);
        let pixels = g.to_model_type(&pixels);
        let (states, last) = g.module("vision_tower", |g| self.vision.model(g, &pixels, self.layers.is_some()));
        let mut x = match &self.layers {
            Some(layers) => layers.pick(g, &states, false),
            None => last.clone(),
        };
        drop((states, last));
        if self.without_class {
            x = g.slice(&x, 1, 1, x.size(1).max(1) - 1);
        }
        let (batch, side) = (x.size(0), x.size(1).isqrt());
        if side * side != x.size(1) || !side.is_multiple_of(self.shrink) {
            g.fail(format!("{} patches cannot be shuffled by {}", x.size(1), self.shrink));
            return x;
        }
        x = g.reshape(&x, [batch, side, side, self.vision.hidden]);
        x = shuffle(g, x, self.shrink);
        x = g.reshape(&x, [batch, x.size(1) * x.size(2), x.size(3)]);
        g.module("multi_modal_projector", |g| {
            let normed = g.norm("layer_norm", &x, Norm::Layer, true);
            two_linears(g, &normed, self.width, self.activation, true)
        })
    }
}

/// `pixel_shuffle`: squares of patches become channels.
fn shuffle(g: &mut Graph, x: Value, shrink: u64) -> Value {
    let (batch, width, height, channels) = (x.size(0), x.size(1), x.size(2), x.size(3));
    let mut x = g.view(&x, [batch, width, height / shrink, channels * shrink]);
    x = g.permute(&x, &[0, 2, 1, 3]);
    x = g.contiguous(&x);
    x = g.view(&x, [batch, height / shrink, width / shrink, channels * shrink * shrink]);
    x = g.permute(&x, &[0, 2, 1, 3]);
    g.contiguous(&x)
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let text = text_model(&c.section("text_config"), text_type(c, "qwen2"))?;
    let ratio = c.number("downsample_ratio", 0.5)?;
    if !(0.01..=1.0).contains(&ratio) {
        return Err(c.refuse("downsample_ratio", "a ratio between 0.01 and 1"));
    }
    let layers = if c.get("vision_feature_layer").is_none_or(|layer| layer == -1) {
        None
    } else {
        Some(FeatureLayers::read(c, -1)?)
    };
    let features = Features {
        vision: Vision::read(&c.section("vision_config"))?,
        layers,
        without_class: c.str_or("vision_feature_select_strategy", "default") == "default",
        shrink: (1.0 / ratio) as u64,
        activation: read::activation(c, "projector_hidden_act", "gelu")?,
        width: text.vocabulary().width,
    };
    // Checkpoints hold a head of their own where the text config says so, whatever the outer default; an outer key decides.
    let outer = c.has("tie_word_embeddings") || !c.section("text_config").has("tie_word_embeddings");
    let tied = if outer {
        c.flag("tie_word_embeddings", true)?
    } else {
        c.section("text_config").flag("tie_word_embeddings", true)?
    };
    let host = Host { text: text.as_ref(), module: "language_model", tied };
    let given = g.inputs.images.is_some();
    host.run(g, task, given, |g| features.model(g));
    Ok(())
}
