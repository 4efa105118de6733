//! Gemma 1: Llama with scaled embeddings and `1 + w` norms.

use super::decoder::{self, Decoder, Vocabulary};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::attention::Masks;
use crate::model::blocks::{SelfAttention, gated_mlp, read};
use crate::model::facts::{AttentionKernels, Facts, Liger, LigerPatch};
use crate::model::op::{Activation, Norm, RotaryTable};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// Gemma.
pub const FAMILY: Family = Family {
    name: "Gemma",
    model_types: &["gemma"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::Patched(LigerPatch::LLAMA),
        lora: &["q_proj", "v_proj"],
        ia3: &["q_proj", "v_proj", "down_proj"],
        ia3_feedforward: &["down_proj"],
        tensor_plan: &[ATTENTION, GATED_MLP],
        scaled_embedding: true,
        text: Some(|c| Ok(Box::new(Gemma::read(c)?))),
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Gemma::read(c)?),
};

/// Gemma 1.
#[derive(Debug, Clone)]
pub(crate) struct Gemma {
    vocabulary: Vocabulary,
    layers: u64,
    width: u64,
    activation: Activation,
    attention: SelfAttention,
}

impl Gemma {
    /// Reads a Gemma.
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let heads = read::positive(c, &["num_attention_heads"], 16)?;
        let kv_heads = read::kv_heads(c, heads, 16)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::positive(c, &["head_dim"], 256)?);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.causal = !c.flag("use_bidirectional_attention", false)?;
        Ok(Self {
            vocabulary: Vocabulary::read(c, 256_000, 3072, true)?,
            layers: c.layers(&["num_hidden_layers"], 28)?,
            width: c.size_or(&["intermediate_size"], 24576)?,
            activation: read::activation(c, "hidden_act", "gelu_pytorch_tanh")?,
            attention,
        })
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let mut hidden = g.norm("input_layernorm", input, Norm::RmsGemma, false);
        hidden = g.module("self_attn", |g| self.attention.run(g, &hidden, Some(rope), mask));
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::RmsGemma, false);
        hidden = mlp(g, &hidden, self.width, self.activation);
        g.add(&residual, &hidden)
    }
}

impl Decoder for Gemma {
    fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    fn embed(&self, g: &mut Graph, ids: &Value) -> Value {
        scaled_embedding(g, ids, self.vocabulary)
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let windows = vec![None; self.layers as usize];
        let masks =
            if self.attention.causal { Masks::new(g, &windows, true) } else { Masks::bidirectional(g, &windows, true) };
        let table = RotaryTable { dim: self.attention.head_dim, axes: 1, doubled: true, fp32: false };
        let rope = g.rotary_table("rotary_emb", g.inputs.seq, table);
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            hidden = g.layer("layers", index, |g| self.layer(g, &hidden, &rope, masks.of(None)));
        }
        g.norm("norm", &hidden, Norm::RmsGemma, false)
    }
}

/// The token table of all Gemmas: rows times `√hidden`, which is a buffer.
pub(crate) fn scaled_embedding(g: &mut Graph, ids: &Value, table: Vocabulary) -> Value {
    g.buffer("embed_tokens.embed_scale", [], DType::F32, false);
    g.scaled_embedding("embed_tokens", ids, table.rows, table.width)
}

/// The gated MLP of all Gemmas.
pub(super) fn mlp(g: &mut Graph, x: &Value, width: u64, activation: Activation) -> Value {
    g.module("mlp", |g| gated_mlp(g, x, ["gate_proj", "up_proj", "down_proj"], width, activation, false))
}
