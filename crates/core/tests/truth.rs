//! Accuracy is a test: all recorded truth is scored once, and a change that makes it worse does not pass.

#![allow(clippy::disallowed_methods, reason = "tests read the recorded truth")]

#[path = "support/recorded.rs"]
mod recorded;

use std::sync::LazyLock;

use recorded::{Recorded, path};
use vramcast_core::report::coverage::Coverage;
use vramcast_core::verify::limits::{self, Limits};

static RECORDED: LazyLock<Recorded> = LazyLock::new(Recorded::score);

const AGAIN: &str = "if it is meant: cargo run -p vramcast-core --example accuracy";

/// Models and adapters to the unit, runs within their tolerance, nothing that turned skipped.
#[test]
fn every_row_is_scored_and_close_or_says_why_not() {
    let wrong: Vec<_> = RECORDED.sets.iter().flat_map(|set| set.wrong().map(|row| (&set.path, row))).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let all: usize = RECORDED.sets.iter().map(|set| set.summary.rows).sum();
    let scored: usize = RECORDED.sets.iter().map(|set| set.summary.scored).sum();
    assert!(RECORDED.sets.len() >= 42 && all > 4400 && scored > 3400, "{scored} of {all}");
}

/// Errors of every file and group stand where `truth/limits.json` says, and no row is gone.
#[test]
fn nothing_is_worse_than_it_was() {
    let text = std::fs::read_to_string(path("truth/limits.json")).unwrap();
    let limits: Limits = serde_json::from_str(&text).unwrap();
    let worse = limits::exceeded(&limits, &RECORDED.sets);
    assert!(worse.is_empty(), "{worse:#?}\n{AGAIN}");
}

/// A figure that gets worse, a row that goes and a file without limits are all found.
#[test]
fn limits_can_fail() {
    let mut limits = limits::of(&RECORDED.sets);
    assert!(limits::exceeded(&limits, &RECORDED.sets).is_empty());
    let group = limits.get_mut("truth/ledger/h200.jsonl").unwrap().get_mut("train").unwrap();
    group.allocated = group.allocated.map(|[median, p95, worst]| [median, p95, worst / 2.0]);
    limits.get_mut("truth/models").unwrap().get_mut("all").unwrap().rows += 1;
    limits.remove("truth/ledger/replay.jsonl");
    let worse = limits::exceeded(&limits, &RECORDED.sets);
    for part in ["h200.jsonl, train", "truth/models, all", "replay.jsonl, train: has no limits"] {
        assert!(worse.iter().any(|line| line.contains(part)), "{part}: {worse:#?}");
    }
}

/// What reports call measured has a recorded run: `data/measured.json` is what the ledgers show.
#[test]
fn what_counts_as_measured_has_a_recorded_run() {
    assert!(RECORDED.coverage() == *Coverage::recorded(), "data/measured.json is not what the ledgers show; {AGAIN}");
}

/// The page of accuracy shows what `verify` prints.
#[test]
fn the_page_of_accuracy_is_what_verify_prints() {
    let page = std::fs::read_to_string(path("docs/accuracy.md")).unwrap();
    assert!(RECORDED.page(&page) == page, "the tables of docs/accuracy.md are not what verify prints; {AGAIN}");
}
