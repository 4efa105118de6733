//! When a run does not fit: single changes that would make it fit, each settled and simulated with all that it implies.
//!
//! Changes that leave the result of training alone come first, then those that cost time, then other arithmetic, less
//! work at once, training less, and more hardware last; among alike ones the largest saving first.

use serde::Serialize;
use serde_json::{Value, json};

use super::request::Request;
use super::resolve::{Surroundings, resolve};
use super::runner::Runner;
use super::{request, spell, tree};
use crate::memory::simulation;
use crate::model::Model;
use crate::plan::{Gpu, RunPlan};
use crate::report::Totals;

/// One change.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Suggestion {
    /// The flags that make it.
    pub change: String,
    /// What it costs.
    pub cost: Cost,
    /// What the process then takes, in bytes.
    pub process: u64,
    /// How much less that is.
    pub saved: u64,
    /// Whether it then fits.
    pub fits: bool,
    /// The peaks it then has.
    pub totals: Totals,
    /// What it changes in the plan: settings by their places, laid over what was asked.
    pub changes: Value,
}

/// What a change costs, cheapest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Cost {
    /// The same result.
    Nothing,
    /// The same result, later.
    Time,
    /// Other rounding or another optimizer.
    Arithmetic,
    /// Fewer samples at once.
    Batch,
    /// Shorter samples.
    Length,
    /// Only adapters are trained.
    Training,
    /// More or larger cards.
    Hardware,
}

impl Cost {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Nothing => "same result",
            Self::Time => "same result, slower",
            Self::Arithmetic => "other arithmetic",
            Self::Batch => "fewer samples at once",
            Self::Length => "shorter samples",
            Self::Training => "trains adapters only",
            Self::Hardware => "more hardware",
        }
    }
}

/// Single changes to a run that must stay below `limit` bytes on its card. Where none suffices alone, the three that save
/// most.
pub fn changes(
    model: &Model,
    request: &Request,
    around: &Surroundings<'_>,
    (plan, now): (&RunPlan, Totals),
    limit: u64,
) -> Vec<Suggestion> {
    let search = Search { model, request, around, now, limit, kept: plan.gpu().memory.saturating_sub(limit) };
    let mut found = Vec::new();
    for (edit, cost) in edits(plan) {
        found.extend(search.consider(edit, cost));
    }
    let (batch, length) = match plan {
        RunPlan::Train(plan) => (plan.batch.batch_size, plan.batch.seq_len),
        RunPlan::Infer(plan) => (plan.batch.batch_size, plan.batch.seq_len),
        RunPlan::Serve(_) => return Vec::new(),
    };
    let micro = if let RunPlan::Train(plan) = plan { Some(plan.gradient_accumulation) } else { None };
    let sized = |samples: u64| {
        let mut edit = json!({"batch": {"batch_size": samples}});
        if let Some(micro) = micro {
            edit["gradient_accumulation"] = json!(u64::from(micro).saturating_mul(batch / samples));
        }
        edit
    };
    // As many samples a step as before: only parts that divide them.
    let parts: Vec<u64> = match micro {
        Some(_) => (1..batch.min(4096)).rev().filter(|samples| batch % samples == 0).collect(),
        None => Vec::new(),
    };
    if micro.is_some() {
        found.extend(parts.into_iter().find_map(|samples| search.fitting(sized(samples), Cost::Batch)));
    } else if let Some(most) = largest_below(batch, 1, |samples| search.fits(&sized(samples))) {
        found.extend(search.consider(sized(most), Cost::Batch));
    }
    let long = |tokens: u64| json!({"batch": {"seq_len": tokens}});
    if let Some(most) = largest_below(length, 64, |tokens| search.fits(&long(tokens))) {
        found.extend(search.consider(long(most), Cost::Length));
    }
    if request.runner == Runner::OneCard {
        let spread = |world: u64| json!({"parallel": {"gpus": world, "engine": {"fsdp2": {}}}});
        let world = (1..=10).map(|power| 1u64 << power).find(|world| search.fits(&spread(*world)));
        found.extend(world.and_then(|world| search.consider(spread(world), Cost::Hardware)));
    }
    found.extend(search.larger_card(plan.gpu()));
    choose(found)
}

/// Edits of a plan that may apply, and what each costs.
fn edits(plan: &RunPlan) -> Vec<(Value, Cost)> {
    let tree = match plan {
        RunPlan::Train(plan) => serde_json::to_value(plan),
        RunPlan::Infer(plan) => serde_json::to_value(plan),
        RunPlan::Serve(plan) => serde_json::to_value(plan),
    };
    let tree = tree.unwrap_or_default();
    let is = |path: &str, value: Value| tree::get(&tree, path) == Some(&value);
    let absent = |path: &str| tree::get(&tree, path).is_none_or(Value::is_null);
    let training = matches!(plan, RunPlan::Train(_));
    let segments = (
        is("allocator.expandable_segments", json!(false)),
        json!({"allocator": {"expandable_segments": true}}),
        Cost::Nothing,
    );
    let mut all = vec![segments];
    if training {
        let adam = is("optimizer.kind", json!("adamw"));
        let checkpoints = json!({"every": 1, "reentrant": false, "offload": false, "selective": null});
        all.extend([
            (is("keep_outputs", json!(true)), json!({"keep_outputs": false}), Cost::Nothing),
            (is("attention", json!("eager")), json!({"attention": "sdpa"}), Cost::Nothing),
            (is("kernels", json!("transformers")), json!({"kernels": "liger"}), Cost::Nothing),
            (
                adam && !is("optimizer.implementation", json!("fused")),
                json!({"optimizer": {"implementation": "fused"}}),
                Cost::Nothing,
            ),
            (is("optimizer_in_backward", json!(false)), json!({"optimizer_in_backward": true}), Cost::Nothing),
            (
                is("checkpointing", json!("off")),
                json!({"checkpointing": "full", "checkpoints": checkpoints}),
                Cost::Time,
            ),
            (is("weights", json!("fp32")), json!({"weights": "bf16", "autocast": null}), Cost::Arithmetic),
            (adam, json!({"optimizer": {"kind": "adamw8bit"}}), Cost::Arithmetic),
            (adam, json!({"optimizer": {"kind": "adafactor"}}), Cost::Arithmetic),
            (absent("adapter"), json!({"adapter": {"method": "lora"}}), Cost::Training),
            (absent("quantization"), json!({"adapter": {"method": "lora"}, "quantization": {}}), Cost::Training),
        ]);
    } else {
        all.extend([
            (is("cache", json!("dynamic")), json!({"cache": "static"}), Cost::Nothing),
            (is("weights", json!("fp32")) && absent("quantization"), json!({"weights": "bf16"}), Cost::Arithmetic),
        ]);
    }
    all.into_iter().filter(|(applies, ..)| *applies).map(|(_, edit, cost)| (edit, cost)).collect()
}

/// A request that is changed and tried again.
struct Search<'a> {
    model: &'a Model,
    request: &'a Request,
    around: &'a Surroundings<'a>,
    now: Totals,
    limit: u64,
    kept: u64,
}

impl Search<'_> {
    /// The request with an edit over it.
    fn edited(&self, edit: &Value) -> Request {
        let mut request = self.request.clone();
        tree::lay(&mut request.stated, edit);
        if let Some(runner) = request::engine_of(&request.stated) {
            request.runner = runner;
        }
        request
    }

    /// What a changed request takes.
    fn run(&self, edit: &Value) -> Option<(Totals, Gpu)> {
        // The answer itself matters more.
        if crate::work::is_short() {
            return None;
        }
        let settled = resolve(self.model, &self.edited(edit), self.around).ok()?;
        let run = match &settled.plan {
            RunPlan::Train(plan) => simulation::train(self.model, plan),
            RunPlan::Infer(plan) => simulation::infer(self.model, plan),
            RunPlan::Serve(_) => return None,
        };
        Some((Totals::of(&run.ok()?), settled.plan.gpu().clone()))
    }

    fn fits(&self, edit: &Value) -> bool {
        self.run(edit).is_some_and(|(totals, gpu)| totals.process.saturating_add(self.kept) <= gpu.memory)
    }

    fn consider(&self, edit: Value, cost: Cost) -> Option<Suggestion> {
        let (totals, gpu) = self.run(&edit)?;
        let process = totals.process;
        let runner = self.edited(&edit).runner;
        Some(Suggestion {
            change: spell::line(&spell::words(&edit, runner)),
            cost,
            process,
            saved: self.now.process.saturating_sub(process),
            fits: process.saturating_add(self.kept) <= gpu.memory && (cost == Cost::Hardware || process <= self.limit),
            totals,
            changes: edit,
        })
    }

    fn fitting(&self, edit: Value, cost: Cost) -> Option<Suggestion> {
        self.consider(edit, cost).filter(|suggestion| suggestion.fits)
    }

    /// The smallest larger card of the same maker on which the run fits with the same room left free.
    fn larger_card(&self, own: &Gpu) -> Option<Suggestion> {
        let cards = (self.around.cards)();
        let mut larger: Vec<Gpu> =
            cards.all().filter(|card| card.memory > own.memory && card.vendor == own.vendor).collect();
        larger.sort_by(|a, b| (a.memory, &a.name).cmp(&(b.memory, &b.name)));
        larger.dedup_by(|a, b| a.memory == b.memory);
        larger.into_iter().find_map(|card| self.fitting(json!({"gpu": card.name}), Cost::Hardware))
    }
}

/// The largest value below `now`, in steps, for which something holds that gets harder with it.
fn largest_below(now: u64, step: u64, holds: impl Fn(u64) -> bool) -> Option<u64> {
    let steps = now.checked_sub(1)? / step;
    let (mut good, mut bad) = (0, steps + 1);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if holds(middle * step) { good = middle } else { bad = middle }
    }
    (good > 0).then_some(good * step)
}

fn choose(mut found: Vec<Suggestion>) -> Vec<Suggestion> {
    if found.iter().any(|suggestion| suggestion.fits) {
        found.retain(|suggestion| suggestion.fits);
        found.sort_by(|a, b| (a.cost, a.process, &a.change).cmp(&(b.cost, b.process, &b.change)));
    } else {
        found.retain(|suggestion| suggestion.saved > 0);
        found.sort_by(|a, b| (a.process, &a.change).cmp(&(b.process, &b.change)));
        found.truncate(3);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_below() {
        assert_eq!(largest_below(8, 1, |n| n <= 5), Some(5));
        assert_eq!(largest_below(8, 1, |_| true), Some(7));
        assert_eq!(largest_below(8, 1, |_| false), None);
        assert_eq!(largest_below(2048, 64, |n| n <= 1000), Some(960));
        assert_eq!(largest_below(0, 64, |_| true), None);
    }
}
