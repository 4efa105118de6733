//! Plans that fit, for what was left open: memory against cost.
//!
//! What is trained and how it is spread make a regime. In each, changes that cost nothing are made; then those that cost
//! time, and the largest micro-batch that fits, are looked for. A regime whose leanest plan does not fit is left at once, and
//! a plan that fits without a change is not changed further: memory grows with what is kept and falls with what is not.

use serde::Serialize;
use serde_json::{Value, json};

use super::moves::{Cost, MOVES, Move, Now, tree_of};
use super::smallest::overlap;
use super::trial::{self, Tried, edited};
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

/// Moves that were made, and the change they come to.
#[derive(Debug, Clone, Default)]
struct Made {
    moves: Vec<usize>,
    change: Value,
}

/// A plan that was found.
struct Found {
    made: Made,
    tried: Tried,
}

impl Made {
    /// The same without a move.
    fn without(&self, at: usize) -> Self {
        let mut fewer = self.clone();
        fewer.moves.retain(|known| *known != at);
        for path in MOVES[at].settings {
            tree::take(&mut fewer.change, path);
        }
        fewer
    }
}

impl Found {
    fn seconds(&self) -> Option<f64> {
        self.tried.cost.and_then(|cost| cost.seconds)
    }

    /// Whether types or the optimizer are others.
    fn rounds(&self) -> bool {
        self.made.moves.iter().any(|at| MOVES[*at].cost == Cost::Arithmetic)
    }

    /// What plans are ranked by: seconds, or operations where the card's figures are not known.
    fn time(&self) -> f64 {
        let cost = self.tried.cost;
        cost.map_or(0.0, |cost| cost.seconds.unwrap_or(cost.operations as f64))
    }
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
    let mut run = Run { search, tried: 0, found: Vec::new(), nearest: None, faults: None };
    let as_asked = run.attempt(std::slice::from_ref(&asked)).pop().flatten();
    run.regimes(&asked);
    let mut chosen = run.choose();
    chosen.iter_mut().for_each(|found| run.without_idle(found));
    let fastest = chosen.iter().filter_map(Found::seconds).fold(f64::INFINITY, f64::min);
    let tree = tree_of(&settled.plan);
    let describe = |found: &Found| {
        let mut planned = run.planned(found, &tree);
        planned.slower = found.seconds().map(|seconds| seconds / fastest).filter(|slower| slower.is_finite());
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
    let asked = as_asked.map(|tried| run.planned(&Found { made: asked, tried }, &tree));
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

struct Run<'a> {
    search: &'a Search<'a>,
    tried: usize,
    found: Vec<Found>,
    nearest: Option<Found>,
    /// Why the first one that could not run could not.
    faults: Option<Vec<Fault>>,
}

impl Run<'_> {
    fn attempt(&mut self, all: &[Made]) -> Vec<Option<Tried>> {
        let requests: Vec<Request> = all.iter().map(|made| edited(self.search.request, &made.change)).collect();
        self.tried += requests.len();
        let mut tried = Vec::with_capacity(requests.len());
        for outcome in (self.search.attempt)(&requests) {
            match outcome {
                Ok(one) => tried.push(Some(one)),
                Err(faults) => {
                    tried.push(None);
                    self.faults.get_or_insert(faults);
                }
            }
        }
        for (made, tried) in all.iter().zip(&tried) {
            let Some(tried) = tried.as_ref().filter(|tried| !tried.fits) else { continue };
            let nearer = |known: &Found| tried.headroom() > known.tried.headroom();
            if self.nearest.as_ref().is_none_or(nearer) {
                self.nearest = Some(Found { made: made.clone(), tried: tried.clone() });
            }
        }
        tried
    }

    fn keep(&mut self, made: &Made, tried: &Tried) {
        self.found.push(Found { made: made.clone(), tried: tried.clone() });
    }

    /// Whether a move may be made: nobody fixed what it decides.
    fn is_free(&self, one: &Move) -> bool {
        let stated =
            |path: &&'static str| tree::get(&self.search.request.stated, path).is_some_and(|value| !value.is_null());
        let kept = match one.cost {
            Cost::Training => self.search.keep.full,
            Cost::Arithmetic => self.search.keep.arithmetic,
            _ => false,
        };
        !kept && !one.fixed.iter().any(stated)
    }

    /// What a plan becomes by each value of a move.
    fn grown(&self, made: &Made, at: usize) -> Vec<Made> {
        let one = &MOVES[at];
        if made.moves.iter().any(|known| *known == at || (one.cost != Cost::Time && overlap(&MOVES[*known], one))) {
            return Vec::new();
        }
        let request = edited(self.search.request, &made.change);
        let Ok(settled) = resolve(self.search.model, &request, self.search.around) else { return Vec::new() };
        let tree = tree_of(&settled.plan);
        let now = Now { tree: &tree, runner: request.runner, model: self.search.model, cards: &[] };
        let mut values = (one.values)(&now);
        if one.cost == Cost::Mesh {
            values.retain(|value| self.is_kept(value));
            // Cards are counted by node where nodes were named: as many as there are stay.
            if tree::get(&self.search.request.stated, "parallel.nodes").is_some_and(|nodes| !nodes.is_null()) {
                values.iter_mut().for_each(|value| drop(tree::take(value, "parallel.gpus")));
            }
        }
        let with = |value: &Value| {
            let mut change = made.change.clone();
            tree::lay(&mut change, &trial::change(self.search.request, one, value));
            Made { moves: made.moves.iter().copied().chain([at]).collect(), change }
        };
        values.iter().map(with).collect()
    }

    /// Whether a split is one of the engine and the axes that were named.
    fn is_kept(&self, split: &Value) -> bool {
        let stated = |path: &str| tree::get(&self.search.request.stated, path).and_then(Value::as_object);
        let engine = stated("parallel.engine").is_none_or(|named| {
            named.iter().filter(|(_, options)| !options.is_null()).all(|(name, options)| {
                let given = &split["parallel"]["engine"][name];
                let kept = |(path, value): (String, Value)| tree::get(given, &path).is_none_or(|now| *now == value);
                given.is_object() && tree::leaves(options).into_iter().all(kept)
            })
        });
        let axes = stated("parallel.mesh").is_none_or(|named| {
            let axis = |name: &str| split["parallel"]["mesh"][name].as_u64().unwrap_or(1);
            named.iter().all(|(name, size)| size.as_u64().is_none_or(|size| size == axis(name)))
        });
        engine && axes
    }

    fn of_cost(&self, cost: Cost) -> Vec<usize> {
        (0..MOVES.len()).filter(|at| MOVES[*at].cost == cost && self.is_free(&MOVES[*at])).collect()
    }

    /// What is trained, how it is spread, and in which arithmetic. On one card all of it is looked at; over many cards what
    /// changes the result only where nothing else fits, since every split is tried with it.
    fn regimes(&mut self, asked: &Made) {
        let with = |run: &Self, all: &[Made], cost: Cost| -> Vec<Made> {
            run.of_cost(cost).into_iter().flat_map(|at| all.iter().flat_map(move |made| run.grown(made, at))).collect()
        };
        let plain = vec![asked.clone()];
        let trained = with(self, &plain, Cost::Training);
        let mut stages = vec![plain.clone(), with(self, &plain, Cost::Arithmetic)];
        stages.push(trained.clone());
        stages.push(with(self, &trained, Cost::Arithmetic));
        for stage in stages {
            let splits = with(self, &stage, Cost::Mesh);
            let alone = splits.is_empty();
            self.explore(stage.into_iter().chain(splits).collect());
            if !alone && !self.found.is_empty() {
                break;
            }
        }
    }

    /// Whether a plan that asks as much of the result fits without being slower by a change.
    fn is_settled(&self, regime: &Made) -> bool {
        let level = |made: &Made| made.moves.iter().map(|at| MOVES[*at].cost).filter(|cost| *cost != Cost::Mesh).max();
        let alike = |found: &&Found| tree::get(&found.made.change, "parallel") == tree::get(&regime.change, "parallel");
        let plain = |found: &Found| found.made.moves.iter().all(|at| MOVES[*at].cost != Cost::Time);
        self.found.iter().filter(alike).any(|found| {
            plain(found) && level(&found.made).unwrap_or(Cost::Nothing) < level(regime).unwrap_or(Cost::Nothing)
        })
    }

    fn explore(&mut self, mut regimes: Vec<Made>) {
        regimes.retain(|regime| !self.is_settled(regime));
        let (cut, slower): (Vec<usize>, Vec<usize>) =
            self.of_cost(Cost::Time).into_iter().partition(|at| MOVES[*at].settings.contains(&"batch.batch_size"));
        let bases =
            regimes.iter().flat_map(|regime| self.bases(regime, &cut).into_iter().map(move |base| (regime, base)));
        let bases: Vec<(&Made, Made)> = bases.filter(|(_, base)| self.settles(base)).collect();
        // All that saves at once: where that does not fit, nothing does.
        let lean = |made: &Made| {
            slower.iter().chain(&cut).fold(made.clone(), |made, at| {
                self.grown(&made, *at).pop().filter(|grown| self.settles(grown)).unwrap_or(made)
            })
        };
        let leanest: Vec<Made> = bases.iter().map(|(_, base)| lean(base)).collect();
        let tried = self.attempt(&leanest);
        for (((regime, base), leanest), tried) in bases.iter().zip(&leanest).zip(tried) {
            if let Some(tried) = tried.filter(|tried| tried.fits)
                && !self.is_settled(regime)
            {
                self.keep(leanest, &tried);
                self.explore_from(base, &cut, &slower);
            }
        }
    }

    /// A regime with all that costs nothing, and without what of that forbids to cut the batch.
    fn bases(&self, regime: &Made, cut: &[usize]) -> Vec<Made> {
        let base = self.of_cost(Cost::Nothing).iter().fold(regime.clone(), |made, at| {
            let last = self.grown(&made, *at).pop();
            last.filter(|grown| self.settles(grown)).unwrap_or(made)
        });
        let cuts =
            |made: &Made| cut.iter().all(|at| self.grown(made, *at).last().is_none_or(|grown| self.settles(grown)));
        if cuts(&base) {
            return vec![base];
        }
        let free = base.moves.iter().filter(|at| MOVES[**at].cost == Cost::Nothing);
        let fewer = free.map(|at| base.without(*at)).find(cuts);
        std::iter::once(base.clone()).chain(fewer).collect()
    }

    fn explore_from(&mut self, base: &Made, cut: &[usize], slower: &[usize]) {
        let mut sets = vec![base.clone()];
        for at in slower {
            sets.extend(self.grown(base, *at));
        }
        let whole = self.attempt(&sets);
        for (made, tried) in sets.into_iter().zip(whole) {
            match tried {
                Some(tried) if tried.fits => self.keep(&made, &tried),
                Some(_) => cut.iter().for_each(|at| self.largest_cut(&made, *at)),
                None => {}
            }
        }
    }

    /// The largest micro-batch that fits.
    fn largest_cut(&mut self, made: &Made, at: usize) {
        let values = self.grown(made, at);
        let (mut low, mut high) = (0, values.len());
        let mut best = None;
        while low < high {
            let middle = low + (high - low) / 2;
            match self.attempt(&values[middle..=middle]).pop().flatten().filter(|tried| tried.fits) {
                Some(tried) => {
                    best = Some((middle, tried));
                    high = middle;
                }
                None => low = middle + 1,
            }
        }
        if let Some((place, tried)) = best {
            self.keep(&values[place].clone(), &tried);
        }
    }

    fn settles(&self, made: &Made) -> bool {
        resolve(self.search.model, &edited(self.search.request, &made.change), self.search.around).is_ok()
    }

    /// Few of those that were found: by what they keep and who runs them the fastest, and the leanest of all. Where adapters alone
    /// suffice, nobody needs another optimizer too.
    fn choose(&mut self) -> Vec<Found> {
        let mut all = std::mem::take(&mut self.found);
        let time = Found::time;
        let trains = |found: &Found| (level(&found.made), quantises(&found.made), found.tried.request.runner);
        let adapted: Vec<_> = all.iter().filter(|found| !found.rounds()).map(trains).collect();
        all.retain(|found| {
            level(&found.made) != Cost::Training || !found.rounds() || !adapted.contains(&trains(found))
        });
        all.sort_by(|a, b| {
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
        kinds.sort();
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
        picked.sort_unstable();
        picked.dedup();
        let mut chosen: Vec<Found> =
            all.into_iter().enumerate().filter(|(at, _)| picked.contains(at)).map(|(_, found)| found).collect();
        chosen.sort_by(|a, b| level(&a.made).cmp(&level(&b.made)).then(time(a).total_cmp(&time(b))));
        chosen.truncate(MOST);
        chosen
    }

    /// Takes back changes that cost nothing and without which it takes no more.
    fn without_idle(&mut self, found: &mut Found) {
        for at in found.made.moves.clone() {
            if MOVES[at].cost != Cost::Nothing {
                continue;
            }
            let fewer = found.made.without(at);
            let Some(tried) = self.attempt(std::slice::from_ref(&fewer)).pop().flatten() else { continue };
            let process = found.tried.totals.process;
            if tried.fits && tried.totals.process <= process.saturating_add(process / 50) {
                *found = Found { made: fewer, tried };
            }
        }
    }

    fn planned(&self, found: &Found, asked: &Value) -> Planned {
        let changes = tree::leaves(&found.made.change).into_iter().filter_map(|(setting, to)| {
            let stated = tree::get(&self.search.request.stated, &setting);
            let from = stated.or_else(|| tree::get(asked, &setting)).cloned().unwrap_or(Value::Null);
            let decides = |at: &&usize| {
                MOVES[**at].settings.iter().any(|known| setting == **known || setting.starts_with(&format!("{known}.")))
            };
            let why = found.made.moves.iter().find(decides).map_or("", |at| MOVES[*at].why);
            (from != to).then_some(Change { setting, from, to, why })
        });
        Planned {
            command: spell::command_line(self.search.around.name, &found.tried.request),
            changes: changes.collect(),
            keeps: level(&found.made),
            totals: found.tried.totals,
            headroom: found.tried.headroom(),
            fits: found.tried.fits,
            cost: found.tried.cost,
            slower: None,
            price: None,
        }
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
