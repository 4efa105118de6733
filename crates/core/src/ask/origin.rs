//! Where every setting of a plan comes from: what was asked, a framework's default, other values, or our guess.

use serde::Serialize;
use serde_json::Value;

use super::runner::Runner;
use super::{table, tree};
use crate::plan::Origin;

/// Every setting of a plan; `framework` is what a framework's defaults decided, `derived` what follows from other values.
pub fn trace(
    plan: &impl Serialize,
    stated: &Value,
    framework: &[(String, Value, String, String)],
    derived: &[(String, String)],
    runner: Runner,
) -> Vec<Origin> {
    let tree = serde_json::to_value(plan).unwrap_or_default();
    let under =
        |place: &str, path: &str| path == place || path.strip_prefix(place).is_some_and(|rest| rest.starts_with('.'));
    let asked = |path: &str| {
        let mut place = path;
        loop {
            match tree::get(stated, place) {
                Some(value) if place == path => return !value.is_null(),
                // A whole that was asked for by a word or a list.
                Some(value) => return !value.is_object() && !value.is_null(),
                None => match place.rsplit_once('.') {
                    Some((outer, _)) => place = outer,
                    None => return false,
                },
            }
        }
    };
    let origin = |(path, value): (String, Value)| {
        let decided = framework.iter().find(|(key, known, ..)| *key == path && *known == value);
        let follows = derived.iter().rev().find(|(place, _)| under(place, &path));
        let row = || table::at(&path, runner.alone()).filter(|row| row.scope.has(runner) || row.path == path);
        let (from, framework) = if asked(&path) {
            ("asked for".to_owned(), None)
        } else if let Some((_, why)) = follows {
            (why.clone(), None)
        } else if let Some((_, _, title, source)) = decided {
            (source.clone(), Some(title.clone()))
        } else {
            (row().map_or("off unless asked for", |row| row.from).to_owned(), None)
        };
        let value = match value {
            Value::Null => "none".to_owned(),
            Value::String(text) => text,
            other => other.to_string(),
        };
        Origin { key: path, value, from, framework }
    };
    let shown = |path: &str| (!path.starts_with("gpu.") || path == "gpu.name") && !path.contains(".config.");
    tree::leaves(&tree).into_iter().filter(|(path, _)| shown(path)).map(origin).collect()
}
