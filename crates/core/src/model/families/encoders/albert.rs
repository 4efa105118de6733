//! ALBERT: one group of layers run again and again, factorised embeddings.

use super::heads::{LmHead, choice_head, first_token, no_head, over_tokens, return_base};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::head::{Labels, classification_head, loss_and_return, loss_and_return_with};
use crate::model::blocks::{EncoderAttention, encoder, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Input, Loss, Norm};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// ALBERT.
pub const FAMILY: Family = Family {
    name: "ALBERT",
    model_types: &["albert"],
    facts: Facts { attention: AttentionKernels::Flash, ..Facts::DEFAULT },
    build,
};

struct Albert {
    vocab: u64,
    embedding: u64,
    hidden: u64,
    layers: u64,
    groups: u64,
    inner: u64,
    width: u64,
    positions: u64,
    types: u64,
    activation: Activation,
    dropout: f64,
    classifier_dropout: f64,
    attention: EncoderAttention,
    tied: bool,
}

impl Albert {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], 4096)?;
        let heads = read::positive(c, &["num_attention_heads"], 64)?;
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["query", "key", "value", "dense"]);
        attention.dropout = c.number("attention_probs_dropout_prob", 0.0)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 30000)?,
            embedding: c.size_or(&["embedding_size"], 128)?,
            hidden,
            layers: c.layers(&["num_hidden_layers"], 12)?,
            groups: c.layers(&["num_hidden_groups"], 1)?.max(1),
            inner: c.layers(&["inner_group_num"], 1)?,
            width: c.size_or(&["intermediate_size"], 16384)?,
            positions: c.size_or(&["max_position_embeddings"], 512)?,
            types: c.size_or(&["type_vocab_size"], 2)?,
            activation: read::activation(c, "hidden_act", "gelu_new")?,
            dropout: c.number("hidden_dropout_prob", 0.0)?,
            classifier_dropout: c.number("classifier_dropout_prob", 0.1)?,
            attention,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let embeddings = g.module("embeddings", |g| self.embeddings(g, &ids));
        let mask = encoder::full_mask(g, &embeddings);
        g.module("encoder", |g| {
            let mut hidden = g.linear("embedding_hidden_mapping_in", &embeddings, self.hidden, true);
            for index in 0..self.layers {
                let group = index * self.groups / self.layers;
                hidden = g.module(&format!("albert_layer_groups.{group}"), |g| {
                    let mut hidden = hidden.clone();
                    for inner in 0..self.inner {
                        hidden = g.layer("albert_layers", inner, |g| self.layer(g, &hidden, &mask));
                    }
                    hidden
                });
            }
            hidden
        })
    }

    fn embeddings(&self, g: &mut Graph, ids: &Value) -> Value {
        let (batch, seq) = (ids.size(0), ids.size(1));
        let held = g.held("position_ids", [1, self.positions], DType::I64);
        let positions = g.slice(&held, 1, 0, seq);
        let types = {
            let held = g.held("token_type_ids", [1, self.positions], DType::I64);
            let types = g.gather(&held, 1, &positions);
            g.expand(&types, [batch, seq])
        };
        let words = g.embedding("word_embeddings", ids, self.vocab, self.embedding);
        let types = g.embedding("token_type_embeddings", &types, self.types, self.embedding);
        let mut embeddings = g.add(&words, &types);
        let places = g.embedding("position_embeddings", &positions, self.positions, self.embedding);
        embeddings = g.add(&embeddings, &places);
        embeddings = g.norm("LayerNorm", &embeddings, Norm::Layer, true);
        g.dropout(&embeddings, self.dropout)
    }

    fn layer(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let attended = g.module("attention", |g| {
            let mut attended = self.attention.run(g, input, Some(mask));
            attended = g.dropout(&attended, self.dropout);
            let sum = g.add(input, &attended);
            g.norm("LayerNorm", &sum, Norm::Layer, true)
        });
        let mut wide = g.linear("ffn", &attended, self.width, true);
        wide = g.activation(self.activation, &wide);
        let output = g.linear("ffn_output", &wide, self.hidden, true);
        drop(wide);
        let sum = g.add(&output, &attended);
        g.norm("full_layer_layer_norm", &sum, Norm::Layer, true)
    }

    fn pooled(&self, g: &mut Graph, hidden: &Value) -> Value {
        let first = first_token(g, hidden);
        let pooled = g.linear("pooler", &first, self.hidden, true);
        g.activation(Activation::Tanh, &pooled)
    }

    fn predictions(&self, g: &mut Graph, hidden: &Value) -> Value {
        let table = if self.tied { g.find("albert.embeddings.word_embeddings.weight") } else { None };
        let names = ["dense", "LayerNorm"];
        let head = LmHead { names, width: self.embedding, activation: self.activation, vocab: self.vocab };
        g.module("predictions", |g| head.logits(g, hidden, table))
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let albert = Albert::read(c)?;
    match task {
        Task::Base => {
            let hidden = albert.model(g);
            let pooled = albert.pooled(g, &hidden);
            return_base(g, &hidden, Some(&pooled));
        }
        Task::MaskedLm | Task::CausalLm => {
            let hidden = g.module("albert", |g| albert.model(g));
            let logits = albert.predictions(g, &hidden);
            loss_and_return(g, Loss::CrossEntropy, logits);
        }
        Task::PreTraining => {
            let labels = Labels::read(c)?;
            let hidden = g.module("albert", |g| albert.model(g));
            let mut pooled = g.module("albert", |g| albert.pooled(g, &hidden));
            let logits = albert.predictions(g, &hidden);
            pooled = g.dropout(&pooled, albert.classifier_dropout);
            let order = g.module("sop_classifier", |g| g.linear("classifier", &pooled, labels.count, true));
            loss_and_return_with(g, Loss::CrossEntropy, logits, &[&order]);
        }
        Task::SequenceClassification | Task::MultipleChoice => {
            let labels = Labels::read(c)?;
            let hidden = g.module("albert", |g| albert.model(g));
            let mut pooled = g.module("albert", |g| albert.pooled(g, &hidden));
            pooled = g.dropout(&pooled, albert.classifier_dropout);
            match task {
                Task::MultipleChoice => choice_head(g, &pooled),
                _ => classification_head(g, "classifier", &pooled, &labels),
            }
        }
        Task::TokenClassification | Task::QuestionAnswering => {
            let hidden = g.module("albert", |g| albert.model(g));
            over_tokens(c, task, g, &hidden, albert.classifier_dropout)?;
        }
        _ => return Err(no_head("ALBERT", task)),
    }
    Ok(())
}
