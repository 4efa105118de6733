//! Who is on the card in a task: a column for each model, the engine among them.

use serde::Serialize;

use crate::memory::log::{Category, Event};
use crate::memory::phase::Work;
use crate::memory::simulation::Simulation;
use crate::plan::TrainPlan;
use crate::plan::objective::VllmMode;

/// A model of a task, or the engine that generates in the policy's place. All sizes are bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Role {
    /// Policy, reference, reward model, teacher or vLLM.
    pub name: String,
    /// Its weights, adapters among them; of an engine all that it is granted.
    pub weights: u64,
    /// Gradients and states of the optimizer.
    pub training: u64,
    /// The most that its passes take besides what is there when they begin.
    pub working: u64,
}

/// The roles of a run.
pub(super) fn of(plan: &TrainPlan, simulation: &Simulation) -> Vec<Role> {
    let mut most: std::collections::BTreeMap<Category, u64> = Default::default();
    let mut now: std::collections::BTreeMap<Category, u64> = Default::default();
    let mut loaded = true;
    for event in &simulation.log.events {
        let (id, made) = match event {
            Event::Allocate(id) => (id, true),
            Event::Free(id) => (id, false),
            Event::Phase(_) if loaded => {
                // What loading left behind: tied tables have gone.
                loaded = false;
                most.clone_from(&now);
                continue;
            }
            _ => continue,
        };
        let storage = &simulation.log.storages[id.0 as usize];
        let sum = now.entry(storage.category).or_default();
        *sum = if made { sum.saturating_add(storage.bytes) } else { sum.saturating_sub(storage.bytes) };
        let peak = most.entry(storage.category).or_default();
        *peak = (*peak).max(*sum);
    }
    let held = |categories: &[Category]| categories.iter().filter_map(|one| most.get(one)).sum::<u64>();
    let working = |works: &[Work]| {
        let phases = simulation.log.phases.iter().zip(&simulation.replay.phases);
        let own = phases.filter(|(phase, _)| works.contains(&phase.work));
        own.map(|(_, memory)| memory.peak.saturating_sub(memory.before)).max().unwrap_or(0)
    };
    let training = held(&[Category::Gradients, Category::OptimizerState]);
    // What is trained has gradients and states by its size.
    let adapters = held(&[Category::Adapters]);
    let (own, value) = (if adapters > 0 { adapters } else { held(&[Category::Weights]) }, held(&[Category::Value]));
    let of_value = (u128::from(training) * u128::from(value) / u128::from(own.saturating_add(value).max(1))) as u64;
    let mut roles = vec![Role {
        name: "policy".into(),
        weights: held(&[Category::Weights, Category::Adapters]),
        training: training - of_value,
        working: working(&[Work::Forward, Work::Backward, Work::Generate, Work::Score]),
    }];
    let others = [
        ("reference", Category::Reference, Work::Reference),
        ("reward model", Category::Reward, Work::Reward),
        ("teacher", Category::Teacher, Work::Teacher),
        ("value model", Category::Value, Work::Score),
    ];
    for (name, category, work) in others {
        if most.contains_key(&category) {
            let weights = held(&[category]);
            let training = if category == Category::Value { of_value } else { 0 };
            roles.push(Role { name: name.into(), weights, training, working: working(&[work]) });
        }
    }
    if plan.objective.vllm.as_ref().is_some_and(|vllm| vllm.mode == VllmMode::Colocate) {
        let granted = (plan.gpu.memory as f64 * plan.objective.share()) as u64;
        roles.push(Role { name: "vLLM".into(), weights: granted, training: 0, working: 0 });
    }
    roles
}

/// The card while an engine is on it, the trainer's process among it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Together {
    /// What happens.
    pub name: String,
    /// The trainer's process.
    pub trainer: u64,
    /// The engine.
    pub engine: u64,
    /// Whether both fit.
    pub fits: bool,
}

/// What trainer and engine hold through a step (trl 1.16, generation/vllm_generation.py): asleep, at level 2, the engine has
/// nothing; then torch's cache is emptied, of which segments stay that are in use in part, the engine's weights come back and the
/// policy's are copied into them one by one; then its cache does. Rehearsed: truth/engines/colocated.jsonl.
pub(super) fn together(plan: &TrainPlan, simulation: &Simulation) -> Vec<Together> {
    let Some(vllm) = plan.objective.vllm.as_ref().filter(|vllm| vllm.mode == VllmMode::Colocate) else {
        return Vec::new();
    };
    let own = simulation.process.iter().filter(|part| part.fact.1 > 0);
    let outside = own.fold(0u64, |sum, part| sum.saturating_add(part.bytes));
    let training = outside.saturating_add(simulation.replay.peak_reserved());
    let phases = simulation.log.phases.iter().zip(&simulation.replay.phases);
    let rollouts = phases.filter(|(phase, _)| phase.work == Work::Generate).map(|(_, memory)| memory.reserved);
    let emptied = rollouts.max().map_or(training, |bytes| outside.saturating_add(bytes));
    let granted = (plan.gpu.memory as f64 * plan.objective.share()) as u64;
    let weights = simulation.program.parameters.iter().map(|one| one.shape.elements().saturating_mul(2));
    let weights = weights.fold(0, u64::saturating_add).min(granted);
    let moments: &[(&str, u64, u64)] = match vllm.enable_sleep_mode {
        true => &[
            ("training, engine asleep", training, 0),
            ("weights go over", emptied, weights),
            ("generation", emptied, granted),
        ],
        false => &[("training", training, granted), ("generation", training, granted)],
    };
    let fits = |trainer: u64, engine| trainer.saturating_add(engine) <= plan.gpu.memory;
    let moment = |(name, trainer, engine): &(&str, u64, u64)| Together {
        name: (*name).into(),
        trainer: *trainer,
        engine: *engine,
        fits: fits(*trainer, *engine),
    };
    moments.iter().map(moment).collect()
}
