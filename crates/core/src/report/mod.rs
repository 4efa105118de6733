//! Stage 5: a simulation into the one value that every interface shows.
//!
//! | module | what is in it |
//! |---|---|
//! | [`alive`] | what is alive at the peak, by component, by module, and the largest things |
//! | [`confidence`] | how far an answer can be trusted |
//! | [`coverage`] | what recorded runs vouch for |
//! | [`events`] | every event of a run, what lived when |
//! | [`job`] | all cards of a run on several, and the host's memory |
//! | [`roles`] | who is on the card in a task |
//! | [`run`] | a run of many steps: which part decides, what the allocator had to do |
//! | [`serving`] | an engine's own account in the same form |
//! | [`timeline`] | allocated memory over the run |
//! | [`verdict`] | which cards hold it |

pub mod alive;
pub mod confidence;
pub mod cost;
pub mod coverage;
pub mod events;
pub mod job;
pub mod placement;
pub mod roles;
pub mod run;
pub mod serving;
pub mod timeline;
pub mod verdict;

use serde::Serialize;

use crate::memory::log::Category;
use crate::memory::simulation::Simulation;
use crate::model::Model;
use crate::model::op::Parameter;
use crate::plan::{Origin, RunPlan};
use crate::serving::Budget;

use alive::Alive;
pub use alive::{Component, LargeTensor, ModuleShare, Term};
pub use confidence::{Band, Confidence, Level};
pub use cost::StepCost;
pub use job::Job;
pub(crate) use run::change;
pub use run::{Cured, Run, Spread};
pub use serving::Buffered;
pub use timeline::{PhaseReport, Sample};
pub use verdict::Verdict;

/// The version of the JSON document; it changes when a field changes its meaning.
pub const SCHEMA: u32 = 1;

/// What a run needs, when and why. All sizes are bytes.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub struct Report {
    /// The version of this document.
    pub schema: u32,
    /// The model.
    pub model: ModelFacts,
    /// What was asked for, from which the plan follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<RequestFacts>,
    /// What was simulated.
    pub plan: RunPlan,
    /// The answer at its three levels.
    pub totals: Totals,
    /// How far it can be trusted.
    pub confidence: Confidence,
    /// The process total taken apart: components at the peak, then slack, fragmentation and what is outside torch. Adds
    /// up to `totals.process` exactly.
    pub breakdown: Vec<Component>,
    /// The peak taken apart by module.
    pub modules: Vec<ModuleShare>,
    /// When the peak is.
    pub peak_phase: String,
    /// The largest things alive at the peak.
    pub largest: Vec<LargeTensor>,
    /// Every component at the peak with its tensors.
    pub terms: Vec<Term>,
    /// Phase by phase.
    pub phases: Vec<PhaseReport>,
    /// Allocated over the run.
    pub timeline: Vec<Sample>,
    /// The whole run, where it is more than one step again and again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<Run>,
    /// What a step of training computes, moves and takes, on each card.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<StepCost>,
    /// All cards together, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<Job>,
    /// A serving engine's own account: its pool of blocks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub budgets: Vec<Budget>,
    /// A serving engine's own account: its buffers, device by device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buffers: Vec<Buffered>,
    /// Which cards hold it.
    pub verdicts: Vec<Verdict>,
    /// Where every setting comes from.
    pub provenance: Vec<Origin>,
    /// Guesses and limits.
    pub notes: Vec<String>,
}

/// What was asked for.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct RequestFacts {
    /// The framework whose defaults lie below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub framework: Option<String>,
    /// Every value that was asked for, by its place in the plan.
    pub settings: serde_json::Value,
}

/// The model in a few numbers.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub struct ModelFacts {
    /// As it was asked for.
    pub name: String,
    /// Its family.
    pub family: String,
    /// Parameters.
    pub parameters: u64,
    /// Parameters that are trained.
    pub trainable: u64,
    /// Parameters that an adapter adds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<u64>,
}

/// The answer, in bytes, at three levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Totals {
    /// The most that tensors hold (`torch.cuda.max_memory_allocated`).
    pub allocated: u64,
    /// The most that torch takes from the driver (`max_memory_reserved`).
    pub reserved: u64,
    /// The most that the process takes, as nvidia-smi shows it.
    pub process: u64,
}

impl Totals {
    /// Of a simulation.
    pub fn of(simulation: &Simulation) -> Self {
        Self {
            allocated: simulation.replay.peak_allocated(),
            reserved: simulation.replay.peak_reserved(),
            process: simulation.process_bytes(),
        }
    }
}

/// Sums a simulation up, with verdicts that were reached on it.
pub fn summarize(name: &str, model: &Model, plan: RunPlan, simulation: &Simulation, verdicts: Vec<Verdict>) -> Report {
    let totals = Totals::of(simulation);
    let alive = Alive::at_peak(simulation);
    let mut notes = model.notes().to_vec();
    notes.extend(plan.notes());
    let confidence = confidence::of(model, &plan);
    if confidence.level == Level::Sources {
        notes.push(format!("not yet measured: {}", confidence.missing.join(", ")));
    }
    if simulation.log.host.peak > 0 {
        let gib = crate::units::Bytes(simulation.log.host.peak).gib();
        notes.push(format!("saved tensors take up to {gib:.2} GiB of pinned host memory"));
    }
    notes.extend(simulation.notes.iter().cloned());
    if plan.gpu().capability.is_none() {
        notes.push(format!("{}: kernels and workspaces are taken from NVIDIA's H200", plan.gpu().name));
    }
    Report {
        schema: SCHEMA,
        model: ModelFacts {
            name: name.to_owned(),
            family: model.family().name.to_owned(),
            parameters: count(simulation, |_| true),
            trainable: trainable(&plan, simulation),
            adapter: simulation.adapter.as_ref().map(|layout| layout.added()),
        },
        request: None,
        run: Run::of(&plan, simulation),
        step: match &plan {
            RunPlan::Train(plan) if plan.job.is_one_step() => Some(cost::of_simulation(model, plan, simulation)),
            _ => None,
        },
        plan,
        totals,
        confidence,
        budgets: Vec::new(),
        buffers: Vec::new(),
        breakdown: alive.breakdown(simulation, totals),
        modules: alive.by_module(),
        peak_phase: timeline::phase_of(simulation, simulation.replay.peak_event),
        largest: alive.largest(10),
        terms: alive.terms(8),
        phases: timeline::phases(simulation),
        timeline: timeline::samples(simulation),
        provenance: Vec::new(),
        job: Job::of(simulation),
        verdicts,
        notes,
    }
}

fn count(simulation: &Simulation, pick: impl Fn(&Parameter) -> bool) -> u64 {
    let picked = simulation.program.parameters.iter().filter(|parameter| pick(parameter));
    picked.fold(0, |sum: u64, parameter| sum.saturating_add(parameter.shape.elements()))
}

fn trainable(plan: &RunPlan, simulation: &Simulation) -> u64 {
    match (plan, &simulation.adapter) {
        (RunPlan::Infer(_) | RunPlan::Serve(_), _) => 0,
        (RunPlan::Train(_), Some(layout)) => layout.trainable(),
        (RunPlan::Train(plan), None) => count(simulation, |parameter| !plan.is_frozen(parameter)),
    }
}

/// How a category is called in reports.
pub fn category_name(category: Category) -> &'static str {
    match category {
        Category::Weights => "weights",
        Category::Reference => "reference model",
        Category::Reward => "reward model",
        Category::Teacher => "teacher",
        Category::Value => "value model",
        Category::Buffers => "buffers",
        Category::Adapters => "adapters",
        Category::Batch => "batch",
        Category::Gradients => "gradients",
        Category::OptimizerState => "optimizer state",
        Category::Activations => "activations",
        Category::Logits => "logits and loss",
        Category::Cache => "cache",
        Category::Temporaries => "temporaries",
        Category::Communication => "communication",
        Category::Workspace => "workspace",
    }
}
