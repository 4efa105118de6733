//! When a run does not fit: the fewest and cheapest changes that make it fit, each settled and simulated with all that it
//! implies.
//!
//! Changes that leave the result of training alone come first, then those that cost time, then other arithmetic, less
//! work at once, training less, and more hardware last; among alike ones the largest saving first. One change is tried
//! before two, and two before three.

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

use super::moves::{Cost, MOVES, Move};
use super::serving;
use super::trial::{self, Tried, attempt_changed, edited, is_none};
use crate::ask::{Kept, Request, Surroundings, resolve, spell, tree};
use crate::model::Model;
use crate::plan::{Gpu, RunPlan};
use crate::report::Totals;

/// One to three changes.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Suggestion {
    /// The flags that make it.
    pub change: String,
    /// The whole command with it.
    pub command: String,
    /// What it costs: of several changes the dearest.
    pub cost: Cost,
    /// How many changes it takes.
    pub moves: u32,
    /// What the process then takes, in bytes.
    pub process: u64,
    /// How much less that is.
    pub saved: u64,
    /// Whether it then fits.
    pub fits: bool,
    /// How often cached memory has to be given back for that.
    #[serde(default, skip_serializing_if = "is_none")]
    pub retries: u32,
    /// The peaks it then has.
    pub totals: Totals,
    /// What it changes in the plan: settings by their places, laid over what was asked.
    pub changes: Value,
}

impl Suggestion {
    /// What it costs, in words.
    pub fn words(&self) -> String {
        // Cached memory is given back again and again there, and the next byte would be too much.
        let full = if self.retries > 0 { ", the card is full" } else { "" };
        format!("{}{full}", self.cost.words())
    }
}

/// A move at one of its values, and what it came to by itself.
struct Step<'a> {
    one: &'a Move,
    values: Vec<Value>,
    tried: Tried,
}

/// A request that is changed and tried again.
struct Search<'a> {
    model: &'a Model,
    request: &'a Request,
    around: &'a Surroundings<'a>,
    kept: Kept,
    now: Totals,
    /// What was tried, by the change.
    known: RefCell<BTreeMap<String, Option<Tried>>>,
}

/// Changes to a run that does not fit; where nothing suffices, the three that save most.
pub fn changes(
    model: &Model,
    request: &Request,
    around: &Surroundings<'_>,
    (plan, now): (&RunPlan, Totals),
    kept: Kept,
) -> Vec<Suggestion> {
    let search = Search { model, request, around, kept, now, known: RefCell::default() };
    let cards: Vec<Gpu> = (around.cards)().all().collect();
    let (request_now, plan) = (request.clone(), plan.clone());
    let asked = Tried { request: request_now, plan, totals: now, fits: false, retries: 0, cost: None };
    let (mut found, mut steps) = (Vec::new(), Vec::new());
    for one in MOVES.iter().chain(serving::MOVES).filter(|one| one.cost != Cost::Mesh) {
        let values = trial::values(one, &asked, model, &cards);
        let Some(last) = values.last() else { continue };
        // What saves most first: where that does not fit, nothing milder does.
        let Some(tried) = search.run(&search.change(one, last)) else { continue };
        if tried.fits {
            let value = search.mildest(one, &values);
            found.extend(search.suggestion(&[(one, value)]));
        } else if !matches!(one.cost, Cost::Batch | Cost::Length) {
            steps.push(Step { one, values, tried });
        }
    }
    let cheapest = found.iter().map(|suggestion| suggestion.cost).min();
    found.extend(search.together(&steps, cheapest));
    if found.is_empty() {
        crate::order::sort_by_key(&mut steps, |step| step.tried.totals.process);
        let saves = |step: &&Step| step.one.cost != Cost::Hardware && step.tried.totals.process < now.process;
        let saving = steps.iter().filter(saves).take(3);
        found.extend(saving.filter_map(|step| search.suggestion(&[(step.one, step.values.last()?)])));
    }
    crate::order::sort_by(&mut found, |a, b| {
        (a.cost, a.moves, a.process, &a.change).cmp(&(b.cost, b.moves, b.process, &b.change))
    });
    found
}

/// Tries of two and of three changes that are made for a cost.
const TRIES: usize = 10;

impl Search<'_> {
    fn change(&self, one: &Move, value: &Value) -> Value {
        trial::change(self.request, one, value)
    }

    fn run(&self, change: &Value) -> Option<Tried> {
        let spelled = change.to_string();
        if let Some(known) = self.known.borrow().get(&spelled) {
            return known.clone();
        }
        let tried = attempt_changed(self.model, (self.request, change), self.around, self.kept).ok();
        self.known.borrow_mut().insert(spelled, tried.clone());
        tried
    }

    fn fits(&self, change: &Value) -> bool {
        let settled = |change: &Value| resolve(self.model, &edited(self.request, change), self.around);
        if change.get("gpu").is_none()
            && settled(change).is_ok_and(|settled| trial::is_hopeless(self.model, &settled.plan, self.kept))
        {
            return false;
        }
        self.run(change).is_some_and(|tried| tried.fits)
    }

    /// The first of a move's values that fits, where the last does.
    fn mildest<'v>(&self, one: &Move, values: &'v [Value]) -> &'v Value {
        let last = values.len() - 1;
        let at = first(last, |at| self.fits(&self.change(one, &values[at])));
        &values[at]
    }

    fn all(&self, made: &[(&Move, &Value)]) -> Value {
        let mut all = json!({});
        made.iter().for_each(|(one, value)| tree::lay(&mut all, &self.change(one, value)));
        all
    }

    fn suggestion(&self, made: &[(&Move, &Value)]) -> Option<Suggestion> {
        let changes = self.all(made);
        let tried = self.run(&changes)?;
        let process = tried.totals.process;
        Some(Suggestion {
            change: spell::line(&spell::words(&changes, tried.request.runner)),
            command: spell::command_line(self.around.name, &tried.request),
            cost: made.iter().map(|(one, _)| one.cost).max().unwrap_or(Cost::Nothing),
            moves: made.len() as u32,
            process,
            saved: self.now.process.saturating_sub(process),
            fits: tried.fits,
            retries: tried.retries,
            totals: tried.totals,
            changes,
        })
    }

    /// Two or three changes that fit together, for every cost below what one change already does: those first that save
    /// most by themselves.
    fn together(&self, steps: &[Step<'_>], cheapest: Option<Cost>) -> Vec<Suggestion> {
        let mut found: Vec<Suggestion> = Vec::new();
        for cost in [Cost::Nothing, Cost::Time, Cost::Arithmetic, Cost::Training, Cost::Hardware] {
            if cheapest.is_some_and(|cheapest| cheapest <= cost) || !found.is_empty() && cost >= Cost::Training {
                break;
            }
            let allowed: Vec<&Step> = steps.iter().filter(|step| step.one.cost <= cost).collect();
            let fitting = [2, 3].into_iter().find_map(|count| self.of_size(&allowed, count, cost));
            found.extend(fitting);
        }
        found
    }

    fn of_size(&self, steps: &[&Step<'_>], count: usize, cost: Cost) -> Option<Suggestion> {
        let mut sets: Vec<(u64, Vec<usize>)> = Vec::new();
        choose(steps.len(), count, &mut |set| {
            let dearest = set.iter().map(|at| steps[*at].one.cost).max();
            let apart = set
                .iter()
                .enumerate()
                .all(|(place, at)| set[..place].iter().all(|other| !overlap(steps[*at].one, steps[*other].one)));
            // More cards or larger ones, not both.
            let machines = set.iter().filter(|at| steps[**at].one.cost == Cost::Hardware).count();
            if dearest == Some(cost) && apart && machines <= 1 {
                let saved = |at: &usize| self.now.process.saturating_sub(steps[*at].tried.totals.process);
                sets.push((set.iter().map(saved).fold(0, u64::saturating_add), set.to_vec()));
            }
        });
        crate::order::sort_by_key(&mut sets, |(saved, _)| std::cmp::Reverse(*saved));
        sets.iter().take(TRIES).find_map(|(_, set)| {
            let last: Vec<(&Move, &Value)> =
                set.iter().filter_map(|at| Some((steps[*at].one, steps[*at].values.last()?))).collect();
            self.fits(&self.all(&last)).then_some(())?;
            // Each is then taken back as far as it goes.
            let mut made = last;
            for place in 0..made.len() {
                let values = &steps[set[place]].values;
                let at = first(values.len() - 1, |at| {
                    let mut other = made.clone();
                    other[place].1 = &values[at];
                    self.fits(&self.all(&other))
                });
                made[place].1 = &values[at];
            }
            self.suggestion(&made).filter(|suggestion| suggestion.fits)
        })
    }
}

/// Whether two moves decide about the same.
pub(super) fn overlap(a: &Move, b: &Move) -> bool {
    let within = |one: &str, other: &str| one == other || one.starts_with(&format!("{other}."));
    a.settings.iter().any(|one| b.settings.iter().any(|other| within(one, other) || within(other, one)))
}

/// Every set of so many of some places.
fn choose(of: usize, count: usize, visit: &mut impl FnMut(&[usize])) {
    fn from(start: usize, of: usize, left: usize, set: &mut Vec<usize>, visit: &mut impl FnMut(&[usize])) {
        if left == 0 {
            return visit(set);
        }
        for at in start..of {
            set.push(at);
            from(at + 1, of, left - 1, set, visit);
            set.pop();
        }
    }
    from(0, of, count, &mut Vec::new(), visit);
}

/// The first place for which something holds that gets easier, where it holds at the last.
pub(super) fn first(last: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, last);
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle) { high = middle } else { low = middle + 1 }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_holds() {
        assert_eq!(first(9, |n| n >= 5), 5);
        assert_eq!(first(9, |_| true), 0);
        assert_eq!(first(9, |n| n == 9), 9);
        assert_eq!(first(0, |_| true), 0);
    }

    #[test]
    fn sets() {
        let mut all = Vec::new();
        choose(4, 2, &mut |set| all.push(set.to_vec()));
        assert_eq!(all, [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]);
    }
}
