//! Plans that fit, for what was left open: memory against cost (`explore.rs` finds them).

use serde::Serialize;
use serde_json::{Value, json};

use super::explore::{Found, Made, Run};
use super::moves::{Cost, MOVES, tree_of};
use super::trial::{Tried, is_none};
use crate::ask::{Request, Surroundings, resolve, spell, tree};
use crate::model::Model;
use crate::plan::{Fault, RunPlan};
use crate::report::Totals;
use crate::report::cost::StepCost;

/// What comes of a search.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub struct Plans {
    /// The version of this document.
    pub schema: u32,
    /// The model.
    pub model: String,
    /// The card, and what it offers in bytes.
    pub gpu: String,
    /// What the card offers, in bytes.
    pub memory: u64,
    /// How many cards there are.
    pub gpus: u64,
    /// What was asked for, as it stands; absent where it cannot run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<Planned>,
    /// Plans that fit, those that change the result least first, then the fastest.
    pub plans: Vec<Planned>,
    /// Where nothing fits, what misses least.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nearest: Option<Planned>,
    /// How many plans were simulated.
    pub tried: usize,
}

/// A plan.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub struct Planned {
    /// The command that gives these numbers.
    pub command: String,
    /// What differs from what was asked.
    pub changes: Vec<Change>,
    /// What that does to the result: of several changes the one that does most.
    pub keeps: Cost,
    /// Its peaks.
    pub totals: Totals,
    /// What stays free on a card (negative: what is missing), in bytes.
    pub headroom: i64,
    /// Whether it fits.
    pub fits: bool,
    /// How often the allocator has to give cached memory back for that, each of which costs time.
    #[serde(default, skip_serializing_if = "is_none")]
    pub retries: u32,
    /// What a step costs on each card.
    pub cost: Option<StepCost>,
    /// How much longer a step of as many samples takes than by the fastest of the plans, as an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slower: Option<f64>,
    /// What an hour of it costs, by the prices that were given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price: Option<f64>,
}

/// One setting that differs.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Change {
    /// Its place in a plan.
    pub setting: String,
    /// What was asked for, or its default.
    pub from: Value,
    /// What it is now.
    pub to: Value,
    /// What that does.
    pub why: &'static str,
}

/// What a search may not touch besides what was stated.
#[derive(Debug, Clone, Copy, Default)]
pub struct Keep {
    /// All of the model is trained.
    pub full: bool,
    /// Types and optimizer stay.
    pub arithmetic: bool,
}

/// Tries requests, all at once where there is more than one core.
pub type Try<'a> = dyn Fn(&[Request]) -> Vec<Result<Tried, Vec<Fault>>> + 'a;

/// A question about plans.
pub struct Search<'a> {
    /// About which model.
    pub model: &'a Model,
    /// What is fixed.
    pub request: &'a Request,
    /// What is known besides.
    pub around: &'a Surroundings<'a>,
    /// What must stay.
    pub keep: Keep,
    /// How requests are tried.
    pub attempt: &'a Try<'a>,
}

/// The most plans that are shown.
const MOST: usize = 8;

/// Looks for plans.
pub fn plans(search: &Search<'_>) -> Result<Plans, Vec<Fault>> {
    let asked = Made { change: json!({}), ..Made::default() };
    // What is wrong with what is fixed shows here.
    let settled = resolve(search.model, search.request, search.around)?;
    let RunPlan::Train(plan) = &settled.plan else {
        return Err(vec![Fault::unsupported("", "plans of anything but training")]);
    };
    let mut run = Run::new(search);
    let as_asked = run.attempt(std::slice::from_ref(&asked)).pop().flatten();
    run.regimes(&asked);
    if run.found.is_empty() && run.squeezed {
        run.squeezes = true;
        run.regimes(&asked);
    }
    let mut chosen = choose(std::mem::take(&mut run.found));
    run.without_idle(&mut chosen);
    let fastest = chosen.iter().filter_map(Found::seconds).fold(f64::INFINITY, f64::min);
    let tree = tree_of(&settled.plan);
    let describe = |found: &Found| {
        let mut planned = planned(search, found, &tree);
        // Beside no plan that fits there is nothing to be slower than.
        let slower = found.seconds().filter(|_| fastest.is_finite()).map(|seconds| seconds / fastest);
        planned.slower = slower.filter(|slower| slower.is_finite());
        planned
    };
    let mut plans: Vec<Planned> = Vec::new();
    for planned in chosen.iter().map(describe) {
        if plans.iter().all(|known| known.command != planned.command) {
            plans.push(planned);
        }
    }
    if let (true, None, Some(faults)) = (plans.is_empty(), &run.nearest, &run.faults) {
        return Err(faults.clone());
    }
    let nearest = run.nearest.as_ref().filter(|_| plans.is_empty()).map(describe);
    let asked = as_asked.map(|tried| planned(search, &Found { made: asked, tried }, &tree));
    let gpus = plan.parallel.as_ref().map_or(1, |parallel| parallel.mesh.world());
    Ok(Plans {
        schema: 1,
        model: search.around.name.to_owned(),
        gpu: plan.gpu.name.clone(),
        memory: plan.gpu.memory,
        gpus,
        asked,
        plans,
        nearest,
        tried: run.tried,
    })
}

/// Few of those that were found: by what they keep and who runs them the fastest, and the leanest of all. Where adapters alone
/// suffice, nobody needs another optimizer too.
fn choose(mut all: Vec<Found>) -> Vec<Found> {
    let time = Found::time;
    let trains = |found: &Found| (level(&found.made), quantises(&found.made), found.tried.request.runner);
    let adapted: Vec<_> = all.iter().filter(|found| !found.rounds()).map(trains).collect();
    all.retain(|found| level(&found.made) != Cost::Training || !found.rounds() || !adapted.contains(&trains(found)));
    crate::order::sort_by(&mut all, |a, b| {
        (level(&a.made), a.tried.totals.process)
            .cmp(&(level(&b.made), b.tried.totals.process))
            .then(time(a).total_cmp(&time(b)))
    });
    let better = |one: &Found, other: &Found| {
        let no_worse = level(&one.made) <= level(&other.made)
            && time(one) <= time(other)
            && one.tried.totals.process <= other.tried.totals.process;
        no_worse && (time(one) < time(other) || one.tried.totals.process < other.tried.totals.process)
    };
    let rivals = |one: &Found, other: &Found| (trains(one).1, trains(one).2) == (trains(other).1, trains(other).2);
    let open: Vec<usize> = (0..all.len())
        .filter(|at| !all.iter().any(|other| rivals(other, &all[*at]) && better(other, &all[*at])))
        .collect();
    let mut picked: Vec<usize> = Vec::new();
    let mut kinds: Vec<(Cost, bool, crate::ask::Runner)> = open.iter().map(|at| trains(&all[*at])).collect();
    crate::order::sort(&mut kinds);
    kinds.dedup();
    for kind in kinds {
        let of_kind = || open.iter().copied().filter(|at| trains(&all[*at]) == kind);
        // The fastest, then the fastest that takes three quarters of its memory, and so on.
        let mut most = u64::MAX;
        for _ in 0..if picked.is_empty() { 3 } else { 2 } {
            let lean = of_kind().filter(|at| all[*at].tried.totals.process <= most);
            let Some(next) = lean.min_by(|a, b| time(&all[*a]).total_cmp(&time(&all[*b]))) else { break };
            most = all[next].tried.totals.process / 4 * 3;
            picked.push(next);
        }
    }
    crate::order::sort(&mut picked);
    picked.dedup();
    let mut chosen: Vec<Found> =
        all.into_iter().enumerate().filter(|(at, _)| picked.contains(at)).map(|(_, found)| found).collect();
    crate::order::sort_by(&mut chosen, |a, b| level(&a.made).cmp(&level(&b.made)).then(time(a).total_cmp(&time(b))));
    chosen.truncate(MOST);
    chosen
}

fn planned(search: &Search<'_>, found: &Found, asked: &Value) -> Planned {
    let changes = tree::leaves(&found.made.change).into_iter().filter_map(|(setting, to)| {
        let stated = tree::get(&search.request.stated, &setting);
        let from = stated.or_else(|| tree::get(asked, &setting)).cloned().unwrap_or(Value::Null);
        let decides = |at: &&usize| {
            MOVES[**at].settings.iter().any(|known| setting == **known || setting.starts_with(&format!("{known}.")))
        };
        let why = found.made.moves.iter().find(decides).map_or("", |at| MOVES[*at].why);
        (from != to).then_some(Change { setting, from, to, why })
    });
    Planned {
        command: spell::command_line(search.around.name, &found.tried.request),
        changes: changes.collect(),
        keeps: level(&found.made),
        totals: found.tried.totals,
        headroom: found.tried.headroom(),
        fits: found.tried.fits,
        retries: found.tried.retries,
        cost: found.tried.cost,
        slower: None,
        price: None,
    }
}

/// Whether the model under its adapters is quantised.
fn quantises(made: &Made) -> bool {
    tree::get(&made.change, "quantization").is_some_and(Value::is_object)
}

/// What moves do to the result: those that only cost time or spread it do nothing.
fn level(made: &Made) -> Cost {
    let costs = made.moves.iter().map(|at| MOVES[*at].cost).filter(|cost| !matches!(cost, Cost::Mesh | Cost::Time));
    costs.max().unwrap_or(Cost::Nothing)
}
