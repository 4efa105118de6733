//! A request tried: settled, simulated and judged on its card.

use serde_json::{Value, json};

use super::moves::{Move, Now, tree_of};
use crate::ask::deduce;
use crate::ask::{Kept, Request, Surroundings, resolve, tree};
use crate::memory::simulation;
use crate::model::Model;
use crate::plan::{Fault, Gpu, InferPlan, ModelCode, Offload, RunPlan, ServePlan, TrainPlan};
use crate::report::cost::{StepCost, of_simulation};
use crate::report::{self, Totals};
use crate::serving;

/// What came of a try.
#[derive(Debug, Clone)]
pub struct Tried {
    /// What was tried.
    pub request: Request,
    /// The plan that follows.
    pub plan: RunPlan,
    /// Its peaks.
    pub totals: Totals,
    /// Whether it runs on its card, with what must stay free.
    pub fits: bool,
    /// How often cached memory had to be given back for that.
    pub retries: u32,
    /// What a step of training costs.
    pub cost: Option<StepCost>,
}

/// Documents do not speak of retries that there are not.
#[allow(clippy::trivially_copy_pass_by_ref)]
pub(super) fn is_none(retries: &u32) -> bool {
    *retries == 0
}

impl Tried {
    /// What stays free (negative: what is missing), in bytes.
    pub fn headroom(&self) -> i64 {
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        signed(self.plan.gpu().memory).saturating_sub(signed(self.totals.process))
    }
}

/// Tries a request. Whether it fits is what the allocator can do under the card's limit.
pub fn attempt(model: &Model, request: &Request, around: &Surroundings<'_>, kept: Kept) -> Result<Tried, Vec<Fault>> {
    // The answer itself matters more than what is tried for it.
    if crate::work::is_short() {
        return Err(vec![Fault::new("", "there is no time left to try it")]);
    }
    let plan = resolve(model, request, around)?.plan;
    let run = match &plan {
        RunPlan::Train(plan) => simulation::train(model, plan),
        RunPlan::Infer(plan) => simulation::infer(model, plan),
        RunPlan::Serve(serving) => {
            return served(model, request, serving, kept).map(|(totals, fits)| Tried {
                request: request.clone(),
                totals,
                fits,
                retries: 0,
                cost: None,
                plan: plan.clone(),
            });
        }
    };
    let run = run.map_err(|error| crate::ask::resolve::faults_of(error, ""))?;
    let (totals, gpu) = (Totals::of(&run), plan.gpu());
    let limit = gpu.memory.saturating_sub(kept.of(gpu.memory));
    let fits = totals.process <= limit && !run.replay.out_of_memory;
    let cost = match &plan {
        RunPlan::Train(plan) if plan.job.is_one_step() => Some(of_simulation(model, plan, &run)),
        _ => None,
    };
    Ok(Tried { request: request.clone(), totals, fits, retries: run.replay.retries, cost, plan })
}

/// What an engine takes, and whether it fits.
fn served(model: &Model, request: &Request, plan: &ServePlan, kept: Kept) -> Result<(Totals, bool), Vec<Fault>> {
    let name = request.runner.name();
    let report = report::serving::summarize(name, model, plan, &serving::start(model, plan)?);
    Ok((report.totals, kept.holds(&report.verdicts)))
}

/// Whether a plan cannot fit whatever its steps take: the weights of a model that is whole on one card are there all the time.
pub fn is_hopeless(model: &Model, plan: &RunPlan, kept: Kept) -> bool {
    let (whole, size) = match plan {
        RunPlan::Train(plan) => {
            let here = plan.parallel.is_none() && plan.quantization.is_none();
            (here && plan.model_code == ModelCode::Transformers, plan.weights.size())
        }
        RunPlan::Infer(plan) => {
            let here = plan.device_map.is_none() && plan.quantization.is_none();
            (here && plan.diffusion.offload == Offload::None, plan.weights.size())
        }
        RunPlan::Serve(_) => (false, 0),
    };
    // No checkpoint has fewer than two bits of each.
    let weights = match model.config()["quantization_config"].is_null() {
        true => model.elements().saturating_mul(size),
        false => model.elements() / 4,
    };
    let gpu = plan.gpu();
    whole && weights > gpu.memory.saturating_sub(kept.of(gpu.memory))
}

/// Tries a request with a change over it.
pub fn attempt_changed(
    model: &Model,
    (request, change): (&Request, &Value),
    around: &Surroundings<'_>,
    kept: Kept,
) -> Result<Tried, Vec<Fault>> {
    let around = match change.get("gpu") {
        // Another card is in another machine.
        Some(_) => &Surroundings { card: None, ..around.again() },
        None => around,
    };
    attempt(model, &edited(request, change), around, kept)
}

/// A request with a change over it.
pub fn edited(request: &Request, change: &Value) -> Request {
    let mut request = request.clone();
    tree::lay(&mut request.stated, change);
    if let Some(runner) = deduce::engine_of(&request.stated) {
        request.runner = runner;
    }
    request
}

/// A move's value as a change of a request: whatever else was stated of what it decides goes back to its default.
pub fn change(request: &Request, one: &Move, value: &Value) -> Value {
    let usual = match request.runner.trains() {
        true => serde_json::to_value(TrainPlan::default()),
        false => serde_json::to_value(InferPlan::default()),
    };
    let usual = usual.unwrap_or_default();
    let mut change = json!({});
    for (path, stated) in tree::leaves(&request.stated) {
        let decided = |setting: &&'static str| path == **setting || path.starts_with(&format!("{setting}."));
        if !one.settings.iter().any(decided) || path.starts_with("parallel") {
            continue;
        }
        if let Some(usual) = tree::get(&usual, &path).filter(|usual| **usual != stated) {
            tree::set(&mut change, &path, usual.clone());
        }
    }
    tree::lay(&mut change, value);
    change
}

/// The values of a move in a plan.
pub fn values(one: &Move, tried: &Tried, model: &Model, cards: &[Gpu]) -> Vec<Value> {
    let tree = tree_of(&tried.plan);
    (one.values)(&Now { tree: &tree, runner: tried.request.runner, model, cards })
}
