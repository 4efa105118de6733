//! The audio tower of Gemma 3n: two strided convolutions with cumulative norms, then a conformer that attends in blocks.

use super::parts::dimension;
use crate::dtype::DType;
use crate::model::op::{Activation, Binary, Convolution, Input, Norm, Op, Reduction, Role, Unary};
use crate::model::{Config, Graph, ModelError, Value};

const NORM: Norm = Norm::RmsWeightFirst;

/// The tower.
#[derive(Debug, Clone)]
pub(super) struct Audio {
    pub hidden: u64,
    layers: u64,
    heads: u64,
    bins: u64,
    channels: [u64; 2],
    kernels: [[u64; 2]; 2],
    strides: [[u64; 2]; 2],
    kernel: u64,
    chunk: u64,
    past: u64,
    future: u64,
    /// Every so many frames one is kept.
    reduction: u64,
}

impl Audio {
    pub(super) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let channels = c.sizes("sscp_conv_channel_size")?.unwrap_or_else(|| vec![128, 32]);
        let &[first, second] = channels.as_slice() else {
            return Err(c.refuse("sscp_conv_channel_size", "two numbers of channels"));
        };
        Ok(Self {
            hidden: dimension(c, &["hidden_size"], 1536)?,
            layers: c.layers(&["conf_num_hidden_layers"], 12)?,
            heads: dimension(c, &["conf_num_attention_heads"], 8)?,
            bins: dimension(c, &["input_feat_size"], 128)?,
            channels: [first, second],
            kernels: pairs(c, "sscp_conv_kernel_size", 3)?,
            strides: pairs(c, "sscp_conv_stride_size", 2)?,
            kernel: dimension(c, &["conf_conv_kernel_size"], 5)?,
            chunk: dimension(c, &["conf_attention_chunk_size"], 12)?,
            past: c.size_or(&["conf_attention_context_left"], 13)?.max(1) - 1,
            future: c.size_or(&["conf_attention_context_right"], 0)?,
            reduction: dimension(c, &["conf_reduction_factor"], 4)?,
        })
    }

    /// `[clips, tokens, hidden]`.
    pub(super) fn model(&self, g: &mut Graph) -> Value {
        let (batch, frames) = (g.inputs.batch, g.inputs.audio_frames.unwrap_or(64).max(16));
        let sound = g.input(Input::Audio, [batch, frames, self.bins]);
        let mut x = g.module("subsample_conv_projection", |g| self.subsample(g, &sound));
        let mask = g.fill(DType::Bool, [batch, x.size(1)]);
        for index in 0..self.layers {
            // Not a checkpointed layer in transformers.
            x = g.module(&format!("conformer.{index}"), |g| self.block(g, &x, &mask));
        }
        let (step, length) = (self.reduction, x.size(1).div_ceil(self.reduction));
        x = g.slice_step(&x, 1, 0, length, step);
        let kept = g.slice_step(&mask, 1, 0, length, step);
        let kept = g.unsqueeze(&kept, -1);
        g.masked_fill(&x, &kept)
    }

    fn subsample(&self, g: &mut Graph, sound: &Value) -> Value {
        let mut x = g.unsqueeze(sound, 1);
        for (index, &channels) in self.channels.iter().enumerate() {
            let ([tall, wide], [down, across]) = (self.kernels[index], self.strides[index]);
            x = g.module(&format!("conv_{index}"), |g| {
                let padded = x.shape().with(2, x.size(2) + tall - 1).with(3, x.size(3) + 2);
                let mut x = g.pad(&x, padded);
                x = g.to_model_type(&x);
                let spec = Convolution {
                    stride: [down as u32, across as u32, 1],
                    padding: [0; 3],
                    groups: 1,
                    transposed: false,
                };
                x = g.convolution("conv", &x, channels, &[tall, wide], spec, false);
                x = g.permute(&x, &[0, 2, 3, 1]);
                x = g.contiguous(&x);
                x = cumulative_norm(g, &x);
                x = g.permute(&x, &[0, 3, 1, 2]);
                x = g.contiguous(&x);
                g.unary(Unary::Relu, &x)
            });
        }
        let (batch, channels, frames, bins) = (x.size(0), x.size(1), x.size(2), x.size(3));
        x = g.permute(&x, &[0, 2, 3, 1]);
        x = g.contiguous(&x);
        x = g.view(&x, [batch, frames, bins * channels]);
        g.linear("input_proj_linear", &x, self.hidden, false)
    }

    fn block(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let mut x = g.module("ffw_layer_start", |g| self.feed_forward(g, input));
        x = g.module("attention", |g| self.attention(g, &x, mask));
        x = {
            let valid = g.unary(Unary::Not, mask);
            let valid = g.unsqueeze(&valid, -1);
            let valid = g.type_as(&valid, &x);
            g.mul(&x, &valid)
        };
        x = g.module("lconv1d", |g| self.convolve(g, &x));
        x = g.module("ffw_layer_end", |g| self.feed_forward(g, &x));
        x = self.clamp(g, &x);
        g.norm("norm", &x, NORM, false)
    }

    fn clamp(&self, g: &mut Graph, x: &Value) -> Value {
        g.buffer("gradient_clipping", [], DType::BF16, false);
        g.unary(Unary::Clamp, x)
    }

    fn feed_forward(&self, g: &mut Graph, input: &Value) -> Value {
        let mut x = self.clamp(g, input);
        x = g.norm("pre_layer_norm", &x, NORM, false);
        x = g.linear("ffw_layer_1", &x, 4 * self.hidden, false);
        x = g.activation(Activation::Silu, &x);
        x = g.linear("ffw_layer_2", &x, self.hidden, false);
        x = g.unary(Unary::Clamp, &x);
        x = g.norm("post_layer_norm", &x, NORM, false);
        x = g.scale(&x);
        g.add(input, &x)
    }

    fn convolve(&self, g: &mut Graph, input: &Value) -> Value {
        let mut x = g.norm("pre_layer_norm", input, NORM, false);
        x = g.linear("linear_start", &x, 2 * self.hidden, false);
        x = {
            let (value, gate) = g.split2(&x, -1, self.hidden, self.hidden);
            g.glu(Activation::Sigmoid, &gate, &value)
        };
        x = g.permute(&x, &[0, 2, 1]);
        x = g.pad(&x, x.shape().with(2, x.size(2) + self.kernel - 1));
        let spec = Convolution { stride: [1; 3], padding: [0; 3], groups: self.hidden, transposed: false };
        x = g.convolution("depthwise_conv1d", &x, self.hidden, &[self.kernel], spec, false);
        x = g.permute(&x, &[0, 2, 1]);
        x = self.clamp(g, &x);
        x = g.norm("conv_norm", &x, NORM, false);
        x = g.activation(Activation::Silu, &x);
        x = g.linear("linear_end", &x, self.hidden, false);
        g.add(&x, input)
    }

    fn attention(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let mut x = self.clamp(g, input);
        x = g.norm("pre_attn_norm", &x, NORM, false);
        x = g.module("attn", |g| self.attend(g, &x, mask));
        x = g.reshape(&x, input.shape());
        x = g.linear("post", &x, self.hidden, false);
        x = g.unary(Unary::Clamp, &x);
        x = g.norm("post_norm", &x, NORM, false);
        g.add(input, &x)
    }

    /// `[batch, frames, heads, dim]`.
    fn attend(&self, g: &mut Graph, hidden: &Value, mask: &Value) -> Value {
        let (batch, frames, dim) = (hidden.size(0), hidden.size(1), self.hidden / self.heads);
        let (blocks, context) = (frames.div_ceil(self.chunk), self.chunk + self.past + self.future);
        let scale = g.parameter("per_dim_scale", [dim], Role::Other);
        g.buffer("q_scale", [], DType::BF16, false);
        g.buffer("softcap", [], DType::F32, false);
        let causal = g.held("local_causal_valid_mask", [self.chunk, context], DType::Bool);
        let [mut query, mut key, mut value] = ["q_proj", "k_proj", "v_proj"].map(|name| {
            let x = g.linear(name, hidden, self.heads * dim, false);
            g.split_last(&x, self.heads, dim)
        });
        query = {
            let scaled = g.scale(&query);
            let scale = g.read(scale, [dim]);
            let scale = g.unary(Unary::Softplus, &scale);
            g.mul(&scaled, &scale)
        };
        if blocks * self.chunk > frames {
            query = g.pad(&query, [batch, blocks * self.chunk, self.heads, dim]);
        }
        query = g.reshape(&query, [batch, blocks, self.chunk, self.heads, dim]);
        key = self.with_context(g, &key, blocks);
        value = self.with_context(g, &value, blocks);
        let seen = {
            let valid = g.unary(Unary::Not, mask);
            let length = frames + self.past + self.future + self.chunk - 1;
            let padded = g.pad(&valid, [batch, length]);
            let valid = g.run(Op::Repeat, &[&padded], [batch, 1, blocks, 1, context]);
            g.binary(Binary::Min, &valid, &causal)
        };
        let mut logits = g.module("relative_position_embedding", |g| self.logits(g, &query, &key));
        logits = g.scalar(Binary::Div, &logits);
        logits = g.unary(Unary::Tanh, &logits);
        logits = g.scale(&logits);
        logits = g.run(Op::Where, &[&seen, &logits, &logits], logits.shape());
        let mut weights = g.softmax(&logits, -1, Some(DType::F32));
        weights = g.type_as(&weights, &value);
        let mixed = {
            let turned = g.permute(&weights, &[0, 2, 1, 3, 4]);
            let left = g.reshape(&turned, [batch * blocks * self.heads, self.chunk, context]);
            let turned = g.permute(&value, &[0, 1, 3, 2, 4]);
            let right = g.reshape(&turned, [batch * blocks * self.heads, context, dim]);
            g.matmul(&left, &right)
        };
        let mut output = g.reshape(&mixed, [batch, blocks, self.heads, self.chunk, dim]);
        output = g.permute(&output, &[0, 1, 3, 2, 4]);
        output = g.reshape(&output, [batch, blocks * self.chunk, self.heads, dim]);
        g.slice(&output, 1, 0, frames)
    }

    /// Scores by content and by distance.
    fn logits(&self, g: &mut Graph, query: &Value, key: &Value) -> Value {
        let (batch, blocks, dim, context) = (query.size(0), query.size(1), query.size(4), key.size(2));
        let span = self.past + self.future + 1;
        let scales = g.held("inv_timescales", [1, 1, self.hidden / 2], DType::F32);
        let timing = {
            let times = g.fill(DType::F32, [1, span, 1]);
            let scaled = g.mul(&times, &scales);
            let sine = g.unary(Unary::Sin, &scaled);
            let cosine = g.unary(Unary::Cos, &scaled);
            let both = g.cat(&[&sine, &cosine], -1);
            g.type_as(&both, query)
        };
        let mut places = g.linear("pos_proj", &timing, self.heads * dim, false);
        places = g.reshape(&places, [span, self.heads, dim]);
        let queries = g.permute(query, &[0, 3, 1, 2, 4]);
        let content = {
            let keys = g.permute(key, &[0, 3, 1, 4, 2]);
            g.matmul(&queries, &keys)
        };
        let turned = g.permute(&places, &[1, 2, 0]);
        let flat = g.reshape(&queries, [batch, self.heads, blocks * self.chunk, dim]);
        let mut distance = g.matmul(&flat, &turned);
        distance = g.reshape(&distance, [batch, self.heads, blocks, self.chunk, span]);
        distance = g.pad(&distance, [batch, self.heads, blocks, self.chunk, context + 1]);
        distance = g.reshape(&distance, [batch, self.heads, blocks, self.chunk * (context + 1)]);
        distance = g.slice(&distance, 3, 0, self.chunk * context);
        distance = g.reshape(&distance, [batch, self.heads, blocks, self.chunk, context]);
        g.add(&content, &distance)
    }

    /// Overlapping windows, one per block: a padded copy, then a copy of every window.
    fn with_context(&self, g: &mut Graph, x: &Value, blocks: u64) -> Value {
        let context = self.chunk + self.past + self.future;
        let padded = g.pad(x, x.shape().with(1, x.size(1) + context - 1));
        g.run(Op::Repeat, &[&padded], [x.size(0), blocks, context, x.size(2), x.size(3)])
    }
}

/// Two pairs of sizes, time before frequency.
fn pairs(c: &Config<'_>, key: &str, default: u64) -> Result<[[u64; 2]; 2], ModelError> {
    let Some(value) = c.get(key) else { return Ok([[default; 2]; 2]) };
    let size = |i: usize, j: usize| value[i][j].as_u64().filter(|size| (1..=64).contains(size));
    match (size(0, 0), size(0, 1), size(1, 0), size(1, 1)) {
        (Some(a), Some(b), Some(x), Some(y)) => Ok([[a, b], [x, y]]),
        _ => Err(c.refuse(key, "two pairs of sizes up to 64")),
    }
}

/// A norm over frequencies and channels whose mean and variance run along time, in fp32.
fn cumulative_norm(g: &mut Graph, x: &Value) -> Value {
    let (batch, frames, bins, channels) = (x.size(0), x.size(1), x.size(2), x.size(3));
    let weight = g.parameter("norm.weight", [channels], Role::Norm);
    let wide = g.float(x);
    let ones = g.fill(DType::F32, x.shape());
    let running = |g: &mut Graph, x: &Value| {
        let flat = g.view(x, [batch, frames, bins * channels]);
        let sum = g.reduce(Reduction::Sum, &flat, 2, true);
        let running = g.cumulative_sum(&sum, 1);
        g.view(&running, [batch, frames, 1, 1])
    };
    let sums = running(g, &wide);
    let counts = running(g, &ones);
    let counts = g.unary(Unary::Clamp, &counts);
    let mean = g.div(&sums, &counts);
    let squared = {
        let apart = g.sub(&wide, &mean);
        g.unary(Unary::Square, &apart)
    };
    let spread = running(g, &squared);
    let variance = g.div(&spread, &counts);
    let mut normed = {
        let apart = g.sub(&wide, &mean);
        let safe = g.scalar(Binary::Add, &variance);
        let scale = g.unary(Unary::Rsqrt, &safe);
        g.mul(&apart, &scale)
    };
    let weight = g.read(weight, [channels]);
    let weight = g.float(&weight);
    normed = g.mul(&normed, &weight);
    normed = g.mul(&normed, &ones);
    g.type_as(&normed, x)
}
