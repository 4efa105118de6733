//! A decoder with its head, as transformers' auto classes make it.

use super::head::{Labels, answer_head, causal_lm_head, loss_and_return, token_head};
use crate::model::graph::{Graph, Value};
use crate::model::op::{Loss, Op};
use crate::model::{Config, ModelError, Task};

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

/// `AutoModelForSequenceClassification`: a score of every token, of which the last counts.
pub fn scores(g: &mut Graph, hidden: &Value, labels: &Labels) {
    let scores = g.linear("score", hidden, labels.count, false);
    let pooled = g.slice(&scores, 1, 0, 1);
    let pooled = g.squeeze(&pooled, 1);
    loss_and_return(g, labels.loss, pooled);
}

/// How a class of the GPT generation classifies tokens.
pub struct Tokens {
    /// Keys of its dropout, the first that is there counts.
    pub dropout: &'static [&'static str],
    /// The dropout where there is none of them.
    pub usual: f64,
    /// Its loss.
    pub loss: Loss,
}

impl Tokens {
    /// As most of them write it.
    pub const USUAL: Self =
        Self { dropout: &["classifier_dropout", "hidden_dropout"], usual: 0.1, loss: Loss::CrossEntropy };
}

/// The same with the classifiers that the classes of the GPT generation write out themselves.
pub fn classifier(
    c: &Config<'_>,
    g: &mut Graph,
    task: Task,
    name: &str,
    (head, tokens): (LmHead<'_>, &Tokens),
    model: impl FnOnce(&mut Graph) -> Value,
) -> Result<(), ModelError> {
    match task {
        Task::SequenceClassification => {
            let labels = Labels::read(c)?;
            // Nobody says `use_cache=False`, and the cache is in what is returned.
            if c.flag("use_cache", true)? {
                g.caches_in_training();
            }
            let hidden = g.module(name, model);
            scores(g, &hidden, &labels);
        }
        Task::TokenClassification => {
            if c.flag("use_cache", true)? {
                g.caches_while_it_runs();
            }
            let given = |key: &&str| c.get(key).and_then(serde_json::Value::as_f64);
            let dropout = tokens.dropout.iter().find_map(given).unwrap_or(tokens.usual);
            let hidden = g.module(name, model);
            let dropped = g.dropout(&hidden, dropout);
            token_head(g, "classifier", &dropped, (Labels::read(c)?.count, tokens.loss), true);
        }
        Task::QuestionAnswering => {
            if c.flag("use_cache", true)? {
                g.caches_while_it_runs();
            }
            let hidden = g.module(name, model);
            answer_head(g, "qa_outputs", &hidden);
        }
        _ => decoder(g, task, name, head, model),
    }
    Ok(())
}
