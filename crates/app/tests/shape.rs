//! Keeps the shape of the code: short files, stages that point one way, a pure core.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    assert!(files.len() > 1, "{} holds too few files to be the right folder", folder.display());
    files
}

/// No file is longer than a person reads; the longest are printed.
#[test]
fn files_stay_short() {
    const HARD_STOP: usize = 800;
    let mut lengths: Vec<(usize, PathBuf)> = rust_files(&root().join("crates"))
        .into_iter()
        .map(|file| (std::fs::read_to_string(&file).unwrap().lines().count(), file))
        .collect();
    lengths.sort();
    let median = lengths[lengths.len() / 2].0;
    for (lines, file) in lengths.iter().rev().take(10) {
        println!("{lines:5} {}", file.display());
    }
    assert!(median <= 200, "the median file has {median} lines");
    let (longest, file) = lengths.last().unwrap();
    assert!(*longest <= HARD_STOP, "{} has {longest} lines", file.display());
}

/// source → model → plan → memory → report: no stage knows a later one.
#[test]
fn stages_point_one_way() {
    const STAGES: [&str; 5] = ["source", "model", "plan", "memory", "report"];
    let core = root().join("crates/core/src");
    for (at, stage) in STAGES.iter().enumerate() {
        for file in rust_files(&core.join(stage)) {
            let text = std::fs::read_to_string(&file).unwrap();
            for later in &STAGES[at + 1..] {
                let reference = format!("crate::{later}::");
                assert!(!text.contains(&reference), "{} names {reference}", file.display());
            }
        }
    }
}

/// Asking knows no interface, showing knows none that asks, and no interface knows another.
#[test]
fn the_application_points_one_way() {
    let app = root().join("crates/app/src");
    for (folder, banned) in [
        ("ask", ["crate::cli", "crate::http", "crate::serve", "crate::render", "clap::"].as_slice()),
        ("render", &["crate::cli", "crate::http", "crate::serve"]),
        ("http", &["crate::cli", "crate::serve", "clap::"]),
        ("serve", &["crate::cli", "clap::"]),
        ("fetch", &["crate::ask", "crate::cli", "crate::serve", "crate::render"]),
        ("detect", &["crate::ask", "crate::cli", "crate::serve"]),
    ] {
        for file in rust_files(&app.join(folder)) {
            let text = std::fs::read_to_string(&file).unwrap();
            for name in banned {
                assert!(!text.contains(name), "{} names {name}", file.display());
            }
        }
    }
}

/// The core touches nothing: clippy bans the functions, this bans the words.
#[test]
fn the_core_is_pure() {
    for file in rust_files(&root().join("crates/core/src")) {
        let text = std::fs::read_to_string(&file).unwrap();
        for banned in ["std::fs", "std::net", "std::env", "std::process", "std::time", "println!", "HashMap"] {
            assert!(!text.contains(banned), "{} uses {banned}", file.display());
        }
    }
}

/// Every public name of the model's data says where it comes from.
#[test]
fn cards_cite_their_source() {
    let text = std::fs::read_to_string(root().join("crates/core/data/gpus.toml")).unwrap();
    let cards = text.matches("[[gpu]]").count();
    assert!(cards >= 60);
    assert_eq!(text.matches("\nsource = \"").count(), cards);
}
