//! Files that a question may bring, read with a cap.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use vramcast_core::ask::file::Content;
use vramcast_core::ask::{Runner, line, program};
use vramcast_core::plan::Fault;
use vramcast_core::plan::import::Beside;
use vramcast_core::source::python;

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

/// A plan file, a file of another tool, or a script with a launch line; keys of `without` are left out.
pub(crate) fn plan(path: &Path, without: &[String]) -> Result<Content, Failure> {
    // `config_registry.py:llama3_8b` is one function of several.
    let (whole, name) = (path.display().to_string(), path.display().to_string());
    let (path, wanted) = match whole.rsplit_once(".py:") {
        Some((file, wanted)) if !path.exists() => (PathBuf::from(format!("{file}.py")), Some(wanted)),
        _ => (path.to_owned(), None),
    };
    let (path, text) = (path.as_path(), once(&path)?);
    let follow = |name: &str| beside(path, name);
    of_text(&text, path, wanted, &Beside { name: &name, open: &follow, without, ..Beside::default() })
}

/// What a text is, by its file's name and by itself.
fn of_text(text: &str, path: &Path, wanted: Option<&str>, around: &Beside<'_>) -> Result<Content, Failure> {
    let name = around.name;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim().is_empty() {
        return Err(Failure::bad_input(format!("{name}: the file is empty")));
    }
    if let Some(code) = code(path, text) {
        let name = path.display().to_string();
        let read = program::read(&code, &Map::new(), wanted, &Beside { name: &name, ..*around });
        let mut content = read.map_err(|faults| Failure::faults(faults, Runner::OneCard).within(&name))?;
        content.notes.iter_mut().for_each(|note| *note = noted(&name, note));
        return Ok(content);
    }
    let named = path.file_name().is_some_and(|file| file.to_string_lossy().contains("Modelfile"));
    let first = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    let from = first.is_some_and(|line| line.starts_with("FROM "));
    if named || from && (text.contains("\nPARAMETER ") || is_nameless(path)) {
        return line::modelfile(text).map_err(|faults| Failure::faults(faults, Runner::OneCard).within(name));
    }
    if is_script(path, text) {
        return script(text, name, around.open, around.without);
    }
    let read = parsed(text, name).and_then(|value| within_file(value, name, around));
    let is_log = text.contains("out of memory") || text.contains("OutOfMemory");
    read.map_err(|failure| match is_log {
        true => failure.hint(format!("vramcast doctor {name} says what broke a run")),
        false => failure,
    })
}

/// The code of a Python program or of a notebook.
fn code(path: &Path, text: &str) -> Option<String> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("py") => Some(text.to_owned()),
        Some("ipynb") => python::notebook(&serde_json::from_str(text).ok()?),
        // What comes by the standard input has no name.
        None if is_nameless(path) && text.trim_start().starts_with('{') => {
            python::notebook(&serde_json::from_str(text).ok()?)
        }
        None if is_nameless(path) && !text.starts_with("#!") => {
            let imports = |line: &str| line.starts_with("import ") || line.starts_with("from ");
            text.lines().any(imports).then(|| text.to_owned())
        }
        _ => None,
    }
}

/// A launch line's words.
pub(crate) fn line(words: &[String], without: &[String]) -> Result<Content, Failure> {
    let here = std::env::current_dir().unwrap_or_default().join("-");
    let follow = |name: &str| beside(&here, name);
    line::read(words, &follow, without).map_err(|faults| Failure::faults(faults, Runner::OneCard).within("the line"))
}

/// A plan's text; what a shell hands over is read once and kept, for it is asked for twice.
fn once(path: &Path) -> Result<String, Failure> {
    static INPUT: std::sync::OnceLock<(PathBuf, String)> = std::sync::OnceLock::new();
    if let Some((_, kept)) = INPUT.get().filter(|(known, _)| known == path) {
        return Ok(kept.clone());
    }
    let text = kind_of_weights(path).map_or_else(|| text(path), Err)?;
    if is_nameless(path) {
        let _ = INPUT.set((path.to_owned(), text.clone()));
    }
    Ok(text)
}

/// Whether a file has no name that says what it is.
fn is_nameless(path: &Path) -> bool {
    path == Path::new("-") || disk::is_stream(path)
}

/// Weights where a plan should be.
fn kind_of_weights(path: &Path) -> Option<Failure> {
    let kind = match path.extension()?.to_str()? {
        "gguf" => "a GGUF file",
        "safetensors" => "a safetensors file",
        _ => return None,
    };
    let said = format!("{}: it is {kind}, a model's weights, not a plan", path.display());
    Some(Failure::bad_input(said).hint(format!("give it as the model: vramcast infer {}", path.display())))
}

/// Whether a file is a script, by its name or its lines.
pub(crate) fn is_script(path: &Path, text: &str) -> bool {
    let named =
        matches!(path.extension().and_then(|extension| extension.to_str()), Some("sh" | "bash" | "slurm" | "sbatch"));
    let unnamed = path.extension().is_none();
    named || text.starts_with("#!") || unnamed && line::shell::lines(text).iter().any(|words| line::is_known(words))
}

/// The one line of a script that starts something.
fn script(text: &str, name: &str, open: Opens<'_>, without: &[String]) -> Result<Content, Failure> {
    let line::shell::Script { lines, files, notes } = line::shell::script(text, &[]);
    // What is exported holds for the lines below.
    let exported: Vec<String> =
        lines.iter().filter(|words| words[0] == "export").flat_map(|words| words[1..].iter().cloned()).collect();
    let mut known: Vec<&Vec<String>> =
        lines.iter().filter(|words| words[0] != "export" && line::is_known(words)).collect();
    // What a program is may stand in it alone.
    if known.is_empty() {
        known = lines.iter().filter(|words| line::runs_script(words)).collect();
    }
    let Some(first) = known.first() else {
        return Err(Failure::bad_input(format!("{name}: none of its lines starts a run that is known"))
            .hint("give the line itself: vramcast fit -- LINE"));
    };
    let words: Vec<String> = exported.into_iter().chain(first.iter().cloned()).collect();
    let written = |wanted: &str| match files.get(wanted) {
        Some(text) => parsed(text, wanted).map_err(|failure| failure.message(crate::failure::Door::CommandLine)),
        None => open(wanted),
    };
    let mut content = line::read(&words, &written, without)
        .map_err(|faults| Failure::faults(faults, Runner::OneCard).within(name))?;
    content.notes.extend(notes);
    if lines.iter().any(|words| words[0].starts_with("--")) {
        content.notes.push("some options stand behind a comment or an empty line, where a shell reads no more".into());
    }
    if known.len() > 1 {
        content.notes.push(format!("{} lines start runs: the first is answered", known.len()));
    }
    content.notes.iter_mut().for_each(|note| *note = noted(name, note));
    Ok(content)
}

/// A note with the file's name, behind the mark of what is not simulated.
fn noted(name: &str, note: &str) -> String {
    match note.strip_prefix("not simulated: ") {
        Some(what) => format!("not simulated: {name}: {what}"),
        None => format!("{name}: {note}"),
    }
}

type Opens<'a> = &'a dyn Fn(&str) -> Result<Value, String>;

/// What a file refers to: beside it, beside a folder above it, or where the program runs.
fn beside(file: &Path, name: &str) -> Result<Value, String> {
    let whole = file.canonicalize().unwrap_or_else(|_| file.to_owned());
    let above = whole.ancestors().skip(1).map(|folder| folder.join(name));
    // A path of another machine may lie here by its last part.
    let last = Path::new(name).file_name().filter(|_| name.starts_with('/')).zip(whole.parent());
    let last = last.map(|(last, folder)| folder.join(last));
    let found = above.chain([Path::new(name).to_owned()]).chain(last).find(|path| path.is_file());
    let Some(path) = found else { return Err("there is no such file beside it, above it or here".into()) };
    // A program is read by whoever knows its line.
    if [".py", ".sh", ".bash", ".slurm", ".sbatch"].iter().any(|end| name.ends_with(end)) {
        return text(&path).map(Value::String).map_err(|failure| failure.message(crate::failure::Door::CommandLine));
    }
    let read = || parsed(&text(&path)?, name);
    read().map_err(|failure| failure.message(crate::failure::Door::CommandLine))
}

/// A document's value; the name says which form it has.
fn parsed(text: &str, name: &str) -> Result<Value, Failure> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let toml = |text: &str| toml::from_str::<Value>(text).map_err(|e| e.to_string());
    let yaml = |text: &str| serde_saphyr::from_str::<Value>(text).map_err(|e| said(&e.to_string()));
    let json = |text: &str| serde_json::from_str::<Value>(text).map_err(|e| e.to_string());
    let form = Path::new(name).extension().and_then(|extension| extension.to_str());
    let parsed = match form {
        Some("toml") => toml(text),
        Some("yaml" | "yml") => yaml(text),
        Some("json") => json(text),
        _ if text.trim_start().starts_with('{') => json(text),
        _ => json(text)
            .or_else(|error| yaml(text).ok().filter(Value::is_object).or_else(|| toml(text).ok()).ok_or(error)),
    };
    parsed.map_err(|error| {
        let failure = match form {
            Some("toml" | "yaml" | "yml" | "json") => Failure::bad_input(format!("{name}: {}", error.trim())),
            _ if text.trim_start().starts_with('{') => Failure::bad_input(format!("{name}: {}", error.trim())),
            _ => Failure::bad_input(format!(
                "{name}: its kind is not known: it is no JSON, YAML, TOML, program or launch line"
            )),
        };
        failure.at(Place::Setting(String::new()))
    })
}

fn within_file(value: Value, name: &str, beside: &Beside<'_>) -> Result<Content, Failure> {
    let mut content =
        Content::read_beside(value, beside).map_err(|faults| Failure::faults(faults, Runner::OneCard).within(name))?;
    content.notes.iter_mut().for_each(|note| *note = noted(name, note));
    Ok(content)
}

/// A text from elsewhere, whose references are not followed; the name says which form it has.
pub(crate) fn content(text: &str, name: &str) -> Result<Content, Failure> {
    of_text(text, Path::new(name), None, &Beside { name, ..Beside::default() })
}

/// DeepSpeed's configuration.
pub(crate) fn deepspeed(path: &Path) -> Result<Value, Failure> {
    let cure = "give DeepSpeed's configuration file; a stage alone is --zero 3";
    let document = json(path).map_err(|failure| if path.exists() { failure } else { failure.hint(cure) })?;
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
    let first = first.strip_prefix("error: ").unwrap_or(first);
    match first.split_once("budget breached") {
        Some((place, _)) => {
            format!("{place}it unfolds to more than a plan can need (an alias counts each time it is used)")
        }
        // What follows speaks to whoever calls the reader.
        None => first.split(", set DuplicateKeyPolicy").next().unwrap_or_default().to_owned(),
    }
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
    let Some(first) = text.lines().find(|line| !line.trim().is_empty()) else {
        return Err(failed("the file is empty".into()));
    };
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
