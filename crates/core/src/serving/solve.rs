//! The other way round: how much fits, and what is needed.

use crate::memory::simulation;
use crate::model::Model;
use crate::plan::{Gpu, Gpus, InferPlan, PlanError};

/// The largest number in a range for which something that gets harder still holds.
pub fn largest(low: u64, high: u64, holds: impl Fn(u64) -> bool) -> Option<u64> {
    if low > high || !holds(low) {
        return None;
    }
    let (mut good, mut bad) = (low, high.saturating_add(1));
    // Doubling first: what is looked for is usually near the small end of a wide range.
    let mut step = 1u64;
    while good.saturating_add(step) < bad {
        let next = good.saturating_add(step);
        if holds(next) {
            good = next;
            step = step.saturating_mul(2);
        } else {
            bad = next;
        }
    }
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if holds(middle) { good = middle } else { bad = middle }
    }
    Some(good)
}

/// Whether `generate` fits on the plan's card: the whole process against what the driver offers.
pub fn fits(model: &Model, plan: &InferPlan) -> Result<bool, PlanError> {
    Ok(simulation::infer(model, plan)?.process_bytes() <= plan.gpu.memory)
}

/// The most prompts at once that fit; `None` when not even one does.
pub fn largest_batch(model: &Model, plan: &InferPlan) -> Result<Option<u64>, PlanError> {
    fits(model, &with_batch(plan, 1))?;
    Ok(largest(1, 1 << 16, |batch| fits(model, &with_batch(plan, batch)).unwrap_or(false)))
}

/// The longest prompt of at most some tokens that fits, with the plan's new tokens after it.
pub fn largest_prompt(model: &Model, plan: &InferPlan, most: u64) -> Result<Option<u64>, PlanError> {
    let with = |seq_len: u64| {
        let mut plan = plan.clone();
        plan.batch.seq_len = seq_len;
        plan
    };
    fits(model, &with(1))?;
    Ok(largest(1, most.min(1 << 22), |prompt| fits(model, &with(prompt)).unwrap_or(false)))
}

/// The smallest of some cards that a plan fits on.
pub fn smallest_card(model: &Model, plan: &InferPlan, cards: &Gpus) -> Result<Option<Gpu>, PlanError> {
    let mut all: Vec<Gpu> = cards.all().collect();
    all.sort_by(|a, b| (a.memory, &a.name).cmp(&(b.memory, &b.name)));
    for gpu in all {
        if fits(model, &InferPlan { gpu: gpu.clone(), ..plan.clone() })? {
            return Ok(Some(gpu));
        }
    }
    Ok(None)
}

/// The fewest cards, doubling from one, for which an engine's budget fits.
pub fn fewest_cards(limit: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    std::iter::successors(Some(1u64), |count| count.checked_mul(2))
        .take_while(|count| *count <= limit)
        .find(|c| fits(*c))
}

fn with_batch(plan: &InferPlan, batch_size: u64) -> InferPlan {
    let mut plan = plan.clone();
    plan.batch.batch_size = batch_size;
    plan
}

#[cfg(test)]
mod tests {
    use super::largest;

    #[test]
    fn the_largest_is_found() {
        assert_eq!(largest(1, 1 << 40, |n| n <= 12_345), Some(12_345));
        assert_eq!(largest(1, 10, |_| true), Some(10));
        assert_eq!(largest(1, 10, |_| false), None);
    }
}
