//! A model's forward pass, recorded through the user's Python and written down as a program.
//!
//! `learn.py` runs there, with the files beside it: on tensors without data, at several sizes, without a GPU and without
//! weights. What it writes is a model like any other (`core/src/model/learned/program.rs`).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// The program that records, and what it finds expressions with.
const FILES: [(&str, &str); 5] = [
    ("learn.py", include_str!("learn.py")),
    ("passes.py", include_str!("passes.py")),
    ("recorder.py", include_str!("recorder.py")),
    ("rules.py", include_str!("rules.py")),
    ("expressions.py", include_str!("expressions.py")),
];

/// Why nothing was learned.
#[derive(Debug, thiserror::Error)]
pub enum LearnError {
    /// No such interpreter.
    #[error("{python}: {source}")]
    Start {
        /// What was started.
        python: String,
        /// Why it did not.
        source: std::io::Error,
    },
    /// Something in the model that no program can say, with its line.
    #[error("{0}")]
    Refused(String),
    /// The process ended before it was done.
    #[error("Python ended early ({status}):\n{stderr}")]
    Died {
        /// How.
        status: String,
        /// What it said last.
        stderr: String,
    },
    /// Temporary files.
    #[error("temporary folder: {0}")]
    Files(#[from] std::io::Error),
}

/// Records what a job names and returns the program.
pub fn learn(job: &Value, python: &Path) -> Result<Value, LearnError> {
    let folder = tempfile::Builder::new().prefix("vramcast-learn-").tempdir()?;
    for (name, text) in FILES {
        std::fs::write(folder.path().join(name), text)?;
    }
    let [program, file, out] = ["learn.py", "job.json", "program.json"].map(|name| folder.path().join(name));
    std::fs::write(&file, job.to_string())?;
    let mut command = Command::new(python);
    command.arg(&program).arg(&file).arg(&out).stdin(Stdio::null());
    let start = |source| LearnError::Start { python: PathBuf::from(python).display().to_string(), source };
    let ended = command.output().map_err(start)?;
    let said = String::from_utf8_lossy(&ended.stdout);
    for line in said.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        if let Some(why) = line["refused"].as_str() {
            return Err(LearnError::Refused(why.to_owned()));
        }
    }
    let learned = std::fs::read(&out).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    learned.ok_or_else(|| {
        let text = String::from_utf8_lossy(&ended.stderr);
        let lines: Vec<&str> = text.lines().collect();
        let stderr = lines[lines.len().saturating_sub(12)..].join("\n");
        LearnError::Died { status: ended.status.to_string(), stderr }
    })
}
