//! How attention is computed, and which models can have it so.

use serde::{Deserialize, Serialize};

use super::PlanError;

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

/// Types whose attention goes through transformers' interface with `_supports_flash_attn` (5.17). Left out: those with
/// attention code of their own for it (Falcon, GPT-J, GPT-Neo), vision-language models, whose towers hand over lengths
/// of images, and GPT-OSS, whose sinks FlashAttention 2 does not know.
const FLASH: [&str; 60] = [
    "albert",
    "apertus",
    "arcee",
    "bart",
    "bert",
    "bitnet",
    "camembert",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "distilbert",
    "electra",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "granite",
    "granitemoe",
    "llama",
    "m2m_100",
    "marian",
    "mbart",
    "minimax_m2",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "pegasus",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vit",
    "xlm-roberta",
    "dinov2",
    "siglip_text_model",
    "siglip_vision_model",
    "clip_text_model",
    "clip_vision_model",
];

/// Of those, the ones without `_supports_flex_attn`, and those whose attention drops probabilities by default, which flex
/// attention refuses.
const NO_FLEX: [&str; 18] = [
    "albert",
    "bart",
    "bert",
    "camembert",
    "distilbert",
    "electra",
    "gpt2",
    "gpt_bigcode",
    "m2m_100",
    "marian",
    "mbart",
    "olmoe",
    "opt",
    "pegasus",
    "phimoe",
    "roberta",
    "stablelm",
    "xlm-roberta",
];

impl AttentionKind {
    /// Whether it is one of the flash-attn package's kernels.
    pub fn is_flash(self) -> bool {
        matches!(self, Self::Flash2 | Self::Flash3)
    }

    /// Refuses what a model of this type cannot run.
    pub fn check_model(self, model_type: &str) -> Result<(), PlanError> {
        let name = match self {
            Self::Sdpa | Self::Eager => return Ok(()),
            Self::Flash2 | Self::Flash3 => "flash attention",
            Self::Flex => "flex attention",
        };
        if FLASH.contains(&model_type) && !(self == Self::Flex && NO_FLEX.contains(&model_type)) {
            return Ok(());
        }
        Err(PlanError::Unsupported {
            what: format!("{name} on {model_type} models"),
            hint: "sdpa chooses torch's own flash kernels".into(),
        })
    }
}
