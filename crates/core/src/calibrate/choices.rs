//! Alternatives that torch itself has, tried when something is off: each is taken whole or not at all.

use serde::Serialize;

use super::Chosen;
use super::run::Run;
use crate::plan::AllocatorOptions;
use crate::verify::ledger::Scored;
use crate::verify::residual::difference;

/// An alternative that was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChoiceFit {
    /// What it is.
    pub choice: &'static str,
    /// Whether it explains the rows.
    pub taken: bool,
    /// Rows that come nearer with it.
    pub nearer: usize,
    /// Rows that come farther away.
    pub farther: usize,
    /// The median difference before and after, in bytes.
    pub median: [u64; 2],
}

struct Alternative {
    choice: &'static str,
    change: fn(Chosen) -> Chosen,
    /// Of peak allocated, or of peak reserved.
    difference: fn(&Scored) -> Option<i64>,
    /// Rows in the middle must be off by more before it is tried.
    tried_above: u64,
}

const ALTERNATIVES: [Alternative; 5] = [
    Alternative {
        choice: "cuBLAS without a workspace (CUBLAS_WORKSPACE_CONFIG=:0:0)",
        change: |chosen| workspace(chosen, 0),
        difference: |row| difference(&row.allocated),
        tried_above: 1 << 20,
    },
    Alternative {
        choice: "cuBLAS with 8 MiB and 128 KiB (CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8)",
        change: |chosen| workspace(chosen, (4096 * 2 + 16 * 8) << 10),
        difference: |row| difference(&row.allocated),
        tried_above: 1 << 20,
    },
    Alternative {
        choice: "cuBLAS with 32 MiB (CUBLAS_WORKSPACE_CONFIG=:32768:1)",
        change: |chosen| workspace(chosen, 32 << 20),
        difference: |row| difference(&row.allocated),
        tried_above: 1 << 20,
    },
    Alternative {
        choice: "SDPA without cuDNN's kernel",
        change: |mut chosen| {
            chosen.machine.cudnn_attention = false;
            chosen
        },
        difference: |row| difference(&row.allocated),
        tried_above: 1 << 20,
    },
    Alternative {
        choice: "PYTORCH_ALLOC_CONF=expandable_segments:True",
        change: |mut chosen| {
            chosen.allocator = Some(AllocatorOptions { expandable_segments: true, ..AllocatorOptions::default() });
            chosen
        },
        difference: |row| difference(&row.reserved),
        tried_above: 20 << 20,
    },
];

fn workspace(mut chosen: Chosen, bytes: u64) -> Chosen {
    chosen.machine.blas_workspace = Some(bytes);
    chosen
}

/// Takes alternatives one after another, the best first, as long as one explains the rows; the runs are then those of
/// the machine that chooses so. Returned are those taken, then those that something is still off without.
pub fn fit(runs: &mut [Run]) -> (Chosen, Vec<ChoiceFit>) {
    let mut chosen = Chosen::default();
    let mut taken = Vec::new();
    loop {
        let changes = ALTERNATIVES.iter().map(|known| (known, (known.change)(chosen)));
        let changes = changes.filter(|(_, changed)| *changed != chosen && taken.len() < ALTERNATIVES.len());
        let tried: Vec<(Chosen, ChoiceFit)> =
            changes.filter_map(|(known, changed)| Some((changed, attempt(runs, known, &changed)?))).collect();
        let gain = |fit: &ChoiceFit| fit.median[0].saturating_sub(fit.median[1]);
        let Some((changed, fit)) = tried.iter().filter(|(_, fit)| fit.taken).max_by_key(|(_, fit)| gain(fit)) else {
            taken.extend(tried.into_iter().map(|(_, fit)| fit));
            return (chosen, taken);
        };
        chosen = *changed;
        taken.push(fit.clone());
        for run in runs.iter_mut() {
            if let Some((scored, parts)) = run.chosen(&chosen) {
                (run.scored, run.parts) = (scored, parts);
            }
        }
    }
}

fn attempt(runs: &[Run], alternative: &Alternative, changed: &Chosen) -> Option<ChoiceFit> {
    let off = |scored: &Scored| (alternative.difference)(scored).map(i64::unsigned_abs);
    let before: Vec<u64> = runs.iter().filter_map(|run| off(&run.scored)).collect();
    if median(before) <= alternative.tried_above {
        return None;
    }
    let pairs: Vec<(u64, u64)> =
        runs.iter().filter_map(|run| Some((off(&run.scored)?, off(&run.chosen(changed)?.0)?))).collect();
    let nearer = pairs.iter().filter(|(before, after)| after < before).count();
    let farther = pairs.iter().filter(|(before, after)| after > before).count();
    let median = [median(pairs.iter().map(|p| p.0).collect()), median(pairs.iter().map(|p| p.1).collect())];
    // It explains the rows when most come nearer, few go away, and the middle is exact with it: never a compromise.
    let taken = nearer * 4 >= pairs.len() * 3 && farther * 10 <= pairs.len() && median[1] <= alternative.tried_above;
    Some(ChoiceFit { choice: alternative.choice, taken, nearer, farther, median })
}

fn median(mut numbers: Vec<u64>) -> u64 {
    numbers.sort_unstable();
    numbers.get(numbers.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}
