//! A decoder with its language-model head, as `AutoModelForCausalLM` and `AutoModel` make it.

use super::head::causal_lm_head;
use crate::model::Task;
use crate::model::graph::{Graph, Value};
use crate::model::op::Op;

/// The head on a decoder.
#[derive(Debug, Clone, Copy)]
pub struct LmHead<'a> {
    /// Rows of the vocabulary.
    pub vocab: u64,
    /// The embedding's name in the model when the head shares its table.
    pub tied: Option<&'a str>,
    /// Whether it has a bias.
    pub bias: bool,
}

/// Runs a model in the module `name` and the head on what it returns; without a head for [`Task::Base`].
pub fn decoder(g: &mut Graph, task: Task, name: &str, head: LmHead<'_>, model: impl FnOnce(&mut Graph) -> Value) {
    if task == Task::Base {
        let hidden = model(g);
        g.run(Op::Return, &[&hidden], []);
        return;
    }
    let hidden = g.module(name, model);
    let tied = head.tied.and_then(|embedding| g.find(&format!("{name}.{embedding}.weight")));
    causal_lm_head(g, hidden, head.vocab, tied, head.bias);
}
