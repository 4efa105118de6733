//! Roles on shared cards, phase by phase: what each holds, and which phase decides. From sources.

use serde::Serialize;

use crate::memory::phase::Work;
use crate::memory::process::Fact;
use crate::memory::simulation::Simulation;
use crate::plan::parallel::Engine;
use crate::plan::placement::{Group, Part};
use crate::plan::{Gpu, TrainPlan};

/// What a role takes on one card, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// Its weights.
    pub weights: u64,
    /// Its optimizer's states.
    pub states: u64,
    /// What scoring takes besides.
    pub scoring: u64,
    /// The most that its update reserves, weights and states among it.
    pub update: u64,
    /// A CUDA context.
    pub context: u64,
    /// What a process holds besides torch's memory, its context among it.
    pub outside: u64,
    /// All its parameters in 16 bits.
    pub whole: u64,
}

impl Figures {
    /// Those of a simulated update.
    pub fn of(plan: &TrainPlan, run: &Simulation) -> Self {
        let whole = run.program.parameters.iter().map(|one| 2 * one.shape.elements()).sum();
        // DeepSpeed has wide copies among its optimizer's states.
        let weights = match plan.parallel.as_ref().map(|parallel| (&parallel.engine, &parallel.mesh)) {
            Some((Engine::Deepspeed(deepspeed), mesh)) if deepspeed.zero.stage == 3 => whole / mesh.world().max(1),
            Some((Engine::Deepspeed(_), _)) => whole,
            _ => super::roles::of(plan, run).first().map_or(0, |role| role.weights),
        };
        let phases = || run.log.phases.iter().zip(&run.replay.phases).filter(|(phase, _)| phase.work == Work::Score);
        let context = run.process.iter().filter(|part| part.fact.0 == Fact::Context && part.fact.1 > 0);
        Self {
            weights,
            states: phases().next_back().map_or(0, |(_, memory)| memory.before.saturating_sub(weights)),
            scoring: phases().map(|(_, memory)| memory.peak.saturating_sub(memory.before)).max().unwrap_or(0),
            update: run.replay.peak_reserved(),
            context: context.map(|part| part.bytes).sum(),
            outside: run.process.iter().fold(0, |sum: u64, part| sum.saturating_add(part.bytes)),
            whole,
        }
    }
}

/// A group of cards through a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Shared {
    /// How many cards.
    pub cards: u64,
    /// The roles on them.
    pub roles: Vec<String>,
    /// What happens, in its order.
    pub phases: Vec<Moment>,
    /// The phase that takes the most.
    pub decides: String,
    /// What it takes, in bytes.
    pub peak: u64,
    /// Whether that fits.
    pub fits: bool,
    /// The largest share of an engine that fits, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_share: Option<f64>,
}

/// One phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Moment {
    /// What happens.
    pub name: String,
    /// Bytes of every role.
    pub roles: Vec<u64>,
    /// What processes hold besides.
    pub outside: u64,
    /// All of it.
    pub total: u64,
}

/// A group's phases.
pub fn of(group: &Group, figures: &[Figures], gpu: &Gpu) -> Shared {
    let pairs = || group.roles.iter().zip(figures);
    // What stays of a role while others run; an engine that never sleeps is there all the time.
    let granted = |share: f64| (gpu.memory as f64 * share) as u64;
    let idle: Vec<u64> = pairs()
        .map(|(role, found)| match &role.part {
            Part::Trained { weights_leave, states_leave, .. } => {
                kept(found.weights, !weights_leave).saturating_add(kept(found.states, !states_leave))
            }
            Part::Scores { offloaded, whole, .. } => kept(if *whole { found.whole } else { found.weights }, !offloaded),
            Part::Rollout { share, sleeps, .. } => kept(granted(*share), !sleeps),
        })
        .collect();
    let outside = outside(group, figures);
    let mut phases = Vec::new();
    let mut moment = |name: String, changes: &[(usize, u64)]| {
        let mut roles = idle.clone();
        changes.iter().for_each(|(at, bytes)| roles[*at] = *bytes);
        let total = roles.iter().fold(outside, |sum, bytes| sum.saturating_add(*bytes));
        phases.push(Moment { name, roles, outside, total });
    };
    let actor = group.roles.iter().position(|role| role.name == "actor");
    let writes = |part: &Part| matches!(part, Part::Rollout { bucket: Some(_), .. });
    let mut engines: Vec<_> = group.roles.iter().enumerate().collect();
    crate::order::sort_by_key(&mut engines, |(_, role)| !writes(&role.part));
    for (at, role) in engines {
        let Part::Rollout { share, split, bucket, .. } = &role.part else { continue };
        if let Some(bucket) = bucket {
            let weights = figures[at].whole / split.max(&1);
            let mut changes = vec![(at, weights.saturating_add(*bucket).max(idle[at]))];
            changes.extend(actor.map(|at| (at, figures[at].weights.max(idle[at]))));
            moment(format!("weights to {}", role.name), &changes);
        }
        let does = if bucket.is_some() { "writes" } else { "scores" };
        moment(format!("{} {does}", role.name), &[(at, granted(*share))]);
    }
    for (at, (role, found)) in pairs().enumerate() {
        match &role.part {
            Part::Trained { states_leave, .. } => {
                let held = found.weights.saturating_add(kept(found.states, !states_leave));
                moment(format!("{} scores", role.name), &[(at, held.saturating_add(found.scoring))]);
            }
            Part::Scores { .. } => moment(format!("{} scores", role.name), &[(at, idle[at] + found.scoring)]),
            Part::Rollout { .. } => {}
        }
    }
    // The critic before the actor, in both.
    for (at, (role, found)) in pairs().enumerate().rev() {
        if matches!(role.part, Part::Trained { .. }) {
            moment(format!("{} is trained", role.name), &[(at, found.update)]);
        }
    }
    let largest = phases.iter().max_by_key(|moment| moment.total);
    let (decides, peak) = largest.map_or_else(Default::default, |moment| (moment.name.clone(), moment.total));
    let largest_share = group.roles.iter().enumerate().find_map(|(at, role)| match role.part {
        Part::Rollout { sleeps, bucket: Some(_), .. } => {
            let awake = phases.iter().filter(|moment| !sleeps || moment.name.ends_with("writes"));
            let beside = awake.map(|moment| moment.total - moment.roles[at]).max()?;
            Some((gpu.memory.saturating_sub(beside) as f64 / gpu.memory.max(1) as f64 * 100.0).floor() / 100.0)
        }
        _ => None,
    });
    Shared {
        cards: group.cards,
        roles: group.roles.iter().map(|role| role.name.to_owned()).collect(),
        fits: peak <= gpu.memory,
        phases,
        decides,
        peak,
        largest_share,
    }
}

fn kept(bytes: u64, stays: bool) -> u64 {
    if stays { bytes } else { 0 }
}

/// Every process has a context; the trainer's, kernels and communicators too.
fn outside(group: &Group, figures: &[Figures]) -> u64 {
    let is_engine = |part: &Part| matches!(part, Part::Rollout { .. });
    let found = |engine: bool| {
        group.roles.iter().zip(figures).filter(move |(role, _)| is_engine(&role.part) == engine).map(|(_, found)| found)
    };
    let engines = found(true).map(|found| found.context).fold(0, u64::saturating_add);
    let trainers = found(false).map(|found| found.outside);
    let trainers = if group.shared { trainers.max().unwrap_or(0) } else { trainers.fold(0, u64::saturating_add) };
    engines.saturating_add(trainers)
}
