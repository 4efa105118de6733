//! Files that a question may bring, read with a cap.

use std::io::Read;
use std::path::Path;

use serde_json::Value;
use vramcast_core::ask::Runner;
use vramcast_core::ask::file::Content;

use crate::failure::{Failure, Place};

/// No plan, adapter or DeepSpeed file is larger.
const MOST_BYTES: u64 = 1 << 20;

/// The bytes of a file, unless there are too many.
pub(crate) fn bytes(path: &Path, most: u64) -> Result<Vec<u8>, Failure> {
    let failed = |what: String| Failure::bad_input(format!("{}: {what}", path.display()));
    let file = std::fs::File::open(path).map_err(|error| failed(error.to_string()))?;
    let mut read = Vec::new();
    file.take(most + 1).read_to_end(&mut read).map_err(|error| failed(error.to_string()))?;
    if read.len() as u64 > most {
        return Err(failed(format!("more than {most} bytes is too large for such a file")));
    }
    Ok(read)
}

/// The text of a small file.
pub(crate) fn text(path: &Path) -> Result<String, Failure> {
    String::from_utf8(bytes(path, MOST_BYTES)?)
        .map_err(|_| Failure::bad_input(format!("{}: it is not UTF-8 text", path.display())))
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

/// A parser's error without the picture that it draws of the place: line, column and what is wrong.
fn said(error: &str) -> String {
    let first = error.lines().next().unwrap_or_default();
    first.strip_prefix("error: ").unwrap_or(first).to_owned()
}

/// PEFT's `adapter_config.json`, or a folder with one.
pub(crate) fn adapter(path: &Path) -> Result<Value, Failure> {
    let file = if path.is_dir() { path.join("adapter_config.json") } else { path.to_owned() };
    json(&file)
}
