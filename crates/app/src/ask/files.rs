//! Files that a question may bring, read with a cap.

use std::path::Path;

use serde_json::Value;
use vramcast_core::ask::Runner;
use vramcast_core::ask::file::Content;
use vramcast_core::plan::Fault;

use crate::disk;
use crate::failure::{Failure, Place};

/// No plan, adapter or DeepSpeed file is larger.
const MOST_BYTES: u64 = 1 << 20;
/// No ledger or log is larger.
const MOST_BYTES_OF_ROWS: u64 = 256 << 20;

/// The bytes of a file, unless there are too many.
pub(crate) fn bytes(path: &Path, most: u64) -> Result<Vec<u8>, Failure> {
    disk::read(path, most).map_err(|error| Failure::bad_input(format!("{}: {error}", path.display())))
}

/// The text of a small file.
pub(crate) fn text(path: &Path) -> Result<String, Failure> {
    long_text(path, MOST_BYTES)
}

/// Measured runs, and other files of many rows.
pub(crate) fn rows(path: &Path) -> Result<String, Failure> {
    long_text(path, MOST_BYTES_OF_ROWS)
}

fn long_text(path: &Path, most: u64) -> Result<String, Failure> {
    disk::text(path, most).map_err(|error| Failure::bad_input(format!("{}: {error}", path.display())))
}

/// A JSON file, as Python writes them too.
pub(crate) fn json(path: &Path) -> Result<Value, Failure> {
    vramcast_core::source::json::parse(&bytes(path, MOST_BYTES)?)
        .map_err(|error| Failure::bad_input(format!("{}: {error}", path.display())))
}

/// A plan file.
pub(crate) fn plan(path: &Path) -> Result<Content, Failure> {
    content(&text(path)?, &path.display().to_string())
}

/// A plan file's text; the name says which form it has.
pub(crate) fn content(text: &str, name: &str) -> Result<Content, Failure> {
    let parsed = match Path::new(name).extension().and_then(|extension| extension.to_str()) {
        Some("toml") => toml::from_str::<Value>(text).map_err(|e| e.to_string()),
        Some("yaml" | "yml") => serde_saphyr::from_str::<Value>(text).map_err(|e| said(&e.to_string())),
        _ => serde_json::from_str::<Value>(text).map_err(|e| e.to_string()),
    };
    let value =
        parsed.map_err(|e| Failure::bad_input(format!("{name}: {}", e.trim())).at(Place::Setting(String::new())))?;
    let mut content = Content::read(value).map_err(|faults| Failure::faults(faults, Runner::OneCard).within(name))?;
    content.notes.iter_mut().for_each(|note| *note = format!("{name}: {note}"));
    Ok(content)
}

/// DeepSpeed's configuration.
pub(crate) fn deepspeed(path: &Path) -> Result<Value, Failure> {
    let document = json(path)?;
    // What is `auto` waits for the model; what is wrong is wrong with any.
    Content::of_deepspeed(&document, Some(1)).map_err(|faults| within(faults, path))?;
    Ok(document)
}

fn within(faults: Vec<Fault>, file: &Path) -> Failure {
    Failure::faults(faults, Runner::OneCard).within(&file.display().to_string())
}

/// A parser's error without the picture that it draws of the place: line, column and what is wrong.
fn said(error: &str) -> String {
    let first = error.lines().next().unwrap_or_default();
    first.strip_prefix("error: ").unwrap_or(first).to_owned()
}

/// PEFT's `adapter_config.json`, or a folder with one.
pub(crate) fn adapter(path: &Path) -> Result<Value, Failure> {
    let file = if path.is_dir() { path.join("adapter_config.json") } else { path.to_owned() };
    let config = json(&file)?;
    Content::of_adapter(&config).map_err(|faults| within(faults, &file))?;
    Ok(config)
}

/// A file of lengths holds one number a sample, or rows of a tokenised data set.
const MOST_LENGTHS: u64 = 64 << 20;

/// What a file says about the lengths of samples, as the setting spells it: numbers, a JSON list, a JSON object of counts, or
/// JSON lines with `input_ids` or `length`.
pub(crate) fn lengths(path: &Path) -> Result<String, Failure> {
    lengths_of(long_text(path, MOST_LENGTHS)?, &path.display().to_string())
}

/// What a text says about lengths.
pub(crate) fn lengths_of(text: String, name: &str) -> Result<String, Failure> {
    let failed = |what: String| Failure::bad_input(format!("{name}: {what}"));
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let is_row = |line: &str| serde_json::from_str::<Value>(line).is_ok_and(|row| length(&row).is_some());
    if !is_row(first) {
        return Ok(text);
    }
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let row = serde_json::from_str::<Value>(line).map_err(|error| failed(format!("line {}: {error}", at + 1)))?;
        let length = length(&row).ok_or_else(|| failed(format!("line {} has no `input_ids` or `length`", at + 1)))?;
        found.push(length.to_string());
    }
    Ok(found.join(" "))
}

/// Tokens of a row of a tokenised data set.
fn length(row: &Value) -> Option<usize> {
    let ids = |key: &str| row.get(key)?.as_array().map(Vec::len);
    let number = |key: &str| row.get(key)?.as_u64().map(|length| length as usize);
    row.as_object()?;
    ids("input_ids").or_else(|| number("length")).or_else(|| number("num_tokens"))
}
