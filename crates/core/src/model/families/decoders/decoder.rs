//! What every decoder here offers, alone and inside a multimodal model.

use crate::model::blocks::{head, read};
use crate::model::op::{Input, Loss, Op};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// The token table, and whether the head shares it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Vocabulary {
    /// Tokens.
    pub rows: u64,
    /// Width of the model.
    pub width: u64,
    /// Whether the head is the same matrix.
    pub tied: bool,
}

impl Vocabulary {
    /// Reads it; what is absent is the class default: tokens, width, tied or not.
    pub(crate) fn read(c: &Config<'_>, rows: u64, width: u64, tied: bool) -> Result<Self, ModelError> {
        Ok(Self {
            rows: c.size_or(&["vocab_size"], rows)?,
            width: read::positive(c, &["hidden_size", "n_embd", "d_model"], width)?,
            tied: c.flag("tie_word_embeddings", tied)?,
        })
    }
}

/// A text model: everything runs inside the current module, the head excepted.
pub(crate) trait Decoder {
    /// The token table.
    fn vocabulary(&self) -> Vocabulary;

    /// Token ids to embeddings.
    fn embed(&self, g: &mut Graph, ids: &Value) -> Value {
        let table = self.vocabulary();
        g.embedding("embed_tokens", ids, table.rows, table.width)
    }

    /// Embeddings `[batch, seq, hidden]` through all layers and the last norm.
    fn model(&self, g: &mut Graph, embeddings: Value) -> Value;

    /// Whether the head has a bias.
    fn head_bias(&self) -> bool {
        false
    }

    /// What is done to the logits before the loss.
    fn finish_logits(&self, _g: &mut Graph, logits: Value) -> Value {
        logits
    }
}

/// The classes transformers makes of a decoder: bare, with a classifier, or with a language head.
pub(crate) fn build(c: &Config<'_>, task: Task, g: &mut Graph, decoder: &dyn Decoder) -> Result<(), ModelError> {
    match task {
        Task::Base => {
            let hidden = from_tokens(g, decoder);
            g.run(Op::Return, &[&hidden], []);
        }
        Task::SequenceClassification => {
            let named = c.section("id2label").keys().count() as u64;
            let labels = c.size_or(&["num_labels"], if named == 0 { 2 } else { named })?;
            let hidden = g.module("model", |g| from_tokens(g, decoder));
            let scores = g.linear("score", &hidden, labels, false);
            let pooled = g.slice(&scores, 1, 0, 1);
            let pooled = g.squeeze(&pooled, 1);
            head::loss_and_return(g, Loss::CrossEntropy, pooled);
        }
        _ => {
            let hidden = g.module("model", |g| from_tokens(g, decoder));
            language_head(g, decoder, hidden, "model.embed_tokens.weight");
        }
    }
    Ok(())
}

/// `lm_head`, the loss and the output; `table` is the full name of the token table.
pub(crate) fn language_head(g: &mut Graph, decoder: &dyn Decoder, hidden: Value, table: &str) {
    let vocabulary = decoder.vocabulary();
    let tied = if vocabulary.tied { g.find(table) } else { None };
    let finish = |g: &mut Graph, logits| decoder.finish_logits(g, logits);
    head::causal_lm_head_named(g, "lm_head", hidden, vocabulary.rows, tied, decoder.head_bias(), finish);
}

fn from_tokens(g: &mut Graph, decoder: &dyn Decoder) -> Value {
    let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
    let embeddings = decoder.embed(g, &ids);
    decoder.model(g, embeddings)
}
