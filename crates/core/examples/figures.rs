//! Every recorded run and its predicted bytes, a line each, so that two states of the code can be compared by `diff`:
//! `cargo run -p vramcast-core --example figures -- truth/ledger/*.jsonl`.

#![allow(clippy::disallowed_methods, missing_docs, reason = "an example reads files")]

use vramcast_core::source::json;
use vramcast_core::verify::ledger::{self, LedgerRow};

fn main() {
    for path in std::env::args().skip(1) {
        let name = path.rsplit('/').next().unwrap_or(&path).to_owned();
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            match ledger::score(&json::parse(line.as_bytes()).unwrap_or_default()) {
                LedgerRow::Scored(row) => {
                    let levels = [row.allocated, row.reserved, row.process].map(|level| level.predicted.unwrap_or(0));
                    println!("{name} {} {levels:?} {}", row.id, row.ok);
                }
                LedgerRow::Skipped { id, skipped } => println!("{name} {id} skipped: {skipped}"),
            }
        }
    }
}
