//! How attention is computed, and which models can have it so.

use serde::{Deserialize, Serialize};

use super::PlanError;
use crate::model::facts::AttentionKernels;
use crate::model::families;

/// How attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionKind {
    /// `F.scaled_dot_product_attention`: torch chooses a kernel.
    Sdpa,
    /// The model's own eager code.
    Eager,
    /// The flash-attn package (FlashAttention 2).
    Flash2,
    /// FlashAttention 3, for Hopper.
    Flash3,
    /// torch's flex attention, compiled by itself within an eager model.
    Flex,
}

/// A kernel of scaled dot product attention to insist on (`torch.nn.attention.sdpa_kernel`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SdpaKernel {
    /// cuDNN's.
    Cudnn,
    /// FlashAttention 2 as torch builds it in.
    Flash,
    /// The memory-efficient one of xFormers.
    Efficient,
    /// Plain products and a softmax.
    Math,
}

impl AttentionKind {
    /// Whether it is one of the flash-attn package's kernels.
    pub fn is_flash(self) -> bool {
        matches!(self, Self::Flash2 | Self::Flash3)
    }

    /// Refuses what a model of this type cannot run.
    pub fn check_model(self, model_type: &str) -> Result<(), PlanError> {
        let runs = families::facts(model_type).attention;
        let (name, runs) = match self {
            Self::Sdpa | Self::Eager => return Ok(()),
            Self::Flash2 | Self::Flash3 => ("flash attention", runs != AttentionKernels::Torch),
            Self::Flex => ("flex attention", runs == AttentionKernels::FlashAndFlex),
        };
        if runs {
            return Ok(());
        }
        Err(PlanError::Unsupported {
            what: format!("{name} on {model_type} models"),
            hint: "sdpa chooses torch's own flash kernels".into(),
        })
    }
}
