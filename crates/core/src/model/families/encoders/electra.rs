//! ELECTRA: BERT's layers, embeddings of their own width, a discriminator or generator on top.

use super::bert::Bert;
use super::heads::{
    LmHead, choice_head, dense_classifier, first_token, language_loss, no_head, over_tokens, return_base,
};
use crate::model::Family;
use crate::model::blocks::head::{Labels, loss_and_return};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Input, Loss, Op};
use crate::model::{Config, Graph, ModelError, Task};

/// ELECTRA.
pub const FAMILY: Family = Family {
    name: "ELECTRA",
    model_types: &["electra"],
    facts: Facts {
        tasks: Some(&[Task::MaskedLm, Task::CausalLm, Task::Base, Task::SequenceClassification, Task::PreTraining]),
        attention: AttentionKernels::Flash,
        lora: &["query", "value"],
        ..Facts::DEFAULT
    },
    build,
};

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let mut bert = Bert::read(c, [30522, 256, 4, 1024])?;
    bert.embedding = c.size_or(&["embedding_size"], 128)?;
    match task {
        Task::Base => {
            let hidden = bert.model(g);
            return_base(g, &hidden, None);
        }
        Task::PreTraining => {
            let hidden = g.module("electra", |g| bert.model(g));
            let logits = g.module("discriminator_predictions", |g| {
                let mut x = g.linear("dense", &hidden, bert.hidden, true);
                x = g.activation(bert.activation, &x);
                let logits = g.linear("dense_prediction", &x, 1, true);
                g.squeeze(&logits, -1)
            });
            if g.inputs.labels {
                let labels = g.input(Input::Labels, logits.shape());
                let loss = g.run(Op::Loss(Loss::BinaryCrossEntropy), &[&logits, &labels], []);
                g.run(Op::Return, &[&loss, &logits], []);
            } else {
                g.run(Op::Return, &[&logits], []);
            }
        }
        Task::MaskedLm | Task::CausalLm => {
            let hidden = g.module("electra", |g| bert.model(g));
            let (names, vocab) = (["dense", "LayerNorm"], bert.vocab);
            let head = LmHead { names, width: bert.embedding, activation: Activation::Gelu, vocab };
            let x = g.module("generator_predictions", |g| head.transform(g, &hidden));
            let table = if bert.tied { g.find("electra.embeddings.word_embeddings.weight") } else { None };
            let logits = match table {
                Some(table) => g.linear_with("generator_lm_head", table, &x, vocab, true),
                None => g.linear("generator_lm_head", &x, vocab, true),
            };
            drop(x);
            loss_and_return(g, language_loss(task), logits);
        }
        Task::SequenceClassification => {
            let labels = Labels::read(c)?;
            let hidden = g.module("electra", |g| bert.model(g));
            dense_classifier(g, &hidden, Activation::Gelu, bert.classifier_dropout, &labels);
        }
        Task::MultipleChoice => {
            let hidden = g.module("electra", |g| bert.model(g));
            let first = first_token(g, &hidden);
            let mut pooled = g.linear("sequence_summary.summary", &first, bert.hidden, true);
            pooled = g.activation(Activation::Gelu, &pooled);
            pooled = g.dropout(&pooled, c.number("summary_last_dropout", 0.1)?);
            choice_head(g, &pooled);
        }
        Task::TokenClassification | Task::QuestionAnswering => {
            let hidden = g.module("electra", |g| bert.model(g));
            over_tokens(c, task, g, &hidden, bert.classifier_dropout)?;
        }
        _ => return Err(no_head("ELECTRA", task)),
    }
    Ok(())
}
