//! The audio tower of Gemma 4: two strided convolutions, then conformer layers with attention in short blocks.

use super::gemma4_vision::clipped_linear;
use super::parts::dimension;
use crate::dtype::DType;
use crate::model::blocks::read;
use crate::model::op::{Activation, Binary, Convolution, Input, Norm, Op, Role, Unary};
use crate::model::{Config, Graph, ModelError, Value};

const NORM: Norm = Norm::RmsWeightFirst;

/// The tower.
#[derive(Debug, Clone)]
pub(super) struct Audio {
    hidden: u64,
    layers: u64,
    heads: u64,
    activation: Activation,
    channels: [u64; 2],
    kernel: u64,
    chunk: u64,
    /// Frames that a block sees before and after itself.
    past: u64,
    future: u64,
    clipped: bool,
    out: u64,
}

impl Audio {
    pub(super) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let channels = c.sizes("subsampling_conv_channels")?.unwrap_or_else(|| vec![128, 32]);
        let &[first, second] = channels.as_slice() else {
            return Err(c.refuse("subsampling_conv_channels", "two numbers of channels"));
        };
        Ok(Self {
            hidden: dimension(c, &["hidden_size"], 1024)?,
            layers: c.layers(&["num_hidden_layers"], 12)?,
            heads: dimension(c, &["num_attention_heads"], 8)?,
            activation: read::activation(c, "hidden_act", "silu")?,
            channels: [first.max(4), second.max(1)],
            kernel: dimension(c, &["conv_kernel_size"], 5)?,
            chunk: dimension(c, &["attention_chunk_size"], 12)?,
            past: dimension(c, &["attention_context_left"], 13)? - 1,
            future: c.size_or(&["attention_context_right"], 0)?,
            clipped: c.flag("use_clipped_linears", true)?,
            out: dimension(c, &["output_proj_dims"], 1536)?,
        })
    }

    /// `[clips, frames / 4, out]`.
    pub(super) fn model(&self, g: &mut Graph) -> Value {
        let (batch, frames) = (g.inputs.batch, g.inputs.audio_frames.unwrap_or(64).max(4));
        // The linear after the convolutions fixes how many bins of the spectrum there are.
        let sound = g.input(Input::Audio, [batch, frames, self.channels[0]]);
        let mut hidden = g.module("subsample_conv_projection", |g| self.subsample(g, &sound));
        let positions = g.module("rel_pos_enc", |g| self.positions(g, &hidden));
        let mask = self.mask(g, hidden.size(1));
        for index in 0..self.layers {
            // Not a checkpointed layer in transformers.
            hidden = g.module(&format!("layers.{index}"), |g| self.layer(g, &hidden, &positions, &mask));
        }
        g.linear("output_proj", &hidden, self.out, true)
    }

    fn subsample(&self, g: &mut Graph, sound: &Value) -> Value {
        let mut x = g.unsqueeze(sound, 1);
        for (index, &channels) in self.channels.iter().enumerate() {
            x = g.module(&format!("layer{index}"), |g| {
                let mask = g.fill(DType::Bool, [x.size(0), 1, x.size(2), 1]);
                let mut x = g.mul(&x, &mask);
                x = g.to_model_type(&x);
                let spec = Convolution { stride: [2, 2, 1], padding: [1, 1, 0], groups: 1, transposed: false };
                x = g.convolution("conv", &x, channels, &[3, 3], spec, false);
                x = g.permute(&x, &[0, 2, 3, 1]);
                x = g.norm("norm", &x, Norm::Layer, false);
                x = g.permute(&x, &[0, 3, 1, 2]);
                x = g.contiguous(&x);
                g.unary(Unary::Relu, &x)
            });
        }
        let (batch, channels, frames, bins) = (x.size(0), x.size(1), x.size(2), x.size(3));
        x = g.permute(&x, &[0, 2, 3, 1]);
        x = g.contiguous(&x);
        x = g.reshape(&x, [batch, frames, bins * channels]);
        g.linear("input_proj_linear", &x, self.hidden, false)
    }

    fn context(&self) -> u64 {
        self.chunk + self.past + self.future
    }

    fn positions(&self, g: &mut Graph, like: &Value) -> Value {
        let (rows, half) = (self.context() / 2 + 1, self.hidden / 2);
        let scales = g.held("inv_timescales", [1, 1, half], DType::BF16);
        g.without_grad(|g| {
            let times = g.fill(DType::I64, [rows, 1]);
            let scaled = g.mul(&times, &scales);
            let sine = g.unary(Unary::Sin, &scaled);
            let cosine = g.unary(Unary::Cos, &scaled);
            let both = g.cat(&[&sine, &cosine], -1);
            g.type_as(&both, like)
        })
    }

    /// Which frames of its context each frame of a block sees.
    fn mask(&self, g: &mut Graph, frames: u64) -> Value {
        g.fill(DType::Bool, [g.inputs.batch, 1, frames.div_ceil(self.chunk), self.chunk, self.context()])
    }

    fn layer(&self, g: &mut Graph, input: &Value, positions: &Value, mask: &Value) -> Value {
        let mut hidden = g.module("feed_forward1", |g| self.feed_forward(g, input));
        let residual = hidden.clone();
        hidden = g.unary(Unary::Clamp, &hidden);
        hidden = g.norm("norm_pre_attn", &hidden, NORM, false);
        hidden = g.module("self_attn", |g| self.attention(g, &hidden, positions, mask));
        hidden = g.unary(Unary::Clamp, &hidden);
        hidden = g.norm("norm_post_attn", &hidden, NORM, false);
        hidden = g.in_place(Binary::Add, &hidden, &residual);
        hidden = g.module("lconv1d", |g| self.convolve(g, &hidden));
        hidden = g.module("feed_forward2", |g| self.feed_forward(g, &hidden));
        hidden = g.unary(Unary::Clamp, &hidden);
        g.norm("norm_out", &hidden, NORM, false)
    }

    fn feed_forward(&self, g: &mut Graph, input: &Value) -> Value {
        let mut hidden = g.unary(Unary::Clamp, input);
        hidden = g.norm("pre_layer_norm", &hidden, NORM, false);
        hidden = clipped_linear(g, "ffw_layer_1", &hidden, 4 * self.hidden, self.clipped);
        hidden = g.activation(self.activation, &hidden);
        hidden = clipped_linear(g, "ffw_layer_2", &hidden, self.hidden, self.clipped);
        hidden = g.unary(Unary::Clamp, &hidden);
        hidden = g.norm("post_layer_norm", &hidden, NORM, false);
        let half = g.fill(DType::F32, []);
        hidden = g.in_place(Binary::Mul, &hidden, &half);
        g.in_place(Binary::Add, &hidden, input)
    }

    fn convolve(&self, g: &mut Graph, input: &Value) -> Value {
        let mut hidden = g.norm("pre_layer_norm", input, NORM, false);
        hidden = clipped_linear(g, "linear_start", &hidden, 2 * self.hidden, self.clipped);
        hidden = {
            let (value, gate) = g.split2(&hidden, -1, self.hidden, self.hidden);
            g.glu(Activation::Sigmoid, &gate, &value)
        };
        hidden = g.transpose(&hidden, 1, 2);
        hidden = g.pad(&hidden, hidden.shape().with(2, hidden.size(2) + self.kernel - 1));
        let spec = Convolution { stride: [1; 3], padding: [0; 3], groups: self.hidden, transposed: false };
        hidden = g.convolution("depthwise_conv1d", &hidden, self.hidden, &[self.kernel], spec, false);
        hidden = g.transpose(&hidden, 1, 2);
        hidden = g.unary(Unary::Clamp, &hidden);
        hidden = g.norm("conv_norm", &hidden, NORM, false);
        hidden = g.activation(self.activation, &hidden);
        hidden = clipped_linear(g, "linear_end", &hidden, self.hidden, self.clipped);
        g.in_place(Binary::Add, &hidden, input)
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, positions: &Value, mask: &Value) -> Value {
        let (batch, frames, dim) = (hidden.size(0), hidden.size(1), self.hidden / self.heads);
        let (blocks, context) = (frames.div_ceil(self.chunk), self.context());
        let scale = g.parameter("per_dim_scale", [dim], Role::Other);
        g.buffer("softcap", [], DType::BF16, false);
        let [mut query, mut key, mut value] = ["q_proj", "k_proj", "v_proj"].map(|name| {
            let x = clipped_linear(g, name, hidden, self.heads * dim, self.clipped);
            let x = g.float(&x);
            g.split_last(&x, self.heads, dim)
        });
        query = {
            let scaled = g.scale(&query);
            let scale = g.read(scale, [dim]);
            let scale = g.unary(Unary::Softplus, &scale);
            g.mul(&scaled, &scale)
        };
        key = g.scale(&key);
        query = {
            let padded = g.pad(&query, [batch, blocks * self.chunk, self.heads, dim]);
            g.reshape(&padded, [batch, blocks, self.chunk, self.heads, dim])
        };
        key = self.with_context(g, &key, blocks);
        value = self.with_context(g, &value, blocks);
        let mut relative = g.linear("relative_k_proj", positions, self.heads * dim, false);
        relative = g.view(&relative, [positions.size(1), self.heads, dim]);
        relative = g.type_as(&relative, &query);
        let queries = g.permute(&query, &[0, 3, 1, 2, 4]);
        let content = {
            let keys = g.permute(&key, &[0, 3, 1, 4, 2]);
            g.matmul(&queries, &keys)
        };
        let place = {
            let flat = g.reshape(&queries, [batch, self.heads, blocks * self.chunk, dim]);
            let keys = g.permute(&relative, &[1, 2, 0]);
            let mut place = g.matmul(&flat, &keys);
            place = g.reshape(&place, [batch, self.heads, blocks, self.chunk, positions.size(1)]);
            place = g.pad(&place, [batch, self.heads, blocks, self.chunk, context + 1]);
            place = g.view(&place, [batch, self.heads, blocks, self.chunk * (context + 1)]);
            place = g.slice(&place, 3, 0, self.chunk * context);
            g.view(&place, [batch, self.heads, blocks, self.chunk, context])
        };
        let mut weights = g.add(&content, &place);
        weights = g.scalar(Binary::Div, &weights);
        weights = g.unary(Unary::Tanh, &weights);
        weights = g.scale(&weights);
        weights = {
            let hidden = g.unary(Unary::Not, mask);
            g.masked_fill(&weights, &hidden)
        };
        weights = g.softmax(&weights, -1, Some(DType::F32));
        let mut output = {
            let values = g.permute(&value, &[0, 3, 1, 2, 4]);
            g.matmul(&weights, &values)
        };
        output = g.permute(&output, &[0, 2, 3, 1, 4]);
        output = g.reshape(&output, [batch, blocks * self.chunk, self.heads * dim]);
        output = g.slice(&output, 1, 0, frames);
        output = g.contiguous(&output);
        output = g.type_as(&output, hidden);
        clipped_linear(g, "post", &output, self.hidden, self.clipped)
    }

    /// Overlapping windows, one per block: a padded copy, then a copy of every window (`unfold`, made dense).
    fn with_context(&self, g: &mut Graph, x: &Value, blocks: u64) -> Value {
        let length = x.size(1) + self.past + self.future + self.chunk - 1;
        let padded = g.pad(x, x.shape().with(1, length));
        g.run(Op::Repeat, &[&padded], [x.size(0), blocks, self.context(), x.size(2), x.size(3)])
    }
}
