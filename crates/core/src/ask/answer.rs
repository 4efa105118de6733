//! A settled plan simulated, judged and summed up: the one document that every interface shows.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::request::Request;
use super::resolve::{Settled, Surroundings, faults_of, longest_sequence, resolve};
use crate::dtype::DType;
use crate::memory::device::Device;
use crate::memory::simulation::{self, Simulation};
use crate::model::{Model, ModuleKind};
use crate::plan::job::Order;
use crate::plan::{
    Fault, Gpu, Gpus, InferPlan, Job, Outliers, PlanError, Quantization, QuantizationScheme, RunPlan, ServePlan,
    TrainPlan,
};
use crate::planner::smallest::{self, Suggestion};
use crate::report::verdict::judge;
use crate::report::{self, Cured, Level, Report, RequestFacts, Spread, Totals, Verdict, change};
use crate::serving;
use crate::units::{Bytes, grouped};

/// What is wanted beside the numbers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted {
    /// What must stay free on a card.
    pub kept: Kept,
    /// Whether to look for changes when it does not fit.
    pub suggestions: bool,
    /// Whether to judge every known card instead of the plan's own.
    pub all_cards: bool,
    /// How far the answer must be trusted, or it is none.
    pub require: Option<Level>,
}

/// What must stay free on a card.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Kept {
    /// Nothing.
    #[default]
    Nothing,
    /// So many bytes.
    Size(u64),
    /// So many hundredths of it.
    Percent(f64),
}

impl Kept {
    /// Of a card of so many bytes.
    pub fn of(self, memory: u64) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Size(bytes) => bytes,
            Self::Percent(percent) => (memory as f64 * percent / 100.0).ceil() as u64,
        }
    }

    /// Whether all cards fit and keep it free.
    pub fn holds(self, verdicts: &[Verdict]) -> bool {
        let free = |one: &Verdict| u64::try_from(one.headroom).is_ok_and(|left| left >= self.of(one.memory));
        verdicts.iter().all(|one| one.fits && free(one))
    }
}

/// The answer.
#[derive(Debug)]
pub struct Answer {
    /// The one value that every interface shows.
    pub report: Report,
    /// Changes that would make it fit.
    pub suggestions: Vec<Suggestion>,
    /// Whether it fits, with what must stay free.
    pub fits: bool,
}

impl Answer {
    /// The document.
    pub fn document(&self) -> Value {
        let mut document = serde_json::to_value(&self.report).unwrap_or_default();
        if !self.suggestions.is_empty() {
            document["suggestions"] = serde_json::to_value(&self.suggestions).unwrap_or_default();
        }
        document
    }
}

/// Simulations of more events than this take a tenth of a second and more.
const MOST_EVENTS: usize = 2_000_000;

/// Answers a request about a model.
pub fn answer(
    model: &Model,
    request: &Request,
    around: &Surroundings<'_>,
    wanted: Wanted,
) -> Result<Answer, Vec<Fault>> {
    let settled = resolve(model, request, around)?;
    let mut answer = match &settled.plan {
        RunPlan::Train(plan) => train(model, plan, request, around, wanted)?,
        RunPlan::Infer(plan) => generate(model, plan, request, around, wanted)?,
        RunPlan::Serve(plan) => serve(model, plan, request, around, wanted)?,
    };
    let Settled { notes, origins, .. } = settled;
    answer.report.request =
        Some(RequestFacts { framework: request.framework.clone(), settings: request.stated.clone() });
    answer.report.provenance = origins;
    answer.report.notes.extend(notes);
    answer.report.notes.extend(short(&answer, wanted.kept));
    let confidence = &answer.report.confidence;
    if let Some(wanted) = wanted.require.filter(|wanted| confidence.level < *wanted) {
        let [is, wanted] = [confidence.level, wanted].map(Level::words);
        let what = format!("the answer is {is}, not {wanted}: nobody measured {}", confidence.missing.join(", "));
        return Err(vec![Fault::new("", what)]);
    }
    Ok(answer)
}

/// What is missing where a run fits, but for what must stay free.
fn short(answer: &Answer, kept: Kept) -> Option<String> {
    let [verdict] = &answer.report.verdicts[..] else { return None };
    if !verdict.fits || answer.fits {
        return None;
    }
    let [left, wanted] = [verdict.headroom.unsigned_abs(), kept.of(verdict.memory)].map(|bytes| Bytes(bytes).gib());
    Some(format!("falls short: {left:.2} GiB are left of {}, and {wanted:.2} GiB shall stay free", verdict.gpu))
}

fn failed(error: PlanError) -> Vec<Fault> {
    faults_of(error, "")
}

fn train(
    model: &Model,
    plan: &TrainPlan,
    request: &Request,
    around: &Surroundings<'_>,
    wanted: Wanted,
) -> Result<Answer, Vec<Fault>> {
    let simulation = simulation::train(model, plan).map_err(failed)?;
    let run = |gpu: &Gpu| simulation::train(model, &TrainPlan { gpu: gpu.clone(), ..plan.clone() });
    let whole = RunPlan::Train(Box::new(plan.clone()));
    let mut answer = judged(model, whole, &simulation, (request, around, wanted), run)?;
    answer.report.notes.extend(untouched_experts(model, plan).map_err(failed)?);
    answer.report.notes.extend(outlier_range(model, plan, simulation.process_bytes()).map_err(failed)?);
    if let Some(run) = &mut answer.report.run {
        run.spread = spread(model, plan, &simulation)?;
        if run.cure.is_some() && simulation.log.events.len() < MOST_EVENTS {
            run.cured = cured(model, plan)?;
        }
    }
    Ok(answer)
}

/// What is allocated at most where evaluation takes less.
fn cured(model: &Model, plan: &TrainPlan) -> Result<Option<Cured>, Vec<Fault>> {
    let Some((evaluation, with)) = plan.job.evaluation.as_ref().and_then(change) else { return Ok(None) };
    let job = Job { evaluation: Some(evaluation), ..plan.job.clone() };
    let simulation = simulation::train(model, &TrainPlan { job, ..plan.clone() }).map_err(failed)?;
    Ok(Some(Cured { with, allocated: simulation.replay.peak_allocated() }))
}

/// Orders of samples that are tried beside the one that was asked for.
const OTHER_ORDERS: u32 = 4;

/// What other orders of the samples come to, where that takes no longer than a moment.
fn spread(model: &Model, plan: &TrainPlan, simulation: &Simulation) -> Result<Option<Spread>, Vec<Fault>> {
    let drawn = plan.job.lengths.is_some() && plan.job.order == Order::Shuffled;
    if !drawn || simulation.log.events.len() >= MOST_EVENTS {
        return Ok(None);
    }
    let first = Totals::of(simulation);
    let mut found = Spread { seeds: OTHER_ORDERS + 1, allocated: [first.allocated; 2], reserved: [first.reserved; 2] };
    for seed in 1..=u64::from(OTHER_ORDERS) {
        let job = Job { seed: plan.job.seed.wrapping_add(seed), ..plan.job.clone() };
        let totals = Totals::of(&simulation::train(model, &TrainPlan { job, ..plan.clone() }).map_err(failed)?);
        found.allocated = [found.allocated[0].min(totals.allocated), found.allocated[1].max(totals.allocated)];
        found.reserved = [found.reserved[0].min(totals.reserved), found.reserved[1].max(totals.reserved)];
    }
    Ok(Some(found))
}

fn generate(
    model: &Model,
    plan: &InferPlan,
    request: &Request,
    around: &Surroundings<'_>,
    wanted: Wanted,
) -> Result<Answer, Vec<Fault>> {
    let simulation = simulation::infer(model, plan).map_err(failed)?;
    let run = |gpu: &Gpu| simulation::infer(model, &InferPlan { gpu: gpu.clone(), ..plan.clone() });
    let whole = RunPlan::Infer(Box::new(plan.clone()));
    judged(model, whole, &simulation, (request, around, wanted), run)
}

/// A simulation with its verdicts and, where it does not fit, what to change.
fn judged(
    model: &Model,
    plan: RunPlan,
    simulation: &Simulation,
    (request, around, wanted): (&Request, &Surroundings<'_>, Wanted),
    run: impl Fn(&Gpu) -> Result<Simulation, PlanError>,
) -> Result<Answer, Vec<Fault>> {
    let gpu = plan.gpu().clone();
    let (limit, now) = (gpu.memory.saturating_sub(wanted.kept.of(gpu.memory)), simulation.process_bytes());
    // A limit of the run's own may be lower than the card's.
    let fits = now <= limit && !simulation.replay.out_of_memory;
    let mut notes = Vec::new();
    // Dozens of changes are tried, each a simulation of its own.
    let quick = simulation.log.events.len() < MOST_EVENTS;
    if !fits && wanted.suggestions && !quick {
        notes.push("no changes were tried: each would take as long as this answer".to_owned());
    }
    let suggestions = match !fits && wanted.suggestions && quick {
        true => smallest::changes(model, request, around, (&plan, Totals::of(simulation)), wanted.kept),
        false => Vec::new(),
    };
    let mut verdicts = verdicts(&gpu, now, wanted, around.cards, run).map_err(failed)?;
    for verdict in verdicts.iter_mut().filter(|verdict| verdict.gpu == gpu.name) {
        verdict.fits &= !simulation.replay.out_of_memory;
    }
    let mut report = report::summarize(around.name, model, plan, simulation, verdicts);
    report.notes.extend(notes);
    Ok(Answer { report, suggestions, fits })
}

fn serve(
    model: &Model,
    plan: &ServePlan,
    request: &Request,
    around: &Surroundings<'_>,
    wanted: Wanted,
) -> Result<Answer, Vec<Fault>> {
    let served = serving::start(model, plan)?;
    let mut report = report::serving::summarize(around.name, model, plan, &served);
    if let (Some(most), serving::Served::Pool(budget)) = (longest_sequence(model), &served)
        && budget.largest_sequence > most
    {
        report.notes.push(format!(
            "memory would hold a sequence of {} tokens; the model was made for {}",
            grouped(budget.largest_sequence),
            grouped(most)
        ));
    }
    let fits = wanted.kept.holds(&report.verdicts);
    let suggestions = match !fits && wanted.suggestions {
        true => smallest::changes(model, request, around, (&report.plan, report.totals), wanted.kept),
        false => Vec::new(),
    };
    if wanted.all_cards {
        let cards = (around.cards)();
        let on = |gpu: Gpu| {
            let plan = ServePlan { gpu, ..plan.clone() };
            let served = serving::start(model, &plan).ok()?;
            report::serving::summarize(around.name, model, &plan, &served).verdicts.pop()
        };
        report.verdicts = cards.all().filter_map(on).collect();
    }
    Ok(Answer { report, suggestions, fits })
}

/// The plan's own card judged, or every known one. A card decides kernels and workspaces, nearly all by its compute
/// capability, so each of those runs for itself; one that is a little too small runs once more, since a full card gives
/// cached memory back. Cards that cannot run the plan at all are left out.
fn verdicts(
    own: &Gpu,
    now: u64,
    wanted: Wanted,
    cards: &dyn Fn() -> Gpus,
    run: impl Fn(&Gpu) -> Result<Simulation, PlanError>,
) -> Result<Vec<Verdict>, PlanError> {
    if !wanted.all_cards {
        return Ok(vec![judge(own, now)]);
    }
    let mut kinds: BTreeMap<u32, Option<Needs>> = BTreeMap::new();
    let mut verdicts = Vec::new();
    for card in cards().all() {
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

/// What bitsandbytes leaves alone: experts that are one parameter for all are no linears.
fn untouched_experts(model: &Model, plan: &TrainPlan) -> Result<Option<String>, PlanError> {
    let Some(quantization) = plan.quantization.as_ref().filter(|known| !known.experts) else { return Ok(None) };
    let program = model.shared_program(plan.batch.training_inputs())?;
    let held = program.modules.iter().filter(|module| module.kind == ModuleKind::Experts).flat_map(|m| &m.parameters);
    let ids: BTreeSet<_> = held.copied().collect();
    let elements =
        ids.iter().fold(0u64, |sum, id| sum.saturating_add(program.parameters[id.0 as usize].shape.elements()));
    if elements == 0 {
        return Ok(None);
    }
    let (dtype, why) = match quantization.prepare {
        true => (DType::F32, ", to which prepare_model_for_kbit_training turns all that is not packed"),
        false => (plan.weights, ""),
    };
    let gib = Bytes(elements.saturating_mul(dtype.size())).gib();
    Ok(Some(format!(
        "bitsandbytes packs linears, and this model's experts are none: they stay whole, {gib:.2} GiB in {}{why}",
        dtype.name()
    )))
}

/// How far LLM.int8 can go: which input columns are outliers depends on the data, and random weights give the most.
fn outlier_range(model: &Model, plan: &TrainPlan, this: u64) -> Result<Option<String>, PlanError> {
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
    let [low, high] = [this.min(that), this.max(that)].map(|bytes| Bytes(bytes).gib());
    Ok(Some(format!(
        "LLM.int8: the columns that hold outliers depend on the data; from {low:.2} GiB with those of trained weights to \
         {high:.2} GiB with random ones, the worst case"
    )))
}
