//! What goes in, and the losses that come out.

use crate::dtype::DType;

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
    /// What the encoder made in an earlier pass.
    Encoded,
    /// Anything else the processor makes, with its element type.
    Other(DType),
}

/// Losses, by how transformers computes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Next-token loss on logits upcast to fp32, labels shifted.
    CausalLm,
    /// Cross entropy on logits in the model's type.
    CrossEntropy,
    /// Cross entropy on logits in the model's type, one figure per row (`reduction="none"`).
    EachToken,
    /// Cross entropy on logits upcast to fp32, labels not shifted.
    CrossEntropyFp32,
    /// Connectionist temporal classification.
    Ctc,
    /// Mean squared error.
    MeanSquared,
    /// `BCEWithLogitsLoss` on logits in the model's type, labels cast to it (ELECTRA's discriminator, multi-label heads).
    BinaryCrossEntropy,
    /// Load balancing of experts over router logits.
    RouterBalance,
}
