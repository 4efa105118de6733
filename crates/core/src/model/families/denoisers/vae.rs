//! `AutoencoderKL` of diffusers: pictures to latents and back. In training both ways run; else latents are decoded, as a pipeline does.

use super::Pictures;
use super::parts;
use super::tiles::{self, Tiles};
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Binary, Convolution, Input, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// The autoencoder of Stable Diffusion and Flux.
pub(super) const FAMILY: Family = Family {
    name: "autoencoder of diffusers",
    model_types: &["AutoencoderKL"],
    facts: Facts {
        tasks: Some(&[Task::Base]),
        served: false,
        registration: &[
            &["encoder", "decoder", "quant_conv", "post_quant_conv"],
            &["conv_in", "down_blocks", "mid_block", "conv_norm_out", "conv_out"],
            &["conv_in", "up_blocks", "mid_block", "conv_norm_out", "conv_out"],
            &["attentions", "resnets", "downsamplers", "upsamplers"],
            &["norm1", "conv1", "norm2", "conv2", "conv_shortcut"],
            &["group_norm", "to_q", "to_k", "to_v", "to_out"],
        ],
        ..Facts::DEFAULT
    },
    build,
};

pub(super) const PICTURES: Pictures = Pictures::stills(32, 1);

struct Autoencoder {
    channels: [u64; 2],
    latents: u64,
    blocks: Vec<u64>,
    layers: u64,
    groups: u64,
    sample: u64,
    attends: bool,
    /// Whether latents pass a convolution of one place on either side.
    quantised: [bool; 2],
}

impl Autoencoder {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        for (key, usual) in [("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")] {
            if c.strings(key)?.is_some_and(|names| names.iter().any(|name| *name != usual)) {
                return Err(c.refuse(key, &format!("{usual} alone")));
            }
        }
        let blocks = c.sizes("block_out_channels")?.unwrap_or_else(|| vec![64]);
        if blocks.is_empty() || blocks.contains(&0) {
            return Err(c.refuse("block_out_channels", "positive sizes"));
        }
        Ok(Self {
            channels: [read::positive(c, &["in_channels"], 3)?, read::positive(c, &["out_channels"], 3)?],
            latents: read::positive(c, &["latent_channels"], 4)?,
            blocks,
            layers: read::positive(c, &["layers_per_block"], 1)?,
            groups: read::positive(c, &["norm_num_groups"], 32)?,
            sample: read::positive(c, &["sample_size"], 32)?,
            attends: c.flag("mid_block_add_attention", true)?,
            quantised: [c.flag("use_quant_conv", true)?, c.flag("use_post_quant_conv", true)?],
        })
    }

    fn run(&self, g: &mut Graph) {
        let (batch, images) = (g.inputs.batch, g.inputs.images);
        let [height, width] = images.map_or([self.sample; 2], |images| [images.height, images.width]);
        if g.inputs.labels {
            let pixels = g.input(Input::Pixels, [batch, self.channels[0], height, width]);
            let moments = self.encode(g, &pixels);
            let (mean, spread) = g.split2(&moments, 1, self.latents, self.latents);
            let spread = g.unary(Unary::Clamp, &spread);
            let half = g.scale(&spread);
            let deviation = g.unary(Unary::Exp, &half);
            drop(half);
            let variance = g.unary(Unary::Exp, &spread);
            let output = self.decode(g, &mean);
            drop((moments, spread, deviation, variance, mean));
            parts::noise_loss(g, &output);
        } else {
            let factor = 1 << (self.blocks.len() - 1).min(16);
            let latents =
                g.input(Input::Pixels, [batch, self.latents, (height / factor).max(1), (width / factor).max(1)]);
            // Its weights are there all the same.
            g.declare_only(|g| {
                let pixels = g.input(Input::Pixels, [1, self.channels[0], factor, factor]);
                self.encode(g, &pixels);
            });
            let output = tiles::one_by_one(g, &latents, |g, latents| self.decode_whole(g, latents));
            parts::noise_loss(g, &output);
        }
    }

    fn encode(&self, g: &mut Graph, pixels: &Value) -> Value {
        let mut sample = g.module("encoder", |g| {
            let mut sample = parts::convolution(g, "conv_in", pixels, self.blocks[0], 3, 1);
            for (at, channels) in self.blocks.iter().copied().enumerate() {
                sample = g.layer("down_blocks", at as u64, |g| {
                    let mut hidden = sample.clone();
                    for index in 0..self.layers {
                        hidden = self.resnet(g, index, &hidden, channels);
                    }
                    let last = at + 1 == self.blocks.len();
                    if last { hidden } else { g.module("downsamplers.0", |g| halved(g, &hidden)) }
                });
            }
            sample = g.single_layer("mid_block", |g| self.middle(g, &sample));
            self.end(g, &sample, self.latents.saturating_mul(2))
        });
        if self.quantised[0] {
            sample = parts::convolution(g, "quant_conv", &sample, self.latents.saturating_mul(2), 1, 1);
        }
        sample
    }

    /// Tile by tile where they are tiled and larger than one; tiles overlap by a quarter.
    fn decode_whole(&self, g: &mut Graph, latents: &Value) -> Value {
        let side = (self.sample >> (self.blocks.len() - 1).min(16)).max(1);
        let tiles = Tiles { side, stride: (side * 3 / 4).max(1), kept: self.sample - self.sample / 4 };
        tiles.decode(g, latents, |g, tile| self.decode(g, tile))
    }

    fn decode(&self, g: &mut Graph, latents: &Value) -> Value {
        let mut sample = latents.clone();
        if self.quantised[1] {
            sample = parts::convolution(g, "post_quant_conv", &sample, self.latents, 1, 1);
        }
        let widest = self.blocks.last().copied().unwrap_or(1);
        g.module("decoder", |g| {
            let mut hidden = parts::convolution(g, "conv_in", &sample, widest, 3, 1);
            hidden = g.single_layer("mid_block", |g| self.middle(g, &hidden));
            for (at, channels) in self.blocks.iter().rev().copied().enumerate() {
                hidden = g.layer("up_blocks", at as u64, |g| {
                    let mut hidden = hidden.clone();
                    for index in 0..=self.layers {
                        hidden = self.resnet(g, index, &hidden, channels);
                    }
                    let size = [2, 3].map(|dim| hidden.size(dim).saturating_mul(2));
                    let last = at + 1 == self.blocks.len();
                    if last { hidden } else { g.module("upsamplers.0", |g| parts::upsample(g, &hidden, size)) }
                });
            }
            self.end(g, &hidden, self.channels[1])
        })
    }

    fn end(&self, g: &mut Graph, sample: &Value, outputs: u64) -> Value {
        let mut hidden = parts::group_norm(g, "conv_norm_out", sample, self.groups);
        hidden = g.activation(Activation::Silu, &hidden);
        parts::convolution(g, "conv_out", &hidden, outputs, 3, 1)
    }

    fn resnet(&self, g: &mut Graph, index: u64, input: &Value, outputs: u64) -> Value {
        g.module(&format!("resnets.{index}"), |g| parts::resnet(g, input, None, outputs, self.groups))
    }

    /// `UNetMidBlock2D`.
    fn middle(&self, g: &mut Graph, input: &Value) -> Value {
        let channels = input.size(1);
        let mut hidden = self.resnet(g, 0, input, channels);
        if self.attends {
            hidden = g.module("attentions.0", |g| self.attention(g, &hidden));
        }
        self.resnet(g, 1, &hidden, channels)
    }

    /// Attention of one head over all places. What comes out lies with its channels last, and so does what is added to it.
    fn attention(&self, g: &mut Graph, input: &Value) -> Value {
        let [batch, channels, height, width] = [0, 1, 2, 3].map(|dim| input.size(dim));
        let rows = g.view(input, [batch, channels, height.saturating_mul(width)]);
        let mut hidden = parts::group_norm(g, "group_norm", &rows, self.groups);
        hidden = g.transpose(&hidden, 1, 2);
        let three = ["to_q", "to_k", "to_v"].map(|name| g.linear(name, &hidden, channels, true));
        hidden = parts::attend_bare(g, three, 1);
        hidden = g.transpose(&hidden, 1, 2);
        hidden = g.reshape(&hidden, [batch, channels, height, width]);
        hidden = g.add(&hidden, input);
        g.scalar(Binary::Div, &hidden)
    }
}

/// `Downsample2D` without padding of its own: a row and a column are put on.
fn halved(g: &mut Graph, x: &Value) -> Value {
    let [batch, channels, height, width] = [0, 1, 2, 3].map(|dim| x.size(dim));
    let wide = g.pad(x, [batch, channels, height.saturating_add(1), width.saturating_add(1)]);
    let spec = Convolution { stride: [2; 3], padding: [0; 3], groups: 1, transposed: false };
    g.convolution("conv", &wide, channels, &[3, 3], spec, true)
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    Autoencoder::read(c)?.run(g);
    Ok(())
}
