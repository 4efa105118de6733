//! DINOv2.

use super::Patches;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::head::{Labels, classification_head};
use crate::model::blocks::{EncoderAttention, gated_mlp, joined_gated_mlp, mlp, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Binary, Norm, Op, Reduction, Role, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// DINOv2.
pub const FAMILY: Family = Family {
    name: "DINOv2",
    model_types: &["dinov2"],
    facts: Facts { attention: AttentionKernels::FlashAndFlex, ..Facts::DEFAULT },
    build,
};

pub(crate) struct Dinov2 {
    patches: Patches,
    hidden: u64,
    layers: u64,
    width: u64,
    gated: bool,
    activation: Activation,
    dropout: f64,
    drop_path: f64,
    mask_token: bool,
    attention: EncoderAttention,
}

impl Dinov2 {
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], 768)?;
        let heads = read::positive(c, &["num_attention_heads"], 12)?;
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["q_proj", "k_proj", "v_proj", "o_proj"]);
        let qkv_bias = c.flag("qkv_bias", true)?;
        attention.bias = [qkv_bias, qkv_bias, qkv_bias, true];
        attention.dropout = c.number("attention_probs_dropout_prob", 0.0)?;
        let gated = c.flag("use_swiglu_ffn", false)?;
        let wide = (hidden as f64 * c.number("mlp_ratio", 4.0)?.clamp(0.0, 1024.0)) as u64;
        Ok(Self {
            patches: Patches::read(c, 224, 14)?,
            hidden,
            layers: c.layers(&["num_hidden_layers"], 12)?,
            width: if gated { (wide * 2 / 3).div_ceil(8) * 8 } else { wide },
            gated,
            activation: read::activation(c, "hidden_act", "gelu")?,
            dropout: c.number("hidden_dropout_prob", 0.0)?,
            drop_path: c.number("drop_path_rate", 0.0)?,
            mask_token: c.flag("use_mask_token", true)?,
            attention,
        })
    }

    /// The last hidden state, class token first.
    pub(crate) fn model(&self, g: &mut Graph) -> Value {
        let pixels = self.patches.input(g);
        let embeddings = g.module("embeddings", |g| self.embeddings(g, &pixels));
        let hidden = g.module("encoder", |g| {
            let mut hidden = embeddings.clone();
            for index in 0..self.layers {
                hidden = g.layer("layer", index, |g| self.layer(g, &hidden));
            }
            hidden
        });
        g.norm("layernorm", &hidden, Norm::Layer, true)
    }

    fn embeddings(&self, g: &mut Graph, pixels: &Value) -> Value {
        let batch = pixels.size(0);
        let class = g.parameter("cls_token", [1, 1, self.hidden], Role::Other);
        if self.mask_token {
            g.parameter("mask_token", [1, self.hidden], Role::Other);
        }
        let mut embeddings = g.module("patch_embeddings", |g| {
            let pixels = g.to_model_type(pixels);
            self.patches.project(g, "projection", &pixels, self.hidden, true)
        });
        let class = g.read(class, [1, 1, self.hidden]);
        let class = g.expand(&class, [batch, 1, self.hidden]);
        embeddings = g.cat(&[&class, &embeddings], 1);
        let positions = self.positions(g, pixels, embeddings.size(1));
        embeddings = g.add(&embeddings, &positions);
        drop(positions);
        g.dropout(&embeddings, self.dropout)
    }

    /// The table of positions, resized for images of another size.
    fn positions(&self, g: &mut Graph, pixels: &Value, rows: u64) -> Value {
        let count = self.patches.count();
        let sizes = [1, count.saturating_add(1), self.hidden];
        let table = g.parameter("position_embeddings", sizes, Role::Other);
        let table = g.read(table, sizes);
        let (height, width) = (pixels.size(2), pixels.size(3));
        if rows == sizes[1] && height == width {
            return table;
        }
        let class = g.slice(&table, 1, 0, 1);
        let mut grid = g.slice(&table, 1, 1, count);
        let side = count.isqrt();
        grid = g.reshape(&grid, [1, side, side, self.hidden]);
        grid = g.permute(&grid, &[0, 3, 1, 2]);
        let wide = g.float(&grid);
        let shape = [1, self.hidden, height / self.patches.patch[0], width / self.patches.patch[1]];
        let resized = g.run(Op::Interpolate, &[&wide], shape);
        drop(wide);
        grid = g.to_model_type(&resized);
        drop(resized);
        grid = g.permute(&grid, &[0, 2, 3, 1]);
        grid = g.view(&grid, [1, shape[2].saturating_mul(shape[3]), self.hidden]);
        g.cat(&[&class, &grid], 1)
    }

    fn layer(&self, g: &mut Graph, input: &Value) -> Value {
        let normed = g.norm("norm1", input, Norm::Layer, true);
        let mut attended = g.module("attention", |g| {
            let attended = self.attention.run(g, &normed, None);
            g.dropout(&attended, self.dropout)
        });
        attended = self.layer_scale(g, "layer_scale1", &attended);
        let dropped = self.drop_path(g, &attended);
        let hidden = g.add(&dropped, input);
        drop(dropped);
        let mut output = g.norm("norm2", &hidden, Norm::Layer, true);
        // One matrix made gate and up at once before transformers 5.22.
        let joined = g.inputs.transformers.is_some_and(|version| version < [5, 22]);
        output = g.module("mlp", |g| match self.gated {
            true if joined => {
                joined_gated_mlp(g, &output, ["weights_in", "weights_out"], self.width, Activation::Silu, true)
            }
            true => gated_mlp(g, &output, ["gate_proj", "up_proj", "down_proj"], self.width, Activation::Silu, true),
            false => mlp(g, &output, ["fc1", "fc2"], self.width, self.activation, true),
        });
        output = self.layer_scale(g, "layer_scale2", &output);
        let dropped = self.drop_path(g, &output);
        g.add(&dropped, &hidden)
    }

    fn layer_scale(&self, g: &mut Graph, name: &str, x: &Value) -> Value {
        let scale = g.parameter(&format!("{name}.lambda1"), [self.hidden], Role::Other);
        let scale = g.read(scale, [self.hidden]);
        g.mul(x, &scale)
    }

    /// Whole samples dropped, in training only.
    fn drop_path(&self, g: &mut Graph, x: &Value) -> Value {
        if self.drop_path <= 0.0 || !g.inputs.labels {
            return x.clone();
        }
        let mut random = g.fill(DType::F32, [x.size(0), 1, 1]);
        random = g.type_as(&random, x);
        random = g.scalar(Binary::Add, &random);
        random = g.unary(Unary::Round, &random);
        let scaled = g.scalar(Binary::Div, x);
        g.mul(&scaled, &random)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let dinov2 = Dinov2::read(c)?;
    let first = |g: &mut Graph, hidden: &Value| {
        let first = g.slice(hidden, 1, 0, 1);
        g.squeeze(&first, 1)
    };
    if task == Task::ImageClassification {
        let labels = Labels::read(c)?;
        let hidden = g.module("dinov2", |g| dinov2.model(g));
        let class = first(g, &hidden);
        let patches = g.slice(&hidden, 1, 1, hidden.size(1).max(1) - 1);
        let mean = g.reduce(Reduction::Mean, &patches, 1, false);
        let both = g.cat(&[&class, &mean], 1);
        drop(mean);
        classification_head(g, "classifier", &both, &labels);
    } else {
        let hidden = dinov2.model(g);
        let pooled = first(g, &hidden);
        g.run(Op::Return, &[&hidden, &pooled], []);
    }
    Ok(())
}
