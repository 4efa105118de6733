//! Writes docs/formats.md: every format that is read and what each of its keys comes to.
//!
//! `cargo run -p vramcast-core --example formats > docs/formats.md`

#![allow(missing_docs, reason = "an example prints")]

use vramcast_core::plan::import::{Sense, formats};

/// What stands above the tables; counts are of the example `corpus` on the repositories as they were fetched.
const HEAD: &str = include_str!("../data/formats.md");

fn main() {
    println!("{HEAD}");
    for format in formats() {
        println!("## {} {}\n\nSource: {}.\n", format.title, format.version, format.source);
        println!("| keys | what they come to |\n|---|---|");
        for row in format.keys.iter().flat_map(|rows| rows.iter()) {
            let keys: Vec<String> = row.keys().map(|key| format!("`{key}`")).collect();
            let what = match row.1 {
                Sense::Whole(place) => format!("sets `{place}`"),
                Sense::Read(what) => format!("honoured: {what}"),
                Sense::Harmless(why) => format!("harmless: {why}"),
                Sense::Said(instead) => format!("said: {instead}"),
                Sense::Refused(why) => format!("refused: {why}"),
            };
            println!("| {} | {} |", keys.join(", "), what.replace(['{', '}'], "`").replace('|', "\\|"));
        }
        println!();
    }
}
