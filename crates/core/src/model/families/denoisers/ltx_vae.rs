//! `AutoencoderKLLTXVideo` of diffusers 0.42 (LTX-Video 0.9): a video in one piece. What is run is decoding.

use super::tiles::{self, Tiles};
use super::{Pictures, parts};
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Convolution, Input, Norm, Reduction, Unary};
use crate::model::{Config, Family, Graph, ModelError, Task, Value};

/// The autoencoder of LTX-Video.
pub(super) const FAMILY: Family = Family {
    name: "video autoencoder of LTX",
    model_types: &["AutoencoderKLLTXVideo"],
    facts: Facts { tasks: Some(&[Task::Base]), served: false, ..Facts::DEFAULT },
    build,
};

pub(super) const PICTURES: Pictures = Pictures { sides: [512, 704], pixels: 1, frames: 161, between: 8 };

/// Pixels of a tile's side, and from one to the next (`tile_sample_min_height`, `tile_sample_stride_height`).
const TILE: [u64; 2] = [512, 448];

struct Autoencoder {
    latents: u64,
    channels: Vec<u64>,
    layers: Vec<u64>,
    scaled: Vec<bool>,
    patch: u64,
}

impl Autoencoder {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        for key in ["timestep_conditioning", "decoder_causal"] {
            if c.flag(key, false)? {
                return Err(c.refuse(key, "false (0.9)"));
            }
        }
        let any = |key: &str| {
            c.get(key).and_then(serde_json::Value::as_array).is_some_and(|all| all.iter().any(|one| *one == true))
        };
        for key in ["decoder_inject_noise", "upsample_residual"] {
            if any(key) {
                return Err(c.refuse(key, "false everywhere (0.9)"));
            }
        }
        let sizes = |key: &str, usual: &[u64]| Ok::<_, ModelError>(c.sizes(key)?.unwrap_or_else(|| usual.to_vec()));
        let channels = sizes("block_out_channels", &[128, 256, 512, 512])?;
        let layers = sizes("layers_per_block", &[4, 3, 3, 3, 4])?;
        let scaled = match c.get("spatio_temporal_scaling").and_then(serde_json::Value::as_array) {
            Some(flags) => flags.iter().map(|flag| *flag == true).collect(),
            None => vec![true, true, true, false],
        };
        if layers.len() != channels.len() + 1 || scaled.len() != channels.len() || channels.contains(&0) {
            return Err(
                c.refuse("block_out_channels", "as many sizes as flags, and one fewer than layers_per_block (0.9)")
            );
        }
        for (key, own) in [("decoder_block_out_channels", &channels), ("decoder_layers_per_block", &layers)] {
            if c.sizes(key)?.is_some_and(|sizes| sizes != *own) {
                return Err(c.refuse(key, "what the encoder has (0.9)"));
            }
        }
        Ok(Self {
            latents: read::positive(c, &["latent_channels"], 128)?,
            channels,
            layers,
            scaled,
            patch: read::positive(c, &["patch_size"], 4)?,
        })
    }

    /// Pixels of a latent's side.
    fn factor(&self) -> u64 {
        self.scaled.iter().fold(self.patch, |sides, scaled| if *scaled { sides.saturating_mul(2) } else { sides })
    }

    fn run(&self, g: &mut Graph) {
        g.declare_only(|g| self.encode(g));
        let factor = self.factor();
        let (batch, [frames, height, width]) = (g.inputs.batch, PICTURES.latents(g));
        let [height, width] = [height, width].map(|side| (side / factor.max(1)).max(1));
        let latents = g.input(Input::Pixels, [batch, self.latents, frames, height, width]);
        let output = tiles::one_by_one(g, &latents, |g, latents| self.decode_whole(g, latents));
        parts::noise_loss(g, &output);
    }

    fn decode_whole(&self, g: &mut Graph, latents: &Value) -> Value {
        let tiles = Tiles::of_pixels(TILE, self.factor());
        tiles.decode(g, latents, |g, tile| self.decode(g, tile))
    }

    fn decode(&self, g: &mut Graph, latents: &Value) -> Value {
        g.module("decoder", |g| {
            let widest = self.channels.last().copied().unwrap_or(1);
            let mut x = framed(g, "conv_in", latents, widest, 1, false);
            x = self.middle(g, &x, self.layers.last().copied().unwrap_or(1));
            for (index, at) in (0..self.channels.len()).rev().enumerate() {
                x = g.module(&format!("up_blocks.{index}"), |g| {
                    let mut x = x.clone();
                    if x.size(1) != self.channels[at] {
                        x = g.single_layer("conv_in", |g| resnet(g, &x, self.channels[at], false));
                    }
                    if self.scaled[at] {
                        x = g.module("upsamplers.0", |g| larger(g, &x));
                    }
                    for layer in 0..self.layers[at] {
                        x = g.layer("resnets", layer, |g| resnet(g, &x, self.channels[at], false));
                    }
                    x
                });
            }
            x = norm(g, &x);
            x = g.activation(Activation::Silu, &x);
            x = framed(g, "conv_out", &x, self.patched(), 1, false);
            // A patch of channels becomes one of pixels.
            let [batch, _, frames, height, width] = [0, 1, 2, 3, 4].map(|dim| x.size(dim));
            let sides = [height, width].map(|side| side.saturating_mul(self.patch));
            x = g.view(&x, [batch, 3, self.patch, self.patch, frames, height, width]);
            x = g.permute(&x, &[0, 1, 4, 5, 3, 6, 2]);
            g.reshape(&x, [batch, 3, frames, sides[0], sides[1]])
        })
    }

    /// Channels of a patch of pixels.
    fn patched(&self) -> u64 {
        self.patch.saturating_mul(self.patch).saturating_mul(3)
    }

    fn middle(&self, g: &mut Graph, x: &Value, layers: u64) -> Value {
        let mut x = x.clone();
        for layer in 0..layers {
            x = g.module("mid_block", |g| g.layer("resnets", layer, |g| resnet(g, &x, x.size(1), false)));
        }
        x
    }

    /// The way in, for its weights.
    fn encode(&self, g: &mut Graph) {
        let pixels = g.input(Input::Pixels, [1, self.patched(), 1, 1, 1]);
        g.module("encoder", |g| {
            let mut x = framed(g, "conv_in", &pixels, self.channels[0], 1, true);
            for at in 0..self.channels.len() {
                x = g.module(&format!("down_blocks.{at}"), |g| {
                    let own = x.size(1);
                    let mut x = x.clone();
                    for layer in 0..self.layers[at] {
                        x = g.layer("resnets", layer, |g| resnet(g, &x, own, true));
                    }
                    if self.scaled[at] {
                        x = framed(g, "downsamplers.0", &x, own, 1, true);
                    }
                    let next = self.channels.get(at + 1).copied().unwrap_or(self.channels[at]);
                    if next == own { x } else { g.single_layer("conv_out", |g| resnet(g, &x, next, true)) }
                });
            }
            x = self.middle(g, &x, self.layers.last().copied().unwrap_or(1));
            framed(g, "conv_out", &x, self.latents.saturating_add(1), 1, true)
        });
    }
}

/// `LTXVideoCausalConv3d` of three places: the first picture stands before, and the last behind, or the first twice before.
fn framed(g: &mut Graph, name: &str, x: &Value, outputs: u64, stride: u32, causal: bool) -> Value {
    let edge = |g: &mut Graph, at: u64, times: u64| {
        let frame = g.slice(x, 2, at, 1);
        g.repeat_interleave(&frame, 2, times)
    };
    let wide = match causal {
        true => {
            let before = edge(g, 0, 2);
            g.cat(&[&before, x], 2)
        }
        false => {
            let (before, behind) = (edge(g, 0, 1), edge(g, x.size(2).saturating_sub(1), 1));
            g.cat(&[&before, x, &behind], 2)
        }
    };
    let spec = Convolution { stride: [stride; 3], padding: [0, 1, 1], groups: 1, transposed: false };
    g.module(name, |g| g.convolution("conv", &wide, outputs, &[3, 3, 3], spec, true))
}

/// `RMSNorm` over the channels without weights: squares in fp32, and a product with what they say.
fn norm(g: &mut Graph, x: &Value) -> Value {
    let last = g.permute(x, &[0, 2, 3, 4, 1]);
    let spread = {
        let wide = g.float(&last);
        let squares = g.unary(Unary::Square, &wide);
        drop(wide);
        g.reduce(Reduction::Mean, &squares, -1, true)
    };
    let spread = g.scale(&spread);
    let wide = g.mul(&last, &spread);
    let narrow = g.type_as(&wide, &last);
    drop((wide, last));
    g.permute(&narrow, &[0, 4, 1, 2, 3])
}

fn resnet(g: &mut Graph, input: &Value, outputs: u64, causal: bool) -> Value {
    let mut x = norm(g, input);
    x = g.activation(Activation::Silu, &x);
    x = framed(g, "conv1", &x, outputs, 1, causal);
    x = norm(g, &x);
    x = g.activation(Activation::Silu, &x);
    x = framed(g, "conv2", &x, outputs, 1, causal);
    let mut shortcut = input.clone();
    if input.size(1) != outputs {
        let last = g.permute(&shortcut, &[0, 2, 3, 4, 1]);
        let normal = g.norm("norm3", &last, Norm::Layer, true);
        shortcut = g.permute(&normal, &[0, 4, 1, 2, 3]);
        let spec = Convolution { stride: [1; 3], padding: [0; 3], groups: 1, transposed: false };
        shortcut = g.module("conv_shortcut", |g| g.convolution("conv", &shortcut, outputs, &[1, 1, 1], spec, true));
    }
    g.add(&x, &shortcut)
}

/// `LTXVideoUpsampler3d`: eight times the channels become twice of all three; the first picture is cut off.
fn larger(g: &mut Graph, x: &Value) -> Value {
    let [batch, channels, frames, height, width] = [0, 1, 2, 3, 4].map(|dim| x.size(dim));
    let mut x = framed(g, "conv", x, channels.saturating_mul(8), 1, false);
    x = g.view(&x, [batch, channels, 2, 2, 2, frames.saturating_mul(height), width]);
    x = g.permute(&x, &[0, 1, 5, 2, 3, 6, 4]);
    x = g.reshape(&x, [batch, channels, frames * 2, height * 2, width * 2]);
    let rest = (frames * 2).saturating_sub(1).max(1);
    g.slice(&x, 2, frames * 2 - rest, rest)
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    Autoencoder::read(c)?.run(g);
    Ok(())
}
