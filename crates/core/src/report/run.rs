//! A run of many steps in a few facts: which part of it decides, where the peak stands, what the allocator had to do.

use serde::Serialize;

use super::roles::{Role, Together};
use crate::memory::allocator;
use crate::memory::phase::{Phase, Work};
use crate::memory::simulation::Simulation;
use crate::plan::job::Evaluation;
use crate::plan::{AllocatorOptions, RunPlan, TrainPlan};

/// A whole run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Run {
    /// Steps that were run.
    pub steps: u32,
    /// Tokens of the shortest, the median and the longest batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lengths: Option<[u64; 3]>,
    /// The step at which most is allocated, and the tokens of its longest sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak: Option<PeakStep>,
    /// What each part of the run takes.
    pub parts: Vec<Part>,
    /// Who is on the card, where a task has several models.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub roles: Vec<Role>,
    /// The card through a step, where an engine shares it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub engine: Vec<Together>,
    /// The part that needs most.
    pub decides: String,
    /// How often the allocator had to give cached memory back and try again; each costs time.
    pub retries: u32,
    /// The same run with other seeds: other orders, and other samples where lengths are drawn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
    /// What would be reserved at most with expandable segments, where that is less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expandable: Option<u64>,
    /// What takes less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cure: Option<String>,
    /// The first of that, and what would be allocated at most with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cured: Option<Cured>,
    /// Where the run ends for want of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fails: Option<Failure>,
}

/// What a change of the part that decides comes to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Cured {
    /// The change, in the words of a command.
    pub with: String,
    /// Peak allocated then.
    pub allocated: u64,
}

/// Peaks over runs with other seeds: the lowest and the highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Spread {
    /// Seeds that were tried.
    pub seeds: u32,
    /// Peak allocated.
    pub allocated: [u64; 2],
    /// Peak reserved.
    pub reserved: [u64; 2],
}

/// Where the peak stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct PeakStep {
    /// The step, counted from 1.
    pub step: u32,
    /// Tokens of its longest sample.
    pub tokens: u64,
}

/// One part of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Part {
    /// Loading, training, evaluation or merging.
    pub name: String,
    /// Most allocated in it.
    pub allocated: u64,
    /// Most reserved in it.
    pub reserved: u64,
}

/// A request that the card had no room for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Failure {
    /// When.
    pub phase: String,
    /// Bytes that were asked for.
    pub bytes: u64,
}

/// Longer logs are not replayed for a comparison.
const MOST_EVENTS: usize = 4_000_000;

/// The part of a run that a phase belongs to.
fn part_of(phase: &Phase, task: bool) -> &'static str {
    match phase.work {
        Work::Generate if task => "generation",
        Work::Score => "scoring",
        Work::Reference => "reference",
        Work::Reward => "reward model",
        Work::Teacher => "teacher",
        Work::Clip | Work::Optimizer | Work::Zero if task => "optimizer",
        Work::Forward | Work::Backward if task => "policy",
        Work::Load => "loading",
        Work::Evaluation => "evaluation",
        Work::Save => "saving",
        Work::Merge => "merging",
        Work::Resume => "resuming",
        _ => "training",
    }
}

impl Run {
    /// Of a simulation that is more than the ideal step, or that the allocator had trouble with.
    pub(super) fn of(plan: &RunPlan, simulation: &Simulation) -> Option<Self> {
        let RunPlan::Train(plan) = plan else { return None };
        let replay = &simulation.replay;
        let task = !plan.objective.is_plain();
        if plan.job.is_plain() && replay.retries == 0 && !task {
            return None;
        }
        let mut parts: Vec<Part> = Vec::new();
        for (phase, memory) in simulation.log.phases.iter().zip(&replay.phases) {
            let name = part_of(phase, task);
            let at = parts.iter().position(|part| part.name == name).unwrap_or_else(|| {
                parts.push(Part { name: name.to_owned(), allocated: 0, reserved: 0 });
                parts.len() - 1
            });
            parts[at].allocated = parts[at].allocated.max(memory.peak);
            parts[at].reserved = parts[at].reserved.max(memory.peak_reserved);
        }
        let decides = parts.iter().max_by_key(|part| part.allocated).map(|part| part.name.clone()).unwrap_or_default();
        let steps = simulation.log.phases.iter().filter_map(|phase| phase.step).max().map_or(0, |last| last + 1);
        let batches = match plan.job.lengths {
            Some(_) => plan.batches(),
            None => Vec::new(),
        };
        let mut tokens: Vec<u64> = batches.iter().map(|sizes| sizes.longest).collect();
        let micro = plan.gradient_accumulation.max(1) as usize;
        let peak = super::timeline::at(simulation, replay.peak_event).and_then(|phase| phase.step).and_then(|step| {
            let of_step = tokens.chunks(micro).nth(step as usize)?;
            Some(PeakStep { step: step + 1, tokens: of_step.iter().copied().max()? })
        });
        crate::order::sort(&mut tokens);
        let lengths = (!tokens.is_empty()).then(|| [tokens[0], tokens[tokens.len() / 2], tokens[tokens.len() - 1]]);
        let fails =
            replay.failed.map(|(event, bytes)| Failure { phase: super::timeline::phase_of(simulation, event), bytes });
        let cure = cure(plan, &decides).map(str::to_owned);
        let (retries, expandable) = (replay.retries, expandable(plan, simulation));
        let roles = if task { super::roles::of(plan, simulation) } else { Vec::new() };
        Some(Self {
            steps,
            lengths,
            peak,
            parts,
            roles,
            engine: super::roles::together(plan, simulation),
            decides,
            retries,
            spread: None,
            expandable,
            cure,
            cured: None,
            fails,
        })
    }
}

/// What makes the part that decides smaller.
fn cure(plan: &TrainPlan, decides: &str) -> Option<&'static str> {
    let evaluation = plan.job.evaluation.as_ref()?;
    match decides {
        "evaluation" if evaluation.metrics && evaluation.accumulation_steps.is_none() && !evaluation.by_batch => {
            Some("eval_accumulation_steps, batch_eval_metrics or an argmax in preprocess_logits_for_metrics keeps less")
        }
        "evaluation" => Some("a smaller evaluation batch takes less"),
        _ => None,
    }
}

/// The first of these changes, and how a command says it.
pub(crate) fn change(evaluation: &Evaluation) -> Option<(Evaluation, String)> {
    let mut changed = evaluation.clone();
    if evaluation.metrics && evaluation.accumulation_steps.is_none() && !evaluation.by_batch {
        changed.accumulation_steps = Some(1);
        return Some((changed, "--eval-accumulation-steps 1".to_owned()));
    }
    changed.batch_size = evaluation.batch_size / 2;
    let words = format!("--eval-batch-size {}", changed.batch_size);
    (changed.batch_size > 0).then_some((changed, words))
}

/// The same run on segments that grow; not for logs that take long to replay.
fn expandable(plan: &TrainPlan, simulation: &Simulation) -> Option<u64> {
    let varies = plan.job.lengths.is_some() || plan.job.evaluation.is_some();
    if !varies || plan.allocator.expandable_segments || simulation.log.events.len() > MOST_EVENTS {
        return None;
    }
    let options = AllocatorOptions { expandable_segments: true, ..plan.allocator };
    let replay = allocator::replay(&simulation.log, options, None);
    let now = simulation.replay.peak_reserved();
    // Less by a twentieth is worth a word.
    Some(replay.peak_reserved()).filter(|less| *less < now - now / 20)
}
