//! BERT, and the layers that RoBERTa and ELECTRA share with it.

use super::heads::{LmHead, choice_head, language_loss, no_head, over_tokens, pooler, return_base};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::head::{Labels, classification_head, loss_and_return, loss_and_return_with};
use crate::model::blocks::{EncoderAttention, encoder, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Binary, Input, Loss, Norm};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// BERT.
pub const FAMILY: Family = Family {
    name: "BERT",
    model_types: &["bert"],
    facts: Facts {
        tasks: Some(&[Task::MaskedLm, Task::CausalLm, Task::Base, Task::SequenceClassification, Task::PreTraining]),

        attention: AttentionKernels::Flash,
        lora: &["query", "value"],
        ia3: &["key", "value", "output.dense"],
        ia3_feedforward: &["output.dense"],
        ..Facts::DEFAULT
    },
    build,
};

pub(crate) struct Bert {
    pub(super) vocab: u64,
    pub(super) hidden: u64,
    /// Width of the embeddings, narrower than the layers in ELECTRA.
    pub(super) embedding: u64,
    pub(super) layers: u64,
    width: u64,
    positions: u64,
    types: u64,
    pub(super) activation: Activation,
    pub(super) dropout: f64,
    pub(super) classifier_dropout: f64,
    attention: EncoderAttention,
    pub(super) tied: bool,
    /// Whether positions are counted from the tokens that are no padding (RoBERTa).
    pub(super) counted_positions: bool,
    /// The row of the first token: rows up to the padding's are no token's where positions are counted.
    pub(super) first_position: u64,
}

impl Bert {
    /// Class defaults: vocabulary, hidden size, heads, width.
    pub(crate) fn read(c: &Config<'_>, defaults: [u64; 4]) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], defaults[1])?;
        let heads = read::positive(c, &["num_attention_heads"], defaults[2])?;
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["query", "key", "value", "dense"]);
        attention.dropout = c.number("attention_probs_dropout_prob", 0.1)?;
        let dropout = c.number("hidden_dropout_prob", 0.1)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], defaults[0])?,
            hidden,
            embedding: hidden,
            layers: c.layers(&["num_hidden_layers"], 12)?,
            width: c.size_or(&["intermediate_size"], defaults[3])?,
            positions: c.size_or(&["max_position_embeddings"], 512)?,
            types: c.size_or(&["type_vocab_size"], 2)?,
            activation: read::activation(c, "hidden_act", "gelu")?,
            dropout,
            classifier_dropout: c.number("classifier_dropout", dropout)?,
            attention,
            tied: c.flag("tie_word_embeddings", true)?,
            counted_positions: false,
            first_position: 0,
        })
    }

    /// The last hidden state.
    pub(crate) fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let mut embeddings = g.module("embeddings", |g| self.embeddings(g, &ids));
        if self.embedding != self.hidden {
            embeddings = g.linear("embeddings_project", &embeddings, self.hidden, true);
        }
        let mask = encoder::full_mask(g, &embeddings);
        g.module("encoder", |g| {
            let mut hidden = embeddings.clone();
            for index in 0..self.layers {
                hidden = g.layer("layer", index, |g| self.layer(g, &hidden, &mask));
            }
            hidden
        })
    }

    fn embeddings(&self, g: &mut Graph, ids: &Value) -> Value {
        let (batch, seq) = (ids.size(0), ids.size(1));
        g.limit_positions(self.positions.saturating_sub(self.first_position));
        let held = g.held("position_ids", [1, self.positions], DType::I64);
        let positions = match self.counted_positions {
            true => counted_positions(g, ids),
            false => g.slice(&held, 1, 0, seq),
        };
        let types = {
            let held = g.held("token_type_ids", [1, self.positions], DType::I64);
            let held = g.expand(&held, [positions.size(0), self.positions]);
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
            let context = g.module("self", |g| self.attention.context(g, input, Some(mask)));
            g.module("output", |g| output(g, &context, input, self.dropout))
        });
        feed_forward(g, &attended, self.width, self.activation, self.dropout)
    }

    fn predictions(&self, g: &mut Graph, hidden: &Value) -> Value {
        let table = if self.tied { g.find("bert.embeddings.word_embeddings.weight") } else { None };
        let names = ["transform.dense", "transform.LayerNorm"];
        let head = LmHead { names, width: self.hidden, activation: self.activation, vocab: self.vocab };
        g.module("cls", |g| g.module("predictions", |g| head.logits(g, hidden, table)))
    }
}

/// `intermediate` and `output` of a BERT layer.
pub(super) fn feed_forward(g: &mut Graph, input: &Value, width: u64, kind: Activation, dropout: f64) -> Value {
    let wide = g.module("intermediate", |g| {
        let mut wide = g.linear("dense", input, width, true);
        wide = g.activation(kind, &wide);
        wide
    });
    g.module("output", |g| output(g, &wide, input, dropout))
}

/// `LayerNorm(dropout(dense(x)) + residual)`.
pub(super) fn output(g: &mut Graph, x: &Value, residual: &Value, dropout: f64) -> Value {
    let mut hidden = g.linear("dense", x, residual.size(-1), true);
    hidden = g.dropout(&hidden, dropout);
    let sum = g.add(&hidden, residual);
    g.norm("LayerNorm", &sum, Norm::Layer, true)
}

/// Positions counted over the tokens that are no padding, in int32 and back.
pub(crate) fn counted_positions(g: &mut Graph, ids: &Value) -> Value {
    let mask = {
        let real = g.compare(ids);
        g.to(&real, DType::I32)
    };
    let counted = {
        let mut sums = g.to(&mask, DType::I64);
        sums = g.cumulative_sum(&sums, 1);
        sums = g.type_as(&sums, &mask);
        g.mul(&sums, &mask)
    };
    let counted = g.to(&counted, DType::I64);
    g.scalar(Binary::Add, &counted)
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let bert = Bert::read(c, [30522, 768, 12, 3072])?;
    match task {
        Task::Base => {
            let hidden = bert.model(g);
            let pooled = g.module("pooler", |g| pooler(g, &hidden));
            return_base(g, &hidden, Some(&pooled));
        }
        Task::MaskedLm | Task::CausalLm => {
            let hidden = g.module("bert", |g| bert.model(g));
            let logits = bert.predictions(g, &hidden);
            loss_and_return(g, language_loss(task), logits);
        }
        Task::PreTraining => {
            let hidden = g.module("bert", |g| bert.model(g));
            let pooled = g.module("bert", |g| g.module("pooler", |g| pooler(g, &hidden)));
            let logits = bert.predictions(g, &hidden);
            let order = g.module("cls", |g| g.linear("seq_relationship", &pooled, 2, true));
            loss_and_return_with(g, Loss::CrossEntropy, logits, &[&order]);
        }
        Task::SequenceClassification => {
            let labels = Labels::read(c)?;
            let hidden = g.module("bert", |g| bert.model(g));
            let mut pooled = g.module("bert", |g| g.module("pooler", |g| pooler(g, &hidden)));
            pooled = g.dropout(&pooled, bert.classifier_dropout);
            classification_head(g, "classifier", &pooled, &labels);
        }
        Task::MultipleChoice => {
            let hidden = g.module("bert", |g| bert.model(g));
            let mut pooled = g.module("bert", |g| g.module("pooler", |g| pooler(g, &hidden)));
            pooled = g.dropout(&pooled, bert.classifier_dropout);
            choice_head(g, &pooled);
        }
        Task::TokenClassification | Task::QuestionAnswering => {
            let hidden = g.module("bert", |g| bert.model(g));
            over_tokens(c, task, g, &hidden, bert.classifier_dropout)?;
        }
        _ => return Err(no_head("BERT", task)),
    }
    Ok(())
}
