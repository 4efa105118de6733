//! Heads and losses.

use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::graph::{Graph, Value};
use crate::model::op::{Binary, Input, Loss, Op, ParameterId};

/// The head of a causal language model: logits (of the last position only when `generate` asks), the loss, the output.
///
/// `tied` is the embedding table when head and embedding share it.
pub fn causal_lm_head(g: &mut Graph, hidden: Value, vocab: u64, tied: Option<ParameterId>, bias: bool) {
    causal_lm_head_named(g, "lm_head", hidden, vocab, tied, bias, |_, logits| logits);
}

/// The same under another name, with something done to the logits (scaling, soft caps) before the loss.
pub fn causal_lm_head_named(
    g: &mut Graph,
    name: &str,
    hidden: Value,
    vocab: u64,
    tied: Option<ParameterId>,
    bias: bool,
    finish: impl FnOnce(&mut Graph, Value) -> Value,
) {
    let kept = kept_positions(g, &hidden);
    let logits = match tied {
        Some(weight) => g.linear_with(name, weight, &kept, vocab, bias),
        None => g.linear(name, &kept, vocab, bias),
    };
    let logits = finish(g, logits);
    loss_and_return(g, Loss::CausalLm, logits);
}

/// The positions whose logits are asked for (`hidden_states[:, slice_indices, :]`).
pub fn kept_positions(g: &mut Graph, hidden: &Value) -> Value {
    let Some(last) = g.inputs.last_logits else { return hidden.clone() };
    let last = last.clamp(1, hidden.size(1).max(1));
    g.slice(hidden, 1, hidden.size(1).max(1) - last, last)
}

/// The loss when there are labels, then the output object.
pub fn loss_and_return(g: &mut Graph, kind: Loss, logits: Value) {
    loss_and_return_with(g, kind, logits, &[]);
}

/// The same with more in the output object.
pub fn loss_and_return_with(g: &mut Graph, kind: Loss, logits: Value, more: &[&Value]) {
    let loss = g.inputs.labels.then(|| {
        let sizes = logits.shape();
        let labels = g.input(Input::Labels, &sizes.sizes()[..sizes.rank().saturating_sub(1)]);
        g.run(Op::Loss(kind), &[&logits, &labels], [])
    });
    let outputs: Vec<&Value> = loss.iter().chain([&logits]).chain(more.iter().copied()).collect();
    g.run(Op::Return, &outputs, []);
}

/// The head of a classifier: the loss when there are labels (one per sample), then the output object.
pub fn classification_head(g: &mut Graph, name: &str, pooled: &Value, labels: &Labels) {
    let logits = if labels.count > 0 { g.linear(name, pooled, labels.count, true) } else { pooled.clone() };
    loss_and_return(g, labels.loss, logits);
}

/// The head that classifies every token.
pub fn token_head(g: &mut Graph, name: &str, hidden: &Value, (classes, loss): (u64, Loss), bias: bool) {
    let logits = g.linear(name, hidden, classes, bias);
    loss_and_return(g, loss, logits);
}

/// The head that finds where an answer begins and ends: two classes per token, and a loss over the positions of each.
pub fn answer_head(g: &mut Graph, name: &str, hidden: &Value) {
    let logits = g.linear(name, hidden, 2, true);
    let mut ends = Vec::new();
    for end in 0..2 {
        let column = g.slice(&logits, -1, end, 1);
        let column = g.squeeze(&column, -1);
        ends.push(g.contiguous(&column));
    }
    let loss = g.inputs.labels.then(|| {
        // Positions behind the last token are clamped to it.
        let positions: Vec<Value> = ends
            .iter()
            .map(|end| {
                let position = g.input(Input::Labels, [end.size(0)]);
                g.scalar(Binary::Add, &position)
            })
            .collect();
        let losses: Vec<Value> = ends
            .iter()
            .zip(&positions)
            .map(|(end, position)| g.run(Op::Loss(Loss::CrossEntropy), &[end, position], []))
            .collect();
        let sum = g.add(&losses[0], &losses[1]);
        g.scalar(Binary::Div, &sum)
    });
    let outputs: Vec<&Value> = loss.iter().chain(&ends).collect();
    g.run(Op::Return, &outputs, []);
}

/// The classes of a classifier.
#[derive(Debug, Clone, Copy)]
pub struct Labels {
    /// How many.
    pub count: u64,
    /// The loss that transformers chooses for them.
    pub loss: Loss,
}

impl Labels {
    /// From `id2label`, else `num_labels`, else 2; the loss by `problem_type`.
    pub fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let named = c.get("id2label").and_then(serde_json::Value::as_object).map(|map| map.len() as u64);
        let count = named.map_or_else(|| c.size_or(&["num_labels"], 2), Ok)?;
        let loss = match c.str_or("problem_type", if count == 1 { "regression" } else { "" }) {
            "regression" => Loss::MeanSquared,
            "multi_label_classification" => Loss::BinaryCrossEntropy,
            _ => Loss::CrossEntropy,
        };
        Ok(Self { count, loss })
    }
}
