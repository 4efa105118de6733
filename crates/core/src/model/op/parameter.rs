//! Parameters and buffers: what a model holds.

use crate::dtype::DType;
use crate::model::Shape;

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
