//! Routed experts and how they are run.

use super::{Activation, ParameterId};

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
