//! Our figures beside AgileRL's published points, as a Markdown table:
//! `cargo run -p vramcast-core --example published_rollouts -- truth/external/agilerl.json [rows]`.
//!
//! Training is run as TRL's GRPO of the same sizes: AgileRL's trainer is its own code, and what differs is said in
//! docs/post-training.md, not fitted. Compared is what training adds to the card; generation is the engine's share and
//! what the process itself takes.

use std::collections::BTreeMap;

use serde_json::Value;
use vramcast_core::dtype::DType;
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::objective::{Vllm, VllmMode};
use vramcast_core::plan::{
    AdapterPlan, Batch, Checkpointing, Gpus, Implementation, LoraPlan, LossKind, LossOptions, Objective, Optimizer,
    Quantization, Targets, TaskKind, TrainPlan,
};
use vramcast_core::source::catalogue;

/// Errors in percent, by what they are of.
#[derive(Default)]
struct Errors(BTreeMap<&'static str, Vec<f64>>);

impl Errors {
    fn add(&mut self, what: &'static str, ours: u64, measured: u64) {
        self.0.entry(what).or_default().push((ours as f64 / measured as f64 - 1.0) * 100.0);
    }

    fn said(&self, what: &str) -> String {
        let Some(all) = self.0.get(what) else { return "–".into() };
        let mean = all.iter().map(|error| error.abs()).sum::<f64>() / all.len() as f64;
        let worst = all.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap_or(0.0);
        format!("{mean:.1}, {worst:+.0}")
    }
}

const COLUMNS: [&str; 5] = ["added by training", "training", "training, theirs", "generation", "generation, theirs"];

#[allow(clippy::disallowed_methods)]
fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(path) = arguments.first() else { panic!("truth/external/agilerl.json") };
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut groups = BTreeMap::<(bool, String), (u32, Errors)>::new();
    let mut left_out = BTreeMap::<String, u32>::new();
    for row in file["rows"].as_array().unwrap() {
        let number = |key: &str| row[key].as_u64().unwrap_or(0);
        let (reserved, outside) = match ours(row) {
            Ok(found) => found,
            Err(why) => {
                *left_out.entry(why).or_default() += 1;
                continue;
            }
        };
        let (measured, asleep) = (number("measured_bytes"), number("sleeping_bytes"));
        let target = row["their_target_bytes"].as_u64().unwrap_or(measured);
        let short =
            |key: &str| row[key].as_str().unwrap_or_default().rsplit(['/', ' ']).next().unwrap_or("").to_owned();
        let pending = row["curated"] != true;
        let name = match row["quantization"].as_str() {
            Some(quantization) => format!("{} {quantization}, {}", short("model"), short("gpu")),
            None => format!("{}, {}", short("model"), short("gpu")),
        };
        for key in [name, "all".to_owned()] {
            let (count, errors) = groups.entry((pending, key)).or_default();
            *count += 1;
            if row["phase"] == "training" {
                errors.add(COLUMNS[0], reserved, measured - asleep);
                errors.add(COLUMNS[1], reserved + asleep, measured);
                errors.add(COLUMNS[2], number("their_estimate_bytes"), target);
            } else {
                let total = Gpus::embedded().find(card(row)).unwrap().memory as f64;
                let share = (row["gpu_memory_utilization"].as_f64().unwrap_or(0.0) * total) as u64;
                errors.add(COLUMNS[3], share + outside, measured);
                errors.add(COLUMNS[4], number("their_estimate_bytes"), measured);
            }
        }
        if arguments.len() > 1 && row["phase"] == "training" {
            let mib = |bytes: u64| bytes >> 20;
            let [seq, micro, group, rank] = ["seq_len", "micro_batch", "group_size", "lora_rank"].map(number);
            println!(
                "{} {seq} x {micro} of {group}, rank {rank}: {} MiB, measured {}",
                short("model"),
                mib(reserved),
                mib(measured - asleep)
            );
        }
    }
    println!("| points | rows | {} |\n|---|---:|{}", COLUMNS.join(" | "), "---:|".repeat(COLUMNS.len()));
    for ((pending, name), (count, errors)) in &groups {
        let name = if *pending { format!("pending: {name}") } else { name.clone() };
        println!("| {name} | {count} | {} |", COLUMNS.map(|what| errors.said(what)).join(" | "));
    }
    left_out.iter().for_each(|(why, count)| println!("left out: {count} × {why}"));
}

fn card(row: &Value) -> &'static str {
    if row["gpu"] == "NVIDIA L4" { "L4" } else { "A100-40GB" }
}

/// What training reserves, and what the process takes besides.
fn ours(row: &Value) -> Result<(u64, u64), String> {
    let id = row["model"].as_str().unwrap_or_default();
    let entry = catalogue::find(id).or_else(|| catalogue::find(catalogue::kin(id)?)).ok_or("no such model")?;
    let model = Model::new(entry.config, entry.auto_class.as_deref()).map_err(|error| error.to_string())?;
    let number = |key: &str| row[key].as_u64().unwrap_or(1);
    let (length, samples) = (number("seq_len"), number("group_size") * number("n_prompts"));
    let prompt = (length / 4).max(8);
    let targets = match row["targets"].as_str() {
        None | Some("all-linear") => Targets::AllLinear,
        Some(names) => Targets::Names(names.split(',').map(str::to_owned).collect()),
    };
    let quantization = row["quantization"].as_str().map(Quantization::parse).transpose();
    let quantization = quantization.map(|found| found.map(|scheme| Quantization { double: true, ..scheme }));
    let plan = TrainPlan {
        batch: Batch {
            batch_size: number("micro_batch").min(samples),
            seq_len: length,
            mask: true,
            ..Batch::default()
        },
        weights: DType::BF16,
        autocast: Some(DType::BF16),
        checkpointing: Checkpointing::Full,
        loss: LossOptions { kind: LossKind::TrlFused, ..LossOptions::default() },
        optimizer: Optimizer { implementation: Implementation::Foreach, ..Optimizer::default() },
        clip: true,
        keep_outputs: false,
        adapter: Some(AdapterPlan::Lora(LoraPlan { rank: number("lora_rank"), targets, ..LoraPlan::default() })),
        quantization: quantization.map_err(|error| error.to_string())?,
        objective: Objective {
            kind: TaskKind::Grpo,
            max_prompt_length: Some(prompt),
            max_completion_length: Some(length - prompt),
            beta: Some(0.04),
            vllm: Some(Vllm { mode: VllmMode::Server, ..Vllm::default() }),
            ..Objective::default()
        },
        gpu: Gpus::embedded().find(card(row)).unwrap(),
        ..TrainPlan::default()
    };
    let found = simulation::train(&model, &plan).map_err(|error| error.to_string())?;
    let reserved = found.replay.peak_reserved();
    Ok((reserved, found.process_bytes() - reserved))
}
