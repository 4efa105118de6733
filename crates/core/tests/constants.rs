//! Sizes that stand in the code say where they come from: a name in someone's source, a file of truth/, traces, or the list of
//! those whose cause is open (docs/open-constants.md).

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::path::{Path, PathBuf};

/// What a comment with a source has in it.
const SOURCES: [&str; 6] = ["`", "truth/", "docs/", "traces", "github.com", ".rs"];

/// What a number of bytes looks like.
const SIZES: [&str; 5] = ["<< 10", "<< 19", "<< 20", "<< 30", "* MIB"];

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// Constants of a file that are sizes, each with the comment above it; units and limits of input are none.
fn sizes(text: &str) -> Vec<(&str, String)> {
    let code = text.split("#[cfg(test)]").next().unwrap();
    let lines: Vec<&str> = code.lines().map(str::trim).collect();
    let constant = |line: &str| line.split("const ").nth(1)?.split(':').next().map(str::len);
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some(length) = constant(line).filter(|_| SIZES.iter().any(|size| line.contains(size))) else { continue };
        let name = &line[line.find("const ").unwrap() + 6..][..length];
        if name != "MIB" && !name.starts_with("MAX_") {
            let above = lines[..index].iter().rev().take_while(|line| line.starts_with("//"));
            found.push((name, above.copied().collect()));
        }
    }
    found
}

#[test]
fn sizes_have_sources() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut seen = 0;
    for path in ["memory", "plan", "serving"].iter().flat_map(|stage| rust_files(&source.join(stage))) {
        for (name, comment) in sizes(&std::fs::read_to_string(&path).unwrap()) {
            seen += 1;
            let sourced = SOURCES.iter().any(|source| comment.contains(source));
            assert!(sourced, "{}: where does {name} come from?", path.display());
        }
    }
    assert!(seen >= 15, "{seen}");
}
