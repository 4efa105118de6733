//! The weights of a model one by one, for engines whose layout is finer than a sum.

use crate::model::op::{Parameter, Role};

/// How a weight is divided among tensor-parallel cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
    /// A matrix or its bias: cut in equal parts.
    Split,
    /// Routed experts: cut in equal parts over tensor and data-parallel cards together.
    Experts,
    /// A table of the vocabulary: cut by rows.
    Table,
    /// Norms, routers, convolutions: on every card.
    Whole,
}

/// One weight as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedTensor {
    /// Its name in the checkpoint.
    pub name: String,
    /// The decoder layer it belongs to.
    pub layer: Option<usize>,
    /// Its sizes as the model declares it.
    pub shape: Vec<u64>,
    /// Bytes of what it is stored as: the packed matrix first, then scales and zeros.
    pub parts: Vec<u64>,
    /// Whether it is held in fewer bits than the model's type.
    pub quantised: bool,
    /// How it is divided.
    pub division: Division,
}

impl ServedTensor {
    /// All its parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, part| sum.saturating_add(*part))
    }

    /// The module's own name: `q_proj` of `model.layers.0.self_attn.q_proj.weight`.
    pub fn module(&self) -> &str {
        let (path, leaf) = self.name.rsplit_once('.').unwrap_or(("", &self.name));
        match leaf {
            "weight" | "bias" => path.rsplit_once('.').map_or(path, |(_, module)| module),
            leaf => leaf,
        }
    }
}

/// How engines divide a parameter by what it is.
pub(super) fn division(parameter: &Parameter, vocabulary: u64) -> Division {
    let table = vocabulary > 0 && parameter.shape.rank() == 2 && parameter.shape.size(0) == vocabulary;
    match parameter.role {
        Role::Experts { .. } => Division::Experts,
        Role::Linear | Role::Embedding if table => Division::Table,
        Role::Linear | Role::Bias => Division::Split,
        _ => Division::Whole,
    }
}

/// Parts of names that belong to encoders of images and sound.
const TOWERS: [&str; 7] =
    ["visual", "vision", "audio", "multi_modal_projector", "mm_projector", "image_newline", "merger"];

/// Whether a weight is an encoder's of images or sound.
pub(crate) fn is_tower(name: &str) -> bool {
    TOWERS.iter().any(|part| name.contains(part))
}
