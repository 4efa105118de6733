//! A rollout engine on the same card: vLLM colocated, as TRL starts it (trl 1.16: generation/vllm_generation.py). From sources, and
//! rehearsed with vLLM 0.26 run eagerly (truth/engines/colocated.jsonl).
//!
//! It is granted a share of the card and fills it with weights, activations and cache. Asleep (level 2) it gives weights and cache
//! back; TRL empties torch's cache before it wakes. Weights go over to it one by one, which is taken to need nothing.

use crate::memory::allocator::Replay;
use crate::memory::log::Log;
use crate::memory::phase::Work;
use crate::memory::process::{Fact, Part};
use crate::plan::objective::VllmMode;
use crate::plan::{Gpu, Objective};

/// What an engine takes of a card.
pub(in crate::memory) struct Colocated {
    granted: u64,
    sleeps: bool,
}

/// The engine of a run, where it has one on its own card.
pub(in crate::memory) fn colocated(objective: &Objective, gpu: &Gpu) -> Option<Colocated> {
    let vllm = objective.vllm.as_ref().filter(|vllm| vllm.mode == VllmMode::Colocate)?;
    let granted = (gpu.memory as f64 * objective.share()) as u64;
    Some(Colocated { granted, sleeps: vllm.enable_sleep_mode })
}

impl Colocated {
    fn part(name: &'static str, bytes: u64) -> Part {
        Part { name, bytes, fact: (Fact::Context, 0) }
    }

    /// What is there all the time.
    pub(in crate::memory) fn awake(&self) -> Option<Part> {
        (!self.sleeps).then(|| Self::part("vLLM engine", self.granted))
    }

    /// What an engine that sleeps adds to the trainer's largest reservation, and what there is to say.
    pub(in crate::memory) fn settle(
        &self,
        log: &Log,
        replay: &Replay,
        gpu: &Gpu,
        others: u64,
    ) -> (Option<Part>, Vec<String>) {
        let training = replay.peak_reserved();
        let generates = |(phase, _): &(&crate::memory::phase::Phase, _)| phase.work == Work::Generate;
        let rollouts = log.phases.iter().zip(&replay.phases).filter(generates);
        let beside = rollouts.map(|(_, memory)| memory.reserved).max().unwrap_or(training);
        let beside = if self.sleeps { beside } else { training };
        let left = gpu.memory.saturating_sub(others).saturating_sub(beside);
        let most = (left as f64 / gpu.memory.max(1) as f64 * 100.0).floor() / 100.0;
        let mut notes = vec![format!(
            "vLLM beside the trainer was rehearsed, not measured: it is granted {:.1} GiB; up to vllm_gpu_memory_utilization {most:.2} fits here",
            crate::units::Bytes(self.granted).gib()
        )];
        if !self.sleeps {
            return (None, notes);
        }
        let together = beside.saturating_add(self.granted);
        let decides = if together > training {
            "generation, with vLLM awake, decides"
        } else {
            "training, with vLLM asleep, decides"
        };
        notes.push(format!("{decides}: what sleep leaves behind (CUDA graphs) is not counted"));
        // Parts are of the trainer's own peak, while the engine sleeps.
        let more = Self::part("more with vLLM awake", together.saturating_sub(training));
        (Some(more).filter(|part| part.bytes > 0), notes)
    }
}
