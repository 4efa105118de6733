//! Qwen2-VL: a vision tower over packed patches of any size, and a Qwen2 decoder with three-axis positions.

use super::parts::{Head, dimension, images, placeholder_mask, tower, with_head};
use super::qwen_text::{QwenText, Sections};
use super::qwen_vision::Patches;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::{SelfAttention, mlp, read};
use crate::model::facts::{Facts, ImageTokens, Liger};
use crate::model::op::{Activation, Input, Norm};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Qwen2-VL.
pub const FAMILY: Family = Family {
    name: "Qwen2-VL",
    model_types: &["qwen2_vl"],
    facts: Facts {
        liger: Liger::NotSimulated,
        patch_side: Some(14),
        image_tokens: Some(ImageTokens::QWEN2),
        ..Facts::DEFAULT
    },
    build,
};

struct Vision {
    patches: Patches,
    depth: u64,
    width: u64,
    activation: Activation,
    out: u64,
}

impl Vision {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let patches = Patches::read(c, ("embed_dim", 1280), 14)?;
        let ratio = c.number("mlp_ratio", 4.0)?.clamp(0.0, 1024.0);
        Ok(Self {
            patches,
            depth: c.layers(&["depth"], 32)?,
            width: (patches.hidden as f64 * ratio) as u64,
            activation: read::activation(c, "hidden_act", "quick_gelu")?,
            out: dimension(c, &["hidden_size"], 3584)?,
        })
    }

    /// One row per token: `[tokens, out]`.
    fn model(&self, g: &mut Graph) -> Value {
        let grid = self.patches.grid(g);
        let mut hidden = self.patches.embed(g, grid, false);
        let rope = self.patches.rotary(g, grid);
        let lengths = grid.frame_lengths();
        for index in 0..self.depth {
            hidden = g.layer("blocks", index, |g| self.block(g, &hidden, &rope, &lengths));
        }
        g.module("merger", |g| merge(g, &self.patches, &hidden, Norm::Layer, self.out))
    }

    fn block(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), lengths: &[u64]) -> Value {
        let hidden = {
            let mut branch = g.norm("norm1", input, Norm::Layer, true);
            branch = g.module("attn", |g| self.patches.attention(g, &branch, rope, lengths));
            g.add(input, &branch)
        };
        let mut branch = g.norm("norm2", &hidden, Norm::Layer, true);
        branch = g.module("mlp", |g| mlp(g, &branch, ["fc1", "fc2"], self.width, self.activation, true));
        g.add(&hidden, &branch)
    }
}

/// The patches of each token joined and projected to the language model's width.
pub(super) fn merge(g: &mut Graph, patches: &Patches, hidden: &Value, norm: Norm, out: u64) -> Value {
    let mut x = g.norm("ln_q", hidden, norm, norm == Norm::Layer);
    x = g.view(&x, [hidden.size(0) / patches.unit(), patches.merged()]);
    x = g.linear("mlp.0", &x, patches.merged(), true);
    x = g.activation(Activation::Gelu, &x);
    g.linear("mlp.2", &x, out, true)
}

/// The language model's part of a config, nested or flat as on the hub.
pub(super) fn text(c: &Config<'_>) -> Result<QwenText, ModelError> {
    let c = &if c.has("text_config") { c.section("text_config") } else { c.clone() };
    let hidden = dimension(c, &["hidden_size"], 8192)?;
    let heads = dimension(c, &["num_attention_heads"], 64)?;
    let kv_heads = dimension(c, &["num_key_value_heads"], 8)?;
    let mut attention = SelfAttention::new(heads, kv_heads, hidden / heads);
    attention.qkv_bias = true;
    attention.dropout = c.number("attention_dropout", 0.0)?;
    let layers = c.layers(&["num_hidden_layers"], 80)?;
    let first = c.size_or(&["max_window_layers"], 80)?;
    let windowed = c.flag("use_sliding_window", false)? && first < layers;
    Ok(QwenText {
        vocab: c.size_or(&["vocab_size"], 152064)?,
        hidden,
        layers,
        width: c.size_or(&["intermediate_size"], 29568)?,
        activation: read::activation(c, "hidden_act", "silu")?,
        sections: Sections::Joined(sections(c, attention.head_dim / 2)?),
        attention,
        window: if windowed { Some((first, c.size_or(&["sliding_window"], 4096)?)) } else { None },
        experts: None,
    })
}

/// `mrope_section` under either name of the rotary settings.
fn sections(c: &Config<'_>, half: u64) -> Result<Vec<u64>, ModelError> {
    let key = if c.has("rope_parameters") { "rope_parameters" } else { "rope_scaling" };
    let given = c.section(key).sizes("mrope_section")?.unwrap_or_else(|| vec![16, 24, 24]);
    // Tiny test configs keep the class default although their heads are narrower; only the sum matters here.
    Ok(if given.iter().sum::<u64>() == half { given } else { vec![half] })
}

/// The whole model around a tower: features go where image tokens stand.
pub(super) fn run(
    c: &Config<'_>,
    task: Task,
    g: &mut Graph,
    vision: impl Fn(&mut Graph) -> Value,
) -> Result<(), ModelError> {
    let text = text(c)?;
    let tied = c.flag("tie_word_embeddings", false)? || c.section("text_config").flag("tie_word_embeddings", false)?;
    with_head(g, task, Head { vocab: text.vocab, tied }, |g| {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let mut embeddings = text.embed(g, &ids);
        let given = g.inputs.images.is_some();
        let features = tower(g, given, |g| g.module("visual", |g| vision(g)));
        let features = features.map(|merged| join_images(g, &merged, &embeddings));
        if let Some(features) = &features {
            let mask = placeholder_mask(g, &ids);
            let _video_mask = placeholder_mask(g, &ids);
            embeddings = g.masked_scatter(&embeddings, &mask, features);
        }
        let positions = g.fill(DType::I64, [3, g.inputs.batch, g.inputs.seq]);
        g.module("language_model", |g| text.model(g, &embeddings, &positions, None))
    });
    Ok(())
}

/// The features of all images, split by image and joined again as the code does, in the embeddings' type.
pub(super) fn join_images(g: &mut Graph, merged: &Value, like: &Value) -> Value {
    let images = images(g);
    let parts = g.split(merged, 0, &vec![merged.size(0) / images; images as usize]);
    let joined = g.cat(&parts.iter().collect::<Vec<_>>(), 0);
    drop(parts);
    g.type_as(&joined, like)
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let vision = Vision::read(&c.section("vision_config"))?;
    run(c, task, g, |g| vision.model(g))
}
