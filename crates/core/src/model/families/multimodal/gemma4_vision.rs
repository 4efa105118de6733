//! The vision tower of Gemma 4: patches of images of any shape, axial rotary, averaged by position to fewer tokens.

use super::parts::{dimension, images, turn};
use crate::dtype::DType;
use crate::model::blocks::{attention, encoder, read};
use crate::model::op::{Activation, Attention, Binary, EagerStyle, Input, Norm, Op, Role, Unary};
use crate::model::{Config, Graph, ModelError, Value};

const NORM: Norm = Norm::RmsWeightFirst;

/// The tower.
#[derive(Debug, Clone)]
pub(super) struct Vision {
    hidden: u64,
    width: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    activation: Activation,
    dropout: f64,
    /// Patches on each side of the square that becomes one token.
    pool: u64,
    patch: u64,
    positions: u64,
    /// Tokens of an image.
    tokens: u64,
    clipped: bool,
    standardised: bool,
}

impl Vision {
    pub(super) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            hidden: dimension(c, &["hidden_size"], 768)?,
            width: c.size_or(&["intermediate_size"], 3072)?,
            layers: c.layers(&["num_hidden_layers"], 16)?,
            heads: dimension(c, &["num_attention_heads"], 12)?,
            kv_heads: dimension(c, &["num_key_value_heads"], 12)?,
            head_dim: dimension(c, &["head_dim"], 64)?,
            activation: read::activation(c, "hidden_activation", "gelu_pytorch_tanh")?,
            dropout: c.number("attention_dropout", 0.0)?,
            pool: dimension(c, &["pooling_kernel_size"], 3)?,
            patch: dimension(c, &["patch_size"], 16)?,
            positions: dimension(c, &["position_embedding_size"], 10240)?,
            tokens: dimension(c, &["default_output_length"], 280)?,
            clipped: c.flag("use_clipped_linears", false)?,
            standardised: c.flag("standardize", false)?,
        })
    }

    /// One row per token of all images: `[tokens, hidden]`. Images are padded to the processor's number of patches.
    pub(super) fn model(&self, g: &mut Graph) -> Value {
        let images = images(g);
        let count = self.tokens * self.pool * self.pool;
        let places = g.input(Input::Other(DType::I64), [images, count, 2]);
        let padding = g.fill(DType::Bool, [images, count]);
        let embedded = g.module("patch_embedder", |g| self.embed(g, images, count, &places, &padding));
        let hidden = g.module("encoder", |g| self.encode(g, &embedded, &places, &padding));
        let mut pooled = self.pooled(g, &hidden, &padding);
        drop(hidden);
        let valid = g.fill(DType::Bool, [images, self.tokens]);
        pooled = g.run(Op::Index, &[&pooled, &valid], [images * self.tokens, self.hidden]);
        if self.standardised {
            let [shift, scale] = ["std_bias", "std_scale"].map(|name| {
                g.buffer(name, [self.hidden], DType::BF16, true);
                let buffer = g.run(Op::Buffer(DType::BF16), &[], [self.hidden]);
                g.float(&buffer)
            });
            let moved = g.sub(&pooled, &shift);
            pooled = g.mul(&moved, &scale);
        }
        g.type_as(&pooled, &embedded)
    }

    fn embed(&self, g: &mut Graph, images: u64, count: u64, places: &Value, padding: &Value) -> Value {
        let shape = [2, self.positions, self.hidden];
        let table = g.parameter("position_embedding_table", shape, Role::Other);
        let mut pixels = g.input(Input::Pixels, [images, count, 3 * self.patch * self.patch]);
        pixels = g.scalar(Binary::Sub, &pixels);
        pixels = g.scale(&pixels);
        pixels = g.to_model_type(&pixels);
        let hidden = g.linear("input_proj", &pixels, self.hidden, false);
        let clamped = g.unary(Unary::Clamp, places);
        let table = g.read(table, shape);
        let [across, down] = [0, 1].map(|axis| {
            let index = g.slice(&clamped, 2, axis, 1);
            let index = g.squeeze(&index, 2);
            let rows = g.slice(&table, 0, axis, 1);
            let rows = g.squeeze(&rows, 0);
            g.index(&rows, &index)
        });
        let sum = g.add(&across, &down);
        let mask = g.unsqueeze(padding, -1);
        let positions = g.run(Op::Where, &[&mask, &sum, &sum], sum.shape());
        g.add(&hidden, &positions)
    }

    fn encode(&self, g: &mut Graph, embedded: &Value, places: &Value, padding: &Value) -> Value {
        let _valid = g.unary(Unary::Not, padding);
        let mask = encoder::full_mask(g, embedded);
        let rope = self.rotary(g, embedded, places);
        let mut hidden = embedded.clone();
        for index in 0..self.layers {
            hidden = g.layer("layers", index, |g| self.layer(g, &hidden, &rope, &mask));
        }
        hidden
    }

    /// Cosine and sine, `[images, patches, head_dim]`: rows twice, then columns twice.
    fn rotary(&self, g: &mut Graph, like: &Value, places: &Value) -> (Value, Value) {
        let quarter = self.head_dim / 4;
        g.module("rotary_emb", |g| {
            g.buffer("original_inv_freq", [quarter], DType::F32, false);
            let frequencies = g.held("inv_freq", [quarter], DType::F32);
            g.without_grad(|g| {
                let frequencies = g.view(&frequencies, [1, quarter]);
                let places = g.unsqueeze(places, -1);
                let places = g.float(&places);
                let angles = g.without_autocast(|g| g.matmul(&places, &frequencies));
                let [cosine, sine] = [Unary::Cos, Unary::Sin].map(|wave| {
                    let mut x = g.unary(wave, &angles);
                    x = g.scale(&x);
                    let [rows, columns] = [0, 1].map(|axis| {
                        let part = g.slice(&x, 2, axis, 1);
                        g.squeeze(&part, 2)
                    });
                    g.cat(&[&rows, &rows, &columns, &columns], -1)
                });
                (g.type_as(&cosine, like), g.type_as(&sine, like))
            })
        })
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let mut hidden = g.norm("input_layernorm", input, NORM, false);
        hidden = g.module("self_attn", |g| self.attend(g, &hidden, rope, mask));
        hidden = g.norm("post_attention_layernorm", &hidden, NORM, false);
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("pre_feedforward_layernorm", &hidden, NORM, false);
        hidden = g.module("mlp", |g| {
            let gate = clipped_linear(g, "gate_proj", &hidden, self.width, self.clipped);
            let up = clipped_linear(g, "up_proj", &hidden, self.width, self.clipped);
            let product = g.glu(self.activation, &gate, &up);
            drop((gate, up));
            clipped_linear(g, "down_proj", &product, self.hidden, self.clipped)
        });
        hidden = g.norm("post_feedforward_layernorm", &hidden, NORM, false);
        g.add(&residual, &hidden)
    }

    fn attend(&self, g: &mut Graph, hidden: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let mut query = self.project(g, "q_proj", hidden, self.heads);
        query = g.norm("q_norm", &query, NORM, false);
        query = turn_axes(g, &query, rope);
        query = g.transpose(&query, 1, 2);
        let mut key = self.project(g, "k_proj", hidden, self.kv_heads);
        key = g.norm("k_norm", &key, NORM, false);
        key = turn_axes(g, &key, rope);
        key = g.transpose(&key, 1, 2);
        let mut value = self.project(g, "v_proj", hidden, self.kv_heads);
        value = g.norm("v_norm", &value, Norm::RmsBare, false);
        value = g.transpose(&value, 1, 2);
        let spec = Attention {
            groups: self.heads / self.kv_heads,
            causal: false,
            dropout_per_mille: (self.dropout.clamp(0.0, 1.0) * 1000.0).round() as u32,
            softcap: false,
            sinks: None,
            eager: EagerStyle::Fp32Softmax,
            sdpa: true,
        };
        let attended = attention::attend(g, spec, &query, &key, &value, Some(mask));
        let joined = attention::join_heads(g, attended);
        clipped_linear(g, "o_proj", &joined, self.hidden, self.clipped)
    }

    fn project(&self, g: &mut Graph, name: &str, hidden: &Value, heads: u64) -> Value {
        let x = clipped_linear(g, name, hidden, heads * self.head_dim, self.clipped);
        g.split_last(&x, heads, self.head_dim)
    }

    /// Means over squares of patches, found by position: a product with a one-hot matrix in fp32.
    fn pooled(&self, g: &mut Graph, hidden: &Value, padding: &Value) -> Value {
        let (images, count) = (hidden.size(0), hidden.size(1));
        let mask = g.unsqueeze(padding, -1);
        let filled = g.masked_fill(hidden, &mask);
        let weights = {
            let chosen = g.fill(DType::I64, [images, count, self.tokens]);
            let chosen = g.float(&chosen);
            g.scalar(Binary::Div, &chosen)
        };
        let wide = g.float(&filled);
        let turned = g.transpose(&weights, 1, 2);
        let mut output = g.matmul(&turned, &wide);
        drop(wide);
        output = g.type_as(&output, &filled);
        output = g.float(&output);
        g.scale(&output)
    }
}

/// A linear whose input and output are clamped to bounds from the checkpoint.
pub(super) fn clipped_linear(g: &mut Graph, name: &str, x: &Value, width: u64, clipped: bool) -> Value {
    g.module(name, |g| {
        if !clipped {
            return g.linear("linear", x, width, false);
        }
        for bound in ["input_min", "input_max", "output_min", "output_max"] {
            g.buffer(bound, [], DType::BF16, true);
        }
        let mut x = g.unary(Unary::Clamp, x);
        x = g.linear("linear", &x, width, false);
        g.unary(Unary::Clamp, &x)
    })
}

/// Each half of a head is turned by one axis.
fn turn_axes(g: &mut Graph, x: &Value, (cosine, sine): &(Value, Value)) -> Value {
    let half = 2 * (x.size(-1) / 4);
    let parts = [x, cosine, sine].map(|x| g.split(x, -1, &[half, x.size(-1) - half]));
    let [parts, cosines, sines] = &parts;
    let mut turned = Vec::new();
    for ((part, cosine), sine) in parts.iter().zip(cosines).zip(sines) {
        let cosine = g.unsqueeze(cosine, 2);
        let sine = g.unsqueeze(sine, 2);
        turned.push(turn(g, part, &cosine, &sine));
    }
    g.cat(&turned.iter().collect::<Vec<_>>(), -1)
}
