//! Options of `vramcast train` about attention and what forward saves.

use clap::{Args, ValueEnum};
use vramcast_core::plan::{AttentionKind, SdpaKernel, TrainPlan};

/// How attention is computed.
#[derive(Debug, Args)]
pub(super) struct AttentionArguments {
    /// How attention is computed [default: sdpa].
    #[arg(long, value_name = "HOW", help_heading = "Kernels")]
    attention: Option<Attention>,
    /// The kernel that SDPA must take (`torch.nn.attention.sdpa_kernel`) [default: torch chooses].
    #[arg(long, value_name = "KERNEL", help_heading = "Kernels")]
    sdpa_kernel: Option<Kernel>,
    /// What forward saves waits in pinned host memory (`torch.autograd.graph.save_on_cpu`).
    #[arg(long, help_heading = "Kernels")]
    save_on_cpu: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Attention {
    Sdpa,
    Eager,
    /// The flash-attn package (FlashAttention 2).
    #[value(name = "flash2", alias = "flash-attention-2", alias = "flash_attention_2")]
    Flash2,
    /// FlashAttention 3.
    #[value(name = "flash3", alias = "flash-attention-3", alias = "flash_attention_3")]
    Flash3,
    /// torch's flex attention, compiled by itself.
    #[value(alias = "flex_attention")]
    Flex,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Kernel {
    Cudnn,
    Flash,
    Efficient,
    Math,
}

impl AttentionArguments {
    /// Writes them into a plan.
    pub(super) fn apply(&self, plan: &mut TrainPlan) {
        if let Some(attention) = self.attention {
            plan.attention = match attention {
                Attention::Sdpa => AttentionKind::Sdpa,
                Attention::Eager => AttentionKind::Eager,
                Attention::Flash2 => AttentionKind::Flash2,
                Attention::Flash3 => AttentionKind::Flash3,
                Attention::Flex => AttentionKind::Flex,
            };
        }
        if let Some(kernel) = self.sdpa_kernel {
            plan.sdpa_kernel = Some(match kernel {
                Kernel::Cudnn => SdpaKernel::Cudnn,
                Kernel::Flash => SdpaKernel::Flash,
                Kernel::Efficient => SdpaKernel::Efficient,
                Kernel::Math => SdpaKernel::Math,
            });
        }
        plan.save_on_cpu |= self.save_on_cpu;
    }
}
