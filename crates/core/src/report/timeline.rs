//! Memory over the run.

use serde::Serialize;

use crate::memory::log::{Category, Event};
use crate::memory::phase::{Phase, Work};
use crate::memory::simulation::Simulation;

/// One phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct PhaseReport {
    /// Its name: step, micro-batch, what.
    pub name: String,
    /// Allocated when it began.
    pub before: u64,
    /// Allocated when it ended.
    pub after: u64,
    /// Most allocated in it.
    pub peak: u64,
    /// Most reserved in it.
    pub peak_reserved: u64,
}

/// A moment of the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Sample {
    /// The phase it lies in.
    pub phase: String,
    /// The most that was asked for in this stretch, without rounding.
    pub bytes: u64,
    /// Of it: weights and buffers.
    pub weights: u64,
    /// Of it: gradients.
    pub gradients: u64,
    /// Of it: optimizer state.
    pub optimizer: u64,
}

/// How many samples a timeline has at most.
const SAMPLES: usize = 240;

/// Runs of more phases are told by their first steps, the one with the peak, and what is no step.
const MOST_PHASES: usize = 96;

/// The phases of a run.
pub(super) fn phases(simulation: &Simulation) -> Vec<PhaseReport> {
    let highest = at(simulation, simulation.replay.peak_event).and_then(|phase| phase.step);
    let all = simulation.log.phases.len() <= MOST_PHASES;
    let told = |phase: &Phase| match phase.work {
        Work::Load | Work::Evaluation | Work::Save | Work::Merge | Work::Resume => true,
        _ => all || phase.step.is_none_or(|step| step < 2 || Some(step) == highest),
    };
    let named = simulation.log.phases.iter().zip(&simulation.replay.phases);
    named
        .filter(|(name, _)| told(name))
        .map(|(name, phase)| PhaseReport {
            name: name.to_string(),
            before: phase.before,
            after: phase.after,
            peak: phase.peak,
            peak_reserved: phase.peak_reserved,
        })
        .collect()
}

/// The phase an event lies in.
pub(super) fn phase_of(simulation: &Simulation, event: usize) -> String {
    at(simulation, event).map_or_else(|| "load".to_owned(), ToString::to_string)
}

/// The same as it is.
pub(super) fn at(simulation: &Simulation, event: usize) -> Option<&Phase> {
    let mut before = simulation.log.events.iter().take(event + 1).rev();
    let index = before.find_map(|event| if let Event::Phase(index) = event { Some(*index) } else { None });
    simulation.log.phases.get(index? as usize)
}

/// Requested bytes over the run, the highest moment of each stretch.
pub(super) fn samples(simulation: &Simulation) -> Vec<Sample> {
    let log = &simulation.log;
    let stretch = log.events.len().div_ceil(SAMPLES).max(1);
    let mut samples: Vec<Sample> = Vec::new();
    let mut now = Moment::default();
    let mut highest: Option<Moment> = None;
    // A step that was written down again frees what its first run frees too, at the end: once counts, as in the allocator.
    let mut alive = vec![false; log.storages.len()];
    crate::work::look();
    for (index, event) in log.events.iter().enumerate() {
        match event {
            Event::Allocate(id) => {
                alive[id.0 as usize] = true;
                let info = &log.storages[id.0 as usize];
                now.bytes += info.bytes;
                if let Some(part) = part(&mut now, info.category) {
                    *part += info.bytes;
                }
            }
            Event::Free(id) if std::mem::take(&mut alive[id.0 as usize]) => {
                let info = &log.storages[id.0 as usize];
                now.bytes -= info.bytes;
                if let Some(part) = part(&mut now, info.category) {
                    *part -= info.bytes;
                }
            }
            Event::Phase(phase) => now.phase = Some(*phase),
            _ => {}
        }
        if highest.is_none_or(|known| now.bytes > known.bytes) {
            highest = Some(now);
        }
        if (index + 1) % stretch == 0 {
            samples.extend(highest.take().map(|moment| moment.sample(&log.phases)));
        }
    }
    samples.extend(highest.map(|moment| moment.sample(&log.phases)));
    samples
}

/// A sample under way.
#[derive(Debug, Clone, Copy, Default)]
struct Moment {
    phase: Option<u32>,
    bytes: u64,
    weights: u64,
    gradients: u64,
    optimizer: u64,
}

impl Moment {
    fn sample(self, phases: &[Phase]) -> Sample {
        let Self { phase, bytes, weights, gradients, optimizer } = self;
        let named = phase.and_then(|phase| phases.get(phase as usize));
        Sample {
            phase: named.map_or_else(|| "load".to_owned(), ToString::to_string),
            bytes,
            weights,
            gradients,
            optimizer,
        }
    }
}

fn part(sample: &mut Moment, category: Category) -> Option<&mut u64> {
    match category {
        Category::Weights | Category::Buffers | Category::Adapters => Some(&mut sample.weights),
        Category::Gradients => Some(&mut sample.gradients),
        Category::OptimizerState => Some(&mut sample.optimizer),
        _ => None,
    }
}
