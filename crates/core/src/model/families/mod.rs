//! The families: one file each, in folders by kind. To add one, copy the nearest file and list it in its folder's
//! `mod.rs` (CONTRIBUTING.md has the steps).

use super::facts::Facts;
use super::{Config, Graph, ModelError, Task, learned};

pub mod decoders;
pub mod denoisers;
pub mod encoders;
pub mod gpt;
mod heads;
pub mod hybrids;
pub mod mixtures;
pub mod multimodal;
pub mod seq2seq;
pub mod speech;
pub mod trainers;
pub mod vision;

/// A family of models that share code.
#[derive(Debug)]
pub struct Family {
    /// Its name, as people say it.
    pub name: &'static str,
    /// The `model_type`s it reads.
    pub model_types: &'static [&'static str],
    /// What libraries know of it.
    pub facts: Facts,
    /// Reads a config and runs the forward pass.
    pub build: fn(&Config<'_>, Task, &mut Graph) -> Result<(), ModelError>,
}

/// Families by kind, with the heads that most of a kind have.
const FOLDERS: [(&[&Family], &[Task]); 11] = [
    (decoders::ALL, &[Task::CausalLm, Task::Base, Task::SequenceClassification]),
    (gpt::ALL, &[Task::CausalLm, Task::Base, Task::SequenceClassification]),
    (mixtures::ALL, &[Task::CausalLm, Task::Base]),
    (hybrids::ALL, &[Task::CausalLm, Task::Base]),
    (encoders::ALL, &[Task::MaskedLm, Task::Base, Task::SequenceClassification, Task::PreTraining]),
    (seq2seq::ALL, &[Task::Seq2SeqLm, Task::Base, Task::PreTraining]),
    (vision::ALL, &[Task::ImageClassification, Task::Base]),
    (speech::ALL, &[Task::Ctc, Task::Base, Task::AudioClassification]),
    (multimodal::ALL, &[Task::ImageTextToText, Task::MultimodalLm, Task::Base]),
    (denoisers::ALL, &[Task::Base]),
    (trainers::ALL, &[Task::CausalLm, Task::Base]),
];

/// Every family.
pub fn all() -> impl Iterator<Item = &'static Family> {
    FOLDERS.iter().flat_map(|(folder, _)| folder.iter().copied())
}

/// The family that reads a `model_type`.
pub fn find(model_type: &str) -> Option<&'static Family> {
    if model_type == learned::program::MODEL_TYPE {
        return Some(&learned::program::FAMILY);
    }
    let written = all().find(|family| family.model_types.contains(&model_type));
    written.or_else(|| learned::types().any(|name| name == model_type).then_some(&learned::FAMILY))
}

/// The heads that the family of a `model_type` has; nothing, where no family reads it.
fn written_tasks(model_type: &str) -> Option<Vec<Task>> {
    if model_type == learned::program::MODEL_TYPE {
        return learned::program::FAMILY.facts.tasks.map(<[Task]>::to_vec);
    }
    FOLDERS.iter().find_map(|(folder, usual)| {
        let family = folder.iter().find(|family| family.model_types.contains(&model_type))?;
        // Heads over samples and tokens are written for decoders and encoders.
        let text = |task: &Task| matches!(task, Task::CausalLm | Task::MaskedLm);
        let more = heads::of(model_type).filter(|_| usual.iter().any(text));
        Some(family.facts.tasks.unwrap_or(usual).iter().copied().chain(more).collect())
    })
}

/// The heads that a `model_type` has and that are modelled, by a family or by a learned table; nothing, where neither reads it.
pub fn tasks(model_type: &str) -> Option<Vec<Task>> {
    let mut tasks = written_tasks(model_type).unwrap_or_default();
    tasks.extend(facts(model_type).also);
    for task in learned::tasks(model_type).unwrap_or_default() {
        if !tasks.contains(&task) {
            tasks.push(task);
        }
    }
    (!tasks.is_empty()).then_some(tasks)
}

/// The family that reads a `model_type` with a head: where the written one has it not, what was learned; nothing, where neither has it.
pub fn with_head(model_type: &str, task: Task) -> Option<&'static Family> {
    let has = |tasks: Option<Vec<Task>>| tasks.is_some_and(|tasks| tasks.contains(&task));
    if has(written_tasks(model_type)) || facts(model_type).also.contains(&task) {
        return find(model_type);
    }
    has(learned::tasks(model_type)).then_some(&learned::FAMILY)
}

/// The head of a `model_type` where a config names none: a language model's, or the first that was learned of it.
pub fn usual_head(model_type: &str) -> Task {
    let learned = find(model_type).is_some_and(|family| std::ptr::eq(family, &learned::FAMILY));
    let tasks = if learned { learned::tasks(model_type).unwrap_or_default() } else { Vec::new() };
    tasks.first().copied().filter(|_| !tasks.contains(&Task::CausalLm)).unwrap_or(Task::CausalLm)
}

/// What libraries know of a `model_type`; nothing, where no family reads it.
pub fn facts(model_type: &str) -> &'static Facts {
    find(model_type).map_or(&Facts::DEFAULT, |family| &family.facts)
}
