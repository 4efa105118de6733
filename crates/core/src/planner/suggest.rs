//! When a run does not fit: single changes that would make it fit, each found by simulating it.
//!
//! Changes that leave the result of training alone come first, then those that cost time, then other arithmetic, less
//! work at once, training less, and more hardware last; among alike ones the largest saving first.

use serde::Serialize;
use serde_json::Value;

use super::changes;
use crate::dtype::DType;
use crate::memory::simulation;
use crate::model::Model;
use crate::plan::parallel::{Engine, Fsdp2};
use crate::plan::{
    AdapterPlan, AttentionKind, CacheImplementation, Checkpointing, Gpu, Gpus, Implementation, InferPlan, Kernels,
    LoraPlan, Mesh, OptimizerKind, Parallel, Quantization, TrainPlan,
};
use crate::report::Totals;

/// One change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
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
    /// What it changes in the plan, as a JSON merge patch.
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

/// Single changes to a training run that must stay below `limit` bytes on its card. Where none suffices alone, the three
/// that save most.
pub fn for_training(model: &Model, plan: &TrainPlan, limit: u64, now: u64, cards: &Gpus) -> Vec<Suggestion> {
    let run = |plan: &TrainPlan| simulation::train(model, plan).ok().map(|run| Totals::of(&run));
    let room = Room { limit, now };
    let mut found = Vec::new();
    let mut consider = |change: &str, cost: Cost, changed: &TrainPlan| {
        if let Some(totals) = run(changed) {
            found.push(room.suggestion(change, cost, totals, changes::between(plan, changed)));
        }
    };
    for (change, cost, edit) in TRAINING {
        let mut changed = plan.clone();
        if edit(&mut changed) {
            consider(change, *cost, &changed);
        }
    }
    let sized = |batch: u64, seq: u64| {
        let mut plan = plan.clone();
        (plan.batch.batch_size, plan.batch.seq_len) = (batch, seq);
        plan
    };
    let (batch, seq) = (plan.batch.batch_size, plan.batch.seq_len);
    let fits = |plan: TrainPlan| run(&plan).is_some_and(|totals| totals.process <= limit);
    if let Some(most) = largest_below(batch, 1, |batch| fits(sized(batch, seq))) {
        let again = batch.div_ceil(most);
        let change = format!("--batch-size {most} (and {again} micro-batches a step for the same batch)");
        consider(&change, Cost::Batch, &sized(most, seq));
    }
    if let Some(most) = largest_below(seq, 64, |seq| fits(sized(batch, seq))) {
        consider(&format!("--seq-len {most}"), Cost::Length, &sized(batch, most));
    }
    if plan.parallel.is_none() {
        let spread = |world: u64| TrainPlan {
            parallel: Some(Parallel {
                mesh: Mesh::sharded(world),
                engine: Engine::Fsdp2(Fsdp2::default()),
                no_sync: false,
            }),
            ..plan.clone()
        };
        if let Some(world) = (1..=10).map(|power| 1u64 << power).find(|world| fits(spread(*world))) {
            consider(&format!("--gpus {world} --engine fsdp2"), Cost::Hardware, &spread(world));
        }
    }
    let other = |gpu: Gpu| TrainPlan { gpu, ..plan.clone() };
    if let Some((gpu, totals)) = larger_card(&plan.gpu, limit, cards, |gpu| run(&other(gpu))) {
        let (change, changes) = (format!("--gpu {:?}", gpu.name), changes::between(plan, &other(gpu)));
        found.push(Suggestion { fits: true, ..room.suggestion(&change, Cost::Hardware, totals, changes) });
    }
    choose(found)
}

/// Single changes to a run of `generate`.
pub fn for_generation(model: &Model, plan: &InferPlan, limit: u64, now: u64, cards: &Gpus) -> Vec<Suggestion> {
    let run = |plan: &InferPlan| {
        plan.check().ok().and_then(|()| simulation::infer(model, plan).ok()).map(|run| Totals::of(&run))
    };
    let room = Room { limit, now };
    let mut found = Vec::new();
    let mut consider = |change: &str, cost: Cost, changed: &InferPlan| {
        if let Some(totals) = run(changed) {
            found.push(room.suggestion(change, cost, totals, changes::between(plan, changed)));
        }
    };
    for (change, cost, edit) in GENERATION {
        let mut changed = plan.clone();
        if edit(&mut changed) {
            consider(change, *cost, &changed);
        }
    }
    let sized = |batch: u64, prompt: u64| {
        let mut plan = plan.clone();
        (plan.batch.batch_size, plan.batch.seq_len) = (batch, prompt);
        plan
    };
    let (batch, prompt) = (plan.batch.batch_size, plan.batch.seq_len);
    let fits = |plan: InferPlan| run(&plan).is_some_and(|totals| totals.process <= limit);
    if let Some(most) = largest_below(batch, 1, |batch| fits(sized(batch, prompt))) {
        consider(&format!("--batch-size {most}"), Cost::Batch, &sized(most, prompt));
    }
    if let Some(most) = largest_below(prompt, 64, |prompt| fits(sized(batch, prompt))) {
        consider(&format!("--prompt {most}"), Cost::Length, &sized(batch, most));
    }
    let other = |gpu: Gpu| InferPlan { gpu, ..plan.clone() };
    if let Some((gpu, totals)) = larger_card(&plan.gpu, limit, cards, |gpu| run(&other(gpu))) {
        let (change, changes) = (format!("--gpu {:?}", gpu.name), changes::between(plan, &other(gpu)));
        found.push(Suggestion { fits: true, ..room.suggestion(&change, Cost::Hardware, totals, changes) });
    }
    choose(found)
}

/// An edit of a plan: the flag, its cost, and the change itself, which says whether it applies.
type Edit<Plan> = (&'static str, Cost, fn(&mut Plan) -> bool);

const TRAINING: &[Edit<TrainPlan>] = &[
    ("--alloc-conf expandable_segments:True", Cost::Nothing, |plan| {
        !std::mem::replace(&mut plan.allocator.expandable_segments, true)
    }),
    ("--drop-outputs", Cost::Nothing, |plan| std::mem::replace(&mut plan.keep_outputs, false)),
    ("--attention sdpa", Cost::Nothing, |plan| {
        std::mem::replace(&mut plan.attention, AttentionKind::Sdpa) == AttentionKind::Eager
    }),
    ("--liger", Cost::Nothing, |plan| std::mem::replace(&mut plan.kernels, Kernels::Liger) == Kernels::Transformers),
    ("--optimizer-implementation fused", Cost::Nothing, |plan| {
        let adam = matches!(plan.optimizer.kind, OptimizerKind::Adam | OptimizerKind::AdamW);
        adam && std::mem::replace(&mut plan.optimizer.implementation, Implementation::Fused) != Implementation::Fused
    }),
    ("--optimizer-in-backward", Cost::Nothing, |plan| {
        plan.gradient_accumulation == 1 && !plan.clip && !std::mem::replace(&mut plan.optimizer_in_backward, true)
    }),
    ("--gradient-checkpointing", Cost::Time, |plan| {
        std::mem::replace(&mut plan.checkpointing, Checkpointing::Full) == Checkpointing::Off
    }),
    ("--precision bf16", Cost::Arithmetic, |plan| {
        plan.autocast = None;
        std::mem::replace(&mut plan.weights, DType::BF16) == DType::F32
    }),
    ("--optimizer adamw8bit", Cost::Arithmetic, |plan| {
        std::mem::replace(&mut plan.optimizer.kind, OptimizerKind::AdamW8bit) == OptimizerKind::AdamW
    }),
    ("--optimizer adafactor", Cost::Arithmetic, |plan| {
        std::mem::replace(&mut plan.optimizer.kind, OptimizerKind::Adafactor) == OptimizerKind::AdamW
    }),
    ("--lora", Cost::Training, |plan| plan.adapter.replace(AdapterPlan::Lora(LoraPlan::default())).is_none()),
    ("--qlora", Cost::Training, |plan| {
        let first = plan.quantization.replace(Quantization::default()).is_none();
        plan.adapter.get_or_insert(AdapterPlan::Lora(LoraPlan::default()));
        first
    }),
];

const GENERATION: &[Edit<InferPlan>] = &[
    ("--alloc-conf expandable_segments:True", Cost::Nothing, |plan| {
        !std::mem::replace(&mut plan.allocator.expandable_segments, true)
    }),
    ("--cache static", Cost::Nothing, |plan| {
        std::mem::replace(&mut plan.cache, CacheImplementation::Static) == CacheImplementation::Dynamic
    }),
    ("--dtype bf16", Cost::Arithmetic, |plan| {
        std::mem::replace(&mut plan.weights, DType::BF16) == DType::F32 && plan.quantization.is_none()
    }),
];

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

/// The smallest larger card of the same maker on which the run fits with the same share left free.
fn larger_card(own: &Gpu, limit: u64, cards: &Gpus, run: impl Fn(Gpu) -> Option<Totals>) -> Option<(Gpu, Totals)> {
    let mut larger: Vec<Gpu> =
        cards.all().filter(|card| card.memory > own.memory && card.vendor == own.vendor).collect();
    larger.sort_by(|a, b| (a.memory, &a.name).cmp(&(b.memory, &b.name)));
    larger.dedup_by(|a, b| a.memory == b.memory);
    let kept = own.memory.saturating_sub(limit);
    larger.into_iter().find_map(|card| {
        let room = card.memory.saturating_sub(kept);
        run(card.clone()).filter(|totals| totals.process <= room).map(|totals| (card, totals))
    })
}

/// What there is, and what the run takes now.
struct Room {
    limit: u64,
    now: u64,
}

impl Room {
    fn suggestion(&self, change: &str, cost: Cost, totals: Totals, changes: Value) -> Suggestion {
        let process = totals.process;
        let (saved, fits) = (self.now.saturating_sub(process), process <= self.limit);
        Suggestion { change: change.to_owned(), cost, process, saved, fits, totals, changes }
    }
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
    use crate::source::catalogue;

    fn model(name: &str) -> Model {
        let entry = catalogue::find(name).unwrap();
        Model::new(entry.config, entry.auto_class.as_deref()).unwrap()
    }

    #[test]
    fn the_largest_below() {
        assert_eq!(largest_below(8, 1, |n| n <= 5), Some(5));
        assert_eq!(largest_below(8, 1, |_| true), Some(7));
        assert_eq!(largest_below(8, 1, |_| false), None);
        assert_eq!(largest_below(2048, 64, |n| n <= 1000), Some(960));
        assert_eq!(largest_below(0, 64, |_| true), None);
    }

    /// Every suggestion that says it fits, fits when it is simulated again, and the cheapest comes first.
    #[test]
    fn suggestions_hold() {
        let model = model("microsoft/phi-2");
        let cards = Gpus::embedded();
        let mut plan = TrainPlan { gpu: cards.find("A100-40GB").unwrap(), ..TrainPlan::default() };
        plan.batch.batch_size = 8;
        let now = simulation::train(&model, &plan).unwrap().process_bytes();
        let limit = plan.gpu.memory;
        assert!(now > limit);
        let found = for_training(&model, &plan, limit, now, &cards);
        let helps = |s: &Suggestion| s.fits && (s.saved > 0 || s.cost == Cost::Hardware);
        assert!(found.iter().all(helps), "{found:?}");
        assert!(found.is_sorted_by_key(|suggestion| suggestion.cost));
        let checkpointed = TrainPlan { checkpointing: Checkpointing::Full, ..plan.clone() };
        let process = simulation::train(&model, &checkpointed).unwrap().process_bytes();
        assert_eq!(
            found.iter().any(|s| s.change == "--gradient-checkpointing" && s.process == process),
            process <= limit
        );
        assert!(found.iter().any(|s| s.cost == Cost::Hardware));
    }
}
