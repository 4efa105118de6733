//! The vision tower of Llama 3.2 Vision: tiles of an image seen together, features of several depths joined.

use super::parts::{dimension, images, patches};
use crate::dtype::DType;
use crate::model::blocks::{EncoderAttention, attention, mlp, read};
use crate::model::families::vision::Patches;
use crate::model::op::{Activation, Attention, Binary, EagerStyle, Input, Norm, Op, Reduction, Role, Unary};
use crate::model::{Config, Graph, ModelError, Value};

/// The tower.
#[derive(Debug, Clone)]
pub(super) struct Vision {
    patches: Patches,
    hidden: u64,
    layers: u64,
    global_layers: u64,
    width: u64,
    activation: Activation,
    attention: EncoderAttention,
    tiles: u64,
    /// Ways to lay out tiles, and one more row for none.
    layouts: u64,
    inner: Vec<u64>,
}

impl Vision {
    pub(super) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = dimension(c, &["hidden_size"], 1280)?;
        let heads = dimension(c, &["attention_heads", "num_attention_heads"], 16)?;
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["q_proj", "k_proj", "v_proj", "o_proj"]);
        attention.bias = [false; 4];
        attention.eager = EagerStyle::Fp32Softmax;
        let layouts = c.get("supported_aspect_ratios").and_then(serde_json::Value::as_array).map_or(8, Vec::len);
        Ok(Self {
            patches: patches(c, 448, 14)?,
            hidden,
            layers: c.layers(&["num_hidden_layers"], 32)?,
            global_layers: c.layers(&["num_global_layers"], 8)?,
            width: c.size_or(&["intermediate_size"], 5120)?,
            activation: read::activation(c, "hidden_act", "gelu")?,
            attention,
            tiles: dimension(c, &["max_num_tiles"], 4)?,
            layouts: layouts as u64 + 1,
            inner: c.sizes("intermediate_layers_indices")?.unwrap_or_else(|| vec![3, 7, 15, 23, 30]),
        })
    }

    /// Rows of one tile: its patches and a class.
    pub(super) fn rows(&self) -> u64 {
        self.patches.count().saturating_add(1)
    }

    /// Tiles of one image, padding included.
    pub(super) fn tiles(&self) -> u64 {
        self.tiles
    }

    /// `[images, tiles, rows, features]`.
    pub(super) fn model(&self, g: &mut Graph) -> Value {
        let images = images(g);
        let (tiles, rows, width) = (self.tiles, self.rows(), self.hidden);
        let shape = [images * tiles, self.patches.channels, self.patches.image[0], self.patches.image[1]];
        let pixels = g.input(Input::Pixels, shape);
        let pixels = g.to_model_type(&pixels);
        let layout = g.input(Input::Other(DType::I64), [images, 1]);
        let class = g.parameter("class_embedding", [width], Role::Other);
        let mut x = self.patches.project(g, "patch_embedding", &pixels, width, false);
        x = g.reshape(&x, [images, tiles, rows - 1, width]);
        x = g.module("pre_tile_positional_embedding", |g| self.add_tiles(g, &x, &layout));
        x = g.reshape(&x, [images * tiles, rows - 1, width]);
        {
            let class = g.read(class, [width]);
            let class = g.expand(&class, [images * tiles, 1, width]);
            x = g.cat(&[&class, &x], 1);
        }
        x = g.reshape(&x, [images, tiles, rows, width]);
        x = g.module("gated_positional_embedding", |g| self.add_positions(g, &x, &layout));
        x = g.norm("layernorm_pre", &x, Norm::Layer, true);
        let padded = rows.next_multiple_of(8);
        x = g.pad(&x, [images, tiles, padded, width]);
        let mask = self.mask(g, &x, padded);
        x = g.view(&x, [images, tiles * padded, width]);
        let states = g.module("transformer", |g| self.encode(g, &x, &mask, self.layers, false));
        x = states.last().cloned().unwrap_or(x);
        x = g.norm("layernorm_post", &x, Norm::Layer, true);
        x = g.reshape(&x, [images, tiles, padded, width]);
        x = g.module("post_tile_positional_embedding", |g| self.add_tiles(g, &x, &layout));
        x = g.reshape(&x, [images, tiles * padded, width]);
        let global = g.module("global_transformer", |g| self.encode(g, &x, &mask, self.global_layers, true));
        x = global.last().cloned().unwrap_or(x);
        x = g.reshape(&x, [images, tiles, padded, width]);
        x = g.slice(&x, 2, 0, rows);
        let inner: Vec<&Value> = self.inner.iter().filter_map(|&index| states.get(index as usize)).collect();
        if inner.is_empty() {
            return x;
        }
        let depth = inner.len() as u64;
        let mut joined = g.stack(&inner, -1);
        joined = g.reshape(&joined, [images, tiles, padded, width * depth]);
        joined = g.slice(&joined, 2, 0, rows);
        joined = g.reshape(&joined, [images, tiles, rows, width * depth]);
        g.cat(&[&x, &joined], -1)
    }

    /// An embedding per tile, by how the tiles are laid out.
    fn add_tiles(&self, g: &mut Graph, x: &Value, layout: &Value) -> Value {
        let gate = g.parameter("gate", [1], Role::Other);
        let mut tiles = g.embedding("embedding", layout, self.layouts, self.tiles * self.hidden);
        tiles = g.reshape(&tiles, [x.size(0), self.tiles, 1, self.hidden]);
        let gate = g.read(gate, [1]);
        let gate = g.unary(Unary::Tanh, &gate);
        tiles = g.mul(&tiles, &gate);
        g.add(x, &tiles)
    }

    fn add_positions(&self, g: &mut Graph, x: &Value, layout: &Value) -> Value {
        let (rows, width) = (self.rows(), self.hidden);
        let gate = g.parameter("gate", [1], Role::Other);
        let table = g.parameter("embedding", [rows, width], Role::Other);
        let gate = g.read(gate, [1]);
        let positions = {
            let open = g.unary(Unary::Tanh, &gate);
            let closed = g.scalar(Binary::Sub, &open);
            let table = g.read(table, [rows, width]);
            g.mul(&closed, &table)
        };
        let places = g.view(&positions, [1, 1, rows, width]);
        let hidden = g.add(x, &places);
        let mut tiles =
            g.embedding("tile_embedding", layout, self.layouts, self.tiles.saturating_mul(rows).saturating_mul(width));
        tiles = g.reshape(&tiles, [x.size(0), self.tiles, rows, width]);
        let gated = {
            let gate = g.unary(Unary::Tanh, &gate);
            g.mul(&gate, &tiles)
        };
        g.add(&hidden, &gated)
    }

    /// Padding is hidden by an additive mask made of an outer product.
    fn mask(&self, g: &mut Graph, like: &Value, rows: u64) -> Value {
        let (images, length) = (like.size(0), self.tiles * rows);
        let mut column = g.fill_like(like, [images, self.tiles, rows, 1]);
        column = g.scalar(Binary::Sub, &column);
        column = g.reshape(&column, [images, length, 1]);
        let row = g.transpose(&column, 1, 2);
        let product = g.matmul(&column, &row);
        let mask = g.scale(&product);
        g.unsqueeze(&mask, 1)
    }

    /// The output of every layer. They are no checkpointed layers in transformers.
    fn encode(&self, g: &mut Graph, input: &Value, mask: &Value, layers: u64, gated: bool) -> Vec<Value> {
        let mut states = Vec::new();
        let mut hidden = input.clone();
        for index in 0..layers {
            hidden = g.module(&format!("layers.{index}"), |g| self.layer(g, &hidden, mask, gated));
            states.push(hidden.clone());
        }
        states
    }

    fn layer(&self, g: &mut Graph, input: &Value, mask: &Value, gated: bool) -> Value {
        let mut hidden = g.norm("input_layernorm", input, Norm::Layer, true);
        hidden = g.module("self_attn", |g| self.attention.run(g, &hidden, Some(mask)));
        if gated {
            hidden = gate(g, "gate_attn", &hidden);
        }
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::Layer, true);
        hidden = g.module("mlp", |g| mlp(g, &hidden, ["fc1", "fc2"], self.width, self.activation, true));
        if gated {
            hidden = gate(g, "gate_ffn", &hidden);
        }
        g.add(&residual, &hidden)
    }
}

/// `tanh(parameter) * x`.
pub(super) fn gate(g: &mut Graph, name: &str, x: &Value) -> Value {
    let gate = g.parameter(name, [1], Role::Other);
    let gate = g.read(gate, [1]);
    let gate = g.unary(Unary::Tanh, &gate);
    g.mul(&gate, x)
}

/// The additive mask of text over image rows, and which text rows see no image at all.
pub(super) fn cross_mask(g: &mut Graph, like: &Value, tiles: u64, rows: u64) -> (Value, Value) {
    let (batch, seq) = (g.inputs.batch, g.inputs.seq);
    let seen = g.input(Input::Other(DType::I64), [batch, seq, 1, tiles]);
    let mut repeated = g.repeat_interleave(&seen, 3, rows);
    repeated = g.view(&repeated, [batch, seq, tiles * rows]);
    repeated = g.unsqueeze(&repeated, 1);
    let inverted = {
        let inverted = g.float(&repeated);
        let inverted = g.scalar(Binary::Sub, &inverted);
        g.type_as(&inverted, like)
    };
    let hidden = g.to(&inverted, DType::Bool);
    let mut mask = g.masked_fill(&inverted, &hidden);
    let mut any = {
        let open = g.compare(&mask);
        let any = g.run(Op::Reduce { kind: Reduction::Max, dim: Some(3), keep: true }, &[&open], [batch, 1, seq, 1]);
        g.type_as(&any, &mask)
    };
    mask = g.in_place(Binary::Mul, &mask, &any);
    let places = g.fill(DType::I64, [seq]);
    mask = g.run(Op::Index, &[&mask, &places], mask.shape());
    any = g.run(Op::Index, &[&any, &places], any.shape());
    (mask, any)
}

/// Softmax attention of text over image rows.
pub(super) fn attend_over(
    g: &mut Graph,
    spec: Attention,
    query: &Value,
    key: &Value,
    value: &Value,
    mask: Option<&Value>,
) -> Value {
    let attended = attention::attend(g, spec, query, key, value, mask);
    attention::join_heads(g, attended)
}
