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
    let mut roles = vec![Role {
        name: "policy".into(),
        weights: held(&[Category::Weights, Category::Adapters]),
        training: held(&[Category::Gradients, Category::OptimizerState]),
        working: working(&[Work::Forward, Work::Backward, Work::Generate, Work::Score]),
    }];
    let others = [
        ("reference", Category::Reference, Work::Reference),
        ("reward model", Category::Reward, Work::Reward),
        ("teacher", Category::Teacher, Work::Teacher),
    ];
    for (name, category, work) in others {
        if most.contains_key(&category) {
            let weights = held(&[category]);
            roles.push(Role { name: name.into(), weights, training: 0, working: working(&[work]) });
        }
    }
    if plan.objective.vllm.as_ref().is_some_and(|vllm| vllm.mode == VllmMode::Colocate) {
        let granted = (plan.gpu.memory as f64 * plan.objective.share()) as u64;
        roles.push(Role { name: "vLLM".into(), weights: granted, training: 0, working: 0 });
    }
    roles
}
