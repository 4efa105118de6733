//! `CogVideoXTransformer3DModel` of diffusers: text and video in one stream, each with its own modulation.

use super::{Pictures, adaptive, parts};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Convolution, Input, Norm, Op};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// CogVideoX of 2B and 5B.
pub(super) const FAMILY: Family = Family {
    name: "CogVideoX of diffusers",
    model_types: &["CogVideoXTransformer3DModel"],
    facts: Facts {
        tasks: Some(&[Task::Base]),
        served: false,
        registration: &[
            &["patch_embed", "time_embedding", "transformer_blocks", "norm_final", "norm_out", "proj_out"],
            &["norm1", "attn1", "norm2", "ff"],
            parts::ATTENTION,
        ],
        ..Facts::DEFAULT
    },
    build,
};

pub(super) const PICTURES: Pictures = Pictures { sides: [60, 90], pixels: 8, frames: 49, between: 4 };

struct CogVideoX {
    channels: [u64; 2],
    patch: u64,
    layers: u64,
    heads: u64,
    head: u64,
    time: u64,
    text: u64,
    tokens: u64,
    /// Places of the table that a model without rotation keeps for the size it was made for.
    kept: Option<u64>,
    biased: bool,
}

impl CogVideoX {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        for key in ["ofs_embed_dim", "patch_size_t"] {
            if c.has(key) {
                return Err(c.refuse(key, "null; CogVideoX 1.5 and models that begin with a picture are not modelled"));
            }
        }
        if c.flag("use_learned_positional_embeddings", false)? {
            return Err(c.refuse("use_learned_positional_embeddings", "false"));
        }
        let patch = read::positive(c, &["patch_size"], 2)?;
        let size = |key: &str, usual: u64| read::positive(c, &[key], usual);
        let frames = (size("sample_frames", 49)? - 1) / size("temporal_compression_ratio", 4)? + 1;
        let places = (size("sample_height", 60)? / patch).saturating_mul(size("sample_width", 90)? / patch);
        Ok(Self {
            channels: [size("in_channels", 16)?, size("out_channels", 16)?],
            patch,
            layers: c.layers(&["num_layers"], 30)?,
            heads: size("num_attention_heads", 30)?,
            head: size("attention_head_dim", 64)?,
            time: size("time_embed_dim", 512)?,
            text: size("text_embed_dim", 4096)?,
            tokens: size("max_text_seq_length", 226)?,
            kept: (!c.flag("use_rotary_positional_embeddings", false)?).then_some(places.saturating_mul(frames)),
            biased: c.flag("attention_bias", true)?,
        })
    }

    fn width(&self) -> u64 {
        self.heads.saturating_mul(self.head)
    }

    fn run(&self, g: &mut Graph) {
        let (batch, [frames, height, width]) = (g.inputs.batch, PICTURES.latents(g));
        let [rows, columns] = [height / self.patch, width / self.patch];
        let places = frames.saturating_mul(rows).saturating_mul(columns);
        let video = g.input(Input::Pixels, [batch, frames, self.channels[0], height, width]);
        let prompt = g.input(Input::Pixels, [batch, self.tokens, self.text]);
        let step = g.input(Input::Pixels, [batch]);
        let table = self.kept.is_none().then(|| {
            [(); 2].map(|()| {
                let side = g.fill(DType::F32, [places, self.head]);
                g.view(&side, [1, 1, places, self.head])
            })
        });
        let sines = parts::time_projection(g, &step, self.width());
        let time = parts::embedding(g, "time_embedding", &sines, self.time);
        let mut hidden = g.module("patch_embed", |g| self.patches(g, &video, &prompt, [frames, rows, columns]));
        let mut text = g.slice(&hidden, 1, 0, self.tokens);
        hidden = g.slice(&hidden, 1, self.tokens, places);
        for index in 0..self.layers {
            (hidden, text) =
                g.layer("transformer_blocks", index, |g| self.block(g, &hidden, &text, &time, table.as_ref()));
        }
        hidden = g.norm("norm_final", &hidden, Norm::Layer, true);
        hidden = g.module("norm_out", |g| {
            let cut = self.modulation(g, &time, 2);
            let normal = g.norm("norm", &hidden, Norm::Layer, true);
            adaptive::shifted(g, &normal, &cut[1], &cut[0])
        });
        let patch = self.patch;
        hidden = g.linear("proj_out", &hidden, patch.saturating_mul(patch).saturating_mul(self.channels[1]), true);
        hidden = g.reshape(&hidden, [batch, frames, rows, columns, self.channels[1], patch, patch]);
        let turned = g.permute(&hidden, &[0, 1, 4, 2, 5, 3, 6]);
        let output = g.reshape(&turned, [batch, frames, self.channels[1], rows * patch, columns * patch]);
        drop((hidden, turned, text, table, time, sines, prompt, video, step));
        parts::noise_loss(g, &output);
    }

    /// `CogVideoXPatchEmbed`: pictures one by one, behind the text.
    fn patches(&self, g: &mut Graph, video: &Value, prompt: &Value, cut: [u64; 3]) -> Value {
        let (batch, width, [frames, rows, columns]) = (video.size(0), self.width(), cut);
        let places = frames.saturating_mul(rows).saturating_mul(columns);
        if let Some(kept) = self.kept {
            g.model_buffer("pos_embedding", [1, self.tokens.saturating_add(kept), width], false);
        }
        let text = g.linear("text_proj", prompt, width, true);
        let [channels, height, length] = [2, 3, 4].map(|dim| video.size(dim));
        let all = g.reshape(video, [batch.saturating_mul(frames), channels, height, length]);
        let side = self.patch;
        let spec = Convolution { stride: [side as u32; 3], padding: [0; 3], groups: 1, transposed: false };
        let mut images = g.convolution("proj", &all, width, &[side, side], spec, true);
        drop(all);
        images = g.view(&images, [batch, frames, width, rows.saturating_mul(columns)]);
        images = g.transpose(&images, 2, 3);
        images = g.reshape(&images, [batch, places, width]);
        let embedded = g.cat(&[&text, &images], 1);
        if self.kept.is_none() {
            return embedded;
        }
        let table = g.fill(DType::F32, [1, self.tokens.saturating_add(places), width]);
        let short = g.to_model_type(&table);
        drop(table);
        g.add(&embedded, &short)
    }

    fn modulation(&self, g: &mut Graph, time: &Value, parts: usize) -> Vec<Value> {
        let active = g.activation(Activation::Silu, time);
        let all = g.linear("linear", &active, self.width().saturating_mul(parts as u64), true);
        let cut = g.split(&all, 1, &vec![self.width(); parts]);
        cut.iter().map(|part| g.unsqueeze(part, 1)).collect()
    }

    /// `CogVideoXLayerNormZero`: one norm for both, and two gates.
    fn zero(&self, g: &mut Graph, name: &str, x: &Value, text: &Value, time: &Value) -> ([Value; 2], Vec<Value>) {
        g.module(name, |g| {
            let cut = self.modulation(g, time, 6);
            let mut normal = g.norm("norm", x, Norm::Layer, true);
            let hidden = adaptive::shifted(g, &normal, &cut[1], &cut[0]);
            normal = g.norm("norm", text, Norm::Layer, true);
            let beside = adaptive::shifted(g, &normal, &cut[4], &cut[3]);
            ([hidden, beside], cut)
        })
    }

    fn block(
        &self,
        g: &mut Graph,
        input: &Value,
        context: &Value,
        time: &Value,
        table: Option<&[Value; 2]>,
    ) -> (Value, Value) {
        let (rows, tokens) = (input.size(1), context.size(1));
        let (mut normal, cut) = self.zero(g, "norm1", input, context, time);
        let attended = g.module("attn1", |g| self.attention(g, &normal, table));
        let mut hidden = parts::gated(g, input, &cut[2], &attended.1);
        let mut text = parts::gated(g, context, &cut[5], &attended.0);
        let again;
        (normal, again) = self.zero(g, "norm2", &hidden, &text, time);
        let [normal, beside] = normal;
        let normal = g.cat(&[&beside, &normal], 1);
        let wide = adaptive::feed_forward(g, "ff", &normal, self.width().saturating_mul(4));
        let part = g.slice(&wide, 1, tokens, rows);
        hidden = parts::gated(g, &hidden, &again[2], &part);
        let part = g.slice(&wide, 1, 0, tokens);
        text = parts::gated(g, &text, &again[5], &part);
        drop((cut, attended, beside, normal, wide, part));
        (hidden, text)
    }

    /// Text first; what it is comes first out of it, too.
    fn attention(&self, g: &mut Graph, [x, text]: &[Value; 2], table: Option<&[Value; 2]>) -> (Value, Value) {
        let (width, rows, tokens) = (self.width(), x.size(1), text.size(1));
        let joined = g.cat(&[text, x], 1);
        let [query, key, value] = ["to_q", "to_k", "to_v"].map(|name| {
            let part = g.linear(name, &joined, width, self.biased);
            let apart = g.split_last(&part, self.heads, self.head);
            g.transpose(&apart, 1, 2)
        });
        let mut query = g.norm("norm_q", &query, Norm::Layer, true);
        let mut key = g.norm("norm_k", &key, Norm::Layer, true);
        if let Some(table) = table {
            for part in [&mut query, &mut key] {
                let cut = g.slice(part, 2, tokens, rows);
                let turned = parts::turned(g, &cut, table);
                *part = g.assign(part, 2, tokens, &turned);
            }
        }
        let op = Op::ScaledDotProduct { causal: false, dropout: false, grouped: false };
        let mut hidden = g.run(op, &[&query, &key, &value], query.shape());
        hidden = g.transpose(&hidden, 1, 2);
        hidden = g.reshape(&hidden, [hidden.size(0), hidden.size(1), width]);
        hidden = g.linear("to_out.0", &hidden, width, true);
        drop((joined, query, key, value));
        g.split2(&hidden, 1, tokens, rows)
    }
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    CogVideoX::read(c)?.run(g);
    Ok(())
}
