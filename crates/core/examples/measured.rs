//! Counts the families and features that recorded runs vouch for, and prints `data/measured.json`:
//! `cargo run -p vramcast-core --example measured -- truth/ledger > crates/core/data/measured.json`.

use vramcast_core::report::coverage::Coverage;
use vramcast_core::source::json;
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
    println!("{}", serde_json::to_string_pretty(&coverage).unwrap());
}
