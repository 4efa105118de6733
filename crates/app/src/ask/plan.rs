//! Plans that fit: the planner's search on all cores, and prices that a user brings.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};
use vramcast_core::ask::{Kept, Request};
use vramcast_core::plan::{Fault, PlanError};
use vramcast_core::planner::frontier::{Keep, Plans, Search, plans};
use vramcast_core::planner::trial::{Tried, attempt};

use super::question::Prepared;
use super::work;
use crate::failure::Failure;

/// What is wanted of plans besides the question.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wish {
    /// What must stay as it is: full (all of the model is trained), arithmetic (types and optimizer).
    pub(crate) keep: Keep,
    /// What an hour of a card costs, by its name.
    pub(crate) prices: BTreeMap<String, f64>,
    /// What must stay free.
    pub(crate) kept: Kept,
    /// Whether other cores may help; a server's are for others.
    pub(crate) alone: bool,
}

/// What must stay as it is, by its names.
pub(crate) fn keep(names: &[String]) -> Result<Keep, Failure> {
    let mut keep = Keep::default();
    for name in names {
        match name.as_str() {
            "full" => keep.full = true,
            "arithmetic" => keep.arithmetic = true,
            _ => return Err(Failure::bad_input(format!("{name} is not full or arithmetic"))),
        }
    }
    Ok(keep)
}

/// Looks for plans.
pub(crate) fn find(prepared: &Prepared, wish: &Wish) -> Result<Plans, Failure> {
    let keep = wish.keep;
    let one = |request: &Request| {
        let tried = prepared.around(false, |model, around| attempt(model, request, around, wish.kept));
        tried.unwrap_or_else(|_| Err(Vec::new()))
    };
    let all = |requests: &[Request]| match wish.alone {
        true => requests.iter().map(one).collect(),
        false => on_all_cores(requests, &one),
    };
    let found = prepared.around(false, |model, around| {
        plans(&Search { model, request: &prepared.request, around, keep, attempt: &all })
    })?;
    let mut found = found.map_err(|faults| prepared.failed(faults))?;
    let price = wish.prices.get(&found.gpu).copied();
    for planned in &mut found.plans {
        planned.price = price.map(|price| price * found.gpus as f64);
    }
    Ok(found)
}

type Outcome = Result<Tried, Vec<Fault>>;

/// Tries requests on as many cores as there are; each thread takes the next one.
fn on_all_cores(requests: &[Request], one: &(impl Fn(&Request) -> Outcome + Sync)) -> Vec<Outcome> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(requests.len());
    let (next, most) = (AtomicUsize::new(0), work::most());
    let worker = || {
        let mut done: Vec<(usize, Outcome)> = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(request) = requests.get(at) else { return done };
            let bounded = vramcast_core::work::bounded(most, Arc::new(AtomicBool::new(false)), || one(request));
            done.push((at, bounded.unwrap_or_else(|_| Err(Vec::new()))));
        }
    };
    let mut done: Vec<(usize, Outcome)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(worker)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
    });
    vramcast_core::order::sort_by_key(&mut done, |(at, _)| *at);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}

/// Prices as a file or an object has them: the price of an hour by the name of a card.
pub(crate) fn prices(value: &Value, prepared: &Prepared) -> Result<BTreeMap<String, f64>, Failure> {
    let bad = |what: String| {
        Failure::bad_input(what).hint("prices are \"CARD\" = PRICE OF AN HOUR, one a line (TOML) or as JSON")
    };
    let object = value.as_object().ok_or_else(|| bad("no names and numbers".into()))?;
    let mut prices = BTreeMap::new();
    for (name, price) in object {
        let price = price.as_f64().filter(|price| *price >= 0.0);
        let price = price.ok_or_else(|| bad(format!("{name}: {} is not a price", object[name])))?;
        let card = prepared.cards().find(name).map_err(|error| match error {
            PlanError::BadValue { expected, .. } => bad(format!("{name} is not {expected}")),
            error => error.into(),
        })?;
        prices.insert(card.name, price);
    }
    Ok(prices)
}

/// The document.
pub(crate) fn document(plans: &Plans) -> Value {
    serde_json::to_value(plans).unwrap_or_else(|_| json!({}))
}
