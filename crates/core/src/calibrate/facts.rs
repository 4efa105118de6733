//! Bytes that driver and libraries take.
//!
//! Each is the median over the rows in which it alone is not known yet: first the context, which rows measure by itself,
//! then what stands beside it alone, then what stands beside those. A median does not follow a few strange rows; these
//! are reported instead.

use serde::Serialize;

use super::run::Run;
use crate::memory::process::Fact;
use crate::plan::Machine;

/// How one fact was learned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FactFit {
    /// Which.
    pub fact: Fact,
    /// What is built in.
    pub before: u64,
    /// What was learned; as before where no row shows it.
    pub after: u64,
    /// Rows it was read off.
    pub rows: usize,
    /// The least and the most that those rows show.
    pub range: Option<[i64; 2]>,
    /// Facts that no row showed alone and that were taken as built in.
    pub given: Vec<Fact>,
    /// How far a row is from what the others say: in the middle, and at most.
    pub left_out: Option<[u64; 2]>,
}

/// A row whose process held more or less than all facts say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stranger {
    /// The row.
    pub id: String,
    /// Measured less explained.
    pub bytes: i64,
}

/// What the driver hands out at once is 2 MiB; more than a few of these is something else.
const STRANGE: i64 = 32 << 20;

/// The machine that the rows show, and how each fact was learned.
pub fn fit(runs: &[Run], start: Machine) -> (Machine, Vec<FactFit>) {
    let runs: Vec<&Run> = runs.iter().collect();
    let mut machine = start;
    let mut learned = Vec::new();
    let mut fits = Vec::new();
    for fact in Fact::ALL {
        let fit = one(&runs, fact, &machine, &learned);
        if fit.rows > 0 {
            learned.push(fact);
            fact.learn(&mut machine, fit.after);
        }
        fits.push(fit);
    }
    (machine, fits)
}

/// The machine that all rows but one show.
pub fn fit_without(runs: &[Run], id: &str, start: Machine) -> Machine {
    let runs: Vec<&Run> = runs.iter().filter(|run| run.id != id).collect();
    let mut machine = start;
    let mut learned = Vec::new();
    for fact in Fact::ALL {
        let fit = one(&runs, fact, &machine, &learned);
        if fit.rows > 0 {
            learned.push(fact);
            fact.learn(&mut machine, fit.after);
        }
    }
    machine
}

/// Rows that the facts do not explain.
pub fn strangers(runs: &[Run], machine: &Machine) -> Vec<Stranger> {
    let stranger = |run: &Run| {
        let bytes = signed(run.outside()?).saturating_sub(signed(run.explained(machine)));
        (bytes.abs() > STRANGE).then(|| Stranger { id: run.id.clone(), bytes })
    };
    runs.iter().filter_map(stranger).collect()
}

fn one(runs: &[&Run], fact: Fact, machine: &Machine, learned: &[Fact]) -> FactFit {
    // All runs are of one card.
    let of = |machine: &Machine| runs.first().map_or(0, |run| run.fact(fact, machine));
    let before = of(&Machine::default());
    // Rows in which all else is learned say most; else rows in which all else is as built in.
    let mut shown: Vec<i64> = samples(runs, fact, machine, |other| learned.contains(&other));
    let mut given = Vec::new();
    if shown.is_empty() {
        shown = samples(runs, fact, machine, |_| true);
        let unlearned = |run: &&&Run| run.parts.iter().any(|(known, _)| *known == fact);
        for run in runs.iter().filter(unlearned) {
            given.extend(run.parts.iter().map(|(known, _)| *known).filter(|k| *k != fact && !learned.contains(k)));
        }
        given.sort();
        given.dedup();
    }
    shown.sort_unstable();
    let range = shown.first().zip(shown.last()).map(|(least, most)| [*least, *most]);
    let after = median(&shown).and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(of(machine));
    FactFit { fact, before, after, rows: shown.len(), range, given, left_out: left_out(&shown) }
}

/// What each row leaves for a fact, where all else in it is known.
fn samples(runs: &[&Run], fact: Fact, machine: &Machine, known: impl Fn(Fact) -> bool) -> Vec<i64> {
    if fact == Fact::Context {
        return runs.iter().filter_map(|run| run.context.map(signed)).collect();
    }
    let sample = |run: &&Run| {
        let (_, times) = *run.parts.iter().find(|(part, _)| *part == fact)?;
        let others = run.parts.iter().filter(|(part, _)| *part != fact);
        let mut rest = signed(run.outside()?);
        for (part, times) in others {
            if !known(*part) {
                return None;
            }
            // A context that was measured in the row itself is the better one.
            let own = run.context.filter(|_| *part == Fact::Context);
            rest -= signed(own.unwrap_or_else(|| run.fact(*part, machine)).saturating_mul(*times));
        }
        Some(rest / signed(times.max(1)))
    };
    runs.iter().filter_map(sample).collect()
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Of sorted numbers; the lower of two in the middle.
fn median(sorted: &[i64]) -> Option<i64> {
    sorted.get(sorted.len().saturating_sub(1) / 2).copied()
}

fn left_out(sorted: &[i64]) -> Option<[u64; 2]> {
    if sorted.len() < 2 {
        return None;
    }
    let mut errors: Vec<u64> = (0..sorted.len())
        .filter_map(|at| {
            let others: Vec<i64> = [&sorted[..at], &sorted[at + 1..]].concat();
            Some((median(&others)? - sorted[at]).unsigned_abs())
        })
        .collect();
    errors.sort_unstable();
    Some([errors[errors.len() / 2], *errors.last()?])
}
