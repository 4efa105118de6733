//! `QwenImageTransformer2DModel` of diffusers: two streams whose positions turn as complex numbers.

use super::{Pictures, adaptive, parts};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Input, Norm};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Qwen-Image.
pub(super) const FAMILY: Family = Family {
    name: "Qwen-Image of diffusers",
    model_types: &["QwenImageTransformer2DModel"],
    facts: Facts {
        tasks: Some(&[Task::Base]),
        served: false,
        registration: &[
            &["time_text_embed", "txt_norm", "img_in", "txt_in", "transformer_blocks", "norm_out", "proj_out"],
            &["img_mod", "attn", "img_mlp", "txt_mod", "txt_mlp"],
            parts::ATTENTION,
        ],
        ..Facts::DEFAULT
    },
    build,
};

/// Pixels of a token's side: eight of a latent, two latents.
pub(super) const PICTURES: Pictures = Pictures::stills(64, 16);
/// Tokens of a prompt, as the pipeline's longest is by default.
const TOKENS: u64 = 512;
/// Positions of either sign that tables are made for.
const POSITIONS: u64 = 4096;

struct QwenImage {
    channels: [u64; 2],
    layers: u64,
    heads: u64,
    head: u64,
    text: u64,
}

impl QwenImage {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        for key in ["zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"] {
            if c.flag(key, false)? {
                return Err(c.refuse(key, "false; what it adds is not modelled"));
            }
        }
        let (patch, outputs) = (read::positive(c, &["patch_size"], 2)?, read::positive(c, &["out_channels"], 16)?);
        Ok(Self {
            channels: [read::positive(c, &["in_channels"], 64)?, outputs.saturating_mul(patch).saturating_mul(patch)],
            layers: c.layers(&["num_layers"], 60)?,
            heads: read::positive(c, &["num_attention_heads"], 24)?,
            head: read::positive(c, &["attention_head_dim"], 128)?,
            text: read::positive(c, &["joint_attention_dim"], 3584)?,
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
        let mut hidden = g.linear("img_in", &picture, self.width(), true);
        let normal = g.norm_of("txt_norm", &[&prompt], Norm::RmsT5, false, self.text);
        let mut text = g.linear("txt_in", &normal, self.width(), true);
        drop(normal);
        let time = g.module("time_text_embed", |g| {
            let sines = parts::time_projection(g, &step, parts::SINES);
            parts::embedding(g, "timestep_embedder", &sines, self.width())
        });
        // Complex numbers of half a head, as two of fp32. Those of a picture's size are kept once they were made.
        let forward = g.held("pos_embed.pos_freqs", [POSITIONS, self.head], DType::F32);
        let _backward = g.held("pos_embed.neg_freqs", [POSITIONS, self.head], DType::F32);
        let kept = g.held("pos_embed.picture", [places, self.head], DType::F32);
        let tables = [g.slice(&forward, 0, 0, TOKENS), g.cat(&[&kept], 0)];
        for index in 0..self.layers {
            (text, hidden) = g.layer("transformer_blocks", index, |g| self.block(g, &hidden, &text, &time, &tables));
        }
        hidden = adaptive::continuous(g, "norm_out", &hidden, &time);
        let output = g.linear("proj_out", &hidden, self.channels[1], true);
        drop((hidden, text, tables, time, prompt, picture, step));
        parts::noise_loss(g, &output);
    }

    /// Shift, scale and gate for either half of a block.
    fn modulation(&self, g: &mut Graph, name: &str, time: &Value) -> Vec<Value> {
        let active = g.activation(Activation::Silu, time);
        let all = g.linear(name, &active, self.width().saturating_mul(6), true);
        let cut = g.split(&all, -1, &[self.width(); 6]);
        cut.iter().map(|part| g.unsqueeze(part, 1)).collect()
    }

    /// `QwenImageTransformerBlock`: every name in it is bound once, so that all of it lives to its end.
    fn block(
        &self,
        g: &mut Graph,
        input: &Value,
        context: &Value,
        time: &Value,
        tables: &[Value; 2],
    ) -> (Value, Value) {
        let inner = self.width().saturating_mul(4);
        let own = self.modulation(g, "img_mod.1", time);
        let other = self.modulation(g, "txt_mod.1", time);
        let plain = |g: &mut Graph, name: &str, x: &Value| g.norm_of(name, &[x], Norm::LayerPlain, false, self.width());
        let normal = plain(g, "img_norm1", input);
        let shifted = adaptive::shifted(g, &normal, &own[1], &own[0]);
        let beside = plain(g, "txt_norm1", context);
        let shifted_beside = adaptive::shifted(g, &beside, &other[1], &other[0]);
        let (attended, text) = g.module("attn", |g| self.joint(g, &shifted, &shifted_beside, tables));
        let mut hidden = parts::gated(g, input, &own[2], &attended);
        let mut context = parts::gated(g, context, &other[2], &text);
        let normal_2 = plain(g, "img_norm2", &hidden);
        let shifted_2 = adaptive::shifted(g, &normal_2, &own[4], &own[3]);
        let wide = adaptive::feed_forward(g, "img_mlp", &shifted_2, inner);
        hidden = parts::gated(g, &hidden, &own[5], &wide);
        let beside_2 = plain(g, "txt_norm2", &context);
        let shifted_beside_2 = adaptive::shifted(g, &beside_2, &other[4], &other[3]);
        let wide_text = adaptive::feed_forward(g, "txt_mlp", &shifted_beside_2, inner);
        context = parts::gated(g, &context, &other[5], &wide_text);
        drop((normal, shifted, beside, shifted_beside, attended, text));
        drop((normal_2, shifted_2, wide, beside_2, shifted_beside_2, wide_text));
        (context, hidden)
    }

    fn joint(&self, g: &mut Graph, hidden: &Value, text: &Value, tables: &[Value; 2]) -> (Value, Value) {
        let width = self.width();
        let own = ["to_q", "to_k", "to_v"].map(|name| g.linear(name, hidden, width, true));
        let other = ["add_q_proj", "add_k_proj", "add_v_proj"].map(|name| g.linear(name, text, width, true));
        let [mut query, mut key, value] = own.map(|x| g.split_last(&x, self.heads, self.head));
        let [mut text_query, mut text_key, text_value] = other.map(|x| g.split_last(&x, self.heads, self.head));
        let names = ["norm_q", "norm_k", "norm_added_q", "norm_added_k"];
        for (x, name) in [&mut query, &mut key, &mut text_query, &mut text_key].into_iter().zip(names) {
            *x = g.norm_of(name, &[x], Norm::RmsT5, false, self.head);
        }
        for (x, table) in [(&mut query, 1), (&mut key, 1), (&mut text_query, 0), (&mut text_key, 0)] {
            *x = self.turned(g, x, &tables[table]);
        }
        let three = [[&text_query, &query], [&text_key, &key], [&text_value, &value]].map(|both| g.cat(&both, 1));
        let all = parts::attended(g, &three, width);
        let (text, hidden) = g.split2(&all, 1, text.size(1), hidden.size(1));
        let dense = g.contiguous(&hidden);
        let hidden = g.linear("to_out.0", &dense, width, true);
        drop(dense);
        let dense = g.contiguous(&text);
        (hidden, g.linear("to_add_out", &dense, width, true))
    }

    /// A product of complex numbers, which are two of fp32 each.
    fn turned(&self, g: &mut Graph, x: &Value, table: &Value) -> Value {
        let wide = g.float(x);
        let table = g.unsqueeze(table, 1);
        let product = g.mul(&wide, &table);
        g.type_as(&product, x)
    }
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    QwenImage::read(c)?.run(g);
    Ok(())
}
