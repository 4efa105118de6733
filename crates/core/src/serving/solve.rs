//! The other way round: how much fits, and what is needed.

use crate::memory::simulation;
use crate::model::Model;
use crate::plan::{InferPlan, PlanError};

/// Whether a number holds, and what is left of what it takes from, where that is known.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Whether it does.
    pub holds: bool,
    /// Bytes that stay free; negative: that are missing.
    pub left: Option<i64>,
}

impl From<bool> for Room {
    fn from(holds: bool) -> Self {
        Self { holds, left: None }
    }
}

/// The largest number in a range for which something that gets harder still holds.
///
/// What is left mostly shrinks by the same for each, so two tries tell where it ends. They are only a hint: allocators round, and a card that
/// is nearly full looks as full with more; so hints take turns with doubled steps and halves.
pub fn largest<R: Into<Room>>(low: u64, high: u64, mut room: impl FnMut(u64) -> R) -> Option<u64> {
    let mut room = |n| -> Room { room(n).into() };
    let first = if low > high { None } else { Some(room(low)).filter(|first| first.holds) }?;
    let (mut good, mut bad) = ((low, first.left), high.saturating_add(1));
    let (mut other, mut step, mut hints) = (None, 1u64, 0u32);
    while bad - good.0 > 1 {
        let hint = other.and_then(|other| crossing(good, other));
        let next = match hint {
            Some(hint) if bad <= high && hints % 3 < 2 => hint,
            _ if bad <= high => good.0 + (bad - good.0) / 2,
            Some(hint) if hint > good.0.saturating_add(step) => {
                step = 1;
                hint.min(good.0.saturating_mul(16))
            }
            _ => good.0.saturating_add(step),
        };
        let next = next.clamp(good.0 + 1, bad - 1);
        hints += u32::from(bad <= high);
        let tried = room(next);
        if tried.holds {
            step = step.saturating_mul(2);
            other = Some(good);
            good = (next, tried.left);
        } else {
            bad = next;
            other = Some((next, tried.left));
        }
    }
    Some(good.0)
}

/// Where nothing is left, by two numbers and what they leave.
fn crossing(one: (u64, Option<i64>), other: (u64, Option<i64>)) -> Option<u64> {
    let (left, there) = (one.1? as f64, other.1? as f64);
    let each = (left - there) / (one.0 as f64 - other.0 as f64);
    (each < 0.0).then(|| (one.0 as f64 - left / each).max(0.0) as u64)
}

/// Whether `generate` fits on the plan's card: the whole process against what the driver offers.
pub fn fits(model: &Model, plan: &InferPlan) -> Result<bool, PlanError> {
    Ok(room(model, plan)?.holds)
}

fn room(model: &Model, plan: &InferPlan) -> Result<Room, PlanError> {
    let [has, takes] = [plan.gpu.memory, simulation::infer(model, plan)?.process_bytes()]
        .map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
    Ok(Room { holds: takes <= has, left: Some(has - takes) })
}

/// The most prompts at once that fit; `None` when not even one does.
pub fn largest_batch(model: &Model, plan: &InferPlan) -> Result<Option<u64>, PlanError> {
    fits(model, &with_batch(plan, 1))?;
    Ok(largest(1, 1 << 16, |batch| room(model, &with_batch(plan, batch)).unwrap_or(false.into())))
}

/// The longest prompt of at most some tokens that fits, with the plan's new tokens after it.
pub fn largest_prompt(model: &Model, plan: &InferPlan, most: u64) -> Result<Option<u64>, PlanError> {
    let with = |seq_len: u64| {
        let mut plan = plan.clone();
        plan.batch.seq_len = seq_len;
        plan
    };
    fits(model, &with(1))?;
    Ok(largest(1, most.min(1 << 22), |prompt| room(model, &with(prompt)).unwrap_or(false.into())))
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
    use super::{Room, largest};

    #[test]
    fn the_largest_is_found() {
        assert_eq!(largest(1, 1 << 40, |n| n <= 12_345), Some(12_345));
        assert_eq!(largest(1, 10, |_| true), Some(10));
        assert_eq!(largest(1, 10, |_| false), None);
        // By what is left, with rounding, few tries are enough; where a card that is nearly full hides it, some more.
        for (hidden, most) in [(false, 8), (true, 28)] {
            let mut tries = 0;
            let found = largest(1, 1 << 40, |n| {
                tries += 1;
                let left = (80 << 30) - (n * 6_543_210).next_multiple_of(2 << 20) as i64;
                let left = if hidden && left > 0 { left.min(1 << 30) } else { left };
                Room { holds: left >= 0, left: Some(left) }
            });
            assert_eq!(found, Some(13_128));
            assert!(tries <= most, "{hidden}: {tries}");
        }
    }
}
