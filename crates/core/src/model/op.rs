//! The vocabulary: what a family's forward pass can say.
//!
//! Semantic operations (norm, attention, experts, loss) leave it to a runtime how they are computed and what that
//! costs; tensor operations are the plain ones of a tensor library, for what has no name of its own.

mod attention;
mod batch;
mod experts;
mod layers;
mod parameter;
mod tensors;

pub use attention::{Attention, CacheKind, CacheUpdate, EagerStyle, Mask};
pub use batch::{Input, Loss};
pub use experts::{ExpertStyle, Experts};
pub use layers::{Activation, Convolution, LinearLayout, Norm, Rotary, RotaryTable};
pub use parameter::{Buffer, OUTPUT_EMBEDDINGS, Parameter, Role, is_head};
pub use tensors::{Binary, Cast, Reduction, Unary};

use crate::dtype::DType;

/// A parameter of the model, by its place in [`super::Model::parameters`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ParameterId(pub u32);

/// A value of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// A module of the program, by its place in [`super::Program::modules`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModuleId(pub u32);

/// One operation; inputs and outputs are kept by the [`super::Step`] that runs it.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// A tensor of the batch.
    Input(Input),
    /// A parameter used as a tensor.
    Parameter(ParameterId),
    /// A non-trainable tensor of the module (rotary frequencies, relative positions), there since load.
    Buffer(DType),
    /// The same for a float tensor that is made in the type of the model's weights.
    ModelBuffer,
    /// A fresh tensor filled on the device (zeros, ones, arange).
    Fill(DType),
    /// The same in the type of the model's weights.
    FillModel,
    /// The same in the element type of the input (`zeros_like`, `new_zeros`), of any sizes.
    FillLike,
    /// Zeros in place of a position bias, in the type of the input; under gradient checkpointing they are made to require
    /// a gradient, as a layer's inputs had to for the older kind of checkpoint.
    ZeroBias,
    /// Rows of a table by index.
    Embedding {
        /// The table.
        weight: ParameterId,
    },
    /// `x · Wᵀ + b`.
    Linear {
        /// The matrix.
        weight: ParameterId,
        /// The bias.
        bias: Option<ParameterId>,
        /// How the matrix lies in memory.
        layout: LinearLayout,
    },
    /// A normalisation over the last dimension (or over groups of channels).
    Norm {
        /// Which formula, computed how.
        kind: Norm,
        /// The scale.
        weight: Option<ParameterId>,
        /// The shift.
        bias: Option<ParameterId>,
    },
    /// A convolution over one, two or three dimensions. With a second input, that tensor is the kernel (weight norm) and
    /// the parameter only lends its shape.
    Convolution {
        /// The kernel, `[out, in / groups, …]`.
        weight: ParameterId,
        /// The bias.
        bias: Option<ParameterId>,
        /// How it slides.
        spec: Convolution,
    },
    /// Cosine and sine of rotary positions: two outputs `[batch or 1, seq, dim]`.
    RotaryTable(RotaryTable),
    /// Rotates queries and keys (inputs q, k, cos, sin; outputs q, k).
    Rotary(Rotary),
    /// The attention mask that the model builds for its batch; a runtime may find that none is needed. An input is the
    /// 2-D mask that the model makes itself where the batch brings none.
    Mask(Mask),
    /// Keys and values go into the cache of a layer and come back whole; nothing happens without a cache. Without
    /// inputs, what a cross-attention cache has held since the first token comes back.
    ///
    /// A constant state ([`CacheKind::State`]) has one input and gives it back as it is: its newest elements are copied
    /// into the state, which is allocated at the first call, in the input's type.
    Cache(CacheUpdate),
    /// The constant state that an earlier pass left in a layer's cache, read and overwritten where it lies.
    CachedState {
        /// Whether it is kept in fp32 instead of the model's type.
        fp32: bool,
    },
    /// Softmax attention: inputs q, k, v and an optional mask or bias; output `[batch, seq, heads, value dim]`.
    Attention(Attention),
    /// `F.scaled_dot_product_attention` itself: inputs q, k, v of `[batch, heads, seq, dim]` and an optional mask.
    ScaledDotProduct {
        /// `is_causal`.
        causal: bool,
        /// Whether probabilities are dropped.
        dropout: bool,
        /// `enable_gqa`.
        grouped: bool,
    },
    /// T5's attention: inputs q, k, v, a position bias `[1, heads, queries, keys]`, and the mask. Eager:
    /// `q @ kᵀ * 1.0`, plus the bias, plus the mask if there is one, softmax in the model's type, dropout, `@ v`. With
    /// SDPA the float mask is made in each layer: without a mask it is the bias itself, or for a causal module of more
    /// than one query `where(arange >= arange, bias, min)`; with a boolean mask `where(mask, bias, min)`. A bias from an
    /// embedding needs a gradient and lies crosswise, so the math kernel runs. The bias of cross-attention is zeros
    /// ([`Op::ZeroBias`]).
    BiasedAttention(Attention),
    /// A pointwise activation.
    Activation(Activation),
    /// `activation(a) * b`, the heart of a gated MLP.
    Glu(Activation),
    /// The activation of a gate whose product with [`Op::GateProduct`] follows once `up` is computed.
    Gate(Activation),
    /// `a * b`, where `a` comes from [`Op::Gate`].
    GateProduct(Activation),
    /// Routed experts as one fused module: inputs hidden `[tokens, hidden]`, chosen experts, their weights.
    Experts(Experts),
    /// Dropout, active in training only.
    Dropout {
        /// The probability, in thousandths.
        per_mille: u32,
    },
    /// `x *= noise`, uniform noise of the shape of `x` made on the spot: in place, active in training only.
    Jitter,
    /// The loss (inputs logits or hidden states, then labels; output a scalar).
    Loss(Loss),
    /// A tensor as it is, given by name to a layer inside a layer: where both are checkpoints, the inner one holds it.
    Given,
    /// What the model returns: its inputs stay alive until the caller lets go of the output object.
    Return,

    /// The same elements, without a history: no gradient passes.
    Detach,
    /// A view of the same elements under other sizes; must be possible without a copy.
    View,
    /// A view where possible, else a copy.
    Reshape,
    /// Two dimensions swapped.
    Transpose(u8, u8),
    /// All dimensions reordered.
    Permute([u8; super::shape::MAX_DIMS]),
    /// A dense copy unless it is dense already.
    Contiguous,
    /// Broadcast without memory.
    Expand,
    /// A range of one dimension.
    Slice {
        /// Which dimension.
        dim: u8,
        /// First index.
        start: u64,
        /// Step between indices.
        step: u64,
    },
    /// One index of a dimension, which goes.
    Select(u8),
    /// `x[…, start : start + n, …] = y`: the second input overwrites a range of the first, which is the output.
    Assign {
        /// Which dimension.
        dim: u8,
        /// First index.
        start: u64,
    },
    /// One dimension cut in several outputs (views).
    Split(u8),
    /// Inputs joined along a dimension.
    Cat(u8),
    /// Inputs copied one after the other into slices of a fresh tensor along a dimension (`new_empty`, then `copy_` into
    /// each slice): the memory of `cat` in the forward pass, a chain of `CopySlices` nodes in the backward pass.
    CopySlices(u8),
    /// The second input added to a slice of the first, in place (`x[1:] += y`).
    AddToSlice {
        /// Which dimension is cut.
        dim: u8,
        /// How much of it the slice takes.
        length: u64,
    },
    /// Inputs joined along a new dimension.
    Stack(u8),
    /// Zero padding.
    Pad,
    /// One input, one output of the same shape.
    Unary(Unary),
    /// Two inputs, broadcast.
    Binary(Binary),
    /// One input and a number.
    Scalar(Binary),
    /// Two inputs, the first overwritten.
    InPlace(Binary),
    /// One input, overwritten: `relu_`, or a product with a number ([`Unary::Neg`]).
    InPlaceUnary(Unary),
    /// To another element type; nothing when it has it already.
    Cast(Cast),
    /// Softmax over a dimension.
    Softmax {
        /// Which dimension.
        dim: u8,
        /// The type it is computed in, when forced.
        dtype: Option<DType>,
    },
    /// A reduction over one dimension (or all, giving a scalar).
    Reduce {
        /// What is computed.
        kind: Reduction,
        /// Which dimension; `None` for all.
        dim: Option<u8>,
        /// Whether the dimension stays with size 1.
        keep: bool,
    },
    /// Batched matrix product of the last two dimensions.
    MatMul,
    /// `torch.linalg.solve_triangular`: the batched solution `x` of `a x = b` for a triangular `a` (inputs a, b).
    SolveTriangular,
    /// The gated delta rule by flash-linear-attention's kernels: inputs q, k `[batch, seq, heads, key dim]`, v
    /// `[batch, seq, heads, value dim]`, decay and update rate `[batch, seq, heads]`. A second output, where there is one, is the
    /// state `[batch, heads, key dim, value dim]` in fp32.
    GatedDeltaRule {
        /// Whether positions are gone through one by one (`fused_recurrent_gated_delta_rule`), else chunk by chunk.
        recurrent: bool,
    },
    /// `baddbmm`: inputs bias (broadcast, copied into the result first), a, b; `bias + number · a @ b` in one kernel.
    /// Backward multiplies each of the two gradients by the number once more.
    AddMatMul,
    /// The largest `k` along the last dimension: values and indices.
    TopK {
        /// Whether the indices alone are kept (`[1]` in the source).
        sorted: bool,
    },
    /// Sorted values and indices along the last dimension.
    Sort,
    /// The index of the largest along the last dimension.
    ArgMax,
    /// Elements by index along a dimension (index of the output's shape).
    Gather(u8),
    /// Whole rows by index: output `[index…, rest…]`.
    Index,
    /// Rows added into a copy of the first input by index (inputs target, index, source).
    IndexAdd,
    /// The same into the first input itself (`index_add_`).
    IndexAddInPlace,
    /// Elements of a source written by index into the first input itself (`index_copy_`; inputs target, index, source).
    IndexCopyInPlace,
    /// The first input with elements written by index (inputs target, index, source).
    Scatter {
        /// Which dimension.
        dim: u8,
        /// Whether the target is overwritten.
        in_place: bool,
    },
    /// The first input where a mask is unset, a number where it is set (inputs x, mask).
    MaskedFill {
        /// Whether the input is overwritten.
        in_place: bool,
    },
    /// Elements of the second input put where a mask is set (inputs x, mask, source).
    MaskedScatter,
    /// Elements of one of two inputs by a mask (inputs mask, a, b).
    Where,
    /// Running sums along a dimension.
    CumulativeSum(u8),
    /// Each element repeated along a dimension.
    RepeatInterleave(u8),
    /// The tensor tiled (a copy).
    Repeat,
    /// Elements moved along a dimension, wrapping.
    Roll(u8),
    /// A lower or upper triangle kept.
    Triangle,
    /// Mean over windows.
    AveragePool,
    /// The mean or the largest over windows, by a kernel that keeps its input; the largest come with their places, a second output.
    Pool {
        /// Whether it gives the places.
        places: bool,
    },
    /// Another resolution by interpolation.
    Interpolate,
    /// A comparison: a boolean output.
    Compare,
    /// A Fourier transform.
    Fourier,
}

impl Op {
    /// Whether it names parameters itself.
    fn has_parameters(&self) -> bool {
        matches!(
            self,
            Self::Parameter(_)
                | Self::Embedding { .. }
                | Self::Linear { .. }
                | Self::Convolution { .. }
                | Self::Norm { .. }
                | Self::Attention(_)
                | Self::BiasedAttention(_)
                | Self::Experts(_)
        )
    }

    /// Whether another operation is this one on parameters that come `by` later.
    pub(crate) fn comes_again(&self, other: &Self, by: u32) -> bool {
        if self.has_parameters() { self.renamed(&mut |id| ParameterId(id.0 + by)) == *other } else { self == other }
    }

    /// The same operation on other parameters.
    pub(crate) fn renamed(&self, name: &mut impl FnMut(ParameterId) -> ParameterId) -> Self {
        let mut op = self.clone();
        match &mut op {
            Self::Parameter(id) | Self::Embedding { weight: id } => *id = name(*id),
            Self::Linear { weight, bias, .. } | Self::Convolution { weight, bias, .. } => {
                *weight = name(*weight);
                *bias = bias.map(name);
            }
            Self::Norm { weight, bias, .. } => {
                *weight = weight.map(&mut *name);
                *bias = bias.map(name);
            }
            Self::Attention(spec) | Self::BiasedAttention(spec) => spec.sinks = spec.sinks.map(name),
            Self::Experts(spec) => {
                (spec.gate_up, spec.down) = (name(spec.gate_up), name(spec.down));
                spec.biases = spec.biases.map(|(up, down)| (name(up), name(down)));
            }
            _ => {}
        }
        op
    }
}
