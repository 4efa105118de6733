//! OPT (and Galactica): learned positions with an offset, ReLU, norms before or after.

use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::causal::{LmHead, Tokens, classifier};
use crate::model::blocks::{attention, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Attention, Binary, EagerStyle, Input, Mask, Norm};
use crate::model::{Breaks, Config, Graph, ModelError, Shape, Task, Value};

/// OPT.
pub const FAMILY: Family = Family {
    name: "OPT",
    model_types: &["opt"],
    facts: Facts {
        attention: AttentionKernels::Flash,
        lora: &["q_proj", "v_proj"],
        ia3: &["q_proj", "k_proj", "fc2"],
        ia3_feedforward: &["fc2"],
        ..Facts::DEFAULT
    },
    build,
};

/// Rows of the position table before the first position.
const OFFSET: u64 = 2;

/// OPT's decoder.
#[derive(Debug)]
pub(crate) struct Opt {
    /// Rows of the vocabulary.
    pub(crate) vocab: u64,
    /// Width of the layers.
    pub(crate) hidden: u64,
    /// Width of the embeddings.
    pub(crate) embedding: u64,
    layers: u64,
    heads: u64,
    width: u64,
    positions: u64,
    activation: Activation,
    norm_before: bool,
    final_norm: bool,
    affine: bool,
    bias: bool,
    dropout: f64,
    attention_dropout: f64,
    /// Whether the head shares the embedding table.
    pub(crate) tied: bool,
}

impl Opt {
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], 768)?;
        let norm_before = c.flag("do_layer_norm_before", true)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 50272)?,
            hidden,
            embedding: c.size_or(&["word_embed_proj_dim"], hidden)?,
            layers: c.layers(&["num_hidden_layers"], 12)?,
            heads: read::positive(c, &["num_attention_heads"], 12)?,
            width: c.size_or(&["ffn_dim"], 3072)?,
            positions: c.size_or(&["max_position_embeddings"], 2048)?,
            activation: read::activation(c, "activation_function", "relu")?,
            norm_before,
            final_norm: norm_before && !c.flag("_remove_final_layer_norm", false)?,
            affine: c.flag("layer_norm_elementwise_affine", true)?,
            bias: c.flag("enable_bias", true)?,
            dropout: c.number("dropout", 0.1)?,
            attention_dropout: c.number("attention_dropout", 0.0)?,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    /// `OPTModel`: the decoder in its module. `embeddings` are given by a model that put image features among them.
    pub(crate) fn model(&self, g: &mut Graph, embeddings: Option<Value>) -> Value {
        g.module("decoder", |g| self.decoder(g, embeddings))
    }

    fn decoder(&self, g: &mut Graph, embeddings: Option<Value>) -> Value {
        let (batch, seq, past) = (g.inputs.batch, g.inputs.seq, g.inputs.past);
        let mut embeddings = embeddings.unwrap_or_else(|| {
            let ids = g.input(Input::Tokens, [batch, seq]);
            g.embedding("embed_tokens", &ids, self.vocab, self.embedding)
        });
        let tokens = embeddings.size(1);
        let shape = Shape::from([batch, tokens.saturating_add(past)]);
        let tokens_mask = if g.inputs.mask { g.input(Input::Mask, shape) } else { g.fill(DType::F32, shape) };
        let mut positions = g.cumulative_sum(&tokens_mask, 1);
        positions = {
            let kept = g.mul(&positions, &tokens_mask);
            let from_zero = g.scalar(Binary::Sub, &kept);
            g.to(&from_zero, DType::I64)
        };
        positions = g.slice(&positions, 1, past, tokens);
        let mask = attention::mask(g, Mask::Causal);
        g.limit_positions(self.positions);
        let position_embeddings = {
            let moved = g.scalar(Binary::Add, &positions);
            g.embedding("embed_positions", &moved, self.positions.saturating_add(OFFSET), self.hidden)
        };
        if self.embedding != self.hidden {
            embeddings = g.linear("project_in", &embeddings, self.hidden, false);
        }
        let mut hidden = g.add(&embeddings, &position_embeddings);
        for index in 0..self.layers {
            hidden = g.layer("layers", index, |g| self.layer(g, &hidden, &mask));
        }
        if self.final_norm {
            hidden = self.norm(g, "final_layer_norm", &hidden);
        }
        if self.embedding != self.hidden {
            hidden = g.linear("project_out", &hidden, self.embedding, false);
        }
        hidden
    }

    fn norm(&self, g: &mut Graph, name: &str, x: &Value) -> Value {
        if self.affine { g.norm(name, x, Norm::Layer, true) } else { g.norm(name, x, Norm::LayerPlain, false) }
    }

    fn layer(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let mut hidden = input.clone();
        if self.norm_before {
            hidden = self.norm(g, "self_attn_layer_norm", &hidden);
        }
        hidden = g.module("self_attn", |g| self.attention(g, &hidden, mask));
        hidden = g.dropout(&hidden, self.dropout);
        hidden = g.add(input, &hidden);
        if !self.norm_before {
            hidden = self.norm(g, "self_attn_layer_norm", &hidden);
        }
        let shape = hidden.shape();
        hidden = g.reshape(&hidden, [shape.size(0).saturating_mul(shape.size(1)), shape.size(2)]);
        let residual = hidden.clone();
        if self.norm_before {
            hidden = self.norm(g, "final_layer_norm", &hidden);
        }
        hidden = g.linear("fc1", &hidden, self.width, self.bias);
        hidden = g.activation(self.activation, &hidden);
        hidden = g.linear("fc2", &hidden, self.hidden, self.bias);
        hidden = g.dropout(&hidden, self.dropout);
        hidden = g.add(&residual, &hidden);
        hidden = g.view(&hidden, shape);
        if !self.norm_before {
            hidden = self.norm(g, "final_layer_norm", &hidden);
        }
        hidden
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, mask: &Value) -> Value {
        let (heads, head_dim) = (self.heads, self.hidden / self.heads);
        let mut query = g.linear("q_proj", hidden, self.hidden, self.bias);
        query = g.scale(&query);
        query = attention::split_heads(g, query, heads, head_dim);
        let mut key = g.linear("k_proj", hidden, self.hidden, self.bias);
        let mut value = g.linear("v_proj", hidden, self.hidden, self.bias);
        key = attention::split_heads(g, key, heads, head_dim);
        value = attention::split_heads(g, value, heads, head_dim);
        (key, value) = g.cache(attention::grouped_cache(heads, head_dim, None), &key, &value);
        let spec = Attention {
            groups: 1,
            causal: true,
            dropout_per_mille: (self.attention_dropout.clamp(0.0, 1.0) * 1000.0).round() as u32,
            softcap: false,
            sinks: None,
            eager: EagerStyle::Fp32Softmax,
            sdpa: true,
        };
        let attended = attention::attend(g, spec, &query, &key, &value, Some(mask));
        let merged = attention::join_heads(g, attended);
        g.linear("out_proj", &merged, self.hidden, self.bias)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let opt = Opt::read(c)?;
    g.breaks = Breaks::Layers;
    let head = LmHead { vocab: opt.vocab, tied: opt.tied.then_some("decoder.embed_tokens"), bias: false };
    classifier(c, g, task, "model", (head, &Tokens::USUAL), |g| opt.model(g, None))
}
