//! Phi-3, Phi-3.5, Phi-4: Llama with one linear for queries, keys and values, and one for gate and up.

use super::decoder::{self, Decoder, Defaults, Sizes, Vocabulary, run_layers};
use crate::model::Family;
use crate::model::blocks::attention::{Masks, attend, rotate_joined, split_heads};
use crate::model::blocks::{joined_gated_mlp, read};
use crate::model::facts::{AttentionKernels, Facts, Liger, LigerPatch};
use crate::model::op::{Norm, Rotary};
use crate::model::tensor_plans::{JOINED_MLP, TensorRules, TensorStyle};
use crate::model::{Config, Graph, ModelError, Value};

/// Phi-3.
pub const FAMILY: Family = Family {
    name: "Phi-3",
    model_types: &["phi3"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::Patched(LigerPatch::LLAMA),
        tensor_plan: &[JOINED_ATTENTION, JOINED_MLP],
        text: Some(|c| Ok(Box::new(Phi3::read(c)?))),
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Phi3::read(c)?),
};

/// How transformers splits its attention, whose projections are joined.
pub(crate) const JOINED_ATTENTION: TensorRules =
    &[("self_attn.qkv_proj", TensorStyle::ColumnGathered), ("self_attn.o_proj", TensorStyle::RowSplit)];

/// Phi-3 and Phi-4.
#[derive(Debug, Clone)]
pub(crate) struct Phi3 {
    sizes: Sizes,
    residual_dropout: f64,
}

impl Phi3 {
    /// Reads a Phi-3.
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 32064,
                hidden: 3072,
                width: 8192,
                layers: 32,
                heads: 32,
                kv_heads: None,
                head_dim: None,
                activation: "silu",
                tied: false,
            },
        )?;
        sizes.attention.out_bias = false;
        sizes.attention.rotary_dim = read::rotary_dim(c, sizes.attention.head_dim, 1.0)?;
        sizes.attention.window = read::window(c, "sliding_window", None)?;
        Ok(Self { sizes, residual_dropout: c.number("resid_pdrop", 0.0)? })
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let mut hidden = g.norm("input_layernorm", input, Norm::Rms, false);
        hidden = g.module("self_attn", |g| self.attention(g, &hidden, rope, mask));
        hidden = self.add_dropped(g, input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::Rms, false);
        let (width, activation) = (self.sizes.width, self.sizes.activation);
        hidden =
            g.module("mlp", |g| joined_gated_mlp(g, &hidden, ["gate_up_proj", "down_proj"], width, activation, false));
        self.add_dropped(g, &residual, &hidden)
    }

    fn add_dropped(&self, g: &mut Graph, residual: &Value, x: &Value) -> Value {
        let dropped = g.dropout(x, self.residual_dropout);
        g.add(residual, &dropped)
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let attention = &self.sizes.attention;
        let (heads, kv_heads, dim) = (attention.heads, attention.kv_heads, attention.head_dim);
        let (wide, narrow) = (heads.saturating_mul(dim), kv_heads.saturating_mul(dim));
        let total = wide.saturating_add(narrow).saturating_add(narrow);
        let joined = g.linear("qkv_proj", hidden, total, false);
        let mut query = g.slice(&joined, -1, 0, wide);
        let mut key = g.slice(&joined, -1, wide, narrow);
        let mut value = g.slice(&joined, -1, wide.saturating_add(narrow), narrow);
        query = split_heads(g, query, heads, dim);
        key = split_heads(g, key, kv_heads, dim);
        value = split_heads(g, value, kv_heads, dim);
        (query, key) = rotate_joined(g, Rotary::Half, attention.rotary_dim, &query, &key, rope);
        (key, value) = g.cache(attention.cache(), &key, &value);
        let attended = attend(g, attention.spec(None), &query, &key, &value, Some(mask));
        attention.output(g, attended, hidden.size(-1))
    }
}

impl Decoder for Phi3 {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let windows = vec![self.sizes.attention.window; self.sizes.layers as usize];
        let masks = Masks::new(g, &windows, false);
        let rope = self.sizes.rope(g);
        let hidden = run_layers(g, embeddings.clone(), &windows, |g, _, window, hidden| {
            self.layer(g, hidden, &rope, masks.of(window))
        });
        g.norm("norm", &hidden, Norm::Rms, false)
    }
}
