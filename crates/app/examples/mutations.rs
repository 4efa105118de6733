//! Readers of foreign text on blind mutations of the seeds of `fuzz/`, where cargo-fuzz is not at hand.
//!
//! `cargo run -p vramcast --example mutations -- SECONDS [SEED]`; a reader that panics ends it, after the input was printed.

#![allow(clippy::disallowed_methods, reason = "an example reads files and the clock")]

use std::time::{Duration, Instant};

use vramcast::foreign;
use vramcast_core::doctor;

/// Numbers that repeat themselves for the same seed (xorshift).
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end.max(1) as u64) as usize
    }
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = format!("{}/../../fuzz/seeds/{target}", env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(folder).expect("the seeds are there").flatten();
    files.filter_map(|file| std::fs::read(file.path()).ok()).collect()
}

/// Bytes changed, cut, doubled, or taken from another seed.
fn mutated(seeds: &[Vec<u8>], dice: &mut Dice) -> Vec<u8> {
    const MARKS: &[u8] = b"{}[]()<>\"'`$#*&|;:=,.-+/\\%@!~\n\t 09aZ\0\x7f\xff";
    let mut bytes = seeds[dice.below(seeds.len())].clone();
    for _ in 0..=dice.below(8) {
        let (from, to) = (dice.below(bytes.len() + 1), dice.below(bytes.len() + 1));
        let (from, to) = (from.min(to), from.max(to));
        match dice.below(5) {
            0 if from < bytes.len() => bytes[from] = MARKS[dice.below(MARKS.len())],
            1 => bytes.insert(from, MARKS[dice.below(MARKS.len())]),
            2 => drop(bytes.drain(from..to)),
            3 if bytes.len() < 1 << 14 => {
                let piece = bytes[from..to].to_vec();
                bytes.splice(from..from, piece);
            }
            _ => {
                let other = &seeds[dice.below(seeds.len())];
                let start = dice.below(other.len());
                bytes.splice(from..to, other[start..].iter().copied().take(64));
            }
        }
    }
    bytes
}

fn main() {
    let mut given = std::env::args().skip(1).filter_map(|word| word.parse::<u64>().ok());
    let (seconds, seed) = (given.next().unwrap_or(10), given.next().unwrap_or(7));
    let (files, logs, mut dice) = (seeds("file"), seeds("log"), Dice(seed.max(1)));
    let (end, mut runs) = (Instant::now() + Duration::from_secs(seconds), 0u64);
    while Instant::now() < end {
        let (file, log) = (mutated(&files, &mut dice), mutated(&logs, &mut dice));
        let shown = String::from_utf8_lossy(&file).into_owned();
        let names = ["a.json", "a.yaml", "a.toml", "a.py", "a.sh", "a.ipynb", "Modelfile"];
        let ended = std::panic::catch_unwind(|| {
            names.iter().for_each(|name| drop(foreign::plan(&shown, name)));
            drop((foreign::job(&shown), foreign::lengths(&shown), foreign::journal(&shown)));
            doctor::diagnose(&doctor::text(&log));
        });
        if ended.is_err() {
            println!("{shown:?}\n{log:?}");
            std::process::exit(1);
        }
        runs += 1;
    }
    println!("{runs} files by {} readers and {runs} logs in {seconds} s, no finding", 10);
}
