//! A page sees no GPU.

use vramcast_core::plan::{Gpu, Gpus};

/// The GPU that a plan is for when nobody names one.
#[derive(Debug, Clone)]
pub struct FirstGpu {
    /// What a plan needs to know of it.
    pub gpu: Gpu,
}

/// None.
pub fn first(_: impl Fn() -> Gpus) -> Option<&'static FirstGpu> {
    None
}

/// Nobody else is on it.
pub fn beside_others(_: &Gpu, _: u64) -> Option<String> {
    None
}
