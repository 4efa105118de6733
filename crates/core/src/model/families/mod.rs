//! The families: one file each, in folders by kind. To add one, copy the nearest file and list it in its folder's
//! `mod.rs` (CONTRIBUTING.md has the steps).

use super::facts::Facts;
use super::{Config, Graph, ModelError, Task};

pub mod decoders;
pub mod encoders;
pub mod gpt;
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

const FOLDERS: [&[&Family]; 10] = [
    decoders::ALL,
    gpt::ALL,
    mixtures::ALL,
    hybrids::ALL,
    encoders::ALL,
    seq2seq::ALL,
    vision::ALL,
    speech::ALL,
    multimodal::ALL,
    trainers::ALL,
];

/// Every family.
pub fn all() -> impl Iterator<Item = &'static Family> {
    FOLDERS.iter().flat_map(|folder| folder.iter().copied())
}

/// The family that reads a `model_type`.
pub fn find(model_type: &str) -> Option<&'static Family> {
    all().find(|family| family.model_types.contains(&model_type))
}

/// What libraries know of a `model_type`; nothing, where no family reads it.
pub fn facts(model_type: &str) -> &'static Facts {
    find(model_type).map_or(&Facts::DEFAULT, |family| &family.facts)
}
