//! `SD3Transformer2DModel` of diffusers: Stable Diffusion 3 and 3.5, text and picture in two streams that attend together.

use super::{Pictures, adaptive, parts};
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Convolution, Input, Norm, Op};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Stable Diffusion 3.
pub(super) const FAMILY: Family = Family {
    name: "Stable Diffusion 3 of diffusers",
    model_types: &["SD3Transformer2DModel"],
    facts: Facts {
        tasks: Some(&[Task::Base]),
        served: false,
        registration: &[
            &["pos_embed", "time_text_embed", "context_embedder", "transformer_blocks", "norm_out", "proj_out"],
            &["norm1", "norm1_context", "attn", "attn2", "ff", "ff_context"],
            parts::ATTENTION,
        ],
        ..Facts::DEFAULT
    },
    build,
};

/// Pixels of a latent's side.
pub(super) const PICTURES: Pictures = Pictures::stills(128, 8);
/// Tokens of a prompt: 77 of CLIP and 256 of T5.
const TOKENS: u64 = 333;

struct Sd3 {
    channels: [u64; 2],
    patch: u64,
    layers: u64,
    heads: u64,
    head: u64,
    text: u64,
    pooled: u64,
    places: u64,
    dual: Vec<u64>,
    normed: bool,
}

impl Sd3 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let channels = read::positive(c, &["in_channels"], 16)?;
        Ok(Self {
            channels: [channels, read::positive(c, &["out_channels"], 16)?],
            patch: read::positive(c, &["patch_size"], 2)?,
            layers: c.layers(&["num_layers"], 18)?,
            heads: read::positive(c, &["num_attention_heads"], 18)?,
            head: read::positive(c, &["attention_head_dim"], 64)?,
            text: read::positive(c, &["joint_attention_dim"], 4096)?,
            pooled: read::positive(c, &["pooled_projection_dim"], 2048)?,
            places: read::positive(c, &["pos_embed_max_size"], 96)?,
            dual: c.sizes("dual_attention_layers")?.unwrap_or_default(),
            normed: match c.str_or("qk_norm", "") {
                "" => false,
                "rms_norm" => true,
                _ => return Err(c.refuse("qk_norm", "rms_norm or null")),
            },
        })
    }

    fn width(&self) -> u64 {
        self.heads.saturating_mul(self.head)
    }

    fn run(&self, g: &mut Graph) {
        let (batch, [_, height, width]) = (g.inputs.batch, PICTURES.latents(g));
        let [rows, columns] = [height / self.patch, width / self.patch];
        if rows.max(columns) > self.places {
            let most = self.places.saturating_mul(self.patch).saturating_mul(PICTURES.pixels);
            g.fail(format!("pictures of at most {most} pixels a side (pos_embed_max_size)"));
        }
        let picture = g.input(Input::Pixels, [batch, self.channels[0], height, width]);
        let prompt = g.input(Input::Pixels, [batch, TOKENS, self.text]);
        let pooled = g.input(Input::Pixels, [batch, self.pooled]);
        let step = g.input(Input::Pixels, [batch]);
        let mut hidden = g.module("pos_embed", |g| self.patches(g, &picture, [rows, columns]));
        hidden = g.contiguous(&hidden);
        let time = g.module("time_text_embed", |g| parts::time_and_text(g, &step, &pooled, self.width()));
        let mut text = g.linear("context_embedder", &prompt, self.width(), true);
        for index in 0..self.layers {
            let (last, dual) = (index + 1 == self.layers, self.dual.contains(&index));
            let (next, picture) =
                g.layer("transformer_blocks", index, |g| self.block(g, &hidden, &text, &time, last, dual));
            hidden = picture;
            if let Some(next) = next {
                text = next;
            }
        }
        hidden = adaptive::continuous(g, "norm_out", &hidden, &time);
        let patch = self.patch;
        hidden = g.linear("proj_out", &hidden, patch.saturating_mul(patch).saturating_mul(self.channels[1]), true);
        hidden = g.reshape(&hidden, [batch, rows, columns, patch, patch, self.channels[1]]);
        hidden = g.permute(&hidden, &[0, 5, 1, 3, 2, 4]);
        let output = g.reshape(&hidden, [batch, self.channels[1], rows * patch, columns * patch]);
        drop((hidden, text, time, pooled, prompt, picture, step));
        parts::noise_loss(g, &output);
    }

    /// `PatchEmbed`: rows of the table are cut out of its middle.
    fn patches(&self, g: &mut Graph, picture: &Value, [rows, columns]: [u64; 2]) -> Value {
        let (side, width) = (self.patch, self.width());
        let spec = Convolution { stride: [side as u32; 3], padding: [0; 3], groups: 1, transposed: false };
        let table = g.model_buffer("pos_embed", [1, self.places.saturating_mul(self.places), width], true);
        let mut latent = g.convolution("proj", picture, width, &[side, side], spec, true);
        latent = g.reshape(&latent, [picture.size(0), width, rows.saturating_mul(columns)]);
        latent = g.transpose(&latent, 1, 2);
        let mut places = g.reshape(&table, [1, self.places, self.places, width]);
        places = g.slice(&places, 1, self.places.saturating_sub(rows) / 2, rows);
        places = g.slice(&places, 2, self.places.saturating_sub(columns) / 2, columns);
        places = g.reshape(&places, [1, rows.saturating_mul(columns), width]);
        g.add(&latent, &places)
    }

    /// `JointTransformerBlock`; the last one gives no text.
    fn block(
        &self,
        g: &mut Graph,
        input: &Value,
        context: &Value,
        time: &Value,
        last: bool,
        dual: bool,
    ) -> (Option<Value>, Value) {
        let (mut normal, own, second) = g.module("norm1", |g| {
            let parts = adaptive::modulation(g, time, if dual { 9 } else { 6 });
            let plain = g.norm_of("norm", &[input], Norm::LayerPlain, false, self.width());
            let first = adaptive::shifted(g, &plain, &parts[1], &parts[0]);
            let second = dual.then(|| adaptive::shifted(g, &plain, &parts[7], &parts[6]));
            (first, parts, second)
        });
        let (mut beside, other) = match last {
            true => (adaptive::continuous(g, "norm1_context", context, time), Vec::new()),
            false => adaptive::zero(g, "norm1_context", context, time, 6),
        };
        let (mut attended, text) = g.module("attn", |g| self.joint(g, &normal, Some(&beside), last));
        attended = g.mul(&own[2], &attended);
        let mut hidden = g.add(input, &attended);
        if let Some(second) = &second {
            let (again, _) = g.module("attn2", |g| self.joint(g, second, None, true));
            let again = g.mul(&own[8], &again);
            hidden = g.add(&hidden, &again);
        }
        let inner = self.width().saturating_mul(4);
        normal = adaptive::adapted(g, "norm2", &hidden, &own[4], &own[3]);
        let mut wide = adaptive::feed_forward(g, "ff", &normal, inner);
        wide = g.mul(&own[5], &wide);
        hidden = g.add(&hidden, &wide);
        let text = text.map(|mut text| {
            text = g.mul(&other[2], &text);
            let context = g.add(context, &text);
            beside = adaptive::adapted(g, "norm2_context", &context, &other[4], &other[3]);
            let wide = adaptive::feed_forward(g, "ff_context", &beside, inner);
            let more = g.mul(&other[5], &wide);
            g.add(&context, &more)
        });
        drop((normal, attended, wide, beside));
        (text, hidden)
    }

    /// `JointAttnProcessor2_0`.
    fn joint(&self, g: &mut Graph, x: &Value, text: Option<&Value>, last: bool) -> (Value, Option<Value>) {
        let mut three = self.projected(g, x, ["to_q", "to_k", "to_v"], ["norm_q", "norm_k"]);
        let added = text.map(|text| {
            let names = ["add_q_proj", "add_k_proj", "add_v_proj"];
            self.projected(g, text, names, ["norm_added_q", "norm_added_k"])
        });
        if let Some(added) = &added {
            for (own, other) in three.iter_mut().zip(added) {
                *own = g.cat(&[own, other], 2);
            }
        }
        let op = Op::ScaledDotProduct { causal: false, dropout: false, grouped: false };
        let mut hidden = g.run(op, &[&three[0], &three[1], &three[2]], three[0].shape());
        hidden = g.transpose(&hidden, 1, 2);
        hidden = g.reshape(&hidden, [hidden.size(0), hidden.size(1), self.width()]);
        let Some(text) = text else { return (g.linear("to_out.0", &hidden, self.width(), true), None) };
        let (rows, tokens) = (x.size(1), text.size(1));
        let mut beside = g.slice(&hidden, 1, rows, tokens);
        hidden = g.slice(&hidden, 1, 0, rows);
        if !last {
            beside = g.linear("to_add_out", &beside, self.width(), true);
        }
        let output = g.linear("to_out.0", &hidden, self.width(), true);
        (output, (!last).then_some(beside))
    }

    fn projected(&self, g: &mut Graph, x: &Value, names: [&str; 3], norms: [&str; 2]) -> [Value; 3] {
        let [query, key, value] = names.map(|name| g.linear(name, x, self.width(), true));
        let [mut query, mut key, value] = [query, key, value].map(|x| {
            let apart = g.split_last(&x, self.heads, self.head);
            g.transpose(&apart, 1, 2)
        });
        if self.normed {
            query = g.norm_of(norms[0], &[&query], Norm::RmsT5, false, self.head);
            key = g.norm_of(norms[1], &[&key], Norm::RmsT5, false, self.head);
        }
        [query, key, value]
    }
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    Sd3::read(c)?.run(g);
    Ok(())
}
