//! BLOOM (and BLOOMZ, mT0's decoder siblings): ALiBi positions, attention code of its own.

use super::alibi;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::causal::{LmHead, Tokens, classifier};
use crate::model::blocks::{attention, read};
use crate::model::facts::Facts;
use crate::model::op::{Activation, Input, Mask, Norm, Op, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// BLOOM.
pub const FAMILY: Family = Family {
    name: "BLOOM",
    model_types: &["bloom"],
    facts: Facts {
        lora: &["query_key_value"],
        ia3: &["query_key_value", "mlp.dense_4h_to_h"],
        ia3_feedforward: &["mlp.dense_4h_to_h"],
        registration: &[&["input_layernorm", "self_attention", "post_attention_layernorm", "mlp"]],
        ..Facts::DEFAULT
    },
    build,
};

struct Bloom {
    vocab: u64,
    hidden: u64,
    layers: u64,
    heads: u64,
    hidden_dropout: f64,
    attention_dropout: f64,
    residual_after_norm: bool,
    /// The linears' inputs are cut in so many parts whose products are summed.
    slices: u64,
    tied: bool,
}

impl Bloom {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let slow = c.flag("slow_but_exact", false)?;
        let slices = if slow { read::positive(c, &["pretraining_tp"], 1)? } else { 1 };
        if slices > 1024 {
            return Err(c.refuse("pretraining_tp", "at most 1024"));
        }
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 250880)?,
            hidden: read::positive(c, &["n_embed", "hidden_size"], 64)?,
            layers: c.layers(&["n_layer", "num_hidden_layers"], 2)?,
            heads: read::positive(c, &["n_head", "num_attention_heads"], 8)?,
            hidden_dropout: c.number("hidden_dropout", 0.0)?,
            attention_dropout: c.number("attention_dropout", 0.0)?,
            residual_after_norm: c.flag("apply_residual_connection_post_layernorm", false)?,
            slices,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let (batch, seq) = (g.inputs.batch, g.inputs.seq);
        let ids = g.input(Input::Tokens, [batch, seq]);
        let embeddings = g.embedding("word_embeddings", &ids, self.vocab, self.hidden);
        let mut hidden = g.norm("word_embeddings_layernorm", &embeddings, Norm::Layer, true);
        let tokens_mask = alibi::tokens_mask(g, DType::F32);
        let bias = alibi::per_row(g, &tokens_mask, self.heads, &hidden, false);
        let mask = {
            let keys = tokens_mask.size(1);
            g.run(Op::Mask(Mask::CausalEager), &[&tokens_mask], [batch, 1, seq, keys])
        };
        // The loop's `outputs` keeps the probabilities of a layer until the next one has run.
        let mut outputs: Option<(Value, Value)> = None;
        for index in 0..self.layers {
            let layer = g.layer("h", index, |g| self.layer(g, &hidden, &bias, &mask));
            hidden = layer.0.clone();
            outputs = Some(layer);
        }
        let normed = g.norm("ln_f", &hidden, Norm::Layer, true);
        drop(outputs);
        normed
    }

    fn layer(&self, g: &mut Graph, input: &Value, bias: &Value, mask: &Value) -> (Value, Value) {
        let mut normed = g.norm("input_layernorm", input, Norm::Layer, true);
        let residual = if self.residual_after_norm { normed.clone() } else { input.clone() };
        let (attended, probabilities) =
            g.module("self_attention", |g| self.attention(g, &normed, &residual, bias, mask));
        normed = g.norm("post_attention_layernorm", &attended, Norm::Layer, true);
        let residual = if self.residual_after_norm { normed.clone() } else { attended.clone() };
        let output = g.module("mlp", |g| {
            let wide = {
                let before = g.linear("dense_h_to_4h", &normed, 4 * self.hidden, true);
                g.activation(Activation::GeluBloom, &before)
            };
            let narrow = self.sliced_linear(g, "dense_4h_to_h", &wide);
            self.dropout_add(g, &narrow, &residual)
        });
        (output, probabilities)
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, residual: &Value, bias: &Value, mask: &Value) -> (Value, Value) {
        let (batch, seq, head_dim) = (hidden.size(0), hidden.size(1), self.hidden / self.heads);
        let rows = batch.saturating_mul(self.heads);
        let fused = g.linear("query_key_value", hidden, 3 * self.hidden, true);
        let split = g.view(&fused, [batch, seq, self.heads, 3, head_dim]);
        let [mut query, mut key, mut value] = [0, 1, 2].map(|part| {
            let part = g.slice(&split, 3, part, 1);
            let part = g.squeeze(&part, 3);
            g.transpose(&part, 1, 2)
        });
        (key, value) = g.cache(attention::grouped_cache(self.heads, head_dim, None), &key, &value);
        let keys = key.size(2);
        query = g.reshape(&query, [rows, seq, head_dim]);
        key = g.reshape(&key, [rows, keys, head_dim]);
        key = g.transpose(&key, 1, 2);
        value = g.reshape(&value, [rows, keys, head_dim]);
        let scores = g.run(Op::AddMatMul, &[bias, &query, &key], [rows, seq, keys]);
        let mut weights = g.view(&scores, [batch, self.heads, seq, keys]);
        weights = g.add(&weights, mask);
        let mut probabilities = g.softmax(&weights, -1, Some(DType::F32));
        probabilities = g.type_as(&probabilities, &query);
        probabilities = g.dropout(&probabilities, self.attention_dropout);
        let flat = g.view(&probabilities, [rows, seq, keys]);
        let mut context = g.matmul(&flat, &value);
        context = {
            let heads = g.view(&context, [batch, self.heads, seq, head_dim]);
            let tokens = g.permute(&heads, &[0, 2, 1, 3]);
            g.reshape(&tokens, [batch, seq, self.hidden])
        };
        let mut output = self.sliced_linear(g, "dense", &context);
        output = self.dropout_add(g, &output, residual);
        (output, probabilities)
    }

    fn dropout_add(&self, g: &mut Graph, x: &Value, residual: &Value) -> Value {
        let dropped = g.dropout(x, self.hidden_dropout);
        g.add(residual, &dropped)
    }

    /// A linear to the hidden width; `slow_but_exact` sums the products of slices, without the bias.
    fn sliced_linear(&self, g: &mut Graph, name: &str, x: &Value) -> Value {
        if self.slices <= 1 {
            return g.linear(name, x, self.hidden, true);
        }
        let weight = g.parameter(&format!("{name}.weight"), [self.hidden, x.size(-1)], Role::Linear);
        g.parameter(&format!("{name}.bias"), [self.hidden], Role::Bias);
        let weight = g.read(weight, [self.hidden, x.size(-1)]);
        let part = x.size(-1) / self.slices;
        let mut sum = g.run(Op::Fill(DType::F32), &[], x.shape().with(-1, self.hidden));
        sum = g.type_as(&sum, x);
        for index in 0..self.slices {
            let inputs = g.slice(x, -1, index * part, part);
            let columns = g.slice(&weight, -1, index * part, part);
            let columns = g.transpose(&columns, 0, 1);
            let product = g.matmul(&inputs, &columns);
            sum = g.add(&sum, &product);
        }
        sum
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let bloom = Bloom::read(c)?;
    let head = LmHead { vocab: bloom.vocab, tied: bloom.tied.then_some("word_embeddings"), bias: false };
    classifier(c, g, task, "transformer", (head, &Tokens { usual: 0.0, ..Tokens::USUAL }), |g| bloom.model(g))
}
