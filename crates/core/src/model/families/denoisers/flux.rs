//! `FluxTransformer2DModel` of diffusers: text and picture in two streams that attend together, then in one.

use super::{Pictures, adaptive, parts};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Input, Norm, Op, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Flux.
pub(super) const FAMILY: Family = Family {
    name: "Flux of diffusers",
    model_types: &["FluxTransformer2DModel"],
    facts: Facts {
        tasks: Some(&[Task::Base]),
        served: false,
        registration: &[
            &[
                "time_text_embed",
                "context_embedder",
                "x_embedder",
                "transformer_blocks",
                "single_transformer_blocks",
                "norm_out",
                "proj_out",
            ],
            &["timestep_embedder", "guidance_embedder", "text_embedder"],
            &["norm1", "norm1_context", "attn", "ff", "ff_context"],
            &["norm", "proj_mlp", "proj_out", "attn"],
            &[
                "norm_q",
                "norm_k",
                "to_q",
                "to_k",
                "to_v",
                "to_out",
                "norm_added_q",
                "norm_added_k",
                "add_q_proj",
                "add_k_proj",
                "add_v_proj",
                "to_add_out",
            ],
        ],
        ..Facts::DEFAULT
    },
    build,
};

/// Pixels of a token's side: eight of a latent, two latents.
pub(super) const PICTURES: Pictures = Pictures::stills(64, 16);
/// Tokens of a prompt: T5's usual length.
const TOKENS: u64 = 512;

struct Flux {
    channels: [u64; 2],
    layers: [u64; 2],
    heads: u64,
    head: u64,
    text: u64,
    pooled: u64,
    guided: bool,
    axes: Vec<u64>,
}

impl Flux {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let channels = read::positive(c, &["in_channels"], 64)?;
        let patch = read::positive(c, &["patch_size"], 1)?;
        let outputs = read::positive(c, &["out_channels"], channels)?;
        Ok(Self {
            channels: [channels, outputs.saturating_mul(patch).saturating_mul(patch)],
            layers: [c.layers(&["num_layers"], 19)?, c.layers(&["num_single_layers"], 38)?],
            heads: read::positive(c, &["num_attention_heads"], 24)?,
            head: read::positive(c, &["attention_head_dim"], 128)?,
            text: read::positive(c, &["joint_attention_dim"], 4096)?,
            pooled: read::positive(c, &["pooled_projection_dim"], 768)?,
            guided: c.flag("guidance_embeds", false)?,
            axes: c.sizes("axes_dims_rope")?.unwrap_or_else(|| vec![16, 56, 56]),
        })
    }

    fn width(&self) -> u64 {
        self.heads.saturating_mul(self.head)
    }

    fn run(&self, g: &mut Graph) {
        let (batch, [_, height, width]) = (g.inputs.batch, PICTURES.latents(g));
        let places = height.saturating_mul(width);
        let step = g.input(Input::Pixels, [batch]);
        let picture = g.input(Input::Pixels, [batch, places, self.channels[0]]);
        let prompt = g.input(Input::Pixels, [batch, TOKENS, self.text]);
        let pooled = g.input(Input::Pixels, [batch, self.pooled]);
        let ids = [g.input(Input::Pixels, [TOKENS, 3]), g.input(Input::Pixels, [places, 3])];
        let guidance = self.guided.then(|| g.input(Input::Pixels, [batch]));
        let mut hidden = g.linear("x_embedder", &picture, self.width(), true);
        let steps = g.scale(&step);
        let guidance = guidance.map(|guidance| g.scale(&guidance));
        let time = g.module("time_text_embed", |g| self.time(g, &steps, guidance.as_ref(), &pooled));
        let mut text = g.linear("context_embedder", &prompt, self.width(), true);
        let ids = g.cat(&[&ids[0], &ids[1]], 0);
        let table = self.table(g, &ids);
        for index in 0..self.layers[0] {
            (text, hidden) = g.layer("transformer_blocks", index, |g| self.double(g, &hidden, &text, &time, &table));
        }
        for index in 0..self.layers[1] {
            (text, hidden) =
                g.layer("single_transformer_blocks", index, |g| self.single(g, &hidden, &text, &time, &table));
        }
        hidden = adaptive::continuous(g, "norm_out", &hidden, &time);
        let output = g.linear("proj_out", &hidden, self.channels[1], true);
        drop((hidden, text, table, ids, time, steps, guidance, pooled, prompt, picture, step));
        parts::noise_loss(g, &output);
    }

    fn time(&self, g: &mut Graph, steps: &Value, guidance: Option<&Value>, pooled: &Value) -> Value {
        let sines = parts::time_projection(g, steps, parts::SINES);
        let mut time = parts::embedding(g, "timestep_embedder", &sines, self.width());
        if let Some(guidance) = guidance {
            let sines = parts::time_projection(g, guidance, parts::SINES);
            let more = parts::embedding(g, "guidance_embedder", &sines, self.width());
            time = g.add(&time, &more);
        }
        let text = parts::embedding(g, "text_embedder", pooled, self.width());
        g.add(&time, &text)
    }

    /// Cosines and sines of all positions, in fp64 along each axis, kept in fp32.
    fn table(&self, g: &mut Graph, ids: &Value) -> [Value; 2] {
        let wide = g.float(ids);
        let rows = wide.size(0);
        let mut all: [Vec<Value>; 2] = Default::default();
        for axis in &self.axes {
            // An eight-byte number, whichever.
            let angles = g.fill(DType::I64, [rows, axis / 2]);
            for side in &mut all {
                let turned = g.unary(Unary::Clone, &angles);
                let twice = g.repeat_interleave(&turned, 1, 2);
                side.push(g.float(&twice));
            }
        }
        all.map(|parts| g.cat(&parts.iter().collect::<Vec<_>>(), -1))
    }

    /// `FluxTransformerBlock`: of the six parts of a modulation the first two are used up.
    fn double(
        &self,
        g: &mut Graph,
        input: &Value,
        context: &Value,
        time: &Value,
        table: &[Value; 2],
    ) -> (Value, Value) {
        let inner = self.width().saturating_mul(4);
        let (mut normal, own) = adaptive::zero(g, "norm1", input, time, 6);
        let (mut beside, other) = adaptive::zero(g, "norm1_context", context, time, 6);
        let (attended, text) = g.module("attn", |g| self.joint(g, &normal, &beside, table));
        let gated = g.mul(&own[2], &attended);
        let mut hidden = g.add(input, &gated);
        normal = adaptive::adapted(g, "norm2", &hidden, &own[4], &own[3]);
        let wide = adaptive::feed_forward(g, "ff", &normal, inner);
        let wide = g.mul(&own[5], &wide);
        hidden = g.add(&hidden, &wide);
        let gated_text = g.mul(&other[2], &text);
        let mut context = g.add(context, &gated_text);
        beside = adaptive::adapted(g, "norm2_context", &context, &other[4], &other[3]);
        let wide_text = adaptive::feed_forward(g, "ff_context", &beside, inner);
        let more = g.mul(&other[5], &wide_text);
        context = g.add(&context, &more);
        context = g.run(Op::Unary(Unary::ClampHalf), &[&context], context.shape());
        drop((normal, beside, attended, text));
        (context, hidden)
    }

    /// `FluxSingleTransformerBlock`.
    fn single(
        &self,
        g: &mut Graph,
        input: &Value,
        context: &Value,
        time: &Value,
        table: &[Value; 2],
    ) -> (Value, Value) {
        let (rows, tokens) = (input.size(1), context.size(1));
        let residual = g.cat(&[context, input], 1);
        let (normal, parts) = adaptive::zero(g, "norm", &residual, time, 3);
        let mut wide = g.linear("proj_mlp", &normal, self.width().saturating_mul(4), true);
        wide = g.activation(Activation::Gelu, &wide);
        let attended = g.module("attn", |g| {
            let three = self.projected(g, &normal, ["to_q", "to_k", "to_v"], ["norm_q", "norm_k"]);
            self.attend(g, three, table)
        });
        let both = g.cat(&[&attended, &wide], 2);
        let mut hidden = g.linear("proj_out", &both, self.width(), true);
        // Their name is given away once the product is there.
        hidden = g.mul(&parts[2], &hidden);
        drop(both);
        hidden = g.add(&residual, &hidden);
        hidden = g.run(Op::Unary(Unary::ClampHalf), &[&hidden], hidden.shape());
        drop((normal, wide, attended));
        (g.slice(&hidden, 1, 0, tokens), g.slice(&hidden, 1, tokens, rows))
    }

    /// Queries, keys and values by head, the first two normalised.
    fn projected(&self, g: &mut Graph, x: &Value, names: [&str; 3], norms: [&str; 2]) -> [Value; 3] {
        let [query, key, value] = names.map(|name| g.linear(name, x, self.width(), true));
        let [query, key, value] = [query, key, value].map(|x| g.split_last(&x, self.heads, self.head));
        let query = g.norm_of(norms[0], &[&query], Norm::RmsFused, false, self.head);
        let key = g.norm_of(norms[1], &[&key], Norm::RmsFused, false, self.head);
        [query, key, value]
    }

    fn joint(&self, g: &mut Graph, hidden: &Value, text: &Value, table: &[Value; 2]) -> (Value, Value) {
        let own = self.projected(g, hidden, ["to_q", "to_k", "to_v"], ["norm_q", "norm_k"]);
        let added = ["add_q_proj", "add_k_proj", "add_v_proj"];
        let other = self.projected(g, text, added, ["norm_added_q", "norm_added_k"]);
        let mut at = 0;
        let three = own.map(|own| {
            at += 1;
            g.cat(&[&other[at - 1], &own], 1)
        });
        let all = self.attend(g, three, table);
        let (text, hidden) = g.split2(&all, 1, text.size(1), hidden.size(1));
        let dense = g.contiguous(&hidden);
        let hidden = g.linear("to_out.0", &dense, self.width(), true);
        drop(dense);
        let dense = g.contiguous(&text);
        (hidden, g.linear("to_add_out", &dense, self.width(), true))
    }

    fn attend(&self, g: &mut Graph, [query, key, value]: [Value; 3], table: &[Value; 2]) -> Value {
        let [batch, rows] = [0, 1].map(|dim| query.size(dim));
        let query = self.rotated(g, query, table);
        let key = self.rotated(g, key, table);
        let [query, key, value] = [query, key, value].map(|x| g.transpose(&x, 1, 2));
        let op = Op::ScaledDotProduct { causal: false, dropout: false, grouped: false };
        let mut hidden = g.run(op, &[&query, &key, &value], query.shape());
        hidden = g.transpose(&hidden, 1, 2);
        g.reshape(&hidden, [batch, rows, self.width()])
    }

    /// `apply_rotary_emb`.
    fn rotated(&self, g: &mut Graph, x: Value, table: &[Value; 2]) -> Value {
        let rows = x.size(1);
        let table = [0, 1].map(|at| g.view(&table[at], [1, rows, 1, self.head]));
        parts::turned(g, &x, &table)
    }
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    Flux::read(c)?.run(g);
    Ok(())
}
