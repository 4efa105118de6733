//! What of a plan the lowering needs.

use crate::dtype::DType;
use crate::memory::saved::ToHost;
use crate::plan::{AttentionKind, Compile, Float8, Kernels};

/// What of a plan the lowering needs.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// How attention is computed.
    pub attention: AttentionKind,
    /// Whether layers are recomputed in backward.
    pub checkpointing: bool,
    /// Whose kernels run.
    pub kernels: Kernels,
    /// The type autocast computes in.
    pub autocast: Option<DType>,
    /// The type the model computes in: what it was built in, unless an engine gathers it in another.
    pub weights: DType,
    /// The type of buffers that were built with the weights; engines may leave it alone.
    pub buffers: DType,
    /// Whether the batch brings a mask, and whether it masks anything.
    pub padded: bool,
    /// Whether the batch brings a 2-D mask.
    pub mask: bool,
    /// Tokens that are no padding, where that is known.
    pub real_tokens: Option<u64>,
    /// Tokens that the loss counts, where that is known.
    pub counted: Option<u64>,
    /// Samples that lie one after the other in the only row.
    pub documents: Option<u64>,
    /// What of that which is saved for backward waits on the host.
    pub save_on_cpu: Option<ToHost>,
    /// What `torch.compile` was called on.
    pub compile: Option<Compile>,
    /// Whether Inductor decides otherwise than usual on padding the gradient of a head's weight.
    pub pads_otherwise: bool,
    /// Whether Inductor reuses buffers whatever waits for it (before torch 2.9).
    pub reuses_all: bool,
    /// How products of compiled layers are scaled to bytes.
    pub float8: Option<Float8>,
    /// Whether the loop lets go of what the model returns, as the Trainer does, whose autocast widens it.
    pub drops_outputs: bool,
    /// Whether a cache is filled though nothing is generated: who calls the model does not say `use_cache=False`.
    pub fills_cache: bool,
    /// Whether what goes into every layer is returned too (`output_hidden_states`).
    pub keeps_hidden: bool,
    /// Whether who calls the model says `use_cache=False`.
    pub refuses_cache: bool,
}
