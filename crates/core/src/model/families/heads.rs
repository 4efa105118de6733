//! Heads over samples and tokens, which only some types of a kind have (`data/heads.txt`).

use crate::model::Task;

fn words(model_type: &str) -> impl Iterator<Item = &'static str> {
    let lines = include_str!("../../../data/heads.txt").lines();
    let line = lines.map(|line| line.split(' ')).find(|line| line.clone().next() == Some(model_type));
    line.into_iter().flatten().skip(1)
}

/// Which of them transformers has for a type.
pub(super) fn of(model_type: &str) -> impl Iterator<Item = Task> {
    words(model_type).map(|word| match word {
        "samples" => Task::SequenceClassification,
        "tokens" => Task::TokenClassification,
        "choices" => Task::MultipleChoice,
        _ => Task::QuestionAnswering,
    })
}

/// What the class that finds answers calls the model inside it.
pub(super) fn inside_answers(model_type: &str) -> &'static str {
    words(model_type).find_map(|word| word.strip_prefix("answers:")).unwrap_or("model")
}
