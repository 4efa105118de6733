//! `HunyuanVideoTransformer3DModel` of diffusers: as Flux, with a refiner of the text and a mask over it.

use super::{Pictures, adaptive, parts};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Convolution, Input, Norm, Reduction, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// HunyuanVideo.
pub(super) const FAMILY: Family = Family {
    name: "HunyuanVideo of diffusers",
    model_types: &["HunyuanVideoTransformer3DModel"],
    facts: Facts {
        tasks: Some(&[Task::Base]),
        served: false,
        registration: &[
            &[
                "x_embedder",
                "context_embedder",
                "time_text_embed",
                "transformer_blocks",
                "single_transformer_blocks",
                "norm_out",
                "proj_out",
            ],
            &["timestep_embedder", "text_embedder", "guidance_embedder"],
            &["time_text_embed", "proj_in", "token_refiner"],
            &["norm1", "norm1_context", "attn", "norm2", "ff", "ff_context", "norm_out"],
            &["attn", "norm", "proj_mlp", "proj_out"],
            parts::ATTENTION,
        ],
        ..Facts::DEFAULT
    },
    build,
};

pub(super) const PICTURES: Pictures = Pictures { sides: [90, 160], pixels: 8, frames: 129, between: 4 };
/// Tokens of a prompt: the pipeline fills up to them.
const TOKENS: u64 = 256;

struct Hunyuan {
    channels: [u64; 2],
    patch: [u64; 3],
    layers: [u64; 3],
    heads: u64,
    head: u64,
    inner: u64,
    text: u64,
    pooled: u64,
    guided: bool,
    axes: Vec<u64>,
}

impl Hunyuan {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        if c.has("image_condition_type") {
            return Err(c.refuse("image_condition_type", "null; models that begin with a picture are not modelled"));
        }
        if c.str_or("qk_norm", "rms_norm") != "rms_norm" {
            return Err(c.refuse("qk_norm", "rms_norm"));
        }
        let side = read::positive(c, &["patch_size"], 2)?;
        let heads = read::positive(c, &["num_attention_heads"], 24)?;
        let head = read::positive(c, &["attention_head_dim"], 128)?;
        Ok(Self {
            channels: [read::positive(c, &["in_channels"], 16)?, read::positive(c, &["out_channels"], 16)?],
            patch: [read::positive(c, &["patch_size_t"], 1)?, side, side],
            layers: [
                c.layers(&["num_refiner_layers"], 2)?,
                c.layers(&["num_layers"], 20)?,
                c.layers(&["num_single_layers"], 40)?,
            ],
            heads,
            head,
            inner: (heads.saturating_mul(head) as f64 * c.number("mlp_ratio", 4.0)?) as u64,
            text: read::positive(c, &["text_embed_dim"], 4096)?,
            pooled: read::positive(c, &["pooled_projection_dim"], 768)?,
            guided: c.flag("guidance_embeds", true)?,
            axes: c.sizes("rope_axes_dim")?.unwrap_or_else(|| vec![16, 56, 56]),
        })
    }

    fn width(&self) -> u64 {
        self.heads.saturating_mul(self.head)
    }

    fn run(&self, g: &mut Graph) {
        let (batch, sizes, width) = (g.inputs.batch, PICTURES.latents(g), self.width());
        let cut = [0, 1, 2].map(|at| sizes[at] / self.patch[at]);
        let places = cut[0].saturating_mul(cut[1]).saturating_mul(cut[2]);
        let video = g.input(Input::Pixels, [batch, self.channels[0], sizes[0], sizes[1], sizes[2]]);
        let prompt = g.input(Input::Pixels, [batch, TOKENS, self.text]);
        let step = g.input(Input::Pixels, [batch]);
        let set = g.fill(DType::F32, [batch, TOKENS]);
        let pooled = g.input(Input::Pixels, [batch, self.pooled]);
        let table = self.table(g, places);
        let time = g.module("time_text_embed", |g| self.conditions(g, &step, &pooled));
        let stride = self.patch.map(|size| size as u32);
        let spec = Convolution { stride, padding: [0; 3], groups: 1, transposed: false };
        let mut hidden = g.module("x_embedder", |g| g.convolution("proj", &video, width, &self.patch, spec, true));
        hidden = g.reshape(&hidden, [batch, width, places]);
        hidden = g.transpose(&hidden, 1, 2);
        let mut text = g.module("context_embedder", |g| self.refined(g, &prompt, &step, &set));
        let mask = g.fill(DType::Bool, [batch, places.saturating_add(TOKENS)]);
        let mask = g.view(&mask, [batch, 1, 1, places.saturating_add(TOKENS)]);
        for index in 0..self.layers[1] {
            (hidden, text) =
                g.layer("transformer_blocks", index, |g| self.double(g, &hidden, &text, &time, &mask, &table));
        }
        for index in 0..self.layers[2] {
            (hidden, text) =
                g.layer("single_transformer_blocks", index, |g| self.single(g, &hidden, &text, &time, &mask, &table));
        }
        hidden = adaptive::continuous(g, "norm_out", &hidden, &time);
        let volume = self.patch.iter().fold(self.channels[1], |all, &size| all.saturating_mul(size));
        hidden = g.linear("proj_out", &hidden, volume, true);
        let [frame, height, side] = self.patch;
        hidden = g.reshape(&hidden, [batch, cut[0], cut[1], cut[2], self.channels[1], frame, height, side]);
        hidden = g.permute(&hidden, &[0, 4, 1, 5, 2, 6, 3, 7]);
        let output = g.reshape(&hidden, [batch, self.channels[1], cut[0] * frame, cut[1] * height, cut[2] * side]);
        drop((hidden, text, mask, table, time, pooled, set, prompt, video, step));
        parts::noise_loss(g, &output);
    }

    /// Cosines and sines along each axis in fp32, joined, as wide as a head.
    fn table(&self, g: &mut Graph, places: u64) -> [Value; 2] {
        let mut all: [Vec<Value>; 2] = Default::default();
        for axis in &self.axes {
            let angles = g.fill(DType::F32, [places, axis / 2]);
            for (side, kind) in all.iter_mut().zip([Unary::Cos, Unary::Sin]) {
                let once = g.unary(kind, &angles);
                side.push(g.repeat_interleave(&once, 1, 2));
            }
        }
        all.map(|parts| {
            let joined = g.cat(&parts.iter().collect::<Vec<_>>(), -1);
            g.view(&joined, [1, places, 1, self.head])
        })
    }

    fn conditions(&self, g: &mut Graph, step: &Value, pooled: &Value) -> Value {
        let sines = parts::time_projection(g, step, parts::SINES);
        let mut time = parts::embedding(g, "timestep_embedder", &sines, self.width());
        let text = parts::embedding(g, "text_embedder", pooled, self.width());
        if self.guided {
            let sines = parts::time_projection(g, step, parts::SINES);
            let more = parts::embedding(g, "guidance_embedder", &sines, self.width());
            time = g.add(&time, &more);
        }
        g.add(&time, &text)
    }

    /// `HunyuanVideoTokenRefiner`: its mask goes to every head.
    fn refined(&self, g: &mut Graph, prompt: &Value, step: &Value, set: &Value) -> Value {
        let batch = prompt.size(0);
        let set = g.unsqueeze(set, -1);
        let product = g.mul(prompt, &set);
        let sum = g.reduce(Reduction::Sum, &product, 1, false);
        drop(product);
        let count = g.reduce(Reduction::Sum, &set, 1, false);
        let mean = g.div(&sum, &count);
        drop((sum, count));
        let pooled = g.type_as(&mean, prompt);
        drop(mean);
        let time = g.module("time_text_embed", |g| parts::time_and_text(g, step, &pooled, self.width()));
        let mut hidden = g.linear("proj_in", prompt, self.width(), true);
        let mask = g.fill(DType::Bool, [batch, 1, TOKENS, TOKENS]);
        for index in 0..self.layers[0] {
            hidden = g.module(&format!("token_refiner.refiner_blocks.{index}"), |g| {
                let normal = g.norm("norm1", &hidden, Norm::Layer, true);
                let attended = g.module("attn", |g| self.refining(g, &normal, &mask));
                let gates = g.module("norm_out", |g| adaptive::modulation(g, &time, 2));
                let hidden = parts::scaled(g, &hidden, &attended, &gates[0]);
                let second = g.norm("norm2", &hidden, Norm::Layer, true);
                let wide = g.module("ff", |g| {
                    let mut wide = g.linear("net.0.proj", &second, self.width().saturating_mul(4), true);
                    wide = g.activation(Activation::Silu, &wide);
                    g.linear("net.2", &wide, self.width(), true)
                });
                drop(second);
                let output = parts::scaled(g, &hidden, &wide, &gates[1]);
                drop((normal, attended, wide));
                output
            });
        }
        hidden
    }

    /// `AttnProcessor2_0` with a mask of its own for every head.
    fn refining(&self, g: &mut Graph, x: &Value, mask: &Value) -> Value {
        let all = g.repeat_interleave(mask, 0, self.heads);
        let mask = g.view(&all, [x.size(0), self.heads, TOKENS, TOKENS]);
        let three = ["to_q", "to_k", "to_v"].map(|name| {
            let part = g.linear(name, x, self.width(), true);
            g.split_last(&part, self.heads, self.head)
        });
        let hidden = parts::masked(g, &three, Some(&mask), self.width());
        let hidden = g.linear("to_out.0", &hidden, self.width(), true);
        g.scalar(crate::model::op::Binary::Div, &hidden)
    }

    fn double(
        &self,
        g: &mut Graph,
        input: &Value,
        context: &Value,
        time: &Value,
        mask: &Value,
        table: &[Value; 2],
    ) -> (Value, Value) {
        let (mut normal, own) = adaptive::zero(g, "norm1", input, time, 6);
        let (mut beside, other) = adaptive::zero(g, "norm1_context", context, time, 6);
        let (attended, text) = g.module("attn", |g| self.joint(g, &normal, &beside, mask, table));
        let mut hidden = parts::scaled(g, input, &attended, &own[2]);
        let mut context = parts::scaled(g, context, &text, &other[2]);
        let plain = |g: &mut Graph, name: &str, x: &Value| g.norm_of(name, &[x], Norm::LayerPlain, false, self.width());
        normal = plain(g, "norm2", &hidden);
        beside = plain(g, "norm2_context", &context);
        normal = adaptive::shifted(g, &normal, &own[4], &own[3]);
        beside = adaptive::shifted(g, &beside, &other[4], &other[3]);
        let wide = adaptive::feed_forward(g, "ff", &normal, self.inner);
        let wide_text = adaptive::feed_forward(g, "ff_context", &beside, self.inner);
        hidden = parts::gated(g, &hidden, &own[5], &wide);
        context = parts::gated(g, &context, &other[5], &wide_text);
        drop((normal, beside, attended, text, wide, wide_text));
        (hidden, context)
    }

    fn single(
        &self,
        g: &mut Graph,
        input: &Value,
        context: &Value,
        time: &Value,
        mask: &Value,
        table: &[Value; 2],
    ) -> (Value, Value) {
        let (rows, tokens) = (input.size(1), context.size(1));
        let residual = g.cat(&[input, context], 1);
        let (normal, parts) = adaptive::zero(g, "norm", &residual, time, 3);
        let mut wide = g.linear("proj_mlp", &normal, self.inner, true);
        wide = g.activation(Activation::Gelu, &wide);
        let cut = (g.slice(&normal, 1, 0, rows), g.slice(&normal, 1, rows, tokens));
        drop(normal);
        let attended = g.module("attn", |g| self.alone(g, &cut.0, &cut.1, mask, table));
        let first = g.cat(&[&attended.0, &attended.1], 1);
        let both = g.cat(&[&first, &wide], 2);
        let mut hidden = g.linear("proj_out", &both, self.width(), true);
        // Their name is given away once the product is there.
        hidden = g.mul(&parts[2], &hidden);
        drop(both);
        hidden = g.add(&hidden, &residual);
        drop((cut, wide, attended, first));
        (g.slice(&hidden, 1, 0, rows), g.slice(&hidden, 1, rows, tokens))
    }

    fn projected(&self, g: &mut Graph, x: &Value, names: [&str; 3], norms: [&str; 2]) -> [Value; 3] {
        let [query, key, value] = names.map(|name| g.linear(name, x, self.width(), true));
        let [mut query, mut key, value] = [query, key, value].map(|x| g.split_last(&x, self.heads, self.head));
        query = g.norm_of(norms[0], &[&query], Norm::RmsT5, false, self.head);
        key = g.norm_of(norms[1], &[&key], Norm::RmsT5, false, self.head);
        [query, key, value]
    }

    /// Two streams with projections of their own.
    fn joint(&self, g: &mut Graph, x: &Value, text: &Value, mask: &Value, table: &[Value; 2]) -> (Value, Value) {
        let mut three = self.projected(g, x, ["to_q", "to_k", "to_v"], ["norm_q", "norm_k"]);
        for part in &mut three[..2] {
            *part = parts::turned(g, part, table);
        }
        let names = ["add_q_proj", "add_k_proj", "add_v_proj"];
        let other = self.projected(g, text, names, ["norm_added_q", "norm_added_k"]);
        for (own, other) in three.iter_mut().zip(&other) {
            *own = g.cat(&[own, other], 1);
        }
        let all = parts::masked(g, &three, Some(mask), self.width());
        let (rows, tokens) = (x.size(1), text.size(1));
        let (hidden, beside) = (g.slice(&all, 1, 0, rows), g.slice(&all, 1, rows, tokens));
        let hidden = g.linear("to_out.0", &hidden, self.width(), true);
        (hidden, g.linear("to_add_out", &beside, self.width(), true))
    }

    /// One stream, joined here once more; its text is not turned.
    fn alone(&self, g: &mut Graph, x: &Value, text: &Value, mask: &Value, table: &[Value; 2]) -> (Value, Value) {
        let (rows, tokens) = (x.size(1), text.size(1));
        let joined = g.cat(&[x, text], 1);
        let mut three = self.projected(g, &joined, ["to_q", "to_k", "to_v"], ["norm_q", "norm_k"]);
        for part in &mut three[..2] {
            let cut = g.slice(part, 1, 0, rows);
            let turned = parts::turned(g, &cut, table);
            let rest = g.slice(part, 1, rows, tokens);
            *part = g.cat(&[&turned, &rest], 1);
        }
        drop(joined);
        let all = parts::masked(g, &three, Some(mask), self.width());
        (g.slice(&all, 1, 0, rows), g.slice(&all, 1, rows, tokens))
    }
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    Hunyuan::read(c)?.run(g);
    Ok(())
}
