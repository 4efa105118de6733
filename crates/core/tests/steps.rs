//! What a step computes and takes, and the largest batches under a limit, against what ran on a card (truth/steps, truth/solve).

#![allow(clippy::disallowed_methods, reason = "tests read the recorded truth")]

use serde_json::{Value, json};
use vramcast_core::dtype::DType;
use vramcast_core::memory::simulation::{self, Simulation};
use vramcast_core::model::Model;
use vramcast_core::plan::{Gpus, TrainPlan};
use vramcast_core::report::cost;
use vramcast_core::source::catalogue;

fn rows(name: &str) -> Vec<Value> {
    let path = format!("{}/../../truth/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn model(row: &Value) -> Model {
    let id = row["model"].as_str().unwrap();
    let entry = catalogue::find(id).or_else(|| catalogue::find(catalogue::kin(id)?)).unwrap();
    Model::new(entry.config, entry.auto_class.as_deref()).unwrap()
}

fn plan(row: &Value) -> TrainPlan {
    let attention = row.get("counted_with").or(row.get("attention")).cloned().unwrap_or(json!("sdpa"));
    let tree = json!({
        "batch": {"batch_size": row["batch"], "seq_len": row["seq"]},
        "weights": row["weights"],
        "autocast": row["autocast"],
        "attention": attention,
        "checkpointing": if row["checkpointing"] == true { "full" } else { "off" },
        "optimizer": {"implementation": row["implementation"]},
    });
    serde_json::from_value(tree).unwrap()
}

fn run(row: &Value) -> Simulation {
    simulation::train(&model(row), &plan(row)).unwrap()
}

/// Forward, backward and recomputation count what torch's own counter counts, to the unit.
#[test]
fn operations_are_those_of_the_flop_counter() {
    let counted: Vec<Value> = rows("steps/h200.jsonl").into_iter().filter(|row| row["operations"].is_u64()).collect();
    let mut models: Vec<&str> = counted.iter().map(|row| row["model"].as_str().unwrap()).collect();
    models.sort_unstable();
    models.dedup();
    assert!(models.len() >= 30 && counted.iter().filter(|row| row["checkpointing"] == true).count() > 10);
    for row in &counted {
        assert_eq!(Some(run(row).log.effort.operations()), row["operations"].as_u64(), "{row}");
    }
}

/// The estimate of a step's time orders plans; the half of the rows that nothing was learned from scores it.
#[test]
fn seconds_rank_steps() {
    let timed: Vec<Value> = rows("steps/h200.jsonl").into_iter().filter(|row| row["seconds"].is_f64()).collect();
    let mut pairs: Vec<(f64, f64)> = Vec::new();
    let number = |row: &Value| row["id"].as_str().unwrap()[1..].parse::<u64>().unwrap();
    for row in timed.iter().filter(|row| number(row) >= 60 || !number(row).is_multiple_of(2)) {
        let row = &json!({"counted_with": row["attention"], "model": row["model"], "batch": row["batch"], "seq": row["seq"],
            "weights": row["weights"], "autocast": row["autocast"], "checkpointing": row["checkpointing"],
            "implementation": row["implementation"], "seconds": row["seconds"]});
        let estimated = cost::of_simulation(&model(row), &plan(row), &run(row)).seconds.unwrap();
        pairs.push((row["seconds"].as_f64().unwrap(), estimated));
    }
    let mut errors: Vec<f64> = pairs.iter().map(|(measured, estimated)| (estimated / measured - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    let (count, correlation) = (pairs.len() as f64, rank_correlation(&pairs));
    let median = errors[errors.len() / 2];
    println!("{count} rows: median error {median:.3}, rank correlation {correlation:.3}");
    assert!(count >= 40.0 && median < 0.22 && correlation > 0.94, "{median} {correlation}");
}

/// Spearman's.
fn rank_correlation(pairs: &[(f64, f64)]) -> f64 {
    // Equal ones share their rank.
    let ranks = |pick: fn(&(f64, f64)) -> f64| -> Vec<f64> {
        let rank = |one: &(f64, f64)| {
            let below = pairs.iter().filter(|other| pick(other) < pick(one)).count() as f64;
            below + pairs.iter().filter(|other| pick(other) == pick(one)).count() as f64 / 2.0
        };
        pairs.iter().map(rank).collect()
    };
    let (one, other) = (ranks(|pair| pair.0), ranks(|pair| pair.1));
    let middle = pairs.len() as f64 / 2.0;
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - middle) * (b - middle)).sum::<f64>();
    product(&one, &other) / (product(&one, &one) * product(&other, &other)).sqrt()
}

/// What others published of speed: compiled and in float8 much of it, epochs of samples shorter than the longest; so only ranks
/// are compared.
#[test]
#[ignore = "second ring: minutes"]
fn published_speeds_rank_alike() {
    let known = rows("steps/published.jsonl");
    for (source, count, least) in [("torchtitan", 13, 0.95), ("LitGPT", 32, 0.85), ("Megatron-Bridge", 10, 0.8)] {
        let mut pairs: Vec<(f64, f64)> = Vec::new();
        let scored =
            |row: &&Value| row["source"].as_str().unwrap().starts_with(source) && row.get("expected_skip").is_none();
        for row in known.iter().filter(scored) {
            let mut plan: TrainPlan = serde_json::from_value(row["plan"].clone()).unwrap();
            plan.gpu = Gpus::embedded().find(row["gpu"].as_str().unwrap()).unwrap();
            let model = model(row);
            let run = simulation::train(&model, &plan).unwrap_or_else(|error| panic!("{}: {error}", row["id"]));
            let cost = cost::of_simulation(&model, &plan, &run);
            let cards = plan.parallel.as_ref().map_or(1, |parallel| parallel.mesh.world()) as f64;
            let estimated = cost.tokens_per_second.unwrap() / cards;
            // As many samples in every epoch, of as many tokens.
            let per_card = row["tokens_per_second_per_card"].as_f64();
            let published = per_card.or_else(|| Some(2000.0 * 512.0 / row["seconds_per_epoch"].as_f64()?)).unwrap();
            println!("{source}, {}: {published:.0} published, {estimated:.0} estimated", row["id"]);
            pairs.push((published, estimated));
        }
        let correlation = rank_correlation(&pairs);
        println!("{source}: {} rows, rank correlation {correlation:.3}", pairs.len());
        assert!(pairs.len() == count && correlation > least, "{source}: {correlation}");
    }
}

/// What the solver found ran, and one sample more did not.
#[test]
fn batches_under_a_limit() {
    for row in rows("solve/h200.jsonl") {
        let mut plan = plan(&row);
        assert_eq!(plan.weights, DType::BF16);
        plan.job.memory_limit = Some(row["memory_limit_gib"].as_u64().unwrap() << 30);
        let run = simulation::train(&model(&row), &plan).unwrap();
        assert_eq!(!run.replay.out_of_memory, row["ran"] == true, "{row}");
    }
}
