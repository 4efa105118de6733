//! `mobilenetv5_300m_enc` of timm, the vision tower of Gemma 3n: convolutions, then attention with one key head.

use super::parts::images;
use crate::model::blocks::attention;
use crate::model::op::{Activation, Attention, Binary, Convolution, EagerStyle, Input, Op, Reduction, Role, Unary};
use crate::model::{Graph, Value};

/// Side of the images it is fed with, and of the map it gives.
const IMAGE: u64 = 768;
/// Side of the map it gives.
pub(super) const OUTPUT: u64 = 16;
/// Channels of the map it gives.
pub(super) const WIDTH: u64 = 2048;

/// A block of a stage.
#[derive(Clone, Copy)]
enum Block {
    /// A wide convolution, then a narrow one: kernel and step of the first, expansion.
    Edge { step: u32, times: u64 },
    /// Depthwise (by kernel, 0 for none), wide, depthwise with a step, narrow.
    Inverted { first: u64, middle: u64, step: u32, times: u64 },
    /// Attention with one head of keys and values, which are shrunk by `step`.
    Attention { heads: u64, dim: u64, step: u32 },
}

/// The stages: channels, and blocks as (block, how often the last two repeat).
fn stages() -> [(u64, Vec<Block>); 4] {
    let start = |first| Block::Inverted { first, middle: 5, step: 2, times: 6 };
    let local = |first| Block::Inverted { first, middle: 0, step: 1, times: 4 };
    let dense = |times| Block::Inverted { first: 0, middle: 0, step: 1, times };
    let pairs = |attention: Block, count| std::iter::repeat_n([attention, dense(2)], count).flatten();
    let mut third = vec![start(5)];
    third.extend([local(5); 7]);
    third.push(dense(1));
    third.extend(pairs(Block::Attention { heads: 12, dim: 64, step: 2 }, 14));
    let mut fourth = vec![start(5)];
    fourth.extend(pairs(Block::Attention { heads: 16, dim: 96, step: 1 }, 19));
    [
        (
            128,
            vec![
                Block::Edge { step: 2, times: 4 },
                Block::Edge { step: 1, times: 4 },
                Block::Edge { step: 1, times: 4 },
            ],
        ),
        (256, vec![start(3), local(5), local(3), local(5), local(3)]),
        (640, third),
        (1280, fourth),
    ]
}

/// `[images, WIDTH, OUTPUT, OUTPUT]`.
pub(super) fn run(g: &mut Graph) -> Value {
    let images = images(g);
    let pixels = g.input(Input::Pixels, [images, 3, IMAGE, IMAGE]);
    g.module("timm_model", |g| {
        let mut x =
            conv_norm(g, "conv_stem", &pixels, Conv { out: 64, kernel: 3, step: 2, groups: 1, bias: true }, true);
        let mut kept = Vec::new();
        for (stage, (channels, blocks)) in stages().into_iter().enumerate() {
            for (index, block) in blocks.into_iter().enumerate() {
                x = g.module(&format!("blocks.{stage}.{index}"), |g| run_block(g, &x, channels, block));
            }
            if stage >= 2 {
                kept.push(x.clone());
            }
        }
        drop(x);
        g.module("msfa", |g| fuse(g, &kept))
    })
}

fn run_block(g: &mut Graph, input: &Value, channels: u64, block: Block) -> Value {
    let width = input.size(1);
    let depthwise = |kernel, step, channels| Conv { out: channels, kernel, step, groups: channels, bias: false };
    let mut x = input.clone();
    match block {
        Block::Edge { step, times } => {
            let wide = Conv { out: width * times, kernel: 3, step, groups: 1, bias: false };
            x = convolve(g, "conv_exp", &x, wide);
            x = norm(g, "bn1", &x, true);
            x = convolve(g, "conv_pwl", &x, pointwise(channels));
            x = norm(g, "bn2", &x, false);
            return if step == 1 { g.add(&x, input) } else { x };
        }
        Block::Inverted { first, middle, step, times } => {
            if first > 0 {
                x = conv_norm(g, "dw_start", &x, depthwise(first, 1, width), false);
            }
            x = conv_norm(g, "pw_exp", &x, pointwise(width * times), true);
            if middle > 0 {
                x = conv_norm(g, "dw_mid", &x, depthwise(middle, step, width * times), true);
            }
            x = conv_norm(g, "pw_proj", &x, pointwise(channels), false);
            x = layer_scale(g, &x);
            return if step == 1 { g.add(&x, input) } else { x };
        }
        Block::Attention { heads, dim, step } => {
            x = norm(g, "norm", &x, false);
            x = g.module("attn", |g| attend(g, &x, heads, dim, step));
            x = layer_scale(g, &x);
        }
    }
    g.add(&x, input)
}

fn attend(g: &mut Graph, x: &Value, heads: u64, dim: u64, step: u32) -> Value {
    let (images, height, width) = (x.size(0), x.size(2), x.size(3));
    let mut query = convolve(g, "query.proj", x, pointwise(heads * dim));
    query = g.reshape(&query, [images, heads, dim, height * width]);
    query = g.transpose(&query, 2, 3);
    query = g.contiguous(&query);
    let [key, value] = ["key", "value"].map(|name| {
        g.module(name, |g| {
            let mut seen = x.clone();
            if step > 1 {
                let shrink = Conv { out: x.size(1), kernel: 3, step, groups: x.size(1), bias: false };
                seen = convolve(g, "down_conv", &seen, shrink);
                seen = norm(g, "norm", &seen, false);
            }
            seen = convolve(g, "proj", &seen, pointwise(dim));
            seen = g.reshape(&seen, [images, dim, seen.size(2) * seen.size(3)]);
            seen = g.transpose(&seen, 1, 2);
            seen = g.unsqueeze(&seen, 1);
            g.contiguous(&seen)
        })
    });
    let spec = Attention {
        groups: heads,
        causal: false,
        dropout_per_mille: 0,
        softcap: false,
        sinks: None,
        eager: EagerStyle::PlainSoftmax,
        sdpa: true,
    };
    let mut out = attention::attend(g, spec, &query, &key, &value, None);
    out = g.reshape(&out, [images, height, width, heads * dim]);
    out = g.permute(&out, &[0, 3, 1, 2]);
    out = g.contiguous(&out);
    convolve(g, "output.proj", &out, pointwise(x.size(1)))
}

/// Maps of the last two stages brought to one size, joined, mixed, and averaged to the output's size.
fn fuse(g: &mut Graph, maps: &[Value]) -> Value {
    let Some(first) = maps.first() else { return g.fill(crate::dtype::DType::F32, [1]) };
    let resized: Vec<Value> = maps
        .iter()
        .map(|map| {
            let shape = map.shape().with(2, first.size(2)).with(3, first.size(3));
            if shape == map.shape() { map.clone() } else { g.run(Op::Interpolate, &[map], shape) }
        })
        .collect();
    let joined = g.cat(&resized.iter().collect::<Vec<_>>(), 1);
    let mut x = g.module("ffn", |g| {
        let wide = conv_norm(g, "pw_exp", &joined, pointwise(2 * joined.size(1)), true);
        conv_norm(g, "pw_proj", &wide, pointwise(WIDTH), false)
    });
    x = g.run(Op::AveragePool, &[&x], [x.size(0), WIDTH, OUTPUT, OUTPUT]);
    norm(g, "norm", &x, false)
}

/// A convolution that keeps the size, or halves it.
#[derive(Clone, Copy)]
struct Conv {
    out: u64,
    kernel: u64,
    step: u32,
    groups: u64,
    bias: bool,
}

fn pointwise(out: u64) -> Conv {
    Conv { out, kernel: 1, step: 1, groups: 1, bias: false }
}

fn convolve(g: &mut Graph, name: &str, x: &Value, conv: Conv) -> Value {
    let mut padding = (conv.kernel / 2) as u32;
    let mut x = x.clone();
    if conv.step > 1 {
        // With a step, "same" padding is uneven: a padded copy.
        let padded = |size: u64| (size.div_ceil(u64::from(conv.step)) - 1) * u64::from(conv.step) + conv.kernel;
        x = g.pad(&x, x.shape().with(2, padded(x.size(2))).with(3, padded(x.size(3))));
        padding = 0;
    }
    let (stride, padding) = ([conv.step, conv.step, 1], [padding, padding, 0]);
    let spec = Convolution { stride, padding, groups: conv.groups, transposed: false };
    g.convolution(name, &x, conv.out, &[conv.kernel; 2], spec, conv.bias)
}

fn conv_norm(g: &mut Graph, name: &str, x: &Value, conv: Conv, act: bool) -> Value {
    g.module(name, |g| {
        let x = convolve(g, "conv", x, conv);
        norm(g, "bn", &x, act)
    })
}

/// timm's `RmsNorm2d`, spelled out over channels, with a gelu where the block has one.
fn norm(g: &mut Graph, name: &str, x: &Value, act: bool) -> Value {
    let channels = x.size(1);
    let weight = g.parameter(&format!("{name}.weight"), [channels], Role::Norm);
    let scale = {
        let square = g.unary(Unary::Square, x);
        let mean = g.reduce(Reduction::Mean, &square, 1, true);
        let safe = g.scalar(Binary::Add, &mean);
        g.unary(Unary::Rsqrt, &safe)
    };
    let mut x = g.mul(x, &scale);
    drop(scale);
    let weight = g.read(weight, [channels]);
    let weight = g.view(&weight, [1, channels, 1, 1]);
    x = g.mul(&x, &weight);
    if act { g.activation(Activation::Gelu, &x) } else { x }
}

fn layer_scale(g: &mut Graph, x: &Value) -> Value {
    let gamma = g.parameter("layer_scale.gamma", [x.size(1)], Role::Other);
    let gamma = g.read(gamma, [x.size(1)]);
    let gamma = g.view(&gamma, [1, x.size(1), 1, 1]);
    g.mul(x, &gamma)
}
