//! What vision-language models share: the head on top, and features put where their tokens stand.

use crate::model::blocks::causal_lm_head;
use crate::model::op::{Op, Reduction};
use crate::model::{Graph, Task, Value};

/// The head of a `…ForConditionalGeneration`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    /// Rows of the head.
    pub vocab: u64,
    /// Whether it shares the embedding's table.
    pub tied: bool,
}

/// Runs `body` as the base model: at the top for `AutoModel`, else under `model` with a language head on it.
pub(super) fn with_head(g: &mut Graph, task: Task, head: Head, body: impl FnOnce(&mut Graph) -> Value) {
    if task == Task::Base {
        let hidden = body(g);
        g.run(Op::Return, &[&hidden], []);
        return;
    }
    let hidden = g.module("model", body);
    let tied = if head.tied { g.find("model.language_model.embed_tokens.weight") } else { None };
    causal_lm_head(g, hidden, head.vocab, tied, false);
}

/// Runs a tower where the batch brings its input and this is not a decoding step, else only declares it.
pub(super) fn tower<T>(g: &mut Graph, given: bool, body: impl FnOnce(&mut Graph) -> T) -> Option<T> {
    if given && g.inputs.past == 0 {
        Some(body(g))
    } else {
        g.declare_only(body);
        None
    }
}

/// Where a placeholder token stands: `(ids == token)[..., None]`, counted once for the check of lengths.
pub(super) fn placeholder_mask(g: &mut Graph, ids: &Value) -> Value {
    let mask = g.compare(ids);
    let _count = g.reduce_all(Reduction::Sum, &mask);
    g.unsqueeze(&mask, -1)
}
