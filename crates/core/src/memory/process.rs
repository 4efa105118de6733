//! What a process holds on the card besides the caching allocator: the CUDA context, loaded kernels, libraries.
//!
//! All of it is fact of the machine ([`Machine`]): which parts a run has is decided here, how large they are is not.

use super::log::Log;
use super::nccl;
use crate::plan::machine::Machine;
use crate::plan::{Gpu, Parallel, Quantization, QuantizationScheme};

/// One part of what the process holds.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Part {
    /// What it is.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// The fact of the machine it is, and how many times.
    #[serde(skip)]
    pub fact: (Fact, u64),
}

/// A fact of the machine that is a number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fact {
    /// The CUDA context.
    Context,
    /// Kernels and libraries of training.
    KernelsTraining,
    /// Kernels and libraries of generation.
    KernelsInference,
    /// cuDNN's attention in training.
    CudnnTraining,
    /// cuDNN's attention in generation.
    CudnnInference,
    /// LLM.int8's products.
    Int8,
    /// Streams of an engine.
    Streams,
    /// One NCCL communicator.
    Communicator,
    /// NCCL's kernels.
    Nccl,
}

impl Fact {
    /// All of them, those that stand alone first.
    pub const ALL: [Self; 9] = [
        Self::Context,
        Self::KernelsTraining,
        Self::KernelsInference,
        Self::CudnnTraining,
        Self::CudnnInference,
        Self::Int8,
        Self::Streams,
        Self::Communicator,
        Self::Nccl,
    ];

    /// How reports call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Context => "CUDA context",
            Self::KernelsTraining | Self::KernelsInference => "kernels and libraries",
            Self::CudnnTraining | Self::CudnnInference => "cuDNN attention",
            Self::Int8 => "LLM.int8 products",
            Self::Streams => "streams of the engine",
            Self::Communicator => "NCCL",
            Self::Nccl => "NCCL kernels",
        }
    }

    /// What it is on a card.
    pub fn of(self, gpu: &Gpu) -> u64 {
        match self {
            Self::Context => gpu.context(),
            other => {
                let mut machine = gpu.machine;
                *other.place(&mut machine)
            }
        }
    }

    /// Writes down what it was found to be on a machine.
    pub fn learn(self, machine: &mut Machine, bytes: u64) {
        *self.place(machine) = bytes;
    }

    /// Where a machine keeps it.
    fn place(self, machine: &mut Machine) -> &mut u64 {
        match self {
            Self::Context => machine.context.get_or_insert_default(),
            Self::KernelsTraining => &mut machine.kernels_training,
            Self::KernelsInference => &mut machine.kernels_inference,
            Self::CudnnTraining => &mut machine.cudnn_training,
            Self::CudnnInference => &mut machine.cudnn_inference,
            Self::Int8 => &mut machine.int8,
            Self::Streams => &mut machine.streams,
            Self::Communicator => &mut machine.communicator,
            Self::Nccl => &mut machine.nccl,
        }
    }

    fn part(self, gpu: &Gpu, times: u64) -> Part {
        Part { name: self.name(), bytes: self.of(gpu).saturating_mul(times), fact: (self, times) }
    }
}

/// What the process holds besides the allocator's segments.
pub fn parts(log: &Log, gpu: &Gpu, quantization: Option<&Quantization>, training: bool) -> Vec<Part> {
    let pick = |train: Fact, infer: Fact| if training { train } else { infer };
    let mut facts = vec![Fact::Context, pick(Fact::KernelsTraining, Fact::KernelsInference)];
    if log.ran_cudnn {
        facts.push(pick(Fact::CudnnTraining, Fact::CudnnInference));
    }
    if quantization.is_some_and(|known| known.scheme == QuantizationScheme::Int8) {
        facts.push(Fact::Int8);
    }
    facts.into_iter().map(|fact| fact.part(gpu, 1)).collect()
}

/// What running on several cards adds.
pub fn parallel_parts(parallel: &Parallel, gpu: &Gpu) -> Vec<Part> {
    let mut parts = Vec::new();
    if parallel.has_streams() {
        parts.push(Fact::Streams.part(gpu, 1));
    }
    // A machine whose communicators take nothing has none: torch's fake process group.
    let groups = parallel.mesh.groups();
    if gpu.machine.communicator == 0 || groups.is_empty() {
        return parts;
    }
    parts.push(Fact::Nccl.part(gpu, 1));
    parts.extend(groups.into_iter().map(|group| {
        let part = Fact::Communicator.part(gpu, 1);
        let connections = nccl::connections(group.ranks, group.traffic, &gpu.machine);
        Part { name: group.name, bytes: part.bytes.saturating_add(connections), ..part }
    }));
    parts
}
