//! The vocabulary: what a family's forward pass can say.
//!
//! Semantic operations (norm, attention, experts, loss) leave it to a runtime how they are computed and what that
//! costs; tensor operations are the plain ones of a tensor library, for what has no name of its own.

use super::shape::Shape;
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
    /// The same in the element type of the input (`zeros_like`, `new_zeros`), of any sizes.
    FillLike,
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
    /// T5's attention: inputs q, k, v, a position bias `[1, heads, queries, keys]`, and the mask. Eager:
    /// `q @ kᵀ * 1.0`, plus the bias, plus the mask if there is one, softmax in the model's type, dropout, `@ v`. With
    /// SDPA the float mask is made in each layer: without a mask it is the bias itself, or for a causal module of more
    /// than one query `where(arange >= arange, bias, min)`; with a boolean mask `where(mask, bias, min)`. A bias from an
    /// embedding needs a gradient, which only the math kernel gives. The bias of cross-attention is zeros
    /// ([`Op::FillLike`]) and needs one under gradient checkpointing alone.
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
    /// What the model returns: its inputs stay alive until the caller lets go of the output object.
    Return,

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
    /// Another resolution by interpolation.
    Interpolate,
    /// A comparison: a boolean output.
    Compare,
    /// A Fourier transform.
    Fourier,
}

/// A tensor of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// Token ids.
    Tokens,
    /// Token ids of the decoder in an encoder-decoder model (made from the labels).
    DecoderTokens,
    /// Labels.
    Labels,
    /// The 2-D mask of the batch.
    Mask,
    /// Positions of the tokens, one row per sample.
    Positions,
    /// Images or patches.
    Pixels,
    /// Audio features or samples.
    Audio,
    /// Anything else the processor makes, with its element type.
    Other(DType),
}

/// How the matrix of a linear lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearLayout {
    /// `[out, in]`, `nn.Linear`.
    OutIn,
    /// `[in, out]`, GPT-2's `Conv1D`.
    InOut,
}

/// The formulas of normalisation in use, by how their code computes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Norm {
    /// `nn.LayerNorm`: one fused kernel.
    Layer,
    /// `nn.LayerNorm` without weight and bias: the same kernel.
    LayerPlain,
    /// Llama's RMSNorm: in fp32, cast back, then times the weight.
    Rms,
    /// OLMo-2's: in fp32, times the weight, then cast back.
    RmsWeightFirst,
    /// Gemma's: in fp32, times `1 + w` in fp32, then cast back.
    RmsGemma,
    /// T5's: the variance in fp32, the product in the input's type.
    RmsT5,
    /// A norm without weight, in fp32 and cast back.
    RmsBare,
    /// `nn.RMSNorm`: one fused kernel.
    RmsFused,
    /// Cohere's LayerNorm in Python: mean and variance in fp32.
    LayerCohere,
    /// OLMo's LayerNorm without weight, in fp32.
    LayerBare,
    /// Nemotron's `1 + w` LayerNorm.
    LayerPlusOne,
    /// `x / max(|x|, eps)` over the last dimension.
    L2,
    /// Mamba-2's RMSNorm with a silu gate before it (inputs x, gate).
    RmsGated,
    /// Zamba 2's: the same, with a variance for each of this many groups of channels.
    RmsGatedGroups(u32),
    /// Qwen3-Next's RMSNorm with a silu gate after it (inputs x, gate).
    RmsThenGate,
    /// `nn.GroupNorm` over this many groups.
    Group(u32),
    /// `nn.BatchNorm` (channels in dimension 1).
    Batch,
}

/// How a convolution slides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convolution {
    /// Step per spatial dimension.
    pub stride: [u32; 3],
    /// Zeros added on each side per spatial dimension.
    pub padding: [u32; 3],
    /// Channel groups.
    pub groups: u64,
    /// Whether it is a transposed convolution.
    pub transposed: bool,
}

/// How cosine and sine are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RotaryTable {
    /// Rotated dimensions of a head.
    pub dim: u64,
    /// Position axes (3 for the multimodal rope of Qwen-VL).
    pub axes: u64,
    /// Whether both halves of the frequencies are joined (`cat(freqs, freqs)`).
    pub doubled: bool,
    /// Whether the table stays in fp32 instead of the model's type.
    pub fp32: bool,
}

/// How queries and keys are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotary {
    /// Llama's: `x * cos + rotate_half(x) * sin`.
    Half,
    /// The same in fp32, cast back.
    HalfFp32,
    /// Llama's on tables in fp32 (OLMo): queries and keys are not cast first, the products promote to fp32, and both
    /// sums are cast back once both are done.
    HalfPromoted,
    /// GPT-J's and Cohere's: neighbours are pairs, `rotate_every_two`.
    Interleaved,
    /// The same in fp32, cast back.
    InterleavedFp32,
    /// As complex numbers in fp32 (Llama 4, DeepSeek-V2).
    Complex,
}

/// Which positions see which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All before.
    Causal,
    /// All before, always as the additive mask of eager code: what `create_causal_mask` makes for a model without SDPA.
    CausalEager,
    /// All before, never left out where a kernel could do without (`allow_is_causal_skip=False`, Falcon).
    CausalKept,
    /// The last `n` before.
    Sliding(u64),
    /// The last `n` before, always as the additive mask of eager code.
    SlidingEager(u64),
    /// Those before in the same chunk of `n`.
    Chunked(u64),
    /// All, in both directions.
    Full,
    /// All within `n` on either side.
    FullSliding(u64),
    /// All before (or the last `n`), and the tokens of one image among themselves in both directions: a real mask always.
    Images(Option<u64>),
}

/// What a layer adds to its cache per token, or keeps whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CacheUpdate {
    /// What kind of cache it is.
    pub kind: CacheKind,
    /// Heads that are stored.
    pub heads: u64,
    /// Elements of a key per head.
    pub key_dim: u64,
    /// Elements of a value per head.
    pub value_dim: u64,
    /// Heads of true keys and values, where the code stores more (Falcon broadcasts before it caches).
    pub true_heads: u64,
}

/// Kinds of cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheKind {
    /// Grows with every token.
    Full,
    /// Grows up to a window.
    Sliding(u64),
    /// The compressed latent of multi-head latent attention (key: latent, value: rotary part); expanded sizes beside it.
    Latent {
        /// Elements per token and layer when stored as full heads, as transformers 4 and 5.17 do.
        expanded: u64,
    },
    /// Grows beside keys and values (index keys of sparse attention, one tensor); no part of the KV bytes per token.
    Index,
    /// Filled once from the encoder or the image.
    Cross,
    /// Does not grow: this many elements per sequence in fp32 or the model's type.
    State {
        /// Elements.
        elements: u64,
    },
}

/// Softmax attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Query heads per key head.
    pub groups: u64,
    /// Whether the module is causal when no mask is passed.
    pub causal: bool,
    /// Attention dropout, in thousandths.
    pub dropout_per_mille: u32,
    /// Scores are squashed by tanh.
    pub softcap: bool,
    /// A learned sink per head joins the softmax.
    pub sinks: Option<ParameterId>,
    /// How the model's own eager code computes it.
    pub eager: EagerStyle,
    /// Whether the family offers SDPA at all; without it, it always runs eager.
    pub sdpa: bool,
}

/// How a family's eager attention is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EagerStyle {
    /// Llama's: repeat keys and values, scores, scale, mask, softmax in fp32, cast, dropout.
    Fp32Softmax,
    /// GPT-2's: softmax in the model's type, then cast to the type of the values, then dropout.
    PlainSoftmax,
    /// BERT's and BART's: softmax in the model's type, dropout, no cast (autocast leaves both in fp32, and the product
    /// casts its input).
    UncastSoftmax,
    /// Falcon's own: with SDPA, `F.scaled_dot_product_attention` itself is called (keys of fewer heads broadcast, not
    /// repeated, no `enable_gqa`) and its output transposed without a copy. Eager: `q @ kᵀ`, divided in place,
    /// `softmax(scores + mask)` in the model's type, `@ v`. With a fifth input (ALiBi, `[batch, heads, 1, keys]`) eager
    /// goes through fp32: scores to fp32, plus ALiBi, times the scale in place, plus the mask, softmax to the
    /// model's type, dropout, `@ v`; SDPA ignores that input.
    Falcon,
}

/// Pointwise activations, by how they are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activation {
    /// `silu`, fused.
    Silu,
    /// `gelu`, fused (exact or tanh: the same memory).
    Gelu,
    /// GPT-2's `gelu_new`, spelled out in Python.
    GeluNew,
    /// `gelu_fast`, spelled out in Python.
    GeluFast,
    /// Bloom's own autograd function.
    GeluBloom,
    /// `quick_gelu`: `x * sigmoid(1.702 x)`.
    QuickGelu,
    /// `relu`.
    Relu,
    /// `relu(x)²`.
    ReluSquared,
    /// `tanh`.
    Tanh,
    /// `sigmoid`.
    Sigmoid,
    /// `softplus`.
    Softplus,
    /// `mish`.
    Mish,
}

/// Routed experts held as fused parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// How many there are.
    pub count: u64,
    /// How many each token goes to.
    pub top_k: u64,
    /// `[experts, 2 × width, hidden]` (or transposed, or `up` alone when not gated).
    pub gate_up: ParameterId,
    /// `[experts, hidden, width]`.
    pub down: ParameterId,
    /// Biases of both, `[experts, …]`.
    pub biases: Option<(ParameterId, ParameterId)>,
    /// Width of one expert.
    pub width: u64,
    /// Whether there is a gate.
    pub gated: bool,
    /// The activation.
    pub activation: Activation,
    /// Whether weights lie as `[experts, in, out]`.
    pub transposed: bool,
    /// How the model's code runs them when the runtime leaves it the choice.
    pub style: ExpertStyle,
}

/// How experts are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertStyle {
    /// transformers' experts interface (grouped matrix product by default).
    Interface,
    /// The interface with GPT-OSS's clamped, interleaved gate.
    InterfaceClamped,
    /// DeepSeek-V4's: the interface with gate and up (halves, as usual) clamped before `activation(gate) * up`.
    InterfaceClampedHalves,
    /// All experts on all tokens (Llama 4); the only input is `[experts · tokens, hidden]`, already weighted:
    /// `bmm` with `gate_up`, `chunk`, `up * activation(gate)`, `bmm` with `down`, back to `[experts · tokens, hidden]`.
    Dense,
    /// A Python loop over experts.
    Loop,
}

/// Losses, by how transformers computes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Next-token loss on logits upcast to fp32, labels shifted.
    CausalLm,
    /// Cross entropy on logits in the model's type.
    CrossEntropy,
    /// Cross entropy on logits upcast to fp32, labels not shifted.
    CrossEntropyFp32,
    /// Connectionist temporal classification.
    Ctc,
    /// Mean squared error.
    MeanSquared,
    /// `BCEWithLogitsLoss` on logits in the model's type, labels cast to it (ELECTRA's discriminator, multi-label heads).
    BinaryCrossEntropy,
    /// CLIP's and SigLIP's contrastive loss.
    Contrastive,
    /// Load balancing of experts over router logits.
    RouterBalance,
}

/// One-input operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Unary {
    Neg,
    Exp,
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
