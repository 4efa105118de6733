//! Scores all recorded truth and writes down what is reached: `truth/limits.json`, `data/measured.json` and the tables of
//! `docs/accuracy.md`. Run it after a change that makes figures better, from the root of the repository:
//! `cargo run -p vramcast-core --example accuracy`.

#![allow(clippy::disallowed_methods, missing_docs, reason = "an example reads and writes files")]

#[path = "../tests/support/recorded.rs"]
mod recorded;

use recorded::{Recorded, path};
use vramcast_core::verify::limits;

fn main() {
    let recorded = Recorded::score();
    let failed: Vec<_> = recorded.sets.iter().flat_map(|set| set.wrong()).collect();
    assert!(failed.is_empty(), "rows that are off come first: {failed:#?}");
    let write = |name: &str, text: String| {
        std::fs::write(path(name), text).unwrap_or_else(|error| panic!("{name}: {error}"));
        println!("{name}");
    };
    write("truth/limits.json", limits::text(&limits::of(&recorded.sets)));
    let measured = serde_json::to_string_pretty(&recorded.coverage()).unwrap_or_default();
    write("crates/core/data/measured.json", measured + "\n");
    let page = std::fs::read_to_string(path("docs/accuracy.md")).unwrap_or_default();
    write("docs/accuracy.md", recorded.page(&page));
}
