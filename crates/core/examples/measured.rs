//! Counts the families and features that recorded runs vouch for, and prints `data/measured.json`:
//! `cargo run -p vramcast-core --example measured -- truth/ledger truth/external > crates/core/data/measured.json`.

use vramcast_core::plan::RunPlan;
use vramcast_core::report::coverage::Coverage;
use vramcast_core::source::json;
use vramcast_core::verify::external::simumax;
use vramcast_core::verify::ledger::{self, LedgerRow};

#[allow(clippy::disallowed_methods)]
fn main() {
    let folder = std::env::args().nth(1).unwrap();
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|end| end == "jsonl"));
    files.sort();
    let mut coverage = Coverage::default();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let row = json::parse(line.as_bytes()).unwrap();
            let close = match ledger::score(&row) {
                LedgerRow::Scored(scored) => scored.ok,
                LedgerRow::Skipped { .. } => false,
            };
            if let (true, Ok(plan)) = (close, ledger::run_plan(&row)) {
                coverage.add(row["config"]["model_type"].as_str().unwrap_or_default(), &plan);
            }
        }
    }
    // Megatron's published runs.
    if let Some(external) = std::env::args().nth(2) {
        let text = std::fs::read_to_string(std::path::Path::new(&external).join("simumax_b200.json")).unwrap();
        let document = json::parse(text.as_bytes()).unwrap();
        let rows = document.as_array().or_else(|| document["rows"].as_array()).cloned().unwrap_or_default();
        for row in rows.iter().filter(|row| !row["memory_reused_from_case"].is_string()) {
            if let Ok((model, plan)) = simumax::plan(row, "B200") {
                let model_type = model.config()["model_type"].as_str().unwrap_or_default().to_owned();
                coverage.add(&model_type, &RunPlan::Train(Box::new(plan)));
            }
        }
    }
    println!("{}", serde_json::to_string_pretty(&coverage).unwrap());
}
