//! Pixtral's vision tower: images of any size in one packed sequence, axial rotary, RMSNorm and gated MLPs.

use super::parts::{dimension, patches};
use crate::dtype::DType;
use crate::model::blocks::{EncoderAttention, attention, gated_mlp, read};
use crate::model::families::vision::Patches;
use crate::model::op::{Activation, Convolution, EagerStyle, Input, Norm, Rotary, Unary};
use crate::model::{Config, Graph, ModelError, Value};

/// The tower.
#[derive(Debug, Clone)]
pub(super) struct Pixtral {
    pub hidden: u64,
    pub patches: Patches,
    layers: u64,
    width: u64,
    activation: Activation,
    attention: EncoderAttention,
}

impl Pixtral {
    pub(super) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = dimension(c, &["hidden_size"], 1024)?;
        let heads = dimension(c, &["num_attention_heads"], 16)?;
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["q_proj", "k_proj", "v_proj", "o_proj"]);
        attention.bias = [false; 4];
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.eager = EagerStyle::Fp32Softmax;
        Ok(Self {
            hidden,
            patches: patches(c, 1024, 16)?,
            layers: c.layers(&["num_hidden_layers"], 24)?,
            width: c.size_or(&["intermediate_size"], 4096)?,
            activation: read::activation(c, "hidden_act", "gelu")?,
            attention,
        })
    }

    /// Patches of each image, down and across.
    pub(super) fn grid(&self, g: &Graph) -> (u64, [u64; 2]) {
        let [patch_height, patch_width] = self.patches.patch;
        let (images, [height, width]) = match g.inputs.images {
            Some(images) if images.height > 0 && images.width > 0 => {
                (images.count.max(1), [images.height, images.width])
            }
            Some(images) => (images.count.max(1), self.patches.image),
            None => (1, [4 * patch_height, 4 * patch_width]),
        };
        (images, [(height / patch_height).max(1), (width / patch_width).max(1)])
    }

    /// The hidden states before and after every layer, `[1, patches, hidden]`.
    pub(super) fn model(&self, g: &mut Graph) -> Vec<Value> {
        let (images, [height, width]) = self.grid(g);
        let [patch_height, patch_width] = self.patches.patch;
        let shape = [images, self.patches.channels, height * patch_height, width * patch_width];
        let pixels = g.input(Input::Pixels, shape);
        let pixels = g.to_model_type(&pixels);
        let stride = [patch_height as u32, patch_width as u32, 1];
        let spec = Convolution { stride, padding: [0; 3], groups: 1, transposed: false };
        let maps = g.convolution("patch_conv", &pixels, self.hidden, &self.patches.patch, spec, false);
        let rows: Vec<Value> = (0..images.min(1 << 16)).map(|image| self.rows(g, &maps, image)).collect();
        let mut hidden = g.cat(&rows.iter().collect::<Vec<_>>(), 0);
        drop(rows);
        hidden = g.unsqueeze(&hidden, 0);
        hidden = g.norm("ln_pre", &hidden, Norm::Rms, false);
        let rope = self.rotary(g, &hidden);
        let count = hidden.size(1);
        let mask = g.fill_like(&hidden, [count, count]);
        let mask = g.expand(&mask, [1, 1, count, count]);
        let mut states = vec![hidden.clone()];
        g.module("transformer", |g| {
            for index in 0..self.layers {
                hidden = g.layer("layers", index, |g| self.layer(g, &hidden, &rope, &mask));
                states.push(hidden.clone());
            }
        });
        states
    }

    /// One image's patches as rows: `embed[...].flatten(1).T`.
    fn rows(&self, g: &mut Graph, maps: &Value, image: u64) -> Value {
        let map = g.slice(maps, 0, image, 1);
        let map = g.view(&map, [self.hidden, maps.size(2) * maps.size(3)]);
        g.transpose(&map, 0, 1)
    }

    /// Cosine and sine, `[patches, head_dim]`: rows and columns take halves of the frequencies.
    fn rotary(&self, g: &mut Graph, like: &Value) -> (Value, Value) {
        let (count, half) = (like.size(1), self.attention.head_dim / 2);
        let positions = g.fill(DType::I64, [count, 2]);
        g.module("patch_positional_embedding", |g| {
            g.buffer("original_inv_freq", [half], DType::F32, false);
            let frequencies = g.held("inv_freq", [half], DType::F32);
            g.without_grad(|g| {
                let frequencies = g.view(&frequencies, [1, half]);
                let positions = g.unsqueeze(&positions, -1);
                let positions = g.float(&positions);
                let angles = g.without_autocast(|g| g.matmul(&positions, &frequencies));
                let mut cosine = g.unary(Unary::Cos, &angles);
                cosine = g.scale(&cosine);
                let mut sine = g.unary(Unary::Sin, &angles);
                sine = g.scale(&sine);
                cosine = recompose(g, &cosine);
                sine = recompose(g, &sine);
                (g.type_as(&cosine, like), g.type_as(&sine, like))
            })
        })
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let mut hidden = g.norm("attention_norm", input, Norm::Rms, false);
        hidden = g.module("attention", |g| self.attend(g, &hidden, rope, mask));
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("ffn_norm", &hidden, Norm::Rms, false);
        let names = ["gate_proj", "up_proj", "down_proj"];
        hidden = g.module("feed_forward", |g| gated_mlp(g, &hidden, names, self.width, self.activation, false));
        g.add(&residual, &hidden)
    }

    fn attend(&self, g: &mut Graph, hidden: &Value, (cosine, sine): &(Value, Value), mask: &Value) -> Value {
        let query = self.attention.project(g, hidden, 0);
        let key = self.attention.project(g, hidden, 1);
        let value = self.attention.project(g, hidden, 2);
        let cosine = g.unsqueeze(cosine, 0);
        let sine = g.unsqueeze(sine, 0);
        let (query, key) = attention::rotate_whole(g, Rotary::Half, &query, &key, &cosine, &sine);
        let attended = attention::attend(g, self.attention.spec(), &query, &key, &value, Some(mask));
        let joined = attention::join_heads(g, attended);
        g.linear("o_proj", &joined, self.hidden, false)
    }
}

/// Rows of the first half of the frequencies, columns of the second, both twice.
fn recompose(g: &mut Graph, x: &Value) -> Value {
    let quarter = x.size(-1) / 2;
    let (rows, columns) = g.split2(x, -1, quarter, x.size(-1) - quarter);
    let rows = g.slice(&rows, 1, 0, 1);
    let rows = g.squeeze(&rows, 1);
    let columns = g.slice(&columns, 1, 1, 1);
    let columns = g.squeeze(&columns, 1);
    let both = g.cat(&[&rows, &columns], -1);
    g.cat(&[&both, &both], -1)
}
