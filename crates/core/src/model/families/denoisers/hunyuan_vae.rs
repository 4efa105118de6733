//! `AutoencoderKLHunyuanVideo` of diffusers 0.42: a long video in overlapping runs of frames. What is run is decoding.

use super::tiles::{self, Tiles};
use super::{Pictures, parts};
use crate::dtype::DType;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Binary, Convolution, Input, Op};
use crate::model::{Config, Family, Graph, ModelError, Task, Value};

/// The autoencoder of HunyuanVideo.
pub(super) const FAMILY: Family = Family {
    name: "video autoencoder of HunyuanVideo",
    model_types: &["AutoencoderKLHunyuanVideo"],
    facts: Facts { tasks: Some(&[Task::Base]), served: false, ..Facts::DEFAULT },
    build,
};

pub(super) const PICTURES: Pictures = Pictures { sides: [720, 1280], pixels: 1, frames: 129, between: 4 };

/// Pixels of a tile's side and from one to the next, and the same in frames (`tile_sample_min_height` and its kin).
const TILE: [u64; 2] = [256, 192];
const FRAMES: [u64; 2] = [16, 12];

struct Autoencoder {
    latents: u64,
    channels: Vec<u64>,
    layers: u64,
    groups: u64,
    attends: bool,
}

impl Autoencoder {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        for (key, usual) in [("spatial_compression_ratio", 8), ("temporal_compression_ratio", 4)] {
            if read::positive(c, &[key], usual)? != usual {
                return Err(c.refuse(key, &usual.to_string()));
            }
        }
        let channels = c.sizes("block_out_channels")?.unwrap_or_else(|| vec![128, 256, 512, 512]);
        if channels.len() != 4 || channels.contains(&0) {
            return Err(c.refuse("block_out_channels", "four positive sizes"));
        }
        Ok(Self {
            latents: read::positive(c, &["latent_channels"], 16)?,
            channels,
            layers: read::positive(c, &["layers_per_block"], 2)?,
            groups: read::positive(c, &["norm_num_groups"], 32)?,
            attends: c.flag("mid_block_add_attention", true)?,
        })
    }

    fn run(&self, g: &mut Graph) {
        g.declare_only(|g| self.encode(g));
        let (batch, [frames, height, width]) = (g.inputs.batch, PICTURES.latents(g));
        let [height, width] = [height, width].map(|side| (side / 8).max(1));
        let latents = g.input(Input::Pixels, [batch, self.latents, frames, height, width]);
        let output = tiles::one_by_one(g, &latents, |g, latents| self.decode_whole(g, latents));
        parts::noise_loss(g, &output);
    }

    /// Frames in overlapping runs where there are many, whether tiles are asked for or not (`use_framewise_decoding`); a run begins with one
    /// that the run before it ended with, and all wait for the end.
    fn decode_whole(&self, g: &mut Graph, latents: &Value) -> Value {
        let frames = latents.size(2);
        let [most, stride] = FRAMES.map(|frames| frames / PICTURES.between);
        if frames <= most {
            return self.decode_tiles(g, latents);
        }
        let mut runs = Vec::new();
        for at in (0..frames).step_by(stride as usize) {
            let run = g.slice(latents, 2, at, (most + 1).min(frames - at));
            let decoded = self.decode_tiles(g, &run);
            let first = u64::from(at > 0);
            runs.push(g.slice(&decoded, 2, first, decoded.size(2) - first));
        }
        let kept = |at: usize, run: &Value| run.size(2).min(FRAMES[1] + u64::from(at == 0));
        let cut: Vec<Value> = runs.iter().enumerate().map(|(at, run)| g.slice(run, 2, 0, kept(at, run))).collect();
        g.cat(&cut.iter().collect::<Vec<_>>(), 2)
    }

    fn decode_tiles(&self, g: &mut Graph, latents: &Value) -> Value {
        let tiles = Tiles::of_pixels(TILE, 8);
        tiles.decode(g, latents, |g, tile| self.decode(g, tile))
    }

    fn decode(&self, g: &mut Graph, latents: &Value) -> Value {
        let sample = plain(g, "post_quant_conv", latents, self.latents, 1);
        g.module("decoder", |g| {
            let mut x = causal(g, "conv_in", &sample, self.channels[3], 3);
            x = self.middle(g, &x);
            for at in 0..4 {
                x = g.module(&format!("up_blocks.{at}"), |g| {
                    let mut x = x.clone();
                    for index in 0..=self.layers {
                        x = g.layer("resnets", index, |g| self.resnet(g, &x, self.channels[3 - at]));
                    }
                    // Sides are doubled three times, time in the second and third.
                    if at == 3 { x } else { g.module("upsamplers.0", |g| larger(g, &x, at > 0)) }
                });
            }
            x = parts::group_norm(g, "conv_norm_out", &x, self.groups);
            x = g.activation(Activation::Silu, &x);
            causal(g, "conv_out", &x, 3, 3)
        })
    }

    fn resnet(&self, g: &mut Graph, input: &Value, outputs: u64) -> Value {
        let input = g.contiguous(input);
        let mut x = parts::group_norm(g, "norm1", &input, self.groups);
        x = g.activation(Activation::Silu, &x);
        x = causal(g, "conv1", &x, outputs, 3);
        x = parts::group_norm(g, "norm2", &x, self.groups);
        x = g.activation(Activation::Silu, &x);
        x = causal(g, "conv2", &x, outputs, 3);
        let shortcut = match input.size(1) == outputs {
            true => input,
            false => causal(g, "conv_shortcut", &input, outputs, 1),
        };
        g.add(&x, &shortcut)
    }

    fn middle(&self, g: &mut Graph, input: &Value) -> Value {
        g.module("mid_block", |g| {
            let channels = input.size(1);
            let mut x = g.layer("resnets", 0, |g| self.resnet(g, input, channels));
            if self.attends {
                let [batch, _, frames, height, width] = [0, 1, 2, 3, 4].map(|dim| x.size(dim));
                x = g.permute(&x, &[0, 2, 3, 4, 1]);
                x = g.reshape(&x, [batch, frames.saturating_mul(height).saturating_mul(width), channels]);
                let mask = mask(g, &x);
                x = g.module("attentions.0", |g| self.attention(g, &x, &mask));
                drop(mask);
                x = g.view(&x, [batch, frames, height, width, channels]);
                x = g.permute(&x, &[0, 4, 1, 2, 3]);
            }
            g.layer("resnets", 1, |g| self.resnet(g, &x, channels))
        })
    }

    /// `Attention` with a residual: one head over all places of all frames.
    fn attention(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let width = input.size(-1);
        let turned = g.transpose(input, 1, 2);
        let normal = parts::group_norm(g, "group_norm", &turned, self.groups);
        let hidden = g.transpose(&normal, 1, 2);
        let three = ["to_q", "to_k", "to_v"].map(|name| g.linear(name, &hidden, width, true));
        let [query, key, value] = three.map(|x| g.unsqueeze(&x, 1));
        let op = Op::ScaledDotProduct { causal: false, dropout: false, grouped: false };
        let mut x = g.run(op, &[&query, &key, &value, mask], query.shape());
        x = g.squeeze(&x, 1);
        x = g.linear("to_out.0", &x, width, true);
        x = g.add(&x, input);
        g.scalar(Binary::Div, &x)
    }

    /// The way in, for its weights.
    fn encode(&self, g: &mut Graph) {
        let pixels = g.input(Input::Pixels, [1, 3, 1, 1, 1]);
        let moments = g.module("encoder", |g| {
            let mut x = causal(g, "conv_in", &pixels, self.channels[0], 3);
            for at in 0..4 {
                x = g.module(&format!("down_blocks.{at}"), |g| {
                    let mut x = x.clone();
                    for index in 0..self.layers {
                        x = g.layer("resnets", index, |g| self.resnet(g, &x, self.channels[at]));
                    }
                    if at == 3 {
                        x
                    } else {
                        g.module("downsamplers.0", |g| causal(g, "conv", &x, self.channels[at], 3))
                    }
                });
            }
            x = self.middle(g, &x);
            x = parts::group_norm(g, "conv_norm_out", &x, self.groups);
            causal(g, "conv_out", &x, self.latents.saturating_mul(2), 3)
        });
        plain(g, "quant_conv", &moments, self.latents.saturating_mul(2), 1);
    }
}

/// A frame sees itself and those before it (`prepare_causal_attention_mask`), written in fp32 first.
fn mask(g: &mut Graph, x: &Value) -> Value {
    let (batch, places) = (x.size(0), x.size(1));
    let numbers = g.fill(DType::I32, [places]);
    let compared = g.fill(DType::Bool, [places, places]);
    let wide = g.fill(DType::F32, [places, places]);
    let mask = g.type_as(&wide, x);
    drop((numbers, compared, wide));
    let mask = g.unsqueeze(&mask, 0);
    // `prepare_attention_mask` repeats it for each head, of which there is one.
    g.expand(&mask, [batch, 1, places, places])
}

fn plain(g: &mut Graph, name: &str, x: &Value, outputs: u64, side: u64) -> Value {
    let spec = Convolution { stride: [1; 3], padding: [0; 3], groups: 1, transposed: false };
    g.convolution(name, x, outputs, &[side; 3], spec, true)
}

/// `HunyuanVideoCausalConv3d`: edges are repeated, the first picture twice.
fn causal(g: &mut Graph, name: &str, x: &Value, outputs: u64, side: u64) -> Value {
    let [batch, channels, frames, height, width] = [0, 1, 2, 3, 4].map(|dim| x.size(dim));
    let more = side - 1;
    let wide = match more {
        0 => x.clone(),
        _ => g.pad(x, [batch, channels, frames + more, height + more, width + more]),
    };
    g.module(name, |g| plain(g, "conv", &wide, outputs, side))
}

/// `HunyuanVideoUpsampleCausal3D`: the first picture apart, since it stays one along time.
fn larger(g: &mut Graph, x: &Value, in_time: bool) -> Value {
    let [batch, channels, frames, height, width] = [0, 1, 2, 3, 4].map(|dim| x.size(dim));
    let sides = [height, width].map(|side| side.saturating_mul(2));
    let first = g.select(x, 2, 0);
    let first = g.run(Op::Interpolate, &[&first], [batch, channels, sides[0], sides[1]]);
    let first = g.unsqueeze(&first, 2);
    // Both parts keep their names while what they became is convolved.
    let others = (frames > 1).then(|| {
        let others = g.slice(x, 2, 1, frames - 1);
        let others = g.contiguous(&others);
        let times = (frames - 1) * if in_time { 2 } else { 1 };
        g.run(Op::Interpolate, &[&others], [batch, channels, times, sides[0], sides[1]])
    });
    let wide = others.as_ref().map_or_else(|| first.clone(), |others| g.cat(&[&first, others], 2));
    causal(g, "conv", &wide, channels, 3)
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    Autoencoder::read(c)?.run(g);
    Ok(())
}
