//! GPT-NeoX (GPT-NeoX-20B, Pythia, StableLM-alpha, RedPajama-INCITE, Dolly).

use crate::model::Family;
use crate::model::blocks::causal::{LmHead, Tokens, classifier};
use crate::model::blocks::{attention, mlp, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Attention, EagerStyle, Input, Loss, Mask, Norm, Rotary, RotaryTable};
use crate::model::tensor_plans::{TensorRules, TensorStyle};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// GPT-NeoX.
pub const FAMILY: Family = Family {
    name: "GPT-NeoX",
    model_types: &["gpt_neox"],
    facts: Facts {
        tasks: Some(&[Task::CausalLm, Task::Base, Task::SequenceClassification]),
        attention: AttentionKernels::FlashAndFlex,
        lora: &["query_key_value"],
        ia3: &["query_key_value", "dense_4h_to_h"],
        ia3_feedforward: &["dense_4h_to_h"],
        tensor_plan: &[SPLIT],
        stored_names: &[("lm_head.", "embed_out.")],
        ..Facts::DEFAULT
    },
    build,
};

/// How transformers splits its layers.
const SPLIT: TensorRules = &[
    ("attention.query_key_value", TensorStyle::Column),
    ("attention.dense", TensorStyle::Row),
    ("mlp.dense_h_to_4h", TensorStyle::Column),
    ("mlp.dense_4h_to_h", TensorStyle::Row),
];

struct GptNeoX {
    vocab: u64,
    hidden: u64,
    layers: u64,
    heads: u64,
    head_dim: u64,
    width: u64,
    rotary_dim: u64,
    activation: Activation,
    attention_bias: bool,
    attention_dropout: f64,
    hidden_dropout: f64,
    parallel: bool,
    tied: bool,
}

impl GptNeoX {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], 6144)?;
        let heads = read::positive(c, &["num_attention_heads"], 64)?;
        let head_dim = read::head_dim(c, hidden, heads)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 50432)?,
            hidden,
            layers: c.layers(&["num_hidden_layers"], 44)?,
            heads,
            head_dim,
            width: c.size_or(&["intermediate_size"], 24576)?,
            rotary_dim: read::rotary_dim(c, head_dim, 0.25)?,
            activation: read::activation(c, "hidden_act", "gelu")?,
            attention_bias: c.flag("attention_bias", true)?,
            attention_dropout: c.number("attention_dropout", 0.0)?,
            hidden_dropout: c.number("hidden_dropout", 0.0)?,
            parallel: c.flag("use_parallel_residual", true)?,
            tied: c.flag("tie_word_embeddings", false)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let embeddings = g.embedding("embed_in", &ids, self.vocab, self.hidden);
        let mask = attention::mask(g, Mask::Causal);
        let mut hidden = g.dropout(&embeddings, self.hidden_dropout);
        let table = RotaryTable { dim: self.rotary_dim, axes: 1, doubled: true, fp32: false };
        let rope = g.rotary_table("rotary_emb", g.inputs.seq, table);
        for index in 0..self.layers {
            hidden = g.layer("layers", index, |g| self.layer(g, &hidden, &rope, &mask));
        }
        g.norm("final_layer_norm", &hidden, Norm::Layer, true)
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let mut attended = {
            let normed = g.norm("input_layernorm", input, Norm::Layer, true);
            g.module("attention", |g| self.attention(g, &normed, rope, mask))
        };
        attended = g.dropout(&attended, self.hidden_dropout);
        if !self.parallel {
            attended = g.add(&attended, input);
        }
        let mut wide = {
            let normed =
                g.norm("post_attention_layernorm", if self.parallel { input } else { &attended }, Norm::Layer, true);
            let names = ["dense_h_to_4h", "dense_4h_to_h"];
            g.module("mlp", |g| mlp(g, &normed, names, self.width, self.activation, true))
        };
        wide = g.dropout(&wide, self.hidden_dropout);
        let sum = g.add(&wide, &attended);
        if self.parallel { g.add(&sum, input) } else { sum }
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let head_dim = self.head_dim;
        let joined = g.linear("query_key_value", hidden, 3 * self.heads * head_dim, self.attention_bias);
        let joined = attention::split_heads(g, joined, self.heads, 3 * head_dim);
        let (mut query, mut key, mut value) = g.split3(&joined, -1, [head_dim; 3]);
        (query, key) = self.rotate(g, query, key, rope);
        (key, value) = g.cache(attention::grouped_cache(self.heads, head_dim, None), &key, &value);
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
        g.linear("dense", &merged, self.hidden, self.attention_bias)
    }

    /// Both parts are joined again even when every dimension is rotated.
    fn rotate(&self, g: &mut Graph, query: Value, key: Value, (cosine, sine): &(Value, Value)) -> (Value, Value) {
        let head_dim = query.size(-1);
        let turned = self.rotary_dim.min(head_dim);
        let query_turned = g.slice(&query, -1, 0, turned);
        let query_passed = g.slice(&query, -1, turned, head_dim - turned);
        let key_turned = g.slice(&key, -1, 0, turned);
        let key_passed = g.slice(&key, -1, turned, head_dim - turned);
        let (mut query, mut key) = attention::rotate_whole(g, Rotary::Half, &query_turned, &key_turned, cosine, sine);
        query = g.cat(&[&query, &query_passed], -1);
        key = g.cat(&[&key, &key_passed], -1);
        (query, key)
    }
}

/// It reads one key alone, and its loss, the newer one, widens.
const TOKENS: Tokens = Tokens { dropout: &["classifier_dropout"], loss: Loss::CrossEntropyFp32, ..Tokens::USUAL };

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = GptNeoX::read(c)?;
    let head = LmHead { vocab: model.vocab, tied: model.tied.then_some("embed_in"), bias: false };
    classifier(c, g, task, "gpt_neox", (head, &TOKENS), |g| model.model(g))
}
