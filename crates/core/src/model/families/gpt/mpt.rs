//! MPT: ALiBi positions, no biases anywhere, attention code of its own.

use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::causal::{LmHead, Tokens, classifier};
use crate::model::blocks::{attention, read};
use crate::model::facts::Facts;
use crate::model::op::{Activation, Binary, Input, Mask, Norm, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// MPT.
pub const FAMILY: Family =
    Family { name: "MPT", model_types: &["mpt"], facts: Facts { lora: &["Wqkv"], ..Facts::DEFAULT }, build };

struct Mpt {
    vocab: u64,
    hidden: u64,
    layers: u64,
    heads: u64,
    positions: u64,
    clipped: bool,
    dropout: f64,
    tied: bool,
}

impl Mpt {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let attention = c.section("attn_config");
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 50368)?,
            hidden: read::positive(c, &["d_model", "hidden_size"], 2048)?,
            layers: c.layers(&["n_layers", "num_hidden_layers"], 24)?,
            heads: read::positive(c, &["n_heads", "num_attention_heads"], 16)?,
            positions: read::positive(c, &["max_seq_len"], 2048)?,
            clipped: attention.number("clip_qkv", 0.0)? != 0.0,
            dropout: attention.number("attn_pdrop", 0.0)?,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let (batch, seq) = (g.inputs.batch, g.inputs.seq);
        let ids = g.input(Input::Tokens, [batch, seq]);
        let embeddings = g.embedding("wte", &ids, self.vocab, self.hidden);
        let bias = self.alibi(g);
        let mask = {
            let additive = attention::mask(g, Mask::CausalEager);
            g.to(&additive, DType::Bool)
        };
        let mut hidden = embeddings.clone();
        // The loop's `outputs` keeps the probabilities of a layer until the next one has run.
        let mut outputs: Option<(Value, Value)> = None;
        for index in 0..self.layers {
            let layer = g.layer("blocks", index, |g| self.layer(g, &hidden, &bias, &mask));
            hidden = layer.0.clone();
            outputs = Some(layer);
        }
        let normed = g.norm("norm_f", &hidden, Norm::Layer, false);
        drop(outputs);
        normed
    }

    /// `[heads, 1, positions]` in fp32, for the longest sequence.
    fn alibi(&self, g: &mut Graph) -> Value {
        let distances = g.fill(DType::I32, [1, 1, 1, self.positions]);
        let rounded = self.heads.next_power_of_two();
        let mut slopes = g.fill(DType::F32, [1, rounded, 1, 1]);
        if rounded != self.heads {
            let odd = g.slice_step(&slopes, 1, 1, rounded / 2, 2);
            let even = g.slice_step(&slopes, 1, 0, rounded / 2, 2);
            slopes = g.cat(&[&odd, &even], 1);
            slopes = g.slice(&slopes, 1, 0, self.heads);
        }
        let bias = g.mul(&distances, &slopes);
        g.squeeze(&bias, 0)
    }

    fn layer(&self, g: &mut Graph, input: &Value, bias: &Value, mask: &Value) -> (Value, Value) {
        let mut normed = g.norm("norm_1", input, Norm::Layer, false);
        let (attended, weights) = g.module("attn", |g| self.attention(g, &normed, bias, mask));
        let hidden = {
            let dropped = g.dropout(&attended, self.dropout);
            g.add(&dropped, input)
        };
        normed = g.norm("norm_2", &hidden, Norm::Layer, false);
        let output = g.module("ffn", |g| {
            let wide = {
                let before = g.linear("up_proj", &normed, 4 * self.hidden, false);
                g.activation(Activation::Gelu, &before)
            };
            let narrow = g.linear("down_proj", &wide, self.hidden, false);
            let dropped = g.dropout(&narrow, self.dropout);
            g.add(&dropped, &hidden)
        });
        (output, weights)
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, bias: &Value, mask: &Value) -> (Value, Value) {
        let (batch, seq, head_dim) = (hidden.size(0), hidden.size(1), self.hidden / self.heads);
        let mut mixed = g.linear("Wqkv", hidden, 3 * self.hidden, false);
        if self.clipped {
            mixed = g.unary(Unary::Clamp, &mixed);
        }
        let (query, key, value) = g.split3(&mixed, 2, [self.hidden; 3]);
        let [query, mut key, mut value] = [query, key, value].map(|x| {
            let x = g.reshape(&x, [batch, seq, self.heads, head_dim]);
            g.transpose(&x, 1, 2)
        });
        (key, value) = g.cache(attention::grouped_cache(self.heads, head_dim, None), &key, &value);
        let mut scores = {
            let turned = g.transpose(&key, -1, -2);
            let product = g.matmul(&query, &turned);
            g.scale(&product)
        };
        let keys = key.size(2);
        let bias = g.slice(bias, 2, self.positions.saturating_sub(keys), keys.min(self.positions));
        scores = g.binary(Binary::Add, &scores, &bias);
        scores = g.masked_fill(&scores, mask);
        let mut weights = {
            let wide = g.float(&scores);
            let soft = g.softmax(&wide, -1, None);
            g.type_as(&soft, &value)
        };
        weights = g.dropout(&weights, self.dropout);
        let mut context = g.matmul(&weights, &value);
        context = {
            let tokens = g.permute(&context, &[0, 2, 1, 3]);
            let dense = g.contiguous(&tokens);
            g.view(&dense, [batch, seq, self.hidden])
        };
        (g.linear("out_proj", &context, self.hidden, false), weights)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let mpt = Mpt::read(c)?;
    let head = LmHead { vocab: mpt.vocab, tied: mpt.tied.then_some("wte"), bias: false };
    classifier(c, g, task, "transformer", (head, &Tokens::USUAL), |g| mpt.model(g))
}
