//! Data files are counted by the command; a page takes lengths.

use std::path::PathBuf;

use serde_json::Value;

use crate::failure::Failure;

/// A data file, and what reads it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Data {
    /// JSON lines, or a JSON list of objects.
    pub(crate) file: PathBuf,
    /// `tokenizer.json`, or a folder with one.
    pub(crate) tokenizer: Option<PathBuf>,
}

/// What was counted: the setting `job.lengths`, and what to say of it.
pub(crate) struct Counted {
    /// Lengths, as a plan holds them.
    pub(crate) lengths: Value,
    /// What was counted, and how.
    pub(crate) notes: Vec<String>,
}

impl Data {
    /// Refused.
    pub(crate) fn count(&self) -> Result<Counted, Failure> {
        let what = format!("{} cannot be read from within a page", self.file.display());
        Err(Failure::bad_input(what).hint("count it with the command: vramcast train --data"))
    }
}
