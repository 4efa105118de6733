//! `Flux2Transformer2DModel` of diffusers: one modulation for all layers of a kind, single layers that project everything at once.

use super::{Pictures, adaptive, parts};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Input, Norm, Op, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Flux.2, dev and klein.
pub(super) const FAMILY: Family = Family {
    name: "Flux 2 of diffusers",
    model_types: &["Flux2Transformer2DModel"],
    facts: Facts {
        tasks: Some(&[Task::Base]),
        served: false,
        registration: &[
            &[
                "time_guidance_embed",
                "double_stream_modulation_img",
                "double_stream_modulation_txt",
                "single_stream_modulation",
                "x_embedder",
                "context_embedder",
                "transformer_blocks",
                "single_transformer_blocks",
                "norm_out",
                "proj_out",
            ],
            &["attn", "ff", "ff_context"],
            &[
                "to_qkv_mlp_proj",
                "to_q",
                "to_k",
                "to_v",
                "norm_q",
                "norm_k",
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

pub(super) const PICTURES: Pictures = Pictures::stills(64, 16);
/// Tokens of a prompt, as the pipeline's longest is by default.
const TOKENS: u64 = 512;

struct Flux2 {
    channels: [u64; 2],
    layers: [u64; 2],
    heads: u64,
    head: u64,
    inner: u64,
    text: u64,
    sines: u64,
    guided: bool,
    axes: Vec<u64>,
}

impl Flux2 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let channels = read::positive(c, &["in_channels"], 128)?;
        let patch = read::positive(c, &["patch_size"], 1)?;
        let outputs = read::positive(c, &["out_channels"], channels)?;
        let heads = read::positive(c, &["num_attention_heads"], 48)?;
        let head = read::positive(c, &["attention_head_dim"], 128)?;
        Ok(Self {
            channels: [channels, outputs.saturating_mul(patch).saturating_mul(patch)],
            layers: [c.layers(&["num_layers"], 8)?, c.layers(&["num_single_layers"], 48)?],
            heads,
            head,
            inner: (heads.saturating_mul(head) as f64 * c.number("mlp_ratio", 3.0)?) as u64,
            text: read::positive(c, &["joint_attention_dim"], 15360)?,
            sines: read::positive(c, &["timestep_guidance_channels"], 256)?,
            guided: c.flag("guidance_embeds", true)?,
            axes: c.sizes("axes_dims_rope")?.unwrap_or_else(|| vec![32; 4]),
        })
    }

    fn width(&self) -> u64 {
        self.heads.saturating_mul(self.head)
    }

    fn run(&self, g: &mut Graph) {
        let (batch, [_, height, width]) = (g.inputs.batch, PICTURES.latents(g));
        let places = height.saturating_mul(width);
        let picture = g.input(Input::Pixels, [batch, places, self.channels[0]]);
        let prompt = g.input(Input::Pixels, [batch, TOKENS, self.text]);
        let step = g.input(Input::Pixels, [batch]);
        let axes = self.axes.len() as u64;
        let ids = [g.input(Input::Pixels, [places, axes]), g.input(Input::Pixels, [TOKENS, axes])];
        let guidance = g.input(Input::Pixels, [batch]);
        let steps = [g.scale(&step), g.scale(&guidance)];
        let time = g.module("time_guidance_embed", |g| {
            let time = self.embedding(g, "timestep_embedder", &steps[0]);
            if !self.guided {
                return time;
            }
            let more = self.embedding(g, "guidance_embedder", &steps[1]);
            g.add(&time, &more)
        });
        let kinds = ["double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"];
        let mut sets = [6, 6, 3].into_iter();
        let [own, other, single] = kinds.map(|name| self.modulation(g, name, &time, sets.next().unwrap_or_default()));
        let mut hidden = g.linear("x_embedder", &picture, self.width(), false);
        let mut text = g.linear("context_embedder", &prompt, self.width(), false);
        let [image, words] = [0, 1].map(|at| self.table(g, &ids[at]));
        let table = [0, 1].map(|at| {
            let joined = g.cat(&[&words[at], &image[at]], 0);
            g.view(&joined, [1, TOKENS.saturating_add(places), 1, self.head])
        });
        for index in 0..self.layers[0] {
            (text, hidden) =
                g.layer("transformer_blocks", index, |g| self.double(g, &hidden, &text, [&own, &other], &table));
        }
        hidden = g.cat(&[&text, &hidden], 1);
        for index in 0..self.layers[1] {
            hidden = g.layer("single_transformer_blocks", index, |g| self.single(g, &hidden, &single, &table));
        }
        hidden = g.slice(&hidden, 1, TOKENS, places);
        hidden = g.module("norm_out", |g| {
            let active = g.activation(Activation::Silu, &time);
            let both = g.linear("linear", &active, self.width().saturating_mul(2), false);
            let (scale, shift) = g.split2(&both, 1, self.width(), self.width());
            let (scale, shift) = (g.unsqueeze(&scale, 1), g.unsqueeze(&shift, 1));
            adaptive::adapted(g, "norm", &hidden, &scale, &shift)
        });
        let output = g.linear("proj_out", &hidden, self.channels[1], false);
        drop((hidden, text, table, image, words, own, other, single, time, steps));
        drop((ids, guidance, prompt, picture, step));
        parts::noise_loss(g, &output);
    }

    fn embedding(&self, g: &mut Graph, name: &str, step: &Value) -> Value {
        let sines = parts::time_projection(g, step, self.sines);
        g.module(name, |g| {
            let mut hidden = g.linear("linear_1", &sines, self.width(), false);
            hidden = g.activation(Activation::Silu, &hidden);
            g.linear("linear_2", &hidden, self.width(), false)
        })
    }

    fn modulation(&self, g: &mut Graph, name: &str, time: &Value, parts: u64) -> Value {
        g.module(name, |g| {
            let active = g.activation(Activation::Silu, time);
            g.linear("linear", &active, self.width().saturating_mul(parts), false)
        })
    }

    /// Parts of a modulation, which every layer cuts for itself.
    fn cut(&self, g: &mut Graph, all: &Value, parts: usize) -> Vec<Value> {
        let rows = g.unsqueeze(all, 1);
        g.split(&rows, -1, &vec![self.width(); parts])
    }

    /// Cosines and sines along each axis, made in fp64, kept in fp32.
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

    fn plain(&self, g: &mut Graph, name: &str, x: &Value) -> Value {
        g.norm_of(name, &[x], Norm::LayerPlain, false, self.width())
    }

    fn gated_halves(&self, g: &mut Graph, both: &Value) -> Value {
        let (gate, up) = (g.slice(both, -1, 0, self.inner), g.slice(both, -1, self.inner, self.inner));
        let gate = g.activation(Activation::Silu, &gate);
        g.mul(&gate, &up)
    }

    fn feed_forward(&self, g: &mut Graph, name: &str, x: &Value) -> Value {
        g.module(name, |g| {
            let mut hidden = g.linear("linear_in", x, self.inner.saturating_mul(2), false);
            hidden = self.gated_halves(g, &hidden);
            g.linear("linear_out", &hidden, self.width(), false)
        })
    }

    fn double(
        &self,
        g: &mut Graph,
        input: &Value,
        context: &Value,
        times: [&Value; 2],
        table: &[Value; 2],
    ) -> (Value, Value) {
        let [own, other] = times.map(|all| self.cut(g, all, 6));
        let mut normal = self.plain(g, "norm1", input);
        normal = adaptive::shifted(g, &normal, &own[1], &own[0]);
        let mut beside = self.plain(g, "norm1_context", context);
        beside = adaptive::shifted(g, &beside, &other[1], &other[0]);
        let (mut attended, mut text) = g.module("attn", |g| self.joint(g, &normal, &beside, table));
        attended = g.mul(&own[2], &attended);
        let mut hidden = g.add(input, &attended);
        normal = self.plain(g, "norm2", &hidden);
        normal = adaptive::shifted(g, &normal, &own[4], &own[3]);
        let wide = self.feed_forward(g, "ff", &normal);
        hidden = parts::gated(g, &hidden, &own[5], &wide);
        text = g.mul(&other[2], &text);
        let mut context = g.add(context, &text);
        beside = self.plain(g, "norm2_context", &context);
        beside = adaptive::shifted(g, &beside, &other[4], &other[3]);
        let wide_text = self.feed_forward(g, "ff_context", &beside);
        context = parts::gated(g, &context, &other[5], &wide_text);
        context = g.run(Op::Unary(Unary::ClampHalf), &[&context], context.shape());
        drop((normal, beside, attended, text, wide, wide_text));
        (context, hidden)
    }

    fn joint(&self, g: &mut Graph, x: &Value, text: &Value, table: &[Value; 2]) -> (Value, Value) {
        let width = self.width();
        let own = ["to_q", "to_k", "to_v"].map(|name| g.linear(name, x, width, false));
        let added = ["add_q_proj", "add_k_proj", "add_v_proj"].map(|name| g.linear(name, text, width, false));
        let mut own = self.normed(g, own, ["norm_q", "norm_k"]);
        let added = self.normed(g, added, ["norm_added_q", "norm_added_k"]);
        for (own, added) in own.iter_mut().zip(&added) {
            *own = g.cat(&[added, own], 1);
        }
        for part in &mut own[..2] {
            *part = parts::turned(g, part, table);
        }
        let all = parts::attended(g, &own, width);
        let (beside, hidden) = g.split2(&all, 1, text.size(1), x.size(1));
        let beside = g.linear("to_add_out", &beside, width, false);
        (g.linear("to_out.0", &hidden, width, false), beside)
    }

    fn normed(&self, g: &mut Graph, three: [Value; 3], norms: [&str; 2]) -> [Value; 3] {
        let [mut query, mut key, value] = three.map(|x| g.split_last(&x, self.heads, self.head));
        query = g.norm_of(norms[0], &[&query], Norm::RmsFused, false, self.head);
        key = g.norm_of(norms[1], &[&key], Norm::RmsFused, false, self.head);
        [query, key, value]
    }

    fn single(&self, g: &mut Graph, input: &Value, time: &Value, table: &[Value; 2]) -> Value {
        let cut = self.cut(g, time, 3);
        let mut normal = self.plain(g, "norm", input);
        normal = adaptive::shifted(g, &normal, &cut[1], &cut[0]);
        let attended = g.module("attn", |g| self.alone(g, &normal, table));
        let mut hidden = parts::gated(g, input, &cut[2], &attended);
        hidden = g.run(Op::Unary(Unary::ClampHalf), &[&hidden], hidden.shape());
        drop((normal, attended));
        hidden
    }

    /// `Flux2ParallelSelfAttnProcessor`.
    fn alone(&self, g: &mut Graph, x: &Value, table: &[Value; 2]) -> Value {
        let width = self.width();
        let (three, two) = (width.saturating_mul(3), self.inner.saturating_mul(2));
        let all = g.linear("to_qkv_mlp_proj", x, three.saturating_add(two), false);
        let (first, mut wide) = g.split2(&all, -1, three, two);
        drop(all);
        let (query, key, value) = g.split3(&first, -1, [width; 3]);
        let mut three = self.normed(g, [query, key, value], ["norm_q", "norm_k"]);
        for part in &mut three[..2] {
            *part = parts::turned(g, part, table);
        }
        let mut hidden = parts::attended(g, &three, width);
        wide = self.gated_halves(g, &wide);
        hidden = g.cat(&[&hidden, &wide], -1);
        let output = g.linear("to_out", &hidden, width, false);
        drop(first);
        output
    }
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    Flux2::read(c)?.run(g);
    Ok(())
}
