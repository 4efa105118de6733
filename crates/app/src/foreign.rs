//! Readers of foreign bytes, each by itself: what `fuzz/` runs. Nothing else uses them from here.

use crate::ask::{data, files, job};
use crate::failure::Door;
use crate::rehearse;

/// A plan file's text, as its name says: how it is read, or what is wrong.
pub fn plan(text: &str, name: &str) -> Result<(), String> {
    files::content(text, name).map(drop).map_err(|failure| failure.message(Door::CommandLine))
}

/// A job's text: whether it is one, and how many problems it has.
pub fn job(text: &str) -> (bool, usize) {
    let (job, problems) = job::check(text);
    (job.is_some(), problems.len())
}

/// Lengths of samples.
pub fn lengths(text: &str) -> Result<String, String> {
    files::lengths_of(text.to_owned(), "lengths").map_err(|failure| failure.message(Door::CommandLine))
}

/// Rows of a data file by a `tokenizer.json` and the config beside it, with its chat template: tokens of each, prompts apart.
pub fn samples(tokenizer: &[u8], config: &serde_json::Value, rows: &str) -> Result<Vec<[u64; 2]>, String> {
    data::of_bytes(tokenizer, config, rows)
}

/// A rehearsal's journal: how many of its lines are understood.
pub fn journal(text: &str) -> usize {
    text.lines().filter(|line| serde_json::from_str::<rehearse::journal::Line>(line).is_ok()).count()
}

/// A shared library: how many libraries and symbols it needs and offers.
pub fn library(bytes: &[u8]) -> Option<usize> {
    rehearse::names_in_library(&mut std::io::Cursor::new(bytes))
}
