//! RoBERTa, XLM-RoBERTa and what is built on them (bge-m3, multilingual-e5, …).

use super::bert::Bert;
use super::heads::{LmHead, choice_head, dense_classifier, language_loss, no_head, over_tokens, pooler, return_base};
use crate::model::Family;
use crate::model::blocks::head::{Labels, loss_and_return};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Role};
use crate::model::{Config, Graph, ModelError, Task};

/// RoBERTa.
pub const FAMILY: Family = Family {
    name: "RoBERTa",
    model_types: &["roberta"],
    facts: Facts {
        tasks: Some(&[Task::MaskedLm, Task::CausalLm, Task::Base, Task::SequenceClassification, Task::PreTraining]),

        attention: AttentionKernels::Flash,
        lora: &["query", "value"],
        ia3: &["key", "value", "output.dense"],
        ia3_feedforward: &["output.dense"],
        registration: &[&["word_embeddings", "token_type_embeddings", "LayerNorm", "position_embeddings"]],
        ..Facts::DEFAULT
    },
    build,
};

/// XLM-RoBERTa.
pub const XLM_ROBERTA: Family = Family {
    name: "XLM-RoBERTa",
    model_types: &["xlm-roberta"],
    facts: Facts {
        ia3: &[],
        ia3_feedforward: &[],
        registration: &[FAMILY.facts.registration[0], &["lm_head", "roberta"]],
        ..FAMILY.facts
    },
    ..FAMILY
};

/// CamemBERT.
pub const CAMEMBERT: Family = Family {
    name: "CamemBERT",
    model_types: &["camembert"],
    facts: Facts { lora: &[], ..XLM_ROBERTA.facts },
    ..FAMILY
};

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let vocab = if c.model_type() == "roberta" { 50265 } else { 30522 };
    let mut bert = Bert::read(c, [vocab, 768, 12, 3072])?;
    bert.counted_positions = true;
    bert.first_position = c.size_or(&["pad_token_id"], 1)?.saturating_add(1);
    match task {
        Task::Base => {
            let hidden = bert.model(g);
            let pooled = g.module("pooler", |g| pooler(g, &hidden));
            return_base(g, &hidden, Some(&pooled));
        }
        Task::MaskedLm | Task::CausalLm | Task::PreTraining => {
            let words = "roberta.embeddings.word_embeddings.weight";
            if bert.tied && c.model_type() != "roberta" {
                // There the head comes first in the module, and so does its name of the shared table.
                let table = g.parameter("lm_head.decoder.weight", [bert.vocab, bert.hidden], Role::Embedding);
                g.alias(words, table);
            }
            let hidden = g.module("roberta", |g| bert.model(g));
            let table = if bert.tied { g.find(words) } else { None };
            let names = ["dense", "layer_norm"];
            let head = LmHead { names, width: bert.hidden, activation: Activation::Gelu, vocab: bert.vocab };
            let logits = g.module("lm_head", |g| head.logits(g, &hidden, table));
            loss_and_return(g, language_loss(task), logits);
        }
        Task::SequenceClassification => {
            let labels = Labels::read(c)?;
            let hidden = g.module("roberta", |g| bert.model(g));
            dense_classifier(g, &hidden, Activation::Tanh, bert.classifier_dropout, &labels);
        }
        Task::MultipleChoice => {
            let hidden = g.module("roberta", |g| bert.model(g));
            let mut pooled = g.module("roberta", |g| g.module("pooler", |g| pooler(g, &hidden)));
            pooled = g.dropout(&pooled, bert.dropout);
            choice_head(g, &pooled);
        }
        Task::TokenClassification | Task::QuestionAnswering => {
            let hidden = g.module("roberta", |g| bert.model(g));
            over_tokens(c, task, g, &hidden, bert.classifier_dropout)?;
        }
        _ => return Err(no_head("RoBERTa", task)),
    }
    Ok(())
}
