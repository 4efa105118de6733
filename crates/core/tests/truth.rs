//! Accuracy is a test: recorded truth is scored, and a change that makes it worse does not pass.

#![allow(clippy::disallowed_methods, reason = "tests read the recorded truth")]

use std::path::{Path, PathBuf};

use serde_json::Value;
use vramcast_core::model::Model;
use vramcast_core::source::{catalogue, json};
use vramcast_core::verify::ledger::{self, LedgerRow, Scored};
use vramcast_core::verify::{lora, models, summary};

fn truth(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../truth").join(path)
}

fn read(path: &Path) -> Value {
    json::parse(&std::fs::read(path).unwrap()).unwrap()
}

/// Parameters, tensors, cache and active parameters of every recorded model, to the unit.
#[test]
fn models_are_exact() {
    let files = std::fs::read_dir(truth("models")).unwrap().map(|entry| entry.unwrap().path());
    let rows: Vec<_> = files.map(|file| models::score(&read(&file))).collect();
    assert!(rows.len() >= 218);
    let wrong: Vec<_> = rows.iter().filter(|row| !row.ok).map(|row| (&row.id, &row.error)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

fn scored(file: &str) -> Vec<Scored> {
    let text = std::fs::read_to_string(truth(file)).unwrap();
    let rows = text.lines().filter(|line| !line.trim().is_empty());
    let scored = rows.map(|line| ledger::score(&json::parse(line.as_bytes()).unwrap()));
    scored.filter_map(|row| if let LedgerRow::Scored(row) = row { Some(*row) } else { None }).collect()
}

/// Bounds per kind of run, in percent: median, 95th percentile and worst of allocated; median of reserved.
fn assert_within(file: &str, group: &str, rows: usize, bounds: [f64; 4]) {
    let all = scored(file);
    let all: Vec<&Scored> = all.iter().collect();
    let groups = summary::by_group(&all);
    let found = groups.iter().find(|known| known.group == group).unwrap_or_else(|| panic!("no rows of {group}"));
    assert!(found.rows >= rows, "{} rows of {group}, not {rows}", found.rows);
    let (allocated, reserved) = (found.allocated.unwrap(), found.reserved.unwrap());
    let figures = [allocated.median, allocated.p95, allocated.worst, reserved.median];
    for (figure, bound) in figures.iter().zip(bounds) {
        assert!(figure <= &bound, "{file}, {group}: {figures:?} against {bounds:?}");
    }
}

#[test]
fn training_on_one_card() {
    assert_within("ledger/h200.jsonl", "train", 92, [0.1, 1.0, 1.0, 1.0]);
}

/// Absolute errors of peak allocated over all kinds of run together: their number, median, 95th percentile, worst.
fn spread(file: &str) -> (usize, f64, f64, f64) {
    let mut errors: Vec<f64> = scored(file).iter().filter_map(|row| row.allocated.error()).map(f64::abs).collect();
    errors.sort_by(f64::total_cmp);
    let count = errors.len();
    (count, errors[count / 2], errors[count * 95 / 100], errors[count - 1])
}

/// Every family that a replay can run, with settings drawn at random: all kinds of run together, scored once.
#[test]
fn families() {
    let (count, median, p95, worst) = spread("ledger/replay-families.jsonl");
    assert!(count >= 330, "{count} rows");
    assert!(median <= 0.01 && p95 <= 0.05 && worst <= 1.6, "median {median}, p95 {p95}, worst {worst}");
}

/// Wider settings drawn at random over the catalogue, on a card and replayed (docs/accuracy.md names the worst).
#[test]
fn random_plans() {
    let (count, median, p95, worst) = spread("ledger/h200-sweep.jsonl");
    assert!(count >= 145, "{count} rows");
    assert!(median <= 0.01 && p95 <= 0.2 && worst <= 0.4, "median {median}, p95 {p95}, worst {worst}");
    let (count, median, p95, worst) = spread("ledger/replay-sweep.jsonl");
    assert!(count >= 200, "{count} rows");
    assert!(median <= 0.01 && p95 <= 0.05 && worst <= 1.9, "median {median}, p95 {p95}, worst {worst}");
    let (count, median, p95, worst) = spread("ledger/replay-blind.jsonl");
    assert!(count >= 90, "{count} rows");
    assert!(median <= 0.01 && p95 <= 0.05 && worst <= 0.2, "median {median}, p95 {p95}, worst {worst}");
}

/// Attention, losses, checkpoints, optimizers, precision, frozen parts, masks, allocator options; other cards.
#[test]
fn options_of_training() {
    assert_within("ledger/h200-options.jsonl", "train", 249, [0.05, 0.5, 1.0, 0.1]);
    assert_within("ledger/h200-options.jsonl", "liger", 12, [0.2, 0.5, 1.0, 3.0]);
    assert_within("ledger/replay-options.jsonl", "train", 93, [0.05, 0.5, 1.0, 0.1]);
}

#[test]
fn adapters_and_quantised_bases() {
    assert_within("ledger/h200.jsonl", "lora", 18, [0.2, 2.0, 2.0, 2.0]);
    assert_within("ledger/h200.jsonl", "qlora-4bit", 11, [0.2, 2.0, 2.0, 2.0]);
    assert_within("ledger/h200.jsonl", "qlora-int8", 11, [12.0, 12.0, 12.0, 12.0]);
    assert_within("ledger/h200.jsonl", "trainer", 5, [0.2, 2.0, 2.0, 2.0]);
    assert_within("ledger/h200.jsonl", "liger", 5, [0.1, 1.0, 1.0, 1.0]);
}

#[test]
fn generation() {
    assert_within("ledger/h200.jsonl", "infer", 25, [0.1, 1.0, 1.0, 2.0]);
    assert_within("ledger/h200.jsonl", "infer-quant", 14, [0.2, 1.0, 1.0, 2.0]);
    // Families drawn at random, quantised caches, beams, sampling. The worst is RWKV with a CUDA kernel of its own.
    assert_within("ledger/h200-inference.jsonl", "infer", 180, [0.01, 0.1, 4.0, 0.1]);
    assert_within("ledger/h200-inference.jsonl", "infer-quant", 18, [0.05, 0.6, 1.0, 0.5]);
    // 80 families, most of them token by token.
    assert_within("ledger/replay-inference.jsonl", "infer", 110, [0.01, 0.1, 0.2, 0.1]);
    // The largest is ALBERT in 4 bits, of 52 MiB: 0.7 MiB of slack in blocks.
    assert_within("ledger/replay-inference.jsonl", "infer-quant", 30, [0.05, 0.5, 1.5, 0.5]);
}

/// Plans drawn at random over all families, and drafted tokens.
#[test]
fn generation_drawn_at_random() {
    assert_within("ledger/replay-blind-inference.jsonl", "infer", 40, [0.01, 0.11, 0.15, 0.01]);
    // The worst is DistilBERT's tied head, 0.7 MiB of 172; reserved Zamba2's tied blocks.
    assert_within("ledger/replay-blind-inference.jsonl", "infer-quant", 14, [0.01, 0.7, 0.7, 0.01]);
}

#[test]
fn drafted_tokens() {
    assert_within("ledger/replay-assisted.jsonl", "infer", 11, [0.005, 0.04, 0.04, 0.05]);
    assert_within("ledger/replay-assisted.jsonl", "infer-quant", 1, [0.005, 0.005, 0.005, 0.05]);
}

#[test]
fn several_cards() {
    assert_within("ledger/h200.jsonl", "fsdp2", 16, [0.3, 2.0, 2.0, 2.0]);
    assert_within("ledger/h200.jsonl", "fsdp1", 3, [0.3, 2.0, 2.0, 2.0]);
    assert_within("ledger/h200.jsonl", "ddp", 3, [0.3, 2.0, 2.0, 2.0]);
    assert_within("ledger/h200.jsonl", "zero-2", 3, [0.3, 2.0, 2.0, 2.0]);
}

/// Every LoRA row of PEFT, refusals included.
#[test]
fn adapter_counts_are_exact() {
    let rows = read(&truth("lora.json"))["rows"].as_array().unwrap().clone();
    assert!(rows.len() >= 95);
    for row in rows {
        let entry = catalogue::find(row["id"].as_str().unwrap()).unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let scored = lora::score(&row, &model);
        assert!(scored.ok, "{scored:?}");
    }
}
