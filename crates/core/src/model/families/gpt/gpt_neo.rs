//! GPT-Neo: learned positions, layers that see everything and layers that see a window in turn.

use super::early;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::causal::{LmHead, Tokens, classifier};
use crate::model::blocks::{attention, mlp, read};
use crate::model::facts::Facts;
use crate::model::op::{Activation, Input, Mask, Norm, Op};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// GPT-Neo.
pub const FAMILY: Family = Family {
    name: "GPT-Neo",
    model_types: &["gpt_neo"],
    facts: Facts {
        lora: &["q_proj", "v_proj"],
        ia3: &["q_proj", "v_proj", "c_proj"],
        ia3_feedforward: &["c_proj"],
        ..Facts::DEFAULT
    },
    build,
};

struct GptNeo {
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

impl GptNeo {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], 2048)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 50257)?,
            hidden,
            layers: c.layers(&["num_layers", "num_hidden_layers"], 24)?,
            heads: read::positive(c, &["num_heads", "num_attention_heads"], 16)?,
            width: c.size_or(&["intermediate_size"], 4 * hidden)?,
            positions: c.size_or(&["max_position_embeddings"], 2048)?,
            activation: read::activation(c, "activation_function", "gelu_new")?,
            residual_dropout: c.number("resid_dropout", 0.0)?,
            embedding_dropout: c.number("embed_dropout", 0.0)?,
            attention_dropout: c.number("attention_dropout", 0.0)?,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let (batch, seq) = (g.inputs.batch, g.inputs.seq);
        let ids = g.input(Input::Tokens, [batch, seq]);
        let embeddings = g.embedding("wte", &ids, self.vocab, self.hidden);
        let positions = g.positions(seq);
        let mask = attention::mask(g, Mask::CausalEager);
        let position_embeddings = g.embedding("wpe", &positions, self.positions, self.hidden);
        let mut hidden = g.add(&embeddings, &position_embeddings);
        hidden = g.dropout(&hidden, self.embedding_dropout);
        // The loop's `outputs` keeps the probabilities of a layer until the next one has run.
        let mut outputs: Option<(Value, Value)> = None;
        for index in 0..self.layers {
            let layer = g.layer("h", index, |g| self.layer(g, &hidden, &mask));
            hidden = layer.0.clone();
            outputs = Some(layer);
        }
        let normed = g.norm("ln_f", &hidden, Norm::Layer, true);
        drop(outputs);
        normed
    }

    fn layer(&self, g: &mut Graph, input: &Value, mask: &Value) -> (Value, Value) {
        let mut hidden = g.norm("ln_1", input, Norm::Layer, true);
        let (attended, weights) = g.module("attn", |g| g.module("attention", |g| self.attention(g, &hidden, mask)));
        hidden = g.add(&attended, input);
        let residual = hidden.clone();
        hidden = g.norm("ln_2", &hidden, Norm::Layer, true);
        let wide = g.module("mlp", |g| {
            let wide = mlp(g, &hidden, ["c_fc", "c_proj"], self.width, self.activation, true);
            g.dropout(&wide, self.residual_dropout)
        });
        (g.add(&residual, &wide), weights)
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, mask: &Value) -> (Value, Value) {
        let (heads, head_dim, positions) = (self.heads, self.hidden / self.heads, self.positions);
        g.buffer("bias", [1, 1, positions, positions], DType::Bool, false);
        let mut query = g.linear("q_proj", hidden, self.hidden, false);
        let mut key = g.linear("k_proj", hidden, self.hidden, false);
        let mut value = g.linear("v_proj", hidden, self.hidden, false);
        query = attention::split_heads(g, query, heads, head_dim);
        key = attention::split_heads(g, key, heads, head_dim);
        value = attention::split_heads(g, value, heads, head_dim);
        (key, value) = g.cache(attention::grouped_cache(heads, head_dim, None), &key, &value);
        let (mut attended, weights) =
            early::attention(g, [&query, &key, &value], self.attention_dropout, |g, mut scores| {
                let seen = g.run(Op::Buffer(DType::Bool), &[], [1, 1, scores.size(2), scores.size(3)]);
                let lowest = g.fill(DType::F32, []);
                scores = g.run(Op::Where, &[&seen, &scores, &lowest], scores.shape());
                g.add(&scores, mask)
            });
        attended = early::merge_heads(g, &attended);
        attended = g.linear("out_proj", &attended, self.hidden, true);
        (g.dropout(&attended, self.residual_dropout), weights)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = GptNeo::read(c)?;
    let head = LmHead { vocab: model.vocab, tied: model.tied.then_some("wte"), bias: false };
    classifier(c, g, task, "transformer", (head, &Tokens { dropout: &["classifier_dropout"], ..Tokens::USUAL }), |g| {
        model.model(g)
    })
}
