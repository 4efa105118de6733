//! `LTXVideoTransformer3DModel` of diffusers: videos of few, wide latents.

use super::{Pictures, adaptive, parts};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Binary, Input, Norm, Reduction, Role, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// LTX-Video.
pub(super) const FAMILY: Family = Family {
    name: "LTX-Video of diffusers",
    model_types: &["LTXVideoTransformer3DModel"],
    facts: Facts {
        tasks: Some(&[Task::Base]),
        served: false,
        registration: &[
            &["scale_shift_table", "proj_in", "time_embed", "caption_projection", "transformer_blocks", "proj_out"],
            &["scale_shift_table", "attn1", "attn2", "ff"],
            &["norm_q", "norm_k", "to_q", "to_k", "to_v", "to_out"],
        ],
        ..Facts::DEFAULT
    },
    build,
};

pub(super) const PICTURES: Pictures = Pictures { sides: [16, 22], pixels: 32, frames: 161, between: 8 };
/// Tokens of a prompt: the pipeline fills up to them.
const TOKENS: u64 = 128;

struct Ltx {
    channels: [u64; 2],
    layers: u64,
    heads: u64,
    head: u64,
    text: u64,
    caption: u64,
    biases: [bool; 2],
}

impl Ltx {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        for key in ["patch_size", "patch_size_t"] {
            if read::positive(c, &[key], 1)? != 1 {
                return Err(c.refuse(key, "1"));
            }
        }
        if c.flag("norm_elementwise_affine", false)? {
            return Err(c.refuse("norm_elementwise_affine", "false"));
        }
        Ok(Self {
            channels: [read::positive(c, &["in_channels"], 128)?, read::positive(c, &["out_channels"], 128)?],
            layers: c.layers(&["num_layers"], 28)?,
            heads: read::positive(c, &["num_attention_heads"], 32)?,
            head: read::positive(c, &["attention_head_dim"], 64)?,
            text: read::positive(c, &["cross_attention_dim"], 2048)?,
            caption: read::positive(c, &["caption_channels"], 4096)?,
            biases: [c.flag("attention_bias", true)?, c.flag("attention_out_bias", true)?],
        })
    }

    fn width(&self) -> u64 {
        self.heads.saturating_mul(self.head)
    }

    fn run(&self, g: &mut Graph) {
        let (batch, sizes, width) = (g.inputs.batch, PICTURES.latents(g), self.width());
        let places = sizes.iter().fold(1, |all: u64, &size| all.saturating_mul(size));
        if self.text != width {
            g.fail(format!("cross_attention_dim of {width}, as wide as the prompt becomes"));
        }
        let video = g.input(Input::Pixels, [batch, places, self.channels[0]]);
        let prompt = g.input(Input::Pixels, [batch, TOKENS, self.caption]);
        let step = g.input(Input::Pixels, [batch]);
        let mask = g.fill(DType::F32, [batch, TOKENS]);
        let table = self.table(g, batch, places);
        let short = g.to_model_type(&mask);
        let unset = g.scalar(Binary::Sub, &short);
        let bias = g.scale(&unset);
        drop((short, unset));
        let bias = g.unsqueeze(&bias, 1);
        let mut hidden = g.linear("proj_in", &video, width, true);
        let (parts_of_time, time) = g.module("time_embed", |g| {
            let sines = parts::time_projection(g, &step, parts::SINES);
            let time = g.module("emb", |g| parts::embedding(g, "timestep_embedder", &sines, width));
            let active = g.activation(Activation::Silu, &time);
            (g.linear("linear", &active, width.saturating_mul(6), true), time)
        });
        let text = parts::caption(g, "caption_projection", &prompt, width);
        for index in 0..self.layers {
            hidden =
                g.layer("transformer_blocks", index, |g| self.block(g, &hidden, &text, &parts_of_time, &table, &bias));
        }
        let own = g.parameter("scale_shift_table", [2, width], Role::Other);
        let own = g.read(own, [2, width]);
        let own = g.view(&own, [1, 1, 2, width]);
        let time = g.view(&time, [batch, 1, 1, width]);
        let both = g.add(&own, &time);
        let (shift, scale) = (g.select(&both, 2, 0), g.select(&both, 2, 1));
        hidden = g.norm_of("norm_out", &[&hidden], Norm::LayerPlain, false, width);
        hidden = adaptive::shifted(g, &hidden, &scale, &shift);
        let output = g.linear("proj_out", &hidden, self.channels[1], true);
        drop((hidden, text, table, both, shift, scale, time, parts_of_time, bias, mask, prompt, video, step));
        parts::noise_loss(g, &output);
    }

    /// `LTXVideoRotaryPosEmbed`: cosines and sines of every place in fp32, three axes in turn.
    fn table(&self, g: &mut Graph, batch: u64, places: u64) -> [Value; 2] {
        let (third, left) = (self.width() / 6, self.width() % 6);
        let angles = g.fill(DType::F32, [batch, places, 3, third]);
        let turned = g.transpose(&angles, -1, -2);
        drop(angles);
        let flat = g.reshape(&turned, [batch, places, third.saturating_mul(3)]);
        drop(turned);
        let [cosine, sine] = [Unary::Cos, Unary::Sin].map(|kind| {
            let once = g.unary(kind, &flat);
            g.repeat_interleave(&once, -1, 2)
        });
        if left == 0 {
            return [cosine, sine];
        }
        let filling = [(); 2].map(|()| g.fill(DType::F32, [batch, places, left]));
        [g.cat(&[&filling[0], &cosine], -1), g.cat(&[&filling[1], &sine], -1)]
    }

    /// `RMSNorm` of diffusers without a weight.
    fn norm(&self, g: &mut Graph, x: &Value) -> Value {
        let wide = g.float(x);
        let squares = g.unary(Unary::Square, &wide);
        drop(wide);
        let mean = g.reduce(Reduction::Mean, &squares, -1, true);
        drop(squares);
        let more = g.scalar(Binary::Add, &mean);
        let root = g.unary(Unary::Rsqrt, &more);
        drop(more);
        let product = g.mul(x, &root);
        drop(root);
        let output = g.type_as(&product, x);
        drop(mean);
        output
    }

    fn block(
        &self,
        g: &mut Graph,
        input: &Value,
        text: &Value,
        time: &Value,
        table: &[Value; 2],
        bias: &Value,
    ) -> Value {
        let width = self.width();
        let mut normal = self.norm(g, input);
        let own = g.parameter("scale_shift_table", [6, width], Role::Other);
        let own = g.read(own, [6, width]);
        let own = g.view(&own, [1, 1, 6, width]);
        let time = g.view(time, [input.size(0), 1, 6, width]);
        let all = g.add(&own, &time);
        let cut = [0, 1, 2, 3, 4, 5].map(|at| g.select(&all, 2, at));
        normal = adaptive::shifted(g, &normal, &cut[1], &cut[0]);
        let mut attended = g.module("attn1", |g| self.attention(g, &normal, &normal, Some(table), None));
        let mut hidden = parts::scaled(g, input, &attended, &cut[2]);
        attended = g.module("attn2", |g| self.attention(g, &hidden, text, None, Some(bias)));
        hidden = g.add(&hidden, &attended);
        let plain = self.norm(g, &hidden);
        normal = adaptive::shifted(g, &plain, &cut[4], &cut[3]);
        drop(plain);
        let wide = adaptive::feed_forward(g, "ff", &normal, width.saturating_mul(4));
        hidden = parts::scaled(g, &hidden, &wide, &cut[5]);
        drop((normal, attended, wide));
        hidden
    }

    fn attention(
        &self,
        g: &mut Graph,
        x: &Value,
        context: &Value,
        table: Option<&[Value; 2]>,
        bias: Option<&Value>,
    ) -> Value {
        let (width, [biased, out]) = (self.width(), self.biases);
        let bias = bias.map(|bias| {
            let all = g.repeat_interleave(bias, 0, self.heads);
            g.view(&all, [bias.size(0), self.heads, 1, TOKENS])
        });
        let query = g.linear("to_q", x, width, biased);
        let [key, value] = ["to_k", "to_v"].map(|name| g.linear(name, context, width, biased));
        let mut query = g.norm_of("norm_q", &[&query], Norm::RmsFused, false, width);
        let mut key = g.norm_of("norm_k", &[&key], Norm::RmsFused, false, width);
        if let Some(table) = table {
            query = parts::turned(g, &query, table);
            key = parts::turned(g, &key, table);
        }
        let three = [query, key, value].map(|x| g.split_last(&x, self.heads, self.head));
        let hidden = parts::masked(g, &three, bias.as_ref(), width);
        g.linear("to_out.0", &hidden, width, out)
    }
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    Ltx::read(c)?.run(g);
    Ok(())
}
