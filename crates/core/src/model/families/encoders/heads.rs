//! Heads that the encoders share.

use crate::model::blocks::head::{Labels, answer_head, loss_and_return, token_head};
use crate::model::op::{Activation, Loss, Norm, Op, ParameterId, Role};
use crate::model::task::CHOICES;
use crate::model::{Config, Graph, ModelError, Task, Value};

/// `decoder(norm(activation(dense(x))))`: the names of dense and norm, the width between them.
pub(super) struct LmHead {
    pub(super) names: [&'static str; 2],
    pub(super) width: u64,
    pub(super) activation: Activation,
    pub(super) vocab: u64,
}

impl LmHead {
    /// The logits. With a tied table the module's own `bias` is the decoder's as well.
    pub(super) fn logits(&self, g: &mut Graph, hidden: &Value, table: Option<ParameterId>) -> Value {
        let x = self.transform(g, hidden);
        let bias = g.parameter("bias", [self.vocab], Role::Bias);
        match table {
            Some(table) => {
                g.alias("decoder.bias", bias);
                g.linear_with("decoder", table, &x, self.vocab, true)
            }
            None => g.linear("decoder", &x, self.vocab, true),
        }
    }

    /// What comes before the decoder.
    pub(super) fn transform(&self, g: &mut Graph, hidden: &Value) -> Value {
        let mut x = g.linear(self.names[0], hidden, self.width, true);
        x = g.activation(self.activation, &x);
        g.norm(self.names[1], &x, Norm::Layer, true)
    }
}

/// The loss of a language head: the newer one of causal models shifts and widens.
pub(super) fn language_loss(task: Task) -> Loss {
    if task == Task::CausalLm { Loss::CausalLm } else { Loss::CrossEntropy }
}

/// `hidden[:, 0]`.
pub(super) fn first_token(g: &mut Graph, hidden: &Value) -> Value {
    let first = g.slice(hidden, 1, 0, 1);
    g.squeeze(&first, 1)
}

/// BERT's pooler: the first token through a linear and tanh.
pub(super) fn pooler(g: &mut Graph, hidden: &Value) -> Value {
    let first = first_token(g, hidden);
    let pooled = g.linear("dense", &first, hidden.size(-1), true);
    g.activation(Activation::Tanh, &pooled)
}

/// RoBERTa's classifier: the first token, dropout, dense, an activation, dropout, `out_proj`.
pub(super) fn dense_classifier(g: &mut Graph, hidden: &Value, kind: Activation, dropout: f64, labels: &Labels) {
    let logits = g.module("classifier", |g| {
        let mut x = first_token(g, hidden);
        x = g.dropout(&x, dropout);
        x = g.linear("dense", &x, hidden.size(-1), true);
        x = g.activation(kind, &x);
        x = g.dropout(&x, dropout);
        g.linear("out_proj", &x, labels.count, true)
    });
    loss_and_return(g, labels.loss, logits);
}

/// Heads over every token: classes (behind dropout), or where an answer begins and ends.
pub(super) fn over_tokens(
    c: &Config<'_>,
    task: Task,
    g: &mut Graph,
    hidden: &Value,
    dropout: f64,
) -> Result<(), ModelError> {
    match task {
        Task::QuestionAnswering => answer_head(g, "qa_outputs", hidden),
        _ => {
            let dropped = g.dropout(hidden, dropout);
            token_head(g, "classifier", &dropped, (Labels::read(c)?.count, Loss::CrossEntropy), true);
        }
    }
    Ok(())
}

/// One number for each answer, and a loss over the answers to a question.
pub(super) fn choice_head(g: &mut Graph, pooled: &Value) {
    let scores = g.linear("classifier", pooled, 1, true);
    let logits = g.view(&scores, [scores.size(0) / CHOICES, CHOICES]);
    loss_and_return(g, Loss::CrossEntropy, logits);
}

/// What `AutoModel` returns.
pub(super) fn return_base(g: &mut Graph, hidden: &Value, pooled: Option<&Value>) {
    let outputs: Vec<&Value> = std::iter::once(hidden).chain(pooled).collect();
    g.run(Op::Return, &outputs, []);
}

/// The error for a head that an encoder does not have.
pub(super) fn no_head(family: &str, task: Task) -> ModelError {
    ModelError::Unsupported {
        what: format!("{family} for {task:?}"),
        hint: "use AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering or AutoModelForMultipleChoice".to_owned(),
    }
}
