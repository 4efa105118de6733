//! torchtune's `TransformerDecoder` of Llama, Mistral and Qwen2 models, as in its versions 0.4 and 0.5
//! (torchtune/modules/transformer.py, attention.py, position_embeddings.py, rms_norm.py).
//!
//! Neighbours are the pairs of its rotation, which it computes in fp32 from one table for all positions the model can
//! have (Qwen2's holds each angle twice; where layers are copies of one, as in all but Llama 3.1 and its successors, each has
//! a table); keys and values of grouped heads are repeated. Adapters and losses are put around it as around any model.

use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::{attention, head, read};
use crate::model::facts::Facts;
use crate::model::op::{Activation, Attention, EagerStyle, Input, Norm};
use crate::model::{Breaks, Config, Graph, ModelError, Task, Value};

/// torchtune.
pub const FAMILY: Family = Family { name: "torchtune", model_types: &["torchtune"], facts: Facts::DEFAULT, build };

/// Angles of all positions, and the positions of a packed batch.
type Table<'a> = (&'a Value, Option<&'a Value>);

struct TransformerDecoder {
    vocabulary: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    embedding: u64,
    intermediate: u64,
    positions: u64,
    /// Whether each layer is a copy of one, its table with it.
    copied: bool,
    /// Numbers of a table per position.
    angles: u64,
    bias: bool,
    tied: bool,
}

impl TransformerDecoder {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let heads = read::positive(c, &["num_heads"], 32)?;
        let embedding = read::positive(c, &["embed_dim"], 4096)?;
        let kv_heads = read::positive(c, &["num_kv_heads"], heads)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(c.refuse("num_kv_heads", "a divisor of num_heads"));
        }
        let head_dim = read::positive(c, &["head_dim"], embedding / heads)?;
        Ok(Self {
            vocabulary: read::positive(c, &["vocab_size"], 32000)?,
            layers: c.layers(&["num_layers"], 32)?,
            heads,
            kv_heads,
            head_dim,
            embedding,
            intermediate: c.size_or(&["intermediate_dim"], 11008)?,
            positions: read::positive(c, &["max_seq_len"], 4096)?,
            copied: c.flag("copied_layers", false)?,
            angles: if c.flag("halves", false)? { 2 * head_dim } else { head_dim },
            bias: c.flag("qkv_bias", false)?,
            tied: c.flag("tied", false)?,
        })
    }

    fn layer(&self, g: &mut Graph, x: &Value, rope: Table<'_>) -> Value {
        let attended = {
            let normed = g.norm("sa_norm", x, Norm::Rms, false);
            g.module("attn", |g| self.attention(g, &normed, rope))
        };
        let hidden = g.add(&attended, x);
        let wide = {
            let normed = g.norm("mlp_norm", &hidden, Norm::Rms, false);
            g.module("mlp", |g| self.mlp(g, &normed))
        };
        g.add(&hidden, &wide)
    }

    fn mlp(&self, g: &mut Graph, x: &Value) -> Value {
        let mut hidden = {
            let gate = g.linear("w1", x, self.intermediate, false);
            g.gate(Activation::Silu, gate)
        };
        hidden = {
            let up = g.linear("w3", x, self.intermediate, false);
            g.gate_product(Activation::Silu, hidden, up)
        };
        g.linear("w2", &hidden, self.embedding, false)
    }

    fn attention(&self, g: &mut Graph, x: &Value, rope: Table<'_>) -> Value {
        let (batch, seq, dim) = (x.size(0), x.size(1), self.head_dim);
        let heads = |g: &mut Graph, x: Value, count: u64| g.view(&x, [batch, seq, count, dim]);
        let mut query = g.linear("q_proj", x, self.heads * dim, self.bias);
        query = heads(g, query, self.heads);
        query = rotated(g, &query, rope);
        query = g.transpose(&query, 1, 2);
        let mut key = g.linear("k_proj", x, self.kv_heads * dim, self.bias);
        let mut value = g.linear("v_proj", x, self.kv_heads * dim, self.bias);
        key = heads(g, key, self.kv_heads);
        key = rotated(g, &key, rope);
        key = self.repeated(g, key);
        value = self.repeated(g, value);
        let spec = Attention {
            groups: 1,
            causal: true,
            dropout_per_mille: 0,
            softcap: false,
            sinks: None,
            eager: EagerStyle::PlainSoftmax,
            sdpa: true,
        };
        let mut output = attention::attend(g, spec, &query, &key, &value, None);
        output = attention::join_heads(g, output);
        g.linear("output_proj", &output, self.embedding, false)
    }

    /// `[batch, seq, …] → [batch, heads, seq, dim]`, copied where several queries share a key.
    fn repeated(&self, g: &mut Graph, x: Value) -> Value {
        let (batch, seq) = (x.size(0), x.size(1));
        let mut x = g.view(&x, [batch, seq, self.kv_heads, 1, self.head_dim]);
        x = g.expand(&x, [batch, seq, self.kv_heads, self.heads / self.kv_heads, self.head_dim]);
        x = g.reshape(&x, [batch, seq, self.heads, self.head_dim]);
        g.transpose(&x, 1, 2)
    }
}

/// Pairs of neighbours turned in fp32, joined again, cast back.
fn rotated(g: &mut Graph, x: &Value, rope: Table<'_>) -> Value {
    let (batch, seq, heads, half) = (x.size(0), x.size(1), x.size(2), x.size(3) / 2);
    let pairs = {
        let wide = g.float(x);
        g.reshape(&wide, [batch, seq, heads, half, 2])
    };
    let table = match rope.1 {
        Some(positions) => {
            let looked_up = g.index(rope.0, positions);
            let table = g.slice(&looked_up, 2, 0, 2 * half);
            g.view(&table, [batch, seq, 1, half, 2])
        }
        None => {
            let rows = g.slice(rope.0, 0, 0, seq);
            let table = g.slice(&rows, 1, 0, 2 * half);
            g.view(&table, [1, seq, 1, half, 2])
        }
    };
    let (cosine, sine) = (g.select(&table, 4, 0), g.select(&table, 4, 1));
    let (first, second) = (g.select(&pairs, 4, 0), g.select(&pairs, 4, 1));
    let real = {
        let (straight, crossed) = (g.mul(&first, &cosine), g.mul(&second, &sine));
        g.sub(&straight, &crossed)
    };
    let imaginary = {
        let (straight, crossed) = (g.mul(&second, &cosine), g.mul(&first, &sine));
        g.add(&straight, &crossed)
    };
    let mut joined = g.stack(&[&real, &imaginary], -1);
    drop((real, imaginary));
    joined = g.view(&joined, [batch, seq, heads, 2 * half]);
    g.type_as(&joined, x)
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = TransformerDecoder::read(c)?;
    g.breaks = Breaks::Attention;
    let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
    let mut hidden = g.embedding("tok_embeddings", &ids, model.vocabulary, model.embedding);
    let positions = model.positions.max(g.inputs.seq);
    let count = if model.copied { model.layers } else { 1 };
    let ropes: Vec<Value> = (0..count)
        .map(|layer| {
            g.held(&format!("layers.{layer}.attn.pos_embeddings.cache"), [positions, model.angles], DType::F32)
        })
        .collect();
    let (batch, seq) = (g.inputs.batch, g.inputs.seq);
    let positions = g.inputs.position_ids.then(|| g.input(Input::Positions, [batch, seq]));
    for index in 0..model.layers {
        let rope = (&ropes[index as usize % ropes.len()], positions.as_ref());
        hidden = g.layer("layers", index, |g| model.layer(g, &hidden, rope));
    }
    hidden = g.norm("norm", &hidden, Norm::Rms, false);
    let tied = if model.tied { g.find("tok_embeddings.weight") } else { None };
    head::causal_lm_head_named(g, "output", hidden, model.vocabulary, tied, false, |g, logits| g.float(&logits));
    Ok(())
}
