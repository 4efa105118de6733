//! A request as a command line: flags where there are any, any other place by `--set`.

use serde_json::Value;

use super::request::{Request, Task};
use super::setting::{Kind, Setting};
use super::{read, table, tree};
use crate::plan::Words;

/// Flags in the words of a command line.
#[derive(Debug, Clone, Copy)]
pub struct Flags(pub super::Runner);

impl Words for Flags {
    fn setting(&self, path: &str) -> String {
        match flagged(path, self.0) {
            Some(row) => format!("--{}", row.flag),
            // It decides defaults and is no part of a plan, so that no row has it.
            None if path == "framework" => "--framework".to_owned(),
            None => path.to_owned(),
        }
    }

    fn change(&self, path: &str, value: &Value) -> String {
        line(&words(&tree::of(path, value.clone()), self.0))
    }
}

/// Keywords of Python.
#[derive(Debug, Clone, Copy)]
pub struct Keywords(pub super::Runner);

impl Words for Keywords {
    fn setting(&self, path: &str) -> String {
        flagged(path, self.0).map_or_else(|| path.to_owned(), Setting::keyword)
    }

    fn change(&self, path: &str, value: &Value) -> String {
        let shown = match value {
            Value::Bool(true) => "True".to_owned(),
            Value::Bool(false) => "False".to_owned(),
            other => other.to_string(),
        };
        format!("{}={shown}", self.setting(path))
    }
}

/// The row whose flag people would use for a place.
fn flagged(path: &str, runner: super::Runner) -> Option<&'static Setting> {
    if let Some((_, flag)) = path.split_once('#') {
        return table::all().find(|row| row.flag == flag);
    }
    let exact = |row: &&Setting| !row.flag.is_empty() && table::placed(row.path, runner) == path;
    let kin = |row: &&Setting| row.scope.runners().any(|one| one.trains() == runner.trains());
    // A flag that means something else to whoever runs names nothing here.
    let foreign = |row: &&Setting| !table::all().any(|own| own.scope.has(runner) && own.is_called(row.flag));
    let own = table::all().filter(|row| row.scope.has(runner)).find(exact);
    own.or_else(|| table::all().filter(exact).filter(kin).find(foreign)).or_else(|| table::all().find(exact))
}

/// The command that asks for it of a model of this name.
pub fn command_line(name: &str, request: &Request) -> String {
    let task = if request.task == Task::Train { "train" } else { "infer" };
    let first = ["vramcast", task, name].map(str::to_owned);
    line(&[&first, command(request).as_slice()].concat())
}

/// Everything that was asked for, as words of a command line.
pub fn command(request: &Request) -> Vec<String> {
    let mut words = words(&request.stated, request.runner);
    if let Some(framework) = &request.framework {
        words.insert(0, framework.clone());
        words.insert(0, "--framework".into());
    }
    if request.task == Task::Infer && request.stated.get("engine").is_none() && request.runner.serves() {
        words.splice(0..0, ["--engine".to_owned(), request.runner.name().to_owned()]);
    }
    words
}

/// A part of a plan as flags.
pub fn words(stated: &Value, runner: super::Runner) -> Vec<String> {
    let mut rest = stated.clone();
    let mut words = Vec::new();
    let spelled = |row: &&&Setting| matches!(row.kind, Kind::Spelled(_));
    let rows: Vec<&Setting> = table::all().filter(|row| row.scope.has(runner) && !row.flag.is_empty()).collect();
    // Words for several values first: what they cover needs no flag of its own.
    for row in rows.iter().filter(spelled).chain(rows.iter().filter(|row| !spelled(row))) {
        if let Some(word) = word(row, stated, &mut rest, runner) {
            words.extend(word);
        }
    }
    for (path, value) in tree::leaves(&rest) {
        // An empty object says that the part exists; what is in it has been said, or its defaults hold.
        let text = value.as_str().filter(|text| serde_json::from_str::<Value>(text).is_err());
        words.push("--set".into());
        words.push(format!("{path}={}", text.map_or_else(|| value.to_string(), str::to_owned)));
    }
    words
}

/// A row's flag for what stands in a tree; what it covers is taken out of the rest.
fn word(row: &Setting, stated: &Value, rest: &mut Value, runner: super::Runner) -> Option<Vec<String>> {
    let flag = format!("--{}", row.flag);
    let path = table::placed(row.path, runner);
    if let Kind::Spelled(spelling) = row.kind {
        let text = (spelling.write)(stated)?;
        let mut covered = (spelling.read)(&text).ok()?;
        if let Some(options) = tree::take(&mut covered, "parallel.engine.*") {
            tree::lay(&mut covered, &tree::of(runner.place(), options));
        }
        let leaves = tree::leaves(&covered);
        let same = |(path, value): &(String, Value)| {
            let there = tree::get(stated, path);
            there == Some(value) || (*value == serde_json::json!({}) && there.is_some_and(Value::is_object))
        };
        let new = leaves.iter().any(|(path, _)| tree::get(rest, path).is_some());
        if !new || !leaves.iter().all(same) {
            return None;
        }
        for (path, value) in &leaves {
            if *value != serde_json::json!({}) || tree::get(rest, path) == Some(value) {
                tree::take(rest, path);
            }
        }
        return Some(match (row.is_switch(), spelling.bare) {
            (true, _) => vec![flag],
            (false, Some(bare)) if bare == text => vec![flag],
            (false, Some(_)) => vec![format!("{flag}={text}")],
            (false, None) => vec![flag, text],
        });
    }
    let value = tree::get(rest, &path)?.clone();
    let text = match (row.kind, &value) {
        (Kind::Switch, Value::Bool(true)) | (Kind::Off, Value::Bool(false)) => None,
        (Kind::Whole, Value::Number(number)) if number.is_u64() => Some(number.to_string()),
        (Kind::Real, Value::Number(number)) => Some(number.to_string()),
        (Kind::Text | Kind::Choice(_) | Kind::Listed(_), Value::String(text)) => Some(text.clone()),
        (Kind::Names, Value::Array(names)) if !names.is_empty() => {
            let plain = names.iter().map(|name| name.as_str().filter(|name| !name.contains(',')));
            Some(plain.collect::<Option<Vec<_>>>()?.join(","))
        }
        _ => return None,
    };
    // Only what reads back to the same is said so.
    let given = text.clone().map_or(read::Given::Bare, read::Given::Text);
    let again = read::read(row, &given).ok()?;
    (tree::get(&again, row.path) == Some(&value)).then(|| {
        tree::take(rest, &path);
        std::iter::once(flag).chain(text).collect()
    })
}

/// Words as a line that a shell reads back to them.
pub fn line(words: &[String]) -> String {
    words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./@:=,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}
