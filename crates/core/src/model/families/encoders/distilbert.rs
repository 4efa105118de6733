//! DistilBERT: BERT without token types and pooler.

use super::heads::{choice_head, first_token, no_head, over_tokens, return_base};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::head::{Labels, classification_head, loss_and_return};
use crate::model::blocks::{EncoderAttention, encoder, mlp, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Input, Loss, Norm};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// DistilBERT.
pub const FAMILY: Family = Family {
    name: "DistilBERT",
    model_types: &["distilbert"],
    facts: Facts { attention: AttentionKernels::Flash, ..Facts::DEFAULT },
    build,
};

struct DistilBert {
    vocab: u64,
    hidden: u64,
    layers: u64,
    width: u64,
    positions: u64,
    activation: Activation,
    dropout: f64,
    classifier_dropout: f64,
    attention: EncoderAttention,
    tied: bool,
}

impl DistilBert {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["dim", "hidden_size"], 768)?;
        let heads = read::positive(c, &["n_heads", "num_attention_heads"], 12)?;
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["q_lin", "k_lin", "v_lin", "out_lin"]);
        attention.dropout = c.number("attention_dropout", 0.1)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 30522)?,
            hidden,
            layers: c.layers(&["n_layers", "num_hidden_layers"], 6)?,
            width: c.size_or(&["hidden_dim"], 3072)?,
            positions: c.size_or(&["max_position_embeddings"], 512)?,
            activation: read::activation(c, "activation", "gelu")?,
            dropout: c.number("dropout", 0.1)?,
            classifier_dropout: c.number("seq_classif_dropout", 0.2)?,
            attention,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let embeddings = g.module("embeddings", |g| self.embeddings(g, &ids));
        let mask = encoder::full_mask(g, &embeddings);
        g.module("transformer", |g| {
            let mut hidden = embeddings.clone();
            for index in 0..self.layers {
                hidden = g.layer("layer", index, |g| self.layer(g, &hidden, &mask));
            }
            hidden
        })
    }

    fn embeddings(&self, g: &mut Graph, ids: &Value) -> Value {
        let words = g.embedding("word_embeddings", ids, self.vocab, self.hidden);
        let held = g.held("position_ids", [1, self.positions], DType::I64);
        let positions = g.slice(&held, 1, 0, ids.size(1));
        let places = g.embedding("position_embeddings", &positions, self.positions, self.hidden);
        let mut embeddings = g.add(&words, &places);
        embeddings = g.norm("LayerNorm", &embeddings, Norm::Layer, true);
        g.dropout(&embeddings, self.dropout)
    }

    fn layer(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let mut attended = g.module("attention", |g| self.attention.run(g, input, Some(mask)));
        attended = {
            let sum = g.add(&attended, input);
            g.norm("sa_layer_norm", &sum, Norm::Layer, true)
        };
        let output = g.module("ffn", |g| {
            let x = mlp(g, &attended, ["lin1", "lin2"], self.width, self.activation, true);
            g.dropout(&x, self.dropout)
        });
        let sum = g.add(&output, &attended);
        g.norm("output_layer_norm", &sum, Norm::Layer, true)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = DistilBert::read(c)?;
    match task {
        Task::Base => {
            let hidden = model.model(g);
            return_base(g, &hidden, None);
        }
        Task::MaskedLm | Task::CausalLm | Task::PreTraining => {
            let hidden = g.module("distilbert", |g| model.model(g));
            let mut x = g.linear("vocab_transform", &hidden, model.hidden, true);
            x = g.activation(model.activation, &x);
            x = g.norm("vocab_layer_norm", &x, Norm::Layer, true);
            let table = if model.tied { g.find("distilbert.embeddings.word_embeddings.weight") } else { None };
            x = match table {
                Some(table) => g.linear_with("vocab_projector", table, &x, model.vocab, true),
                None => g.linear("vocab_projector", &x, model.vocab, true),
            };
            loss_and_return(g, Loss::CrossEntropy, x);
        }
        Task::SequenceClassification | Task::MultipleChoice => {
            let labels = Labels::read(c)?;
            let hidden = g.module("distilbert", |g| model.model(g));
            let mut pooled = first_token(g, &hidden);
            pooled = g.linear("pre_classifier", &pooled, model.hidden, true);
            pooled = g.activation(Activation::Relu, &pooled);
            pooled = g.dropout(&pooled, model.classifier_dropout);
            match task {
                Task::MultipleChoice => choice_head(g, &pooled),
                _ => classification_head(g, "classifier", &pooled, &labels),
            }
        }
        Task::TokenClassification | Task::QuestionAnswering => {
            let mut hidden = g.module("distilbert", |g| model.model(g));
            if task == Task::QuestionAnswering {
                hidden = g.dropout(&hidden, c.number("qa_dropout", 0.1)?);
            }
            over_tokens(c, task, g, &hidden, model.dropout)?;
        }
        _ => return Err(no_head("DistilBERT", task)),
    }
    Ok(())
}
