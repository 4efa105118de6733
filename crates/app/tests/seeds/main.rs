//! Every command that the seed documents show, in our words, and what it prints. `docs/seeds.md` is the same as a table.

mod seed_000;
mod seed_001;
mod seed_002;
mod seed_003;
mod seed_004;

use assert_cmd::Command;
use assert_cmd::assert::Assert;
use serde_json::Value;

/// Runs vramcast without network, with no settings of the user's own.
fn vramcast(line: &str) -> Assert {
    words(&line.split_whitespace().collect::<Vec<_>>())
}

fn words(words: &[&str]) -> Assert {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    command.current_dir(root).env("HF_HUB_OFFLINE", "1").env("COLUMNS", "80").env("XDG_CONFIG_HOME", "/nonexistent");
    command.args(words).assert()
}

fn stdout(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn stderr(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

/// The answer as text, whether it fits or not.
fn text(line: &str) -> String {
    let assert = vramcast(line);
    assert!(matches!(assert.get_output().status.code(), Some(0 | 1)), "{line}: {}", stderr(&assert));
    let text = stdout(&assert);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{line} is wider than 80:\n{text}");
    text
}

fn json(line: &str) -> Value {
    let assert = vramcast(&format!("{line} --json"));
    assert!(matches!(assert.get_output().status.code(), Some(0 | 1)), "{line}: {}", stdout(&assert));
    serde_json::from_str(&stdout(&assert)).unwrap()
}

/// Whether some line of a text has these cells, whatever the space between them.
fn has_row(text: &str, cells: &[&str]) -> bool {
    let row = cells.join(" ");
    text.lines().any(|line| line.split_whitespace().collect::<Vec<_>>().join(" ").contains(&row))
}
