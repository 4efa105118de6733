//! GPT-2 (and DialoGPT, Cerebras-GPT, GPT-3 as published).

use crate::model::Family;
use crate::model::blocks::causal::{self, LmHead};
use crate::model::blocks::{attention, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Attention, EagerStyle, Input, Mask, Norm};
use crate::model::{Breaks, Config, Graph, ModelError, Task, Value};

/// GPT-2.
pub const FAMILY: Family = Family {
    name: "GPT-2",
    model_types: &["gpt2"],
    facts: Facts {
        tasks: Some(&[Task::CausalLm, Task::Base, Task::SequenceClassification]),
        attention: AttentionKernels::Flash,
        lora: &["c_attn"],
        ia3: &["c_attn", "mlp.c_proj"],
        ia3_feedforward: &["mlp.c_proj"],
        ..Facts::DEFAULT
    },
    build,
};

struct Gpt2 {
    vocab: u64,
    hidden: u64,
    layers: u64,
    heads: u64,
    width: u64,
    positions: u64,
    activation: Activation,
    residual_dropout: f64,
    embedding_dropout: f64,
    attention_dropout: f64,
    tied: bool,
}

impl Gpt2 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["n_embd", "hidden_size"], 768)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 50257)?,
            hidden,
            layers: c.layers(&["num_hidden_layers", "n_layer"], 12)?,
            heads: read::positive(c, &["n_head", "num_attention_heads"], 12)?,
            width: c.size_or(&["n_inner"], 4 * hidden)?,
            positions: c.size_or(&["n_positions", "max_position_embeddings"], 1024)?,
            activation: read::activation(c, "activation_function", "gelu_new")?,
            residual_dropout: c.number("resid_pdrop", 0.1)?,
            embedding_dropout: c.number("embd_pdrop", 0.1)?,
            attention_dropout: c.number("attn_pdrop", 0.1)?,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let (batch, seq) = (g.inputs.batch, g.inputs.seq);
        let ids = g.input(Input::Tokens, [batch, seq]);
        let embeddings = g.embedding("wte", &ids, self.vocab, self.hidden);
        let positions = g.positions(seq);
        let position_embeddings = g.embedding("wpe", &positions, self.positions, self.hidden);
        let mut hidden = g.add(&embeddings, &position_embeddings);
        let mask = attention::mask(g, Mask::Causal);
        hidden = g.dropout(&hidden, self.embedding_dropout);
        for index in 0..self.layers {
            hidden = g.layer("h", index, |g| self.layer(g, &hidden, &mask));
        }
        g.norm("ln_f", &hidden, Norm::Layer, true)
    }

    fn layer(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let mut hidden = g.norm("ln_1", input, Norm::Layer, true);
        let attended = g.module("attn", |g| self.attention(g, &hidden, mask));
        hidden = g.add(&attended, input);
        let residual = hidden.clone();
        hidden = g.norm("ln_2", &residual, Norm::Layer, true);
        let forwarded = g.module("mlp", |g| {
            let mut wide = g.conv1d_linear("c_fc", &hidden, self.width);
            wide = g.activation(self.activation, &wide);
            wide = g.conv1d_linear("c_proj", &wide, self.hidden);
            g.dropout(&wide, self.residual_dropout)
        });
        g.add(&residual, &forwarded)
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, mask: &Value) -> Value {
        let joined = g.conv1d_linear("c_attn", hidden, 3 * self.hidden);
        let (query, key, value) = g.split3(&joined, 2, [self.hidden; 3]);
        drop(joined);
        let head_dim = self.hidden / self.heads;
        let query = attention::split_heads(g, query, self.heads, head_dim);
        let key = attention::split_heads(g, key, self.heads, head_dim);
        let value = attention::split_heads(g, value, self.heads, head_dim);
        let (key, value) = g.cache(attention::grouped_cache(self.heads, head_dim, None), &key, &value);
        let spec = Attention {
            groups: 1,
            causal: true,
            dropout_per_mille: (self.attention_dropout * 1000.0).round() as u32,
            softcap: false,
            sinks: None,
            eager: EagerStyle::PlainSoftmax,
            sdpa: true,
        };
        let attended = attention::attend(g, spec, &query, &key, &value, Some(mask));
        let mut output = attention::join_heads(g, attended);
        output = g.conv1d_linear("c_proj", &output, self.hidden);
        g.dropout(&output, self.residual_dropout)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let gpt2 = Gpt2::read(c)?;
    g.breaks = Breaks::Loss;
    let tied = gpt2.tied.then_some("wte");
    causal::classifier(
        c,
        g,
        task,
        "transformer",
        (LmHead { vocab: gpt2.vocab, tied, bias: false }, &causal::Tokens::USUAL),
        |g| gpt2.model(g),
    )
}
