//! The speech encoder of Phi-4-multimodal: strided convolutions and a conformer with relative positions.

use super::parts::dimension;
use crate::dtype::DType;
use crate::model::blocks::{EncoderAttention, read};
use crate::model::op::{Activation, Binary, Convolution, EagerStyle, Input, Norm, Op, Role};
use crate::model::{Config, Graph, ModelError, Value};

/// Frames that attention sees at once; longer sound is cut.
const LONGEST: u64 = 500;

/// The encoder and its projections.
#[derive(Debug, Clone)]
pub(super) struct Audio {
    hidden: u64,
    width: u64,
    blocks: u64,
    activation: Activation,
    dropout: f64,
    kernel: u64,
    /// Channels inside the convolution module: after the gate, of the depthwise part, after the separable one.
    gated: u64,
    multiplier: u64,
    separable: u64,
    bins: u64,
    /// How often time is halved.
    halvings: u32,
    channels: u64,
    buckets: u64,
    downsample: u64,
    attention: EncoderAttention,
    embedding_dropout: f64,
    out: u64,
}

impl Audio {
    pub(super) fn read(c: &Config<'_>, embedding_dropout: f64, out: u64) -> Result<Self, ModelError> {
        let hidden = dimension(c, &["hidden_size"], 1024)?;
        let heads = dimension(c, &["num_attention_heads"], 16)?;
        let dropout = c.number("dropout_rate", 0.0)?;
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["q_proj", "k_proj", "v_proj", "o_proj"]);
        attention.dropout = dropout;
        attention.eager = EagerStyle::Fp32Softmax;
        let distance = c.size_or(&["bias_max_distance"], 1000)?;
        Ok(Self {
            hidden,
            width: c.size_or(&["intermediate_size"], 1536)?,
            blocks: c.layers(&["num_blocks"], 24)?,
            activation: read::activation(c, "activation", "swish")?,
            dropout,
            kernel: dimension(c, &["kernel_size"], 3)?,
            gated: dimension(c, &["ext_pw_out_channel"], 1024)?,
            multiplier: dimension(c, &["depthwise_multiplier"], 1)?,
            separable: dimension(c, &["depthwise_separable_out_channel"], 1024)?,
            bins: dimension(c, &["input_size"], 80)?,
            halvings: dimension(c, &["time_reduction"], 8)?.ilog2(),
            channels: dimension(c, &["nemo_conv_channels"], 1024)?,
            buckets: if c.flag("bias_symmetric", false)? { distance } else { distance.saturating_mul(2) },
            downsample: dimension(c, &["downsample_rate"], 1)?,
            attention,
            embedding_dropout,
            out,
        })
    }

    /// The embeddings with the sound's features among them; `beside_images` chooses the projection.
    pub(super) fn run(&self, g: &mut Graph, ids: &Value, embeddings: &Value, beside_images: bool) -> Value {
        let heard = g.module("encoder", |g| self.encode(g));
        if self.downsample != 1 {
            g.fail("a downsample_rate other than 1 does not fit the encoder's output");
        }
        for kind in ["speech", "vision_speech"] {
            g.declare_only(|g| self.project(g, &heard, kind));
        }
        let projected = self.project(g, &heard, if beside_images { "vision_speech" } else { "speech" });
        drop(heard);
        let rows = [projected.size(0) * projected.size(1), self.out];
        let parts = g.split(&projected, 0, &vec![1; projected.size(0).min(1 << 16) as usize]);
        let mut joined = g.cat(&parts.iter().collect::<Vec<_>>(), 0);
        joined = g.view(&joined, rows);
        joined = g.type_as(&joined, embeddings);
        let places = g.without_grad(|g| g.compare(ids));
        let put = g.without_autocast(|g| {
            g.run(Op::Scatter { dim: 0, in_place: false }, &[embeddings, &places, &joined], embeddings.shape())
        });
        g.dropout(&put, self.embedding_dropout)
    }

    fn project(&self, g: &mut Graph, heard: &Value, kind: &str) -> Value {
        let mut x = g.linear(&format!("up_proj_for_{kind}"), heard, self.out, true);
        x = g.activation(Activation::Gelu, &x);
        g.linear(&format!("down_proj_for_{kind}"), &x, self.out, true)
    }

    fn encode(&self, g: &mut Graph) -> Value {
        let (batch, frames) = (g.inputs.batch, g.inputs.audio_frames.unwrap_or(64).max(1));
        let sound = g.input(Input::Audio, [batch, frames, self.bins]);
        let mut x = g.to_model_type(&sound);
        for name in ["global_mean", "global_invstd"] {
            g.buffer(&format!("encoder_embedding.{name}"), [self.bins], DType::F32, true);
        }
        let mean = g.fill_like(&x, [self.bins]);
        x = g.sub(&x, &mean);
        x = g.mul(&x, &mean);
        x = g.module("embed", |g| self.subsample(g, &x));
        let length = x.size(1);
        let padded = length.next_multiple_of(LONGEST);
        if length > LONGEST {
            x = g.pad(&x, [batch, padded, self.hidden]);
            x = g.run(Op::Repeat, &[&x], [batch * (padded / LONGEST), LONGEST, self.hidden]);
        }
        let mask = self.mask(g, &x);
        for index in 0..self.blocks {
            // Not a checkpointed layer in transformers.
            x = g.module(&format!("encoders.{index}"), |g| self.block(g, &x, &mask));
        }
        if length > LONGEST {
            x = g.reshape(&x, [batch, padded, self.hidden]);
            x = g.slice(&x, 1, 0, length);
        }
        x
    }

    fn subsample(&self, g: &mut Graph, x: &Value) -> Value {
        let mut x = g.unsqueeze(x, 1);
        let halve = |groups| Convolution { stride: [2, 2, 1], padding: [1, 1, 0], groups, transposed: false };
        let point = Convolution { stride: [1; 3], padding: [0; 3], groups: 1, transposed: false };
        x = g.convolution("conv.0", &x, self.channels, &[3, 3], halve(1), true);
        x = g.activation(Activation::Relu, &x);
        for step in 1..u64::from(self.halvings) {
            x = g.convolution(
                &format!("conv.{}", 3 * step - 1),
                &x,
                self.channels,
                &[3, 3],
                halve(self.channels),
                true,
            );
            x = g.convolution(&format!("conv.{}", 3 * step), &x, self.channels, &[1, 1], point, true);
            x = g.activation(Activation::Relu, &x);
        }
        let (batch, frames, bins) = (x.size(0), x.size(2), x.size(3));
        x = g.transpose(&x, 1, 2);
        x = g.reshape(&x, [batch, frames, self.channels * bins]);
        g.linear("out", &x, self.hidden, true)
    }

    /// Which frames are sound, plus a learned bias by distance.
    fn mask(&self, g: &mut Graph, x: &Value) -> Value {
        let (batch, frames) = (x.size(0), x.size(1));
        let seen = g.fill(DType::Bool, [batch, frames, frames]);
        let distances = g.fill(DType::I64, [frames, frames]);
        let heads = self.attention.heads;
        let mut bias = g.embedding("relative_attention_bias_layer.bias_values", &distances, self.buckets, heads);
        bias = g.permute(&bias, &[2, 0, 1]);
        bias = g.unsqueeze(&bias, 0);
        let seen = g.unsqueeze(&seen, 1);
        g.add(&seen, &bias)
    }

    fn block(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let mut hidden = self.half_step(g, "feed_forward_in", input);
        hidden = {
            let normed = g.norm("layer_norm_att", &hidden, Norm::Layer, true);
            let attended = g.module("self_attn", |g| self.attention.run(g, &normed, Some(mask)));
            g.add(&hidden, &attended)
        };
        hidden = {
            let convolved = g.module("conv", |g| self.convolve(g, &hidden));
            g.add(&hidden, &convolved)
        };
        hidden = self.half_step(g, "feed_forward_out", &hidden);
        g.norm("layer_norm", &hidden, Norm::Layer, true)
    }

    /// `x + 0.5 * mlp(x)`.
    fn half_step(&self, g: &mut Graph, name: &str, x: &Value) -> Value {
        let mut out = g.module(name, |g| {
            let mut wide = g.norm("layer_norm", x, Norm::Layer, true);
            wide = g.linear("gate_up_proj", &wide, self.width.saturating_mul(2), true);
            let (up, gate) = g.split2(&wide, -1, self.width, self.width);
            drop(wide);
            let mut product = g.glu(self.activation, &gate, &up);
            product = g.dropout(&product, self.dropout);
            product = g.linear("down_proj", &product, self.hidden, true);
            g.dropout(&product, self.dropout)
        });
        out = g.scale(&out);
        g.add(x, &out)
    }

    fn convolve(&self, g: &mut Graph, x: &Value) -> Value {
        let spec =
            |padding, groups| Convolution { stride: [1; 3], padding: [padding, 0, 0], groups, transposed: false };
        let mut x = g.norm("layer_norm", x, Norm::Layer, true);
        x = g.module("glu", |g| {
            let turned = g.permute(&x, &[0, 2, 1]);
            let wide = g.convolution("ext_pw_conv_1d", &turned, self.gated.saturating_mul(2), &[1], spec(0, 1), true);
            let [kept, gate] = [("b1", 0), ("b2", self.gated)].map(|(name, start)| {
                let bias = g.parameter(name, [1, self.gated, 1], Role::Bias);
                let bias = g.read(bias, [1, self.gated, 1]);
                let half = g.slice(&wide, 1, start, self.gated);
                g.add(&half, &bias)
            });
            let gate = g.activation(Activation::Silu, &gate);
            let gated = g.binary(Binary::Mul, &kept, &gate);
            g.permute(&gated, &[0, 2, 1])
        });
        x = g.permute(&x, &[0, 2, 1]);
        let length = x.size(2);
        x = g.module("dw_sep_conv_1d", |g| {
            let deep = self.hidden.saturating_mul(self.multiplier);
            let wide =
                g.convolution("dw_conv", &x, deep, &[self.kernel], spec(self.kernel as u32 - 1, self.hidden), true);
            g.convolution("pw_conv", &wide, self.separable, &[1], spec(0, 1), true)
        });
        x = g.slice(&x, 2, 0, length);
        x = g.activation(Activation::Silu, &x);
        x = g.convolution("ext_pw_conv_1d", &x, self.gated, &[1], spec(0, 1), true);
        x = g.permute(&x, &[0, 2, 1]);
        g.dropout(&x, self.dropout)
    }
}
