//! Facts of a machine that neither the model's config nor the card's data sheet tells: what driver, libraries and
//! settings of the installed torch take or choose. `vramcast calibrate` learns them from measured runs.

use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;

/// The stack of a thread (`cudaLimitStackSize`): a context has one for every thread that the card can hold. On an H200
/// each KiB takes 264 MiB, which is 132 multiprocessors of 2048 threads (`cuCtxSetLimit`, driver 580).
const STACK: u64 = 1 << 10;

/// What else a context holds, on the 132 multiprocessors of an H200 (driver 580): 526.8 MiB less the stacks. NVIDIA does not
/// say what it is. Taken to grow with multiprocessors, an RTX 3090 (82 of them, of 1536 threads) has 286 MiB in all;
/// readings there are 295 to 329 MiB with the kernels of llama.cpp (truth/external/llamacpp_ananke.json).
const REST: [u64; 2] = [275_578_880, 132];

/// What torch's first kernel loads with lazy loading (620.8 MiB in all rows of truth/ledger, less the bare context); with
/// `CUDA_MODULE_LOADING=EAGER` it would be 734 MiB.
const TORCH: u64 = 94 * MIB;

/// What the CUDA context of a process holds before its first kernel.
pub(super) fn bare_context(multiprocessors: u64, threads_per_multiprocessor: u64) -> u64 {
    let stacks = multiprocessors.saturating_mul(threads_per_multiprocessor).saturating_mul(STACK);
    stacks.saturating_add(multiprocessors.saturating_mul(REST[0]) / REST[1])
}

/// What a machine takes besides what is computed on it. The defaults are read off the H200 rows of truth/ledger
/// (driver 580, torch 2.11): what the process held at the end, less what torch had reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Machine {
    /// Driver, context and torch's own modules when the first tensor exists; the rule for the card when absent.
    pub context: Option<u64>,
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
    /// One NCCL communicator of one rank: for each of 64 channels three allocations, which the driver hands out in units
    /// of 2 MiB (`NCCL_CUMEM_ENABLE=0`: 8 MiB), and 4 MiB. What reaches other ranks is in memory/nccl.rs.
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
            context: None,
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

    /// What a torch process holds on a card whose context takes `bare` bytes, when the first tensor exists.
    pub(super) fn context(&self, bare: u64) -> u64 {
        self.context.unwrap_or(bare.saturating_add(TORCH))
    }
}
