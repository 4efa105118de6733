//! What a process holds on the card besides the caching allocator: the CUDA context, loaded kernels, libraries.
//!
//! All figures are read off the H200 rows of truth/ledger (driver 580, torch 2.11): `nvml_used_end` less what was
//! reserved. They are machine facts: another driver, card or torch has its own, and `vramcast calibrate` is to learn them.

use super::log::Log;
use crate::plan::{Gpu, Parallel};

const MIB: u64 = 1 << 20;
/// Driver, context and torch's own modules when the first tensor exists: 620.8 MiB in all 213 rows.
pub const CONTEXT: u64 = 650_969_088;
/// Kernels loaded lazily and library handles by the end of `generate`: rows without fused attention end at 686.8 MiB.
const KERNELS_INFERENCE: u64 = 66 * MIB;
/// The same by the end of training steps: 750.8 MiB.
const KERNELS_TRAINING: u64 = 130 * MIB;
/// cuDNN's fused attention: 766.8 against 750.8 MiB in training, 694.8 to 698.8 against 686.8 MiB in `generate`.
const CUDNN_TRAINING: u64 = 16 * MIB;
const CUDNN_INFERENCE: u64 = 8 * MIB;

/// Streams of an engine that gathers and reduces beside the computation: 836.8 against 766.8 MiB in all such rows.
const STREAMS: u64 = 70 * MIB;
/// One NCCL communicator: DDP's rows end at 1324.8 MiB, without streams of the engine.
pub const COMMUNICATOR: u64 = 558 * MIB;

/// One part of what the process holds.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Part {
    /// What it is.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
}

/// What the process holds besides the allocator's segments.
pub fn parts(log: &Log, gpu: &Gpu, training: bool) -> Vec<Part> {
    let mut parts = vec![
        Part { name: "CUDA context", bytes: CONTEXT },
        Part { name: "kernels and libraries", bytes: if training { KERNELS_TRAINING } else { KERNELS_INFERENCE } },
    ];
    let fused = log.storages.iter().any(|storage| storage.operation == "scaled_dot_product_attention");
    // Which kernel it was follows from the card: Hopper and Blackwell take cuDNN's.
    if fused && gpu.capability.is_none_or(|capability| (90..120).contains(&capability)) {
        let bytes = if training { CUDNN_TRAINING } else { CUDNN_INFERENCE };
        parts.push(Part { name: "cuDNN attention", bytes });
    }
    parts
}

/// What a process holds besides what it asked the driver for: context, loaded kernels and library handles. For runs that
/// are watched instead of simulated.
pub fn unasked(training: bool) -> u64 {
    CONTEXT + if training { KERNELS_TRAINING } else { KERNELS_INFERENCE }
}

/// What running on several cards adds.
pub fn parallel_parts(parallel: &Parallel) -> Vec<Part> {
    let mut parts = Vec::new();
    if parallel.has_streams() {
        parts.push(Part { name: "streams of the engine", bytes: STREAMS });
    }
    // One line for each group of the mesh, where the count is the mesh's own.
    let groups = parallel.mesh.groups();
    if parallel.communicators as usize == groups.len() {
        parts.extend(groups.into_iter().map(|name| Part { name, bytes: COMMUNICATOR }));
    } else if parallel.communicators > 0 {
        let bytes = COMMUNICATOR.saturating_mul(u64::from(parallel.communicators));
        parts.push(Part { name: "NCCL", bytes });
    }
    parts
}
