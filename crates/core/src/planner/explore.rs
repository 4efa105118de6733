//! The search for plans that fit.
//!
//! What is trained and how it is spread make a regime. In each, changes that cost nothing are made; then those that cost
//! time, and the largest micro-batch that fits, are looked for. A regime whose leanest plan does not fit is left at once, and
//! a plan that fits without a change is not changed further: memory grows with what is kept and falls with what is not.

use serde_json::Value;

use super::frontier::Search;
use super::moves::{Cost, MOVES, Move, Now, tree_of};
use super::smallest::overlap;
use super::trial::{self, Tried, edited};
use crate::ask::{Request, resolve, tree};
use crate::plan::{Fault, Kernels, RunPlan, liger};

/// Moves that were made, and the change they come to.
#[derive(Debug, Clone, Default)]
pub(super) struct Made {
    pub(super) moves: Vec<usize>,
    pub(super) change: Value,
}

/// A plan that was found.
pub(super) struct Found {
    pub(super) made: Made,
    pub(super) tried: Tried,
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
    pub(super) fn seconds(&self) -> Option<f64> {
        self.tried.cost.and_then(|cost| cost.seconds)
    }

    /// Whether types or the optimizer are others.
    pub(super) fn rounds(&self) -> bool {
        self.made.moves.iter().any(|at| MOVES[*at].cost == Cost::Arithmetic)
    }

    /// What plans are ranked by: seconds, or operations where the card's figures are not known.
    pub(super) fn time(&self) -> f64 {
        let cost = self.tried.cost;
        cost.map_or(0.0, |cost| cost.seconds.unwrap_or(cost.operations as f64))
    }
}

/// A search under way.
pub(super) struct Run<'a> {
    search: &'a Search<'a>,
    pub(super) tried: usize,
    pub(super) found: Vec<Found>,
    pub(super) nearest: Option<Found>,
    /// Why the first one that could not run could not.
    pub(super) faults: Option<Vec<Fault>>,
    /// Whether some fit only because cached memory is given back when the card is full.
    pub(super) squeezed: bool,
    /// Whether such are taken: a promise to the last byte is for those who have nothing better.
    pub(super) squeezes: bool,
}

impl<'a> Run<'a> {
    pub(super) fn new(search: &'a Search<'a>) -> Self {
        Self { search, tried: 0, found: Vec::new(), nearest: None, faults: None, squeezed: false, squeezes: false }
    }

    pub(super) fn attempt(&mut self, all: &[Made]) -> Vec<Option<Tried>> {
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
        self.squeezed |= tried.iter().flatten().any(|tried| tried.fits && tried.retries > 0);
        for (made, tried) in all.iter().zip(&tried) {
            let Some(tried) = tried.as_ref().filter(|tried| !tried.fits) else { continue };
            let nearer = |known: &Found| tried.headroom() > known.tried.headroom();
            if self.nearest.as_ref().is_none_or(nearer) {
                self.nearest = Some(Found { made: made.clone(), tried: tried.clone() });
            }
        }
        tried
    }

    /// Whether a plan may be among the answers.
    fn suits(&self, tried: &Tried) -> bool {
        tried.fits && (self.squeezes || tried.retries == 0)
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
        // A part of what was decided may still be decided otherwise: how a base is quantised, once it is.
        let refines = |known: &Move| known.settings.iter().all(|whole| !one.settings.contains(whole));
        let decided = |known: &Move| overlap(known, one) && !(known.cost == Cost::Training && refines(known));
        if made.moves.iter().any(|known| *known == at || (one.cost != Cost::Time && decided(&MOVES[*known]))) {
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
    pub(super) fn regimes(&mut self, asked: &Made) {
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
        let mut open = Vec::new();
        for (((regime, base), leanest), tried) in bases.iter().zip(&leanest).zip(tried) {
            if let Some(tried) = tried.filter(|tried| self.suits(tried))
                && !self.is_settled(regime)
            {
                self.keep(leanest, &tried);
                open.push(base.clone());
            }
        }
        self.explore_from(open, &cut, &slower);
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

    /// Each as it is, then with each change that costs time, then in the largest parts of the batch that fit; all of them at once,
    /// since cores are idle otherwise.
    fn explore_from(&mut self, bases: Vec<Made>, cut: &[usize], slower: &[usize]) {
        let with = |base: &Made| -> Vec<Made> { slower.iter().flat_map(|at| self.grown(base, *at)).collect() };
        let sets: Vec<Made> = bases.iter().flat_map(|base| std::iter::once(base.clone()).chain(with(base))).collect();
        let whole = self.attempt(&sets);
        let mut cuts = Vec::new();
        for (made, tried) in sets.into_iter().zip(whole) {
            match tried {
                Some(tried) if self.suits(&tried) => self.keep(&made, &tried),
                Some(_) => cuts.extend(cut.iter().map(|at| Cuts::of(self.grown(&made, *at)))),
                None => {}
            }
        }
        while cuts.iter().any(|cuts| !cuts.is_over()) {
            let asked: Vec<&mut Cuts> = cuts.iter_mut().filter(|cuts| !cuts.is_over()).collect();
            let tries: Vec<Made> = asked.iter().map(|cuts| cuts.values[cuts.middle()].clone()).collect();
            for (cuts, tried) in asked.into_iter().zip(self.attempt(&tries)) {
                cuts.halve(tried.filter(|tried| self.suits(tried)));
            }
        }
        for Cuts { values, best, .. } in cuts {
            if let Some((place, tried)) = best {
                self.keep(&values[place], &tried);
            }
        }
    }

    fn settles(&self, made: &Made) -> bool {
        let settled = resolve(self.search.model, &edited(self.search.request, &made.change), self.search.around);
        settled.is_ok_and(|settled| match &settled.plan {
            // Kernels that are not known of a model show only where it is run.
            RunPlan::Train(plan) if plan.kernels == Kernels::Liger => {
                liger::patch(self.search.model.config()["model_type"].as_str().unwrap_or_default()).is_ok()
            }
            _ => true,
        })
    }

    /// Takes back changes that cost nothing and without which it takes no more.
    pub(super) fn without_idle(&mut self, all: &mut [Found]) {
        let free = |found: &Found| -> Vec<usize> {
            found.made.moves.iter().copied().filter(|at| MOVES[*at].cost == Cost::Nothing).collect()
        };
        let moves: Vec<Vec<usize>> = all.iter().map(free).collect();
        for turn in 0..moves.iter().map(Vec::len).max().unwrap_or(0) {
            let fewer: Vec<(usize, Made)> = (0..all.len())
                .filter_map(|place| Some((place, all[place].made.without(*moves[place].get(turn)?))))
                .collect();
            let tries: Vec<Made> = fewer.iter().map(|(_, made)| made.clone()).collect();
            for ((place, made), tried) in fewer.into_iter().zip(self.attempt(&tries)) {
                let process = all[place].tried.totals.process;
                let enough =
                    |tried: &Tried| self.suits(tried) && tried.totals.process <= process.saturating_add(process / 50);
                if let Some(tried) = tried.filter(enough) {
                    all[place] = Found { made, tried };
                }
            }
        }
    }
}

/// The parts that a batch can be cut into, largest first, and where between those that fit begin.
struct Cuts {
    values: Vec<Made>,
    low: usize,
    high: usize,
    best: Option<(usize, Tried)>,
}

impl Cuts {
    fn of(values: Vec<Made>) -> Self {
        Self { low: 0, high: values.len(), best: None, values }
    }

    fn is_over(&self) -> bool {
        self.low >= self.high
    }

    fn middle(&self) -> usize {
        self.low + (self.high - self.low) / 2
    }

    /// The one in the middle fitted, or not.
    fn halve(&mut self, fitted: Option<Tried>) {
        let middle = self.middle();
        match fitted {
            Some(tried) => (self.high, self.best) = (middle, Some((middle, tried))),
            None => self.low = middle + 1,
        }
    }
}
