//! A plan simulated, judged and summed up.

use std::collections::BTreeMap;

use serde_json::Value;
use vramcast_core::memory::device::Device;
use vramcast_core::memory::simulation::{self, Simulation};
use vramcast_core::model::Model;
use vramcast_core::plan::{
    Gpu, Gpus, InferPlan, Outliers, PlanError, Quantization, QuantizationScheme, RunPlan, TrainPlan,
};
use vramcast_core::planner::suggest::{self, Suggestion};
use vramcast_core::report::verdict::judge;
use vramcast_core::report::{self, Report, Verdict};

use super::start::Start;
use crate::cli::model::{Found, positions, too_long};
use crate::cli::{Failure, Place};
use crate::detect;
use crate::render::gib;

/// What is wanted beside the numbers.
pub(crate) struct Options<'a> {
    /// What must stay free on a card of so many bytes.
    pub(crate) kept: &'a dyn Fn(u64) -> Result<u64, Failure>,
    /// Whether to look for changes when it does not fit.
    pub(crate) suggest: bool,
    /// Whether to judge every known card instead of the plan's own.
    pub(crate) all_cards: bool,
    /// The table of cards; reading it takes longer than one estimate, so it is asked for only when needed.
    pub(crate) cards: &'a dyn Fn() -> Result<Gpus, Failure>,
}

/// The answer.
pub(crate) struct Estimate {
    /// The one value that every interface shows.
    pub(crate) report: Report,
    /// Changes that would make it fit.
    pub(crate) suggestions: Vec<Suggestion>,
    /// Whether it fits, with what must stay free.
    pub(crate) fits: bool,
}

impl Estimate {
    /// The document of `--json`.
    pub(crate) fn document(&self) -> Result<Value, Failure> {
        let broken = |error: serde_json::Error| Failure::bad_input(error.to_string());
        let mut document = serde_json::to_value(&self.report).map_err(broken)?;
        if !self.suggestions.is_empty() {
            document["suggestions"] = serde_json::to_value(&self.suggestions).map_err(broken)?;
        }
        Ok(document)
    }
}

/// Simulations of more events than this take a tenth of a second and more.
const MOST_EVENTS: usize = 2_000_000;

/// A training run.
pub(crate) fn train(
    found: &Found,
    mut plan: TrainPlan,
    mut start: Start,
    options: &Options,
) -> Result<Estimate, Failure> {
    let model = found.require_model()?;
    if !plan.frozen.is_empty() {
        start.notes.extend(plan.resolve_frozen(&model.program(plan.batch.training_inputs())?)?);
    }
    let simulation = simulation::train(model, &plan)?;
    if let Some(most) = simulation.program.positions.filter(|most| *most < plan.batch.seq_len) {
        return Err(too_long(&found.name, plan.batch.seq_len, most).at(Place::Plan("/batch/seq_len".into())));
    }
    for unused in model.unused_inputs(&plan.batch.training_inputs())? {
        start.notes.push(format!("{unused}: {} does not take it, so it changes nothing", found.name));
    }
    let (limit, now) = (limit(&plan.gpu, options)?, simulation.process_bytes());
    // Dozens of changes are tried, each a simulation of its own.
    let quick = simulation.log.events.len() < MOST_EVENTS;
    if now > limit && options.suggest && !quick {
        start.notes.push("no changes were tried: each would take as long as this answer".into());
    }
    let suggestions = if now > limit && options.suggest && quick {
        suggest::for_training(model, &plan, limit, now, &(options.cards)()?)
    } else {
        Vec::new()
    };
    let run = |gpu: &Gpu| simulation::train(model, &TrainPlan { gpu: gpu.clone(), ..plan.clone() });
    let verdicts = verdicts(&plan.gpu, now, options, run)?;
    let provenance = start.provenance(&plan);
    let range = outlier_range(model, &plan, now)?;
    let beside = detect::beside_others(&plan.gpu, now);
    let mut report = report::summarize(&found.name, model, RunPlan::Train(Box::new(plan)), &simulation, verdicts);
    report.provenance = provenance;
    report.notes.extend(start.notes);
    report.notes.extend(range);
    report.notes.extend(beside);
    report.notes.splice(0..0, own_notes(found, model));
    Ok(Estimate { report, suggestions, fits: now <= limit })
}

/// A run of `generate`; `notes` come before the report's own.
pub(crate) fn generate(
    found: &Found,
    plan: InferPlan,
    mut notes: Vec<String>,
    options: &Options,
) -> Result<Estimate, Failure> {
    let model = found.require_model()?;
    let tokens = plan.batch.seq_len.saturating_add(plan.new_tokens);
    if let Some(most) = positions(model).filter(|most| *most < tokens) {
        notes.push(format!("{} has {most} positions, and {tokens} tokens need as many: torch would fail", found.name));
    }
    let simulation = simulation::infer(model, &plan)?;
    let (limit, now) = (limit(&plan.gpu, options)?, simulation.process_bytes());
    let suggestions = if now > limit && options.suggest {
        suggest::for_generation(model, &plan, limit, now, &(options.cards)()?)
    } else {
        Vec::new()
    };
    let run = |gpu: &Gpu| simulation::infer(model, &InferPlan { gpu: gpu.clone(), ..plan.clone() });
    let verdicts = verdicts(&plan.gpu, now, options, run)?;
    notes.extend(detect::beside_others(&plan.gpu, now));
    let mut report = report::summarize(&found.name, model, RunPlan::Infer(Box::new(plan)), &simulation, verdicts);
    notes.extend(own_notes(found, model));
    report.notes.splice(0..0, notes);
    Ok(Estimate { report, suggestions, fits: now <= limit })
}

fn limit(own: &Gpu, options: &Options) -> Result<u64, Failure> {
    Ok(own.memory.saturating_sub((options.kept)(own.memory)?))
}

/// The plan's own card judged, or every known one. A card decides kernels and workspaces, nearly all by its compute
/// capability, so each of those runs for itself; one that is a little too small runs once more, since a full card gives
/// cached memory back. Cards that cannot run the plan at all are left out.
fn verdicts(
    own: &Gpu,
    now: u64,
    options: &Options,
    run: impl Fn(&Gpu) -> Result<Simulation, PlanError>,
) -> Result<Vec<Verdict>, Failure> {
    if !options.all_cards {
        return Ok(vec![judge(own, now)]);
    }
    let mut kinds: BTreeMap<u32, Option<Needs>> = BTreeMap::new();
    let mut verdicts = Vec::new();
    for card in (options.cards)()?.all() {
        let card = Gpu { machine: own.machine, ..card };
        if card.name == own.name && card.memory == own.memory {
            verdicts.push(judge(own, now));
            continue;
        }
        let roomy = || run(&Gpu { memory: u64::MAX, ..card.clone() }).ok().map(|simulation| Needs::of(&simulation));
        let Some(needs) = *kinds.entry(Device::of(&card).capability).or_insert_with(roomy) else { continue };
        let squeezed = (needs.least..needs.process).contains(&card.memory);
        let process = if squeezed { run(&card)?.process_bytes() } else { needs.process };
        verdicts.push(judge(&card, process));
    }
    Ok(verdicts)
}

/// What a run takes on a card with room.
#[derive(Clone, Copy)]
struct Needs {
    /// Of the process.
    process: u64,
    /// Without what the allocator has cached.
    least: u64,
}

impl Needs {
    fn of(simulation: &Simulation) -> Self {
        let process = simulation.process_bytes();
        let cached = simulation.replay.peak_reserved().saturating_sub(simulation.replay.peak_allocated());
        Self { process, least: process.saturating_sub(cached) }
    }
}

/// What is known about the source; the model's own notes are in the report already.
fn own_notes(found: &Found, model: &Model) -> Vec<String> {
    found.notes.iter().filter(|note| !model.notes().contains(note)).cloned().collect()
}

/// How far LLM.int8 can go: which input columns are outliers depends on the data, and random weights give the most.
fn outlier_range(model: &Model, plan: &TrainPlan, this: u64) -> Result<Option<String>, Failure> {
    let Some(quantization) = plan.quantization.as_ref().filter(|known| known.scheme == QuantizationScheme::Int8) else {
        return Ok(None);
    };
    let other = match quantization.outliers {
        Outliers::Trained => Outliers::RandomWeights,
        _ => Outliers::Trained,
    };
    let quantization = Quantization { outliers: other, ..quantization.clone() };
    let plan = TrainPlan { quantization: Some(quantization), ..plan.clone() };
    let that = simulation::train(model, &plan)?.process_bytes();
    let [low, high] = [this.min(that), this.max(that)].map(gib);
    Ok(Some(format!(
        "LLM.int8: the columns that hold outliers depend on the data; from {low} GiB with those of trained weights to \
         {high} GiB with random ones, the worst case"
    )))
}
