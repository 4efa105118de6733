//! Says in one line what `cargo test` leaves to the second ring: what needs more than Rust. Tests of it are ignored with
//! a reason that begins `second ring:`, and no other test may be.
#![allow(clippy::disallowed_methods, reason = "looks at the sources of tests")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const REASON: &str = "second ring: ";

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn main() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for package in ["app/tests", "core/tests", "python/tests"] {
        sources(&crates.join(package), &mut files);
    }
    let mut needs: BTreeMap<String, usize> = BTreeMap::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for line in text.lines().map(str::trim).filter(|line| line.starts_with("#[ignore")) {
            let reason = line.split('"').nth(1).and_then(|reason| reason.strip_prefix(REASON));
            let Some(reason) = reason else { panic!("{}: {line}: only the second ring is left out", file.display()) };
            *needs.entry(reason.to_owned()).or_default() += 1;
        }
    }
    assert!(!needs.is_empty(), "the second ring is empty: `.ci/full` and this file can go");
    let needs: Vec<String> = needs.iter().map(|(reason, tests)| format!("{tests} with {reason}")).collect();
    println!("\nLeft to the second ring, which installs what it needs: {}. Run it: .ci/full\n", needs.join(", "));
}
