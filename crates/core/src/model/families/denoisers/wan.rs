//! `WanTransformer3DModel` of diffusers: videos out of text; norms and gates in fp32.

use super::{Pictures, adaptive, parts};
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Convolution, Input, Norm, Op, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Wan 2.1, and 2.2 of 14B.
pub(super) const FAMILY: Family = Family {
    name: "Wan of diffusers",
    model_types: &["WanTransformer3DModel"],
    facts: Facts {
        tasks: Some(&[Task::Base]),
        served: false,
        registration: &[
            &["scale_shift_table", "patch_embedding", "condition_embedder", "blocks", "proj_out"],
            &["time_embedder", "time_proj", "text_embedder"],
            &["scale_shift_table", "attn1", "attn2", "norm2", "ffn"],
            &["to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k"],
        ],
        ..Facts::DEFAULT
    },
    build,
};

pub(super) const PICTURES: Pictures = Pictures { sides: [60, 104], pixels: 8, frames: 81, between: 4 };
/// Tokens of a prompt: the pipeline fills up to them.
const TOKENS: u64 = 512;

struct Wan {
    channels: [u64; 2],
    patch: [u64; 3],
    layers: u64,
    heads: u64,
    head: u64,
    text: u64,
    sines: u64,
    inner: u64,
    positions: u64,
    crossed: bool,
}

impl Wan {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        for key in ["image_dim", "added_kv_proj_dim"] {
            if c.has(key) {
                return Err(c.refuse(key, "null; models that begin with a picture are not modelled"));
            }
        }
        let patch = c.sizes("patch_size")?.unwrap_or_else(|| vec![1, 2, 2]);
        let patch: [u64; 3] = patch.try_into().map_err(|_| c.refuse("patch_size", "three sizes"))?;
        if patch.contains(&0) {
            return Err(c.refuse("patch_size", "three sizes of at least 1"));
        }
        Ok(Self {
            channels: [read::positive(c, &["in_channels"], 16)?, read::positive(c, &["out_channels"], 16)?],
            patch,
            layers: c.layers(&["num_layers"], 40)?,
            heads: read::positive(c, &["num_attention_heads"], 40)?,
            head: read::positive(c, &["attention_head_dim"], 128)?,
            text: read::positive(c, &["text_dim"], 4096)?,
            sines: read::positive(c, &["freq_dim"], 256)?,
            inner: read::positive(c, &["ffn_dim"], 13824)?,
            positions: read::positive(c, &["rope_max_seq_len"], 1024)?,
            crossed: c.flag("cross_attn_norm", true)?,
        })
    }

    fn width(&self) -> u64 {
        self.heads.saturating_mul(self.head)
    }

    fn run(&self, g: &mut Graph) {
        let (batch, sizes) = (g.inputs.batch, PICTURES.latents(g));
        let cut = [0, 1, 2].map(|at| sizes[at] / self.patch[at]);
        let places = cut[0].saturating_mul(cut[1]).saturating_mul(cut[2]);
        if cut.iter().any(|&size| size > self.positions) {
            g.fail(format!("more than {} positions along an axis (rope_max_seq_len)", self.positions));
        }
        let video = g.input(Input::Pixels, [batch, self.channels[0], sizes[0], sizes[1], sizes[2]]);
        let prompt = g.input(Input::Pixels, [batch, TOKENS, self.text]);
        let step = g.input(Input::Pixels, [batch]);
        let table = g.module("rope", |g| self.table(g, cut));
        let stride = self.patch.map(|size| size as u32);
        let spec = Convolution { stride, padding: [0; 3], groups: 1, transposed: false };
        let mut hidden = g.convolution("patch_embedding", &video, self.width(), &self.patch, spec, true);
        hidden = g.reshape(&hidden, [batch, self.width(), places]);
        hidden = g.transpose(&hidden, 1, 2);
        hidden = g.contiguous(&hidden);
        let (time, parts_of_time, text) = g.module("condition_embedder", |g| self.conditions(g, &step, &prompt));
        for index in 0..self.layers {
            hidden = g.layer("blocks", index, |g| self.block(g, &hidden, &text, &parts_of_time, &table));
        }
        let own = g.parameter("scale_shift_table", [1, 2, self.width()], Role::Other);
        let own = g.read(own, [1, 2, self.width()]);
        let time = g.unsqueeze(&time, 1);
        let both = g.add(&own, &time);
        let (shift, scale) = g.split2(&both, 1, 1, 1);
        hidden = self.shifted(g, "norm_out", &hidden, &scale, &shift);
        let volume = self.patch.iter().fold(self.channels[1], |all, &size| all.saturating_mul(size));
        hidden = g.linear("proj_out", &hidden, volume, true);
        let [frame, height, width] = self.patch;
        hidden = g.reshape(&hidden, [batch, cut[0], cut[1], cut[2], frame, height, width, self.channels[1]]);
        hidden = g.permute(&hidden, &[0, 7, 1, 4, 2, 5, 3, 6]);
        let output = g.reshape(&hidden, [batch, self.channels[1], cut[0] * frame, cut[1] * height, cut[2] * width]);
        drop((hidden, text, table, time, parts_of_time, both, prompt, video, step));
        parts::noise_loss(g, &output);
    }

    /// `WanRotaryPosEmbed`: rows of all axes are joined for every place.
    fn table(&self, g: &mut Graph, cut: [u64; 3]) -> [Value; 2] {
        let side = self.head / 6 * 2;
        let parts = [self.head.saturating_sub(side.saturating_mul(2)), side, side];
        ["freqs_cos", "freqs_sin"].map(|name| {
            let all = g.model_buffer(name, [self.positions, self.head], false);
            let (first, second, third) = g.split3(&all, 1, parts);
            let mut axis = 0;
            let along = [first, second, third].map(|part| {
                let rows = g.slice(&part, 0, 0, cut[axis]);
                let mut shape = [1, 1, 1, parts[axis]];
                shape[axis] = cut[axis];
                let apart = g.view(&rows, shape);
                axis += 1;
                g.expand(&apart, [cut[0], cut[1], cut[2], parts[axis - 1]])
            });
            let joined = g.cat(&[&along[0], &along[1], &along[2]], -1);
            g.reshape(&joined, [1, cut[0].saturating_mul(cut[1]).saturating_mul(cut[2]), 1, self.head])
        })
    }

    /// `WanTimeTextImageEmbedding` without a picture.
    fn conditions(&self, g: &mut Graph, step: &Value, prompt: &Value) -> (Value, Value, Value) {
        let sines = parts::time_projection(g, step, self.sines);
        let time = parts::embedding(g, "time_embedder", &sines, self.width());
        let active = g.activation(Activation::Silu, &time);
        let parts_of_time = g.linear("time_proj", &active, self.width().saturating_mul(6), true);
        let text = parts::caption(g, "text_embedder", prompt, self.width());
        let parts_of_time = g.view(&parts_of_time, [step.size(0), 6, self.width()]);
        (time, parts_of_time, text)
    }

    /// A norm in fp32, scaled and shifted there, in the model's type again.
    fn shifted(&self, g: &mut Graph, name: &str, x: &Value, scale: &Value, shift: &Value) -> Value {
        let wide = g.float(x);
        let moved = adaptive::adapted(g, name, &wide, scale, shift);
        drop(wide);
        g.type_as(&moved, x)
    }

    fn block(&self, g: &mut Graph, input: &Value, text: &Value, time: &Value, table: &[Value; 2]) -> Value {
        let own = g.parameter("scale_shift_table", [1, 6, self.width()], Role::Other);
        let own = g.read(own, [1, 6, self.width()]);
        let wide = g.float(time);
        let all = g.add(&own, &wide);
        drop(wide);
        let cut = g.split(&all, 1, &[1; 6]);
        let mut normal = self.shifted(g, "norm1", input, &cut[1], &cut[0]);
        let mut attended = g.module("attn1", |g| self.attention(g, &normal, &normal, Some(table)));
        let mut hidden = self.gated(g, input, &attended, &cut[2]);
        normal = match self.crossed {
            true => {
                let wide = g.float(&hidden);
                let normal = g.norm("norm2", &wide, Norm::Layer, true);
                drop(wide);
                g.type_as(&normal, &hidden)
            }
            false => {
                let wide = g.float(&hidden);
                g.type_as(&wide, &hidden)
            }
        };
        attended = g.module("attn2", |g| self.attention(g, &normal, text, None));
        hidden = g.add(&hidden, &attended);
        normal = self.shifted(g, "norm3", &hidden, &cut[4], &cut[3]);
        let wide = adaptive::feed_forward(g, "ffn", &normal, self.inner);
        let float = g.float(&wide);
        let output = self.gated(g, &hidden, &float, &cut[5]);
        drop((normal, attended, wide, hidden));
        output
    }

    /// `(x.float() + y * gate).type_as(x)`.
    fn gated(&self, g: &mut Graph, x: &Value, y: &Value, gate: &Value) -> Value {
        let wide = g.float(x);
        let part = g.mul(y, gate);
        let sum = g.add(&wide, &part);
        drop((wide, part));
        g.type_as(&sum, x)
    }

    fn attention(&self, g: &mut Graph, x: &Value, context: &Value, table: Option<&[Value; 2]>) -> Value {
        let width = self.width();
        let query = g.linear("to_q", x, width, true);
        let [key, value] = ["to_k", "to_v"].map(|name| g.linear(name, context, width, true));
        let query = g.norm_of("norm_q", &[&query], Norm::RmsFused, false, width);
        let key = g.norm_of("norm_k", &[&key], Norm::RmsFused, false, width);
        let mut three = [query, key, value].map(|x| g.split_last(&x, self.heads, self.head));
        if let Some(table) = table {
            for x in &mut three[..2] {
                *x = self.turned(g, x, table);
            }
        }
        let hidden = parts::attended(g, &three, width);
        g.linear("to_out.0", &hidden, width, true)
    }

    /// Neighbours are pairs, written into every second place of a fresh tensor.
    fn turned(&self, g: &mut Graph, x: &Value, [cosine, sine]: &[Value; 2]) -> Value {
        let [batch, rows, heads, head] = [0, 1, 2, 3].map(|dim| x.size(dim));
        let pairs = g.view(x, [batch, rows, heads, head / 2, 2]);
        let (first, second) = (g.select(&pairs, 4, 0), g.select(&pairs, 4, 1));
        let cosine = g.slice_step(cosine, 3, 0, head / 2, 2);
        let sine = g.slice_step(sine, 3, 1, head / 2, 2);
        let part = |g: &mut Graph, a: &Value, b: &Value, plus: bool| {
            let (left, right) = (g.mul(&first, a), g.mul(&second, b));
            if plus { g.add(&left, &right) } else { g.sub(&left, &right) }
        };
        let even = part(g, &cosine, &sine, false);
        let odd = part(g, &sine, &cosine, true);
        g.run(Op::CopySlices(3), &[&even, &odd], x.shape())
    }
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    Wan::read(c)?.run(g);
    Ok(())
}
