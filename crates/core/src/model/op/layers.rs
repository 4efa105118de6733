//! Variants of the layers that have a name: linears, norms, convolutions, rotations, activations.

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
    /// ERNIE 4.5's: pairs are swapped in the model's type, each product is in fp32, and both sums are cast back once both
    /// are done.
    InterleavedPromoted,
    /// As complex numbers in fp32 (Llama 4, DeepSeek-V2).
    Complex,
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
