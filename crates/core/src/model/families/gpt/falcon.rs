//! Falcon 1 and 2 (7B, 40B, 180B, RefinedWeb): fused projections, one to all key heads, attention code of its own.

use super::alibi;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::causal::{LmHead, Tokens, classifier};
use crate::model::blocks::{attention, read};
use crate::model::facts::Facts;
use crate::model::op::{
    Activation, Attention, Binary, CacheKind, CacheUpdate, EagerStyle, Input, Mask, Norm, Op, Role, Rotary, RotaryTable,
};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Falcon.
pub const FAMILY: Family = Family {
    name: "Falcon",
    model_types: &["falcon", "RefinedWeb", "RefinedWebModel"],
    facts: Facts {
        lora: &["query_key_value"],
        ia3: &["query_key_value", "dense_4h_to_h"],
        ia3_feedforward: &["dense_4h_to_h"],
        ..Facts::DEFAULT
    },
    build,
};

struct Falcon {
    vocab: u64,
    hidden: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    width: u64,
    activation: Activation,
    new_architecture: bool,
    multi_query: bool,
    parallel: bool,
    norms: u64,
    alibi: bool,
    bias: bool,
    hidden_dropout: f64,
    attention_dropout: f64,
    tied: bool,
}

impl Falcon {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["n_embed", "hidden_size"], 4544)?;
        let heads = read::positive(c, &["num_attention_heads", "n_head"], 71)?;
        let new_architecture = c.flag("new_decoder_architecture", false)?;
        let multi_query = c.flag("multi_query", true)?;
        let stated = read::positive(c, &["num_kv_heads", "n_head_kv"], heads)?;
        let norms = c.size_or(&["num_ln_in_parallel_attn"], if new_architecture { 2 } else { 1 })?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 65024)?,
            hidden,
            layers: c.layers(&["num_hidden_layers", "n_layer"], 32)?,
            heads,
            kv_heads: if new_architecture {
                stated
            } else if multi_query {
                1
            } else {
                heads
            },
            width: c.size_or(&["ffn_hidden_size"], 4 * hidden)?,
            activation: read::activation(c, "activation", "gelu")?,
            new_architecture,
            multi_query,
            parallel: c.flag("parallel_attn", true)?,
            norms,
            alibi: c.flag("alibi", false)?,
            bias: c.flag("bias", false)?,
            hidden_dropout: c.number("hidden_dropout", 0.0)?,
            attention_dropout: c.number("attention_dropout", 0.0)?,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let (batch, seq) = (g.inputs.batch, g.inputs.seq);
        let ids = g.input(Input::Tokens, [batch, seq]);
        let embeddings = g.embedding("word_embeddings", &ids, self.vocab, self.hidden);
        let mut bias = self.alibi.then(|| {
            let mask = alibi::tokens_mask(g, DType::I64);
            alibi::per_row(g, &mask, self.heads, &embeddings, true)
        });
        let mut mask = attention::mask(g, Mask::CausalKept);
        if let Some(rows) = bias.take() {
            let rows = g.view(&rows, [batch, self.heads, 1, rows.size(-1)]);
            let masked = g.compare(&mask);
            let divided = g.scalar(Binary::Div, &rows);
            let shape = [batch, self.heads, seq, rows.size(-1)];
            mask = g.run(Op::MaskedFill { in_place: false }, &[&divided, &masked], shape);
            bias = Some(rows);
        }
        let table = RotaryTable { dim: self.hidden / self.heads, axes: 1, doubled: true, fp32: false };
        let rope = g.rotary_table("rotary_emb", seq, table);
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            hidden = g.layer("h", index, |g| self.layer(g, &hidden, &rope, &mask, bias.as_ref()));
        }
        g.norm("ln_f", &hidden, Norm::Layer, true)
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value, bias: Option<&Value>) -> Value {
        let two_norms = self.new_architecture && self.norms == 2;
        let normed = g.norm(if two_norms { "ln_attn" } else { "input_layernorm" }, input, Norm::Layer, true);
        let for_mlp = if two_norms { g.norm("ln_mlp", input, Norm::Layer, true) } else { normed.clone() };
        let attended = g.module("self_attention", |g| self.attention(g, &normed, rope, mask, bias));
        if self.new_architecture || self.parallel {
            let wide = g.module("mlp", |g| self.mlp(g, &for_mlp));
            let wide = {
                let before = wide;
                g.in_place(Binary::Add, &before, &attended)
            };
            return self.dropout_add(g, &wide, input, self.hidden_dropout);
        }
        let residual = self.dropout_add(g, &attended, input, self.attention_dropout);
        drop(for_mlp);
        let for_mlp = g.norm("post_attention_layernorm", &residual, Norm::Layer, true);
        let wide = g.module("mlp", |g| self.mlp(g, &for_mlp));
        self.dropout_add(g, &wide, &residual, self.hidden_dropout)
    }

    fn mlp(&self, g: &mut Graph, x: &Value) -> Value {
        let wide = {
            let before = self.linear(g, "dense_h_to_4h", x, self.width);
            g.activation(self.activation, &before)
        };
        self.linear(g, "dense_4h_to_h", &wide, self.hidden)
    }

    fn attention(
        &self,
        g: &mut Graph,
        hidden: &Value,
        rope: &(Value, Value),
        mask: &Value,
        bias: Option<&Value>,
    ) -> Value {
        let (batch, seq, head_dim) = (hidden.size(0), hidden.size(1), self.hidden / self.heads);
        let width = if self.new_architecture || self.multi_query {
            (self.heads + 2 * self.kv_heads).saturating_mul(head_dim)
        } else {
            3 * self.hidden
        };
        let fused = self.linear(g, "query_key_value", hidden, width);
        let stored_heads = if self.new_architecture { self.heads } else { self.kv_heads };
        let (mut query, mut key, mut value) = self.split_heads(g, &fused);
        query = by_head(g, &query, [batch, self.heads, seq, head_dim]);
        key = by_head(g, &key, [batch, stored_heads, seq, head_dim]);
        value = by_head(g, &value, [batch, stored_heads, seq, head_dim]);
        if bias.is_none() {
            (query, key) = attention::rotate_whole(g, Rotary::Half, &query, &key, &rope.0, &rope.1);
        }
        let cache = CacheUpdate {
            kind: CacheKind::Full,
            heads: stored_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            true_heads: self.kv_heads,
        };
        (key, value) = g.cache(cache, &key, &value);
        let dropout = if bias.is_some() { self.attention_dropout } else { 0.0 };
        let spec = Attention {
            groups: self.heads / stored_heads.max(1),
            causal: true,
            dropout_per_mille: (dropout.clamp(0.0, 1.0) * 1000.0).round() as u32,
            softcap: false,
            sinks: None,
            eager: EagerStyle::Falcon,
            sdpa: true,
        };
        let mut inputs = vec![&query, &key, &value, mask];
        inputs.extend(bias);
        let mut attended = g.run(Op::Attention(spec), &inputs, [batch, seq, self.heads, head_dim]);
        attended = g.reshape(&attended, [batch, seq, self.hidden]);
        self.linear(g, "dense", &attended, self.hidden)
    }

    /// Queries, keys and values `[batch, seq, heads, dim]`; keys and values picked by a list are copies.
    fn split_heads(&self, g: &mut Graph, fused: &Value) -> (Value, Value, Value) {
        let (batch, seq, head_dim) = (fused.size(0), fused.size(1), self.hidden / self.heads);
        if self.new_architecture {
            let groups = self.heads / self.kv_heads;
            let split = g.view(fused, [batch, seq, self.kv_heads, groups + 2, head_dim]);
            let query = g.slice(&split, 3, 0, groups);
            let key = picked(g, &split, 3);
            let value = picked(g, &split, 3);
            let key = g.expand(&key, query.shape());
            let value = g.expand(&value, query.shape());
            let flat = [batch, seq, self.heads, head_dim];
            return (g.reshape(&query, flat), g.reshape(&key, flat), g.reshape(&value, flat));
        }
        if !self.multi_query {
            let split = g.view(fused, [batch, seq, self.heads, 3, head_dim]);
            let [query, key, value] = [0, 1, 2].map(|part| {
                let part = g.slice(&split, 3, part, 1);
                g.squeeze(&part, 3)
            });
            return (query, key, value);
        }
        let split = g.view(fused, [batch, seq, self.heads + 2, head_dim]);
        let query = g.slice(&split, 2, 0, self.heads);
        (query, picked(g, &split, 2), picked(g, &split, 2))
    }

    /// Falcon's linear adds its bias after the product.
    fn linear(&self, g: &mut Graph, name: &str, x: &Value, outputs: u64) -> Value {
        let product = g.linear(name, x, outputs, false);
        if !self.bias {
            return product;
        }
        let bias = g.parameter(&format!("{name}.bias"), [outputs], Role::Bias);
        let bias = g.read(bias, [outputs]);
        g.add(&product, &bias)
    }

    fn dropout_add(&self, g: &mut Graph, x: &Value, residual: &Value, p: f64) -> Value {
        let dropped = g.dropout(x, p);
        g.add(residual, &dropped)
    }
}

/// One entry of a dimension, picked by a list of one index: a copy.
fn picked(g: &mut Graph, x: &Value, dim: i64) -> Value {
    let index = g.fill(DType::I64, [1]);
    g.run(Op::Index, &[x, &index], x.shape().with(dim, 1))
}

fn by_head(g: &mut Graph, x: &Value, shape: [u64; 4]) -> Value {
    let turned = g.transpose(x, 1, 2);
    g.reshape(&turned, shape)
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let falcon = Falcon::read(c)?;
    let head = LmHead { vocab: falcon.vocab, tied: falcon.tied.then_some("word_embeddings"), bias: false };
    classifier(c, g, task, "transformer", (head, &Tokens { usual: 0.0, ..Tokens::USUAL }), |g| falcon.model(g))
}
