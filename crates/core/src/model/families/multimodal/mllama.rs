//! Llama 3.2 Vision: Llama layers, and between them layers that attend to the image instead of the text.

use super::mllama_vision::{Vision, attend_over, cross_mask, gate};
use super::parts::{dimension, tower};
use crate::model::Family;
use crate::model::blocks::{SelfAttention, attention, causal_lm_head, gated_mlp, read};
use crate::model::facts::{Facts, Liger};
use crate::model::op::{Activation, CacheKind, CacheUpdate, Input, Mask, Norm, Op, Role, RotaryTable};
use crate::model::{Config, Graph, ModelError, Shape, Task, Value};

/// Llama 3.2 Vision.
pub const FAMILY: Family = Family {
    name: "Llama 3.2 Vision",
    model_types: &["mllama", "mllama_text_model"],
    facts: Facts {
        liger: Liger::NotSimulated,
        registration: &[&["vision_model", "language_model", "multi_modal_projector"]],
        tasks: super::ALSO_CAUSAL,
        ..Facts::DEFAULT
    },
    build,
};

struct Text {
    vocab: u64,
    hidden: u64,
    layers: u64,
    width: u64,
    activation: Activation,
    attention: SelfAttention,
    cross: Vec<u64>,
}

/// What cross layers see: image rows `[images · tiles, rows, hidden]` in the first pass, their masks always.
struct Seen {
    rows: Option<Value>,
    length: u64,
    mask: Value,
    text_rows: Value,
}

impl Text {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = dimension(c, &["hidden_size"], 4096)?;
        let heads = dimension(c, &["num_attention_heads"], 32)?;
        let kv_heads = dimension(c, &["num_key_value_heads"], 8)?;
        let mut attention = SelfAttention::new(heads, kv_heads, hidden / heads);
        attention.dropout = c.number("dropout", 0.0)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 128_256)?,
            hidden,
            layers: c.layers(&["num_hidden_layers"], 40)?,
            width: c.size_or(&["intermediate_size"], 14336)?,
            activation: read::activation(c, "hidden_act", "silu")?,
            attention,
            cross: c.sizes("cross_attention_layers")?.unwrap_or_else(|| vec![3, 8, 13, 18, 23, 28, 33, 38]),
        })
    }

    fn model(&self, g: &mut Graph, seen: Option<&Seen>) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        // Eight rows more than the vocabulary: the image token and spare ones.
        let embeddings = g.embedding("embed_tokens", &ids, self.vocab + 8, self.hidden);
        let mask = attention::mask(g, Mask::Causal);
        let table = RotaryTable { dim: self.attention.head_dim, axes: 1, doubled: true, fp32: false };
        let rope = g.rotary_table("rotary_emb", g.inputs.seq, table);
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            if !self.cross.contains(&index) {
                hidden = g.layer("layers", index, |g| self.layer(g, &hidden, &rope, &mask));
            } else if seen.is_some() {
                hidden = g.layer("layers", index, |g| self.cross_layer(g, &hidden, seen));
            } else {
                g.declare_only(|g| g.layer("layers", index, |g| self.cross_layer(g, &hidden, None)));
            }
        }
        g.norm("norm", &hidden, Norm::Rms, false)
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let mut hidden = g.norm("input_layernorm", input, Norm::Rms, false);
        hidden = g.module("self_attn", |g| self.attention.run(g, &hidden, Some(rope), mask));
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::Rms, false);
        hidden = self.mlp(g, &hidden);
        g.add(&residual, &hidden)
    }

    fn cross_layer(&self, g: &mut Graph, input: &Value, seen: Option<&Seen>) -> Value {
        let mut hidden = g.norm("input_layernorm", input, Norm::Rms, false);
        hidden = g.module("cross_attn", |g| self.cross_attention(g, &hidden, seen));
        hidden = gate(g, "cross_attn_attn_gate", &hidden);
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::Rms, false);
        hidden = self.mlp(g, &hidden);
        if let Some(seen) = seen {
            let rows = g.squeeze(&seen.text_rows, 1);
            hidden = g.mul(&rows, &hidden);
        }
        hidden = gate(g, "cross_attn_mlp_gate", &hidden);
        g.add(&residual, &hidden)
    }

    fn mlp(&self, g: &mut Graph, x: &Value) -> Value {
        let names = ["gate_proj", "up_proj", "down_proj"];
        g.module("mlp", |g| gated_mlp(g, x, names, self.width, self.activation, false))
    }

    fn cross_attention(&self, g: &mut Graph, hidden: &Value, seen: Option<&Seen>) -> Value {
        let (kv_heads, dim) = (self.attention.kv_heads, self.attention.head_dim);
        let mut query = self.attention.project(g, hidden, 0, self.attention.heads);
        query = g.norm("q_norm", &query, Norm::Rms, false);
        let update =
            CacheUpdate { kind: CacheKind::Cross, heads: kv_heads, key_dim: dim, value_dim: dim, true_heads: kv_heads };
        let (key, value) = match seen {
            Some(Seen { rows: Some(rows), length, .. }) => self.image_keys(g, rows, *length, update),
            Some(seen) => {
                g.declare_only(|g| self.image_keys(g, hidden, hidden.size(1), update));
                let shape = Shape::from([hidden.size(0), kv_heads, seen.length, dim]);
                let mut both = g.run_many(Op::Cache(update), &[], &[shape, shape]);
                let value = both.pop();
                (both.pop().unwrap_or_else(|| query.clone()), value.unwrap_or_else(|| query.clone()))
            }
            None => self.image_keys(g, hidden, hidden.size(1), update),
        };
        let mut spec = self.attention.spec(None);
        spec.causal = false;
        let attended = attend_over(g, spec, &query, &key, &value, seen.map(|seen| &seen.mask));
        g.linear("o_proj", &attended, self.hidden, false)
    }

    fn image_keys(&self, g: &mut Graph, rows: &Value, length: u64, update: CacheUpdate) -> (Value, Value) {
        let (batch, heads, dim) = (g.inputs.batch, self.attention.kv_heads, self.attention.head_dim);
        let mut key = g.linear("k_proj", rows, heads.saturating_mul(dim), false);
        let mut value = g.linear("v_proj", rows, heads.saturating_mul(dim), false);
        key = g.view(&key, [batch, length, heads, dim]);
        value = g.view(&value, [batch, length, heads, dim]);
        key = g.transpose(&key, 1, 2);
        value = g.transpose(&value, 1, 2);
        key = g.norm("k_norm", &key, Norm::Rms, false);
        let mut both = g.run_many(Op::Cache(update), &[&key, &value], &[key.shape(), value.shape()]);
        match (both.pop(), both.pop()) {
            (Some(value), Some(key)) => (key, value),
            _ => (key, value),
        }
    }
}

/// The image, projected, and the masks that go with it; in a decoding step the image is in the cache already.
fn look(g: &mut Graph, vision: &Vision, width: u64, features: u64) -> Option<Seen> {
    let given = g.inputs.images;
    let images = given.map_or(1, |images| images.count.max(1));
    let length = images.div_ceil(g.inputs.batch.max(1)) * vision.tiles() * vision.rows();
    let rows = tower(g, given.is_some(), |g| {
        let seen = g.module("vision_model", |g| vision.model(g));
        if seen.size(-1) != features && given.is_some() {
            g.fail(format!("vision_output_dim is {features}, but the tower gives {}", seen.size(-1)));
        }
        let weight = g.parameter("multi_modal_projector.weight", [width, features], Role::Linear);
        let projected = g.linear_with("multi_modal_projector", weight, &seen, width, true);
        g.reshape(&projected, [seen.size(0) * seen.size(1), seen.size(2), width])
    });
    given?;
    if let Some(rows) = &rows {
        let total = rows.size(0).saturating_mul(rows.size(1));
        if total != length.saturating_mul(g.inputs.batch) {
            g.fail("every sample needs as many images as the others");
            return None;
        }
    }
    let like = rows.clone().unwrap_or_else(|| g.fill(crate::dtype::DType::BF16, [1]));
    let (mask, text_rows) = cross_mask(g, &like, length / vision.rows(), vision.rows());
    Some(Seen { rows, length, mask, text_rows })
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    if c.model_type() == "mllama_text_model" {
        let text = Text::read(c)?;
        let hidden = g.module("model", |g| text.model(g, None));
        causal_lm_head(g, hidden, text.vocab, None, false);
        return Ok(());
    }
    let text = Text::read(&c.section("text_config"))?;
    if task == Task::CausalLm {
        let hidden = g.module("model", |g| text.model(g, None));
        causal_lm_head(g, hidden, text.vocab, None, false);
        return Ok(());
    }
    let vision = Vision::read(&c.section("vision_config"))?;
    let features = c.section("vision_config").size_or(&["vision_output_dim"], 7680)?;
    let body = |g: &mut Graph| {
        let seen = look(g, &vision, text.hidden, features);
        g.module("language_model", |g| text.model(g, seen.as_ref()))
    };
    if task == Task::Base {
        let hidden = body(g);
        g.run(Op::Return, &[&hidden], []);
        return Ok(());
    }
    let hidden = g.module("model", body);
    causal_lm_head(g, hidden, text.vocab, None, false);
    Ok(())
}
