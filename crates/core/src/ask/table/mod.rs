//! Every setting, by topic: one row each. A new option is one row here, its place in a plan, and the place where the
//! simulation uses it.

mod adapters;
mod cards;
mod deepspeed;
mod fsdp;
mod generation;
mod job;
mod megatron;
mod serving;
mod step;
mod tasks;

use super::runner::{Runner, Scope};
use super::setting::{Kind, Setting};

/// Types that weights, gradients and states may have.
pub(super) const FLOATS: Kind = Kind::Choice(&[("fp32", ""), ("bf16", ""), ("fp16", "")]);

/// The table.
const TOPICS: [&[Setting]; 12] = [
    cards::HARDWARE,
    step::BATCH,
    step::STEP,
    tasks::ROWS,
    job::ROWS,
    adapters::ROWS,
    generation::ROWS,
    cards::ROWS,
    fsdp::ROWS,
    deepspeed::ROWS,
    megatron::ROWS,
    serving::ROWS,
];

/// Every setting, in the order of the table.
pub fn all() -> impl Iterator<Item = &'static Setting> {
    TOPICS.iter().flat_map(|rows| rows.iter())
}

/// Those that some of these honour.
pub fn of(scope: Scope) -> impl Iterator<Item = &'static Setting> {
    all().filter(move |row| row.scope.meets(scope))
}

/// The setting of a flag, an alias or a keyword for whoever runs; else one that somebody else has under that name.
pub fn called(name: &str, runner: Runner) -> Option<&'static Setting> {
    let same = || all().filter(|row| row.is_called(name));
    same().find(|row| row.scope.has(runner)).or_else(|| {
        let near = same().find(|row| row.scope.runners().any(|one| one.trains() == runner.trains()));
        near.or_else(|| same().next())
    })
}

/// The setting at a place of a plan, for some of those who run plans; the longest place that leads there.
pub fn at(path: &str, scope: Scope) -> Option<&'static Setting> {
    let leads =
        |row: &&Setting| row.scope.meets(scope) && behind(row, path, |rest| rest.is_empty() || rest.starts_with('.'));
    let exact = |row: &&Setting| behind(row, path, str::is_empty);
    of(scope).find(exact).or_else(|| all().find(exact)).or_else(|| all().filter(leads).max_by_key(|row| row.path.len()))
}

/// Whether a path begins with the place of a setting, and what is behind it is as wanted. Resolving a plan asks it of every row
/// for every value.
fn behind(row: &Setting, path: &str, wanted: fn(&str) -> bool) -> bool {
    match row.path.strip_prefix("parallel.engine.*") {
        None => path.strip_prefix(row.path).is_some_and(wanted),
        Some(end) => row.scope.runners().any(|runner| {
            path.strip_prefix(runner.place()).and_then(|rest| rest.strip_prefix(end)).is_some_and(wanted)
        }),
    }
}

/// A place with the engine's own in it.
pub fn placed(path: &str, runner: Runner) -> String {
    match path.strip_prefix("parallel.engine.*") {
        Some(rest) => format!("{}{rest}", runner.place()),
        None => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flag means one thing to whoever runs, and every row says what it is.
    #[test]
    fn the_table_is_sound() {
        for runner in Runner::ALL {
            let mut names: Vec<&str> = Vec::new();
            for row in all().filter(|row| row.scope.has(runner) && !row.flag.is_empty()) {
                for name in std::iter::once(&row.flag).chain(row.aliases) {
                    assert!(!names.contains(name), "--{name} stands twice for {}", runner.title());
                    names.push(name);
                }
            }
        }
        for row in all() {
            assert!(
                !row.help.is_empty() && row.help.ends_with(|c: char| c.is_alphanumeric() || ")`/".contains(c)),
                "{}",
                row.path
            );
            assert!(!row.from.is_empty(), "{}", row.path);
        }
        assert!(all().count() > 150);
    }

    #[test]
    fn names_and_places_lead_to_rows() {
        assert_eq!(called("lora_r", Runner::OneCard).map(|row| row.path), Some("adapter.rank"));
        assert_eq!(called("batch-size", Runner::LlamaCpp).map(|row| row.path), Some("logical_batch"));
        assert_eq!(called("batch-size", Runner::Fsdp2).map(|row| row.path), Some("batch.batch_size"));
        let wrap = at("parallel.engine.fsdp2.wrap", Scope::TRAIN).map(|row| row.flag);
        assert_eq!(wrap, Some("wrap"));
        assert_eq!(at("checkpoints.selective", Scope::TRAIN).map(|row| row.flag), Some("gradient-checkpointing"));
    }
}
