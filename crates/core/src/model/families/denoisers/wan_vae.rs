//! `AutoencoderKLWan` (2.1) and `AutoencoderKLQwenImage` of diffusers 0.42: videos latent by latent, with the last frames that every
//! convolution along time has seen kept for the next. What is run is decoding.

use super::tiles::{self, Tiles};
use super::{Pictures, parts};
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Convolution, Input, Op, Reduction, Role, Unary};
use crate::model::{Config, Family, Graph, ModelError, Shape, Task, Value};

/// The autoencoder of Wan 2.1 and of Qwen-Image.
pub(super) const FAMILY: Family = Family {
    name: "video autoencoder of Wan",
    model_types: &["AutoencoderKLWan"],
    facts: Facts { tasks: Some(&[Task::Base]), served: false, ..Facts::DEFAULT },
    build,
};

/// The same for single pictures.
pub(super) const QWEN: Family =
    Family { name: "autoencoder of Qwen-Image", model_types: &["AutoencoderKLQwenImage"], ..FAMILY };

/// Wan's default is 81 pictures; one for each latent and three more.
pub(super) const PICTURES: Pictures = Pictures { sides: [480, 832], pixels: 1, frames: 81, between: 4 };
/// Pictures of one alone.
pub(super) const STILL: Pictures = Pictures { sides: [1024, 1024], pixels: 1, frames: 1, between: 1 };

/// Frames that a convolution along time keeps of what it has seen.
const KEPT: u64 = 2;

/// Pixels of a tile's side, and from one to the next (`tile_sample_min_height`, `tile_sample_stride_height`).
const TILE: [u64; 2] = [256, 192];

struct Autoencoder {
    base: u64,
    latents: u64,
    widths: Vec<u64>,
    blocks: u64,
    /// Which halvings are along time too, on the way in.
    along_time: Vec<bool>,
}

/// What convolutions have seen, in the order in which they run; nothing before the first latent.
#[derive(Default)]
struct Seen {
    kept: Vec<Option<Value>>,
    at: usize,
}

impl Seen {
    /// What the next convolution has kept; `first` says that nothing was asked of it yet.
    fn next(&mut self) -> (usize, bool) {
        let at = self.at;
        self.at += 1;
        let first = at == self.kept.len();
        if first {
            self.kept.push(None);
        }
        (at, first)
    }
}

impl Autoencoder {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        for (key, usual) in [("is_residual", false), ("clip_output", true)] {
            if c.flag(key, usual)? != usual {
                return Err(c.refuse(key, "as Wan 2.1 has it"));
            }
        }
        if c.has("patch_size") {
            return Err(c.refuse("patch_size", "null, as Wan 2.1 has it"));
        }
        let widths = c.sizes("dim_mult")?.unwrap_or_else(|| vec![1, 2, 4, 4]);
        if widths.is_empty() || widths.contains(&0) {
            return Err(c.refuse("dim_mult", "positive sizes"));
        }
        let along_time = match c.get("temperal_downsample").and_then(serde_json::Value::as_array) {
            Some(flags) => flags.iter().map(|flag| *flag == true).collect(),
            None => vec![false, true, true],
        };
        if along_time.len() + 1 != widths.len() {
            return Err(c.refuse("temperal_downsample", "one flag for each halving"));
        }
        Ok(Self {
            base: read::positive(c, &["base_dim"], 96)?,
            latents: read::positive(c, &["z_dim"], 16)?,
            widths,
            blocks: read::positive(c, &["num_res_blocks"], 2)?,
            along_time,
        })
    }

    fn width(&self, at: usize) -> u64 {
        self.base.saturating_mul(self.widths[at])
    }

    fn run(&self, g: &mut Graph, pictures: &Pictures) {
        let factor = 1 << (self.widths.len() - 1).min(16);
        let batch = g.inputs.batch;
        let [_, height, width] = pictures.latents(g);
        let frames = pictures.latents(g)[0];
        let [height, width] = [height, width].map(|side| (side / factor).max(1));
        // Weights of the way in are there all the same.
        g.declare_only(|g| self.encode(g));
        let latents = g.input(Input::Pixels, [batch, self.latents, frames, height, width]);
        let output = tiles::one_by_one(g, &latents, |g, latents| self.decode(g, latents));
        parts::noise_loss(g, &output);
    }

    /// In tiles where that is asked for and there are several, each a latent at a time.
    fn decode(&self, g: &mut Graph, latents: &Value) -> Value {
        let tiles = Tiles::of_pixels(TILE, 1 << (self.widths.len() - 1).min(16));
        if !tiles.are_needed(g, latents) {
            return self.decode_whole(g, latents);
        }
        let whole = tiles.join(g, latents, |g, tile| {
            let (mut seen, mut frames) = (Seen::default(), Vec::new());
            for at in 0..tile.size(2) {
                seen.at = 0;
                let frame = g.slice(tile, 2, at, 1);
                let frame = causal(g, "post_quant_conv", &frame, self.latents, [1, 1], None);
                frames.push(g.module("decoder", |g| self.decoder(g, &frame, &mut seen)));
            }
            g.cat(&frames.iter().collect::<Vec<_>>(), 2)
        });
        g.unary(Unary::Clamp, &whole)
    }

    /// A latent at a time; what came out is joined with what there was.
    fn decode_whole(&self, g: &mut Graph, latents: &Value) -> Value {
        let sample = causal(g, "post_quant_conv", latents, self.latents, [1, 1], None);
        let mut seen = Seen::default();
        let mut all: Option<Value> = None;
        for at in 0..sample.size(2) {
            seen.at = 0;
            let latent = g.slice(&sample, 2, at, 1);
            let output = g.module("decoder", |g| self.decoder(g, &latent, &mut seen));
            drop(latent);
            all = Some(match all.take() {
                Some(before) => g.cat(&[&before, &output], 2),
                None => output,
            });
        }
        let all = all.unwrap_or_else(|| sample.clone());
        g.unary(Unary::Clamp, &all)
    }

    fn decoder(&self, g: &mut Graph, latent: &Value, seen: &mut Seen) -> Value {
        let last = self.widths.len() - 1;
        let mut x = watched(g, "conv_in", latent, self.width(last), seen);
        x = g.module("mid_block", |g| self.middle(g, &x, seen));
        for at in 0..=last {
            x = g.module(&format!("up_blocks.{at}"), |g| {
                let outputs = self.width(last - at);
                let mut x = x.clone();
                for index in 0..=self.blocks {
                    x = g.layer("resnets", index, |g| resnet(g, &x, outputs, seen));
                }
                if at == last { x } else { g.module("upsamplers.0", |g| self.larger(g, &x, last - 1 - at, seen)) }
            });
        }
        x = norm(g, "norm_out", &x, 3);
        x = g.activation(Activation::Silu, &x);
        watched(g, "conv_out", &x, 3, seen)
    }

    /// `WanResample`: twice as many frames where time is halved too, but for the first latent; then twice the sides, in fp32.
    fn larger(&self, g: &mut Graph, x: &Value, halving: usize, seen: &mut Seen) -> Value {
        let [batch, channels, mut frames, height, width] = [0, 1, 2, 3, 4].map(|dim| x.size(dim));
        let mut x = x.clone();
        if self.along_time[halving] {
            let (at, first) = seen.next();
            if first {
                g.declare_only(|g| causal(g, "time_conv", &x, channels.saturating_mul(2), [3, 1], None));
            } else {
                let start = frames.saturating_sub(KEPT);
                let tail = g.slice(&x, 2, start, frames - start);
                let mut new = g.unary(Unary::Clone, &tail);
                if new.size(2) < KEPT {
                    let before = match &seen.kept[at] {
                        Some(kept) => g.slice(kept, 2, kept.size(2) - 1, 1),
                        None => g.fill_like(&new, new.shape()),
                    };
                    new = g.cat(&[&before, &new], 2);
                }
                x = causal(g, "time_conv", &x, channels.saturating_mul(2), [3, 1], seen.kept[at].as_ref());
                seen.kept[at] = Some(new);
                x = g.view(&x, [batch, 2, channels, frames, height, width]);
                let halves = [0, 1].map(|half| g.select(&x, 1, half));
                x = g.stack(&[&halves[0], &halves[1]], 3);
                frames = frames.saturating_mul(2);
                x = g.reshape(&x, [batch, channels, frames, height, width]);
            }
        }
        x = g.permute(&x, &[0, 2, 1, 3, 4]);
        x = g.reshape(&x, [batch.saturating_mul(frames), channels, height, width]);
        let sides = [height, width].map(|side| side.saturating_mul(2));
        let wide = g.float(&x);
        let large = g.run(Op::Interpolate, &[&wide], [x.size(0), channels, sides[0], sides[1]]);
        drop(wide);
        x = g.type_as(&large, &x);
        drop(large);
        x = parts::convolution(g, "resample.1", &x, channels / 2, 3, 1);
        x = g.view(&x, [batch, frames, channels / 2, sides[0], sides[1]]);
        g.permute(&x, &[0, 2, 1, 3, 4])
    }

    fn middle(&self, g: &mut Graph, x: &Value, seen: &mut Seen) -> Value {
        let channels = x.size(1);
        let mut x = g.layer("resnets", 0, |g| resnet(g, x, channels, seen));
        x = g.module("attentions.0", |g| attention(g, &x));
        g.layer("resnets", 1, |g| resnet(g, &x, channels, seen))
    }

    /// One picture on the way in, for its weights.
    fn encode(&self, g: &mut Graph) {
        let (mut seen, last) = (Seen::default(), self.widths.len() - 1);
        let side = 1 << last.min(16);
        let pixels = g.input(Input::Pixels, [1, 3, 1, side, side]);
        let out = g.module("encoder", |g| {
            let mut x = watched(g, "conv_in", &pixels, self.base, &mut seen);
            let mut index = 0;
            for at in 0..=last {
                for _ in 0..self.blocks {
                    x = g.layer("down_blocks", index, |g| resnet(g, &x, self.width(at), &mut seen));
                    index += 1;
                }
                if at < last {
                    x = g.module(&format!("down_blocks.{index}"), |g| {
                        let channels = x.size(1);
                        let flat = g.view(&x, [1, channels, x.size(3), x.size(4)]);
                        let half = g.module("resample", |g| parts::convolution(g, "1", &flat, channels, 3, 2));
                        let half = g.view(&half, [1, channels, 1, half.size(2), half.size(3)]);
                        if self.along_time[at] {
                            causal(g, "time_conv", &half, channels, [3, 1], None);
                        }
                        half
                    });
                    index += 1;
                }
            }
            x = g.module("mid_block", |g| self.middle(g, &x, &mut seen));
            x = norm(g, "norm_out", &x, 3);
            watched(g, "conv_out", &x, self.latents.saturating_mul(2), &mut seen)
        });
        causal(g, "quant_conv", &out, self.latents.saturating_mul(2), [1, 1], None);
    }
}

/// `WanCausalConv3d` of so many places along time and along sides: frames that were seen stand before, or empty ones.
fn causal(g: &mut Graph, name: &str, x: &Value, outputs: u64, [time, side]: [u64; 2], seen: Option<&Value>) -> Value {
    let mut x = x.clone();
    let mut missing = time - 1;
    if let Some(seen) = seen.filter(|_| missing > 0) {
        x = g.cat(&[seen, &x], 2);
        missing = missing.saturating_sub(seen.size(2));
    }
    let [batch, channels, frames, height, width] = [0, 1, 2, 3, 4].map(|dim| x.size(dim));
    // `F.pad` by nothing is a copy all the same.
    let sizes = [batch, channels, frames + missing, height + side - 1, width + side - 1];
    x = g.pad(&x, sizes);
    let spec = Convolution { stride: [1; 3], padding: [0; 3], groups: 1, transposed: false };
    g.convolution(name, &x, outputs, &[time, side, side], spec, true)
}

/// A convolution that keeps the last frames it has seen for the next latent.
fn watched(g: &mut Graph, name: &str, x: &Value, outputs: u64, seen: &mut Seen) -> Value {
    let (at, _) = seen.next();
    let start = x.size(2).saturating_sub(KEPT);
    let tail = g.slice(x, 2, start, x.size(2) - start);
    let mut new = g.unary(Unary::Clone, &tail);
    if let (true, Some(kept)) = (new.size(2) < KEPT, &seen.kept[at]) {
        let before = g.slice(kept, 2, kept.size(2) - 1, 1);
        new = g.cat(&[&before, &new], 2);
    }
    let output = causal(g, name, x, outputs, [3, 3], seen.kept[at].as_ref());
    seen.kept[at] = Some(new);
    output
}

/// `WanRMS_norm`: `F.normalize` over the channels in fp32, then three products.
fn norm(g: &mut Graph, name: &str, x: &Value, places: usize) -> Value {
    let channels = x.size(1);
    let normal = {
        let wide = g.float(x);
        let length = g.reduce(Reduction::Mean, &wide, 1, true);
        let length = g.unary(Unary::Clamp, &length);
        let normal = g.div(&wide, &length);
        drop((wide, length));
        g.type_as(&normal, x)
    };
    let mut sizes = vec![channels];
    sizes.resize(places + 1, 1);
    let gamma = g.module(name, |g| {
        let gamma = g.parameter("gamma", Shape::new(&sizes), Role::Norm);
        g.read(gamma, Shape::new(&sizes))
    });
    let mut x = g.scale(&normal);
    x = g.mul(&x, &gamma);
    g.scale(&x)
}

fn resnet(g: &mut Graph, input: &Value, outputs: u64, seen: &mut Seen) -> Value {
    let shortcut = match input.size(1) == outputs {
        true => input.clone(),
        false => causal(g, "conv_shortcut", input, outputs, [1, 1], None),
    };
    let mut x = norm(g, "norm1", input, 3);
    x = g.activation(Activation::Silu, &x);
    x = watched(g, "conv1", &x, outputs, seen);
    x = norm(g, "norm2", &x, 3);
    x = g.activation(Activation::Silu, &x);
    x = watched(g, "conv2", &x, outputs, seen);
    g.add(&x, &shortcut)
}

/// `WanAttentionBlock`: one head over the places of every frame.
fn attention(g: &mut Graph, input: &Value) -> Value {
    let [batch, channels, frames, height, width] = [0, 1, 2, 3, 4].map(|dim| input.size(dim));
    let (all, places) = (batch.saturating_mul(frames), height.saturating_mul(width));
    let mut x = g.permute(input, &[0, 2, 1, 3, 4]);
    x = g.reshape(&x, [all, channels, height, width]);
    x = norm(g, "norm", &x, 2);
    let three = parts::convolution(g, "to_qkv", &x, channels.saturating_mul(3), 1, 1);
    let three = g.view(&three, [all, 1, channels.saturating_mul(3), places]);
    let three = g.permute(&three, &[0, 1, 3, 2]);
    let three = g.contiguous(&three);
    let (query, key, value) = g.split3(&three, -1, [channels; 3]);
    let op = Op::ScaledDotProduct { causal: false, dropout: false, grouped: false };
    x = g.run(op, &[&query, &key, &value], query.shape());
    drop((three, query, key, value));
    x = g.squeeze(&x, 1);
    x = g.permute(&x, &[0, 2, 1]);
    x = g.reshape(&x, [all, channels, height, width]);
    x = parts::convolution(g, "proj", &x, channels, 1, 1);
    x = g.view(&x, [batch, frames, channels, height, width]);
    x = g.permute(&x, &[0, 2, 1, 3, 4]);
    g.add(&x, input)
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    let pictures = if c.model_type() == "AutoencoderKLWan" { PICTURES } else { STILL };
    Autoencoder::read(c)?.run(g, &pictures);
    Ok(())
}
