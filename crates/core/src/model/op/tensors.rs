//! Plain tensor operations by name.

use crate::dtype::DType;

/// One-input operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Unary {
    Neg,
    Exp,
    Expm1,
    Log,
    Sqrt,
    /// RecurrentGemma's own autograd function: `sqrt(x)` that saves `x`; backward `grad / sqrt(clip(4 x))`.
    SqrtBound,
    Rsqrt,
    Cos,
    Sin,
    Abs,
    Square,
    Reciprocal,
    Tanh,
    Sigmoid,
    Softplus,
    Silu,
    Relu,
    LogSigmoid,
    Clamp,
    /// T5's guard against overflow, `torch.clamp` between tensors: in fp16 alone, else nothing.
    ClampFp16,
    /// To fixed limits, where numbers are fp16.
    ClampHalf,
    Round,
    Not,
    Clone,
}

/// Two-input operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Pow,
    Max,
    Min,
}

/// Target element types of a cast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cast {
    /// This type.
    To(DType),
    /// The type of the second input.
    Like,
    /// The type the model's weights have.
    Model,
    /// This type, laid out densely in the same copy (`to(dtype, memory_format=torch.contiguous_format)`); nothing, not even
    /// another layout, when it has the type already.
    Dense(DType),
    /// The type of the second input, in the same way.
    DenseLike,
}

/// Reductions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Reduction {
    Sum,
    Mean,
    Max,
    Variance,
    Norm,
    LogSumExp,
}
