//! Parameters and buffers: what a model holds.

use crate::dtype::DType;
use crate::model::Shape;
use crate::source::quantization::{self, Weight};

/// A parameter and what it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its full name.
    pub name: String,
    /// Its sizes.
    pub shape: Shape,
    /// What it is for.
    pub role: Role,
}

/// Paths of output embeddings in transformers: what `all-linear` leaves out (`get_output_embeddings` of each model). A
/// model without one of these has no such head.
pub const OUTPUT_EMBEDDINGS: [&str; 12] = [
    "lm_head",
    "language_model.lm_head",
    "embed_out",
    "proj_out",
    "head",
    "decoder",
    "cls.predictions.decoder",
    "predictions.decoder",
    "lm_head.decoder",
    "generator_lm_head",
    "vocab_projector",
    "output",
];

/// Whether a weight of that name is a model's head: an output embedding, or a `lm_head` deeper in a model of several.
pub fn is_head(name: &str) -> bool {
    let path = name.strip_suffix(".weight").unwrap_or(name);
    OUTPUT_EMBEDDINGS.contains(&path) || path.ends_with(".lm_head")
}

impl Parameter {
    /// It as a weight that a quantised checkpoint may store otherwise.
    pub fn weight(&self, dtype: DType) -> Weight<'_> {
        let role = match self.role {
            Role::Linear if is_head(&self.name) => quantization::Role::Head,
            Role::Linear => quantization::Role::Linear,
            Role::Experts { .. } => quantization::Role::Experts,
            Role::Embedding => quantization::Role::Embedding,
            _ => quantization::Role::Other,
        };
        Weight { name: &self.name, shape: self.shape.sizes(), dtype, role, transposed: false }
    }
}

/// What a parameter is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A table of rows.
    Embedding,
    /// The matrix of a linear.
    Linear,
    /// A convolution's kernel.
    Convolution,
    /// Fused routed experts: of `count`, `top_k` run for a token.
    Experts {
        /// How many.
        count: u64,
        /// How many run.
        top_k: u64,
    },
    /// The bias of something.
    Bias,
    /// The scale or shift of a norm.
    Norm,
    /// A table that is never trained: `requires_grad` is off (Whisper's sinusoids).
    Frozen,
    /// Anything else.
    Other,
}

/// A tensor that is no parameter but lives as long as the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// Its full name.
    pub name: String,
    /// Its sizes.
    pub shape: Shape,
    /// Its element type.
    pub dtype: DType,
    /// Whether it has the type of the model's weights instead.
    pub model_type: bool,
    /// Whether checkpoints hold it.
    pub persistent: bool,
}
