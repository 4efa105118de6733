//! Llama and everything built like it (Llama 1 to 3, Yi, Vicuna, SmolLM, TinyLlama, …).

use crate::model::Family;
use crate::model::blocks::{SelfAttention, attention, causal_lm_head, gated_mlp, read};
use crate::model::op::{Activation, Input, Mask, Norm, RotaryTable};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Llama.
pub const FAMILY: Family = Family { name: "Llama", model_types: &["llama"], build };

struct Llama {
    vocab: u64,
    hidden: u64,
    layers: u64,
    width: u64,
    activation: Activation,
    mlp_bias: bool,
    tied: bool,
    attention: SelfAttention,
}

impl Llama {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size", "n_embd", "d_model"], 4096)?;
        let heads = read::positive(c, &["num_attention_heads", "n_head", "n_heads"], 32)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], heads)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, hidden, heads)?);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 32000)?,
            hidden,
            layers: c.layers(&["num_hidden_layers", "n_layer", "n_layers"], 32)?,
            width: c.size_or(&["intermediate_size", "ffn_dim"], 11008)?,
            activation: read::activation(c, "hidden_act", "silu")?,
            mlp_bias: c.flag("mlp_bias", false)?,
            tied: c.flag("tie_word_embeddings", false)?,
            attention,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let embeddings = g.embedding("embed_tokens", &ids, self.vocab, self.hidden);
        let mask = attention::mask(g, Mask::Causal);
        let table = RotaryTable { dim: self.attention.head_dim, axes: 1, doubled: true, fp32: false };
        let rope = g.rotary_table("rotary_emb", g.inputs.seq, table);
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            hidden = g.layer("layers", index, |g| self.layer(g, &hidden, &rope, &mask));
        }
        g.norm("norm", &hidden, Norm::Rms, false)
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let hidden = g.norm("input_layernorm", input, Norm::Rms, false);
        let hidden = g.module("self_attn", |g| self.attention.run(g, &hidden, Some(rope), mask));
        let residual = g.add(input, &hidden);
        let hidden = g.norm("post_attention_layernorm", &residual, Norm::Rms, false);
        let names = ["gate_proj", "up_proj", "down_proj"];
        let hidden = g.module("mlp", |g| gated_mlp(g, &hidden, names, self.width, self.activation, self.mlp_bias));
        g.add(&residual, &hidden)
    }
}

fn build(c: &Config<'_>, _task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let llama = Llama::read(c)?;
    let hidden = g.module("model", |g| llama.model(g));
    let tied = if llama.tied { g.find("model.embed_tokens.weight") } else { None };
    causal_lm_head(g, hidden, llama.vocab, tied, false);
    Ok(())
}
