//! What of a card vLLM's rules ask for.

use serde::{Deserialize, Serialize};

use crate::plan::{Gpu, Gpus};

/// A card as vLLM's rules know it; nothing of one that has no name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// Its name: an A100 gets the defaults of small cards whatever its memory.
    pub name: String,
    /// CUDA compute capability times ten.
    pub capability: u32,
    /// Whether NCCL opens many channels between such cards.
    pub many_channels: bool,
    /// Whether its memory is the host's: NVML does not say how much, and vLLM takes it for a small card.
    pub hosted: bool,
}

impl From<&Gpu> for Card {
    fn from(gpu: &Gpu) -> Self {
        let (many_channels, hosted) = (gpu.many_channels, gpu.hosted);
        Self { name: gpu.name.clone(), capability: gpu.capability(), many_channels, hosted }
    }
}

/// One of the table.
impl From<&str> for Card {
    fn from(name: &str) -> Self {
        Gpus::embedded().find(name).map_or_else(|_| Self::default(), |gpu| Self::from(&gpu))
    }
}

impl Card {
    /// Whether it is of compute capability 9.0.
    pub(super) fn is_hopper(&self) -> bool {
        self.capability == 90
    }

    /// Whether it is one of Blackwell's for data centres.
    pub(super) fn is_large_blackwell(&self) -> bool {
        self.capability / 10 == 10
    }

    pub(super) fn is_a100(&self) -> bool {
        self.name.to_ascii_lowercase().contains("a100")
    }
}
