//! Facts of a machine that neither the model's config nor the card's data sheet tells: what driver, libraries and
//! settings of the installed torch take or choose. `vramcast calibrate` learns them from measured runs.

use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;

/// What a machine takes besides what is computed on it. The defaults are read off the H200 rows of truth/ledger
/// (driver 580, torch 2.11): what the process held at the end, less what torch had reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Machine {
    /// Driver, context and torch's own modules when the first tensor exists: 620.8 MiB in all rows.
    pub context: u64,
    /// Kernels loaded lazily and library handles by the end of training steps: 750.8 MiB with the context.
    pub kernels_training: u64,
    /// The same by the end of `generate`: 686.8 MiB with the context.
    pub kernels_inference: u64,
    /// cuDNN's fused attention in training: 766.8 against 750.8 MiB.
    pub cudnn_training: u64,
    /// cuDNN's fused attention in `generate`: 694.8 to 698.8 against 686.8 MiB.
    pub cudnn_inference: u64,
    /// LLM.int8's products (bitsandbytes' cuBLASLt handle): 814.8 against 750.8 MiB, and 750.8 against 686.8 MiB.
    pub int8: u64,
    /// Streams of an engine that gathers and reduces beside the computation: 836.8 against 766.8 MiB.
    pub streams: u64,
    /// NCCL's kernels, which the first communicator loads: it took 558 MiB, each further one 388 to 390 MiB, and with
    /// `NCCL_MAX_NCHANNELS=4` 198 and 28 to 30 MiB (H200, NCCL 2.28.9, one rank).
    pub nccl: u64,
    /// One NCCL communicator: 6 MiB for each of 64 channels, and 4 MiB.
    pub communicator: u64,
    /// Channels of a collective among several cards (`NCCL_MAX_NCHANNELS`): as logs of eight H100 on one switch show.
    pub nccl_channels: u64,
    /// `NCCL_BUFFSIZE`.
    pub nccl_buffer: u64,
    /// cuBLAS's workspace (`CUBLAS_WORKSPACE_CONFIG`); torch's rule for the card when absent.
    pub blas_workspace: Option<u64>,
    /// Whether SDPA may take cuDNN's kernel where the card has it (`torch.backends.cuda.cudnn_sdp_enabled`).
    pub cudnn_attention: bool,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            context: 650_969_088,
            kernels_training: 130 * MIB,
            kernels_inference: 66 * MIB,
            cudnn_training: 16 * MIB,
            cudnn_inference: 8 * MIB,
            int8: 64 * MIB,
            streams: 70 * MIB,
            nccl: 170 * MIB,
            communicator: 388 * MIB,
            nccl_channels: 24,
            nccl_buffer: 4 * MIB,
            blas_workspace: None,
            cudnn_attention: true,
        }
    }
}

impl Machine {
    /// Whether nothing was learned of it.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// What a process holds besides what it asked the driver for: context, loaded kernels and library handles.
    pub fn unasked(&self, training: bool) -> u64 {
        self.context.saturating_add(if training { self.kernels_training } else { self.kernels_inference })
    }
}
