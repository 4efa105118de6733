//! What denoisers and autoencoders of diffusers share (diffusers 0.42: models/resnet.py, models/transformers/transformer_2d.py, models/attention.py).

use crate::dtype::DType;
use crate::model::op::{Activation, Binary, Convolution, Norm, Op, Unary};
use crate::model::{Graph, Value};

/// A square convolution that keeps the size, or halves it.
pub(super) fn convolution(g: &mut Graph, name: &str, x: &Value, outputs: u64, side: u64, stride: u32) -> Value {
    let padding = (side / 2) as u32;
    let spec = Convolution { stride: [stride; 3], padding: [padding; 3], groups: 1, transposed: false };
    g.convolution(name, x, outputs, &[side, side], spec, true)
}

/// `nn.GroupNorm` over the channels.
pub(super) fn group_norm(g: &mut Graph, name: &str, x: &Value, groups: u64) -> Value {
    if !x.size(1).is_multiple_of(groups) {
        g.fail(format!("{} channels are not {groups} groups of as many each (norm_num_groups)", x.size(1)));
    }
    g.norm_of(name, &[x], Norm::Group(groups as u32), true, x.size(1))
}

/// `ResnetBlock2D`, as the module it is called in.
pub(super) fn resnet(g: &mut Graph, input: &Value, time: Option<&Value>, outputs: u64, groups: u64) -> Value {
    let mut hidden = group_norm(g, "norm1", input, groups);
    hidden = g.activation(Activation::Silu, &hidden);
    hidden = convolution(g, "conv1", &hidden, outputs, 3, 1);
    let mut shift = None;
    if let Some(time) = time {
        let active = g.activation(Activation::Silu, time);
        let projected = g.linear("time_emb_proj", &active, outputs, true);
        let wide = g.view(&projected, [projected.size(0), outputs, 1, 1]);
        hidden = g.add(&hidden, &wide);
        shift = Some(wide);
    }
    hidden = group_norm(g, "norm2", &hidden, groups);
    hidden = g.activation(Activation::Silu, &hidden);
    hidden = convolution(g, "conv2", &hidden, outputs, 3, 1);
    let mut shortcut = input.clone();
    if input.size(1) != outputs {
        if g.inputs.labels {
            shortcut = g.contiguous(&shortcut);
        }
        shortcut = convolution(g, "conv_shortcut", &shortcut, outputs, 1, 1);
    }
    let sum = g.add(&shortcut, &hidden);
    let output = g.scalar(Binary::Div, &sum);
    drop(shift);
    output
}

/// `Upsample2D` with its convolution: twice as large, or as large as what it will be joined with.
pub(super) fn upsample(g: &mut Graph, x: &Value, [height, width]: [u64; 2]) -> Value {
    let wide = g.run(Op::Interpolate, &[x], [x.size(0), x.size(1), height, width]);
    convolution(g, "conv", &wide, x.size(1), 3, 1)
}

/// What a transformer inside a picture's blocks is made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transformer {
    pub(super) heads: u64,
    pub(super) blocks: u64,
    pub(super) groups: u64,
    /// Whether rows go in and out by a linear, not by a convolution.
    pub(super) linear: bool,
}

impl Transformer {
    /// `Transformer2DModel`.
    pub(super) fn run(&self, g: &mut Graph, input: &Value, text: &Value) -> Value {
        let [batch, width, height, length] = [0, 1, 2, 3].map(|dim| input.size(dim));
        let places = height.saturating_mul(length);
        let mut hidden = group_norm(g, "norm", input, self.groups);
        if !self.linear {
            hidden = convolution(g, "proj_in", &hidden, width, 1, 1);
        }
        hidden = g.permute(&hidden, &[0, 2, 3, 1]);
        hidden = g.reshape(&hidden, [batch, places, width]);
        if self.linear {
            hidden = g.linear("proj_in", &hidden, width, true);
        }
        for index in 0..self.blocks {
            hidden = g.layer("transformer_blocks", index, |g| self.block(g, &hidden, text));
        }
        let mut output = hidden.clone();
        if self.linear {
            output = g.linear("proj_out", &output, width, true);
        }
        output = g.reshape(&output, [batch, height, length, width]);
        output = g.permute(&output, &[0, 3, 1, 2]);
        output = g.contiguous(&output);
        if !self.linear {
            output = convolution(g, "proj_out", &output, width, 1, 1);
        }
        g.add(&output, input)
    }

    /// `BasicTransformerBlock`.
    fn block(&self, g: &mut Graph, input: &Value, text: &Value) -> Value {
        let width = input.size(-1);
        let mut normal = g.norm("norm1", input, Norm::Layer, true);
        let mut attended = g.module("attn1", |g| self.attention(g, &normal, &normal));
        let mut hidden = g.add(&attended, input);
        normal = g.norm("norm2", &hidden, Norm::Layer, true);
        attended = g.module("attn2", |g| self.attention(g, &normal, text));
        hidden = g.add(&attended, &hidden);
        normal = g.norm("norm3", &hidden, Norm::Layer, true);
        let wide = g.module("ff", |g| {
            let inner = width.saturating_mul(4);
            let both = g.linear("net.0.proj", &normal, inner.saturating_mul(2), true);
            let (up, gate) = g.split2(&both, -1, inner, inner);
            let gate = g.activation(Activation::Gelu, &gate);
            let product = g.mul(&up, &gate);
            drop((both, up, gate));
            g.linear("net.2", &product, width, true)
        });
        g.add(&wide, &hidden)
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, context: &Value) -> Value {
        let width = hidden.size(-1);
        let query = g.linear("to_q", hidden, width, false);
        let key = g.linear("to_k", context, width, false);
        let value = g.linear("to_v", context, width, false);
        if g.inputs.making.sliced_attention {
            return sliced(g, [query, key, value], self.heads);
        }
        attend(g, [query, key, value], self.heads)
    }
}

/// `SlicedAttnProcessor` as "auto" has it: half of the heads at a time, with their scores.
fn sliced(g: &mut Graph, parts: [Value; 3], heads: u64) -> Value {
    let [batch, rows, width] = [0, 1, 2].map(|dim| parts[0].size(dim));
    let all = batch.saturating_mul(heads);
    let [query, key, value] = parts.map(|x| {
        let apart = g.split_last(&x, heads, width / heads.max(1));
        let turned = g.transpose(&apart, 1, 2);
        g.reshape(&turned, [all, x.size(1), width / heads.max(1)])
    });
    let output = g.fill_like(&query, query.shape());
    let (at_once, mut last) = ((heads / 2).max(1), None);
    for start in (0..all).step_by(at_once as usize) {
        let [query, key, value] = [&query, &key, &value].map(|x| g.slice(x, 0, start, at_once.min(all - start)));
        let turned = g.transpose(&key, 1, 2);
        let room = g.fill_like(&query, [query.size(0), rows, key.size(1)]);
        let scores = g.matmul(&query, &turned);
        drop(room);
        let weights = g.softmax(&scores, -1, None);
        drop(scores);
        // The name of the last slice is given away when the next is there.
        last = Some(g.matmul(&weights, &value));
    }
    drop((query, key, value));
    let apart = g.view(&output, [batch, heads, rows, width / heads.max(1)]);
    let turned = g.transpose(&apart, 1, 2);
    let hidden = g.reshape(&turned, [batch, rows, width]);
    drop((last, output));
    let hidden = g.linear("to_out.0", &hidden, width, true);
    g.scalar(Binary::Div, &hidden)
}

/// The same, scaled back as `AttnProcessor2_0` does.
pub(super) fn attend(g: &mut Graph, parts: [Value; 3], heads: u64) -> Value {
    let hidden = attend_bare(g, parts, heads);
    g.scalar(Binary::Div, &hidden)
}

/// `F.scaled_dot_product_attention` over heads, and the way out.
pub(super) fn attend_bare(g: &mut Graph, parts: [Value; 3], heads: u64) -> Value {
    let [batch, rows, width] = [0, 1, 2].map(|dim| parts[0].size(dim));
    let [query, key, value] = parts.map(|x| {
        let apart = g.split_last(&x, heads, width / heads.max(1));
        g.transpose(&apart, 1, 2)
    });
    let op = Op::ScaledDotProduct { causal: false, dropout: false, grouped: false };
    let mut hidden = g.run(op, &[&query, &key, &value], query.shape());
    hidden = g.transpose(&hidden, 1, 2);
    hidden = g.reshape(&hidden, [batch, rows, width]);
    g.linear("to_out.0", &hidden, width, true)
}

/// The order in which `Attention` of diffusers has its parts.
pub(super) const ATTENTION: &[&str] = &[
    "norm_q",
    "norm_k",
    "to_q",
    "to_k",
    "to_v",
    "add_k_proj",
    "add_v_proj",
    "add_q_proj",
    "to_out",
    "to_add_out",
    "norm_added_q",
    "norm_added_k",
];

/// `dispatch_attention_fn` of torch's own kind over `[batch, rows, heads, size]`, heads joined.
pub(super) fn attended(g: &mut Graph, three: &[Value; 3], width: u64) -> Value {
    masked(g, three, None, width)
}

/// The same with a mask.
pub(super) fn masked(g: &mut Graph, three: &[Value; 3], mask: Option<&Value>, width: u64) -> Value {
    let [query, key, value] = [0, 1, 2].map(|at| g.transpose(&three[at], 1, 2));
    let op = Op::ScaledDotProduct { causal: false, dropout: false, grouped: false };
    let inputs: Vec<&Value> = [&query, &key, &value].into_iter().chain(mask).collect();
    let mut hidden = g.run(op, &inputs, query.shape());
    drop((query, key, value));
    hidden = g.transpose(&hidden, 1, 2);
    g.reshape(&hidden, [hidden.size(0), hidden.size(1), width])
}

/// `x + gate * y`.
pub(super) fn gated(g: &mut Graph, x: &Value, gate: &Value, y: &Value) -> Value {
    let part = g.mul(gate, y);
    g.add(x, &part)
}

/// `x + y * gate`.
pub(super) fn scaled(g: &mut Graph, x: &Value, y: &Value, gate: &Value) -> Value {
    let part = g.mul(y, gate);
    g.add(x, &part)
}

/// `PixArtAlphaTextProjection` with gelu.
pub(super) fn caption(g: &mut Graph, name: &str, x: &Value, width: u64) -> Value {
    g.module(name, |g| {
        let mut hidden = g.linear("linear_1", x, width, true);
        hidden = g.activation(Activation::Gelu, &hidden);
        g.linear("linear_2", &hidden, width, true)
    })
}

/// `apply_rotary_emb` along the last dimension: neighbours are pairs, products in fp32.
pub(super) fn turned(g: &mut Graph, x: &Value, [cosine, sine]: &[Value; 2]) -> Value {
    let shape = x.shape();
    let pairs = g.split_last(x, x.size(-1) / 2, 2);
    let (real, imaginary) = (g.select(&pairs, -1, 0), g.select(&pairs, -1, 1));
    let negative = g.unary(Unary::Neg, &imaginary);
    let around = g.stack(&[&negative, &real], -1);
    drop(negative);
    let around = g.view(&around, shape);
    let wide = g.float(x);
    let first = g.mul(&wide, cosine);
    drop(wide);
    let wide = g.float(&around);
    let second = g.mul(&wide, sine);
    drop(wide);
    let sum = g.add(&first, &second);
    drop((first, second));
    g.type_as(&sum, x)
}

/// Width of the sines of a step.
pub(super) const SINES: u64 = 256;

/// Sines and cosines of steps in fp32 (`get_timestep_embedding`), in the model's type.
pub(super) fn time_projection(g: &mut Graph, steps: &Value, width: u64) -> Value {
    let (rows, half) = (steps.shape().elements(), width / 2);
    let mut exponent = g.fill(DType::F32, [half]);
    exponent = g.scale(&exponent);
    exponent = g.scale(&exponent);
    let rates = g.unary(Unary::Exp, &exponent);
    let wide = g.float(steps);
    let wide = g.view(&wide, [rows, 1]);
    let mut angles = g.mul(&wide, &rates);
    angles = g.scale(&angles);
    let (sine, cosine) = (g.unary(Unary::Sin, &angles), g.unary(Unary::Cos, &angles));
    let mut both = g.cat(&[&sine, &cosine], -1);
    let (sine, cosine) = g.split2(&both, -1, half, half);
    both = g.cat(&[&cosine, &sine], -1);
    g.to_model_type(&both)
}

/// `TimestepEmbedding`.
pub(super) fn embedding(g: &mut Graph, name: &str, x: &Value, width: u64) -> Value {
    g.module(name, |g| {
        let mut hidden = g.linear("linear_1", x, width, true);
        hidden = g.activation(Activation::Silu, &hidden);
        g.linear("linear_2", &hidden, width, true)
    })
}

/// `CombinedTimestepTextProjEmbeddings`.
pub(super) fn time_and_text(g: &mut Graph, step: &Value, pooled: &Value, width: u64) -> Value {
    let sines = time_projection(g, step, SINES);
    let time = embedding(g, "timestep_embedder", &sines, width);
    let text = embedding(g, "text_embedder", pooled, width);
    g.add(&time, &text)
}

/// Mean squared error in fp32 against noise of the same shape, as training scripts of diffusers compute it.
pub(super) fn noise_loss(g: &mut Graph, output: &Value) {
    if g.inputs.labels {
        let wide = g.float(output);
        let noise = g.fill_like(output, output.shape());
        let target = g.float(&noise);
        drop(noise);
        let loss = g.run(Op::Loss(crate::model::op::Loss::MeanSquared), &[&wide, &target], []);
        g.run(Op::Return, &[&loss, output], []);
    } else {
        g.run(Op::Return, &[output], []);
    }
}
