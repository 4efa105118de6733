//! Forward passes of learned types that come along: `data/passes.jsonl.zz`, made by `tools/learn/shipped.py`.
//!
//! A line has a type, the class that loads it, the keys of its class's default config and the program that was learned with
//! them. A config with other values there is not answered from it. In passes of timm's models a number that nothing else has
//! (`classes`) stands for the number of classes.

use std::io::Read;
use std::sync::OnceLock;

use serde_json::{Map, Value};

use crate::model::ModelError;

/// A page waits for every byte, so it has none.
#[cfg(not(target_arch = "wasm32"))]
const PACKED: &[u8] = include_bytes!("../../../data/passes.jsonl.zz");
#[cfg(target_arch = "wasm32")]
const PACKED: &[u8] = &[];

fn lines() -> &'static str {
    static LINES: OnceLock<String> = OnceLock::new();
    LINES.get_or_init(|| {
        let mut text = String::new();
        // A file of our own: what cannot be read has no lines.
        let _ = flate2::read::ZlibDecoder::new(PACKED).read_to_string(&mut text);
        text
    })
}

fn start(model_type: &str, class: &str) -> String {
    format!("{{\"type\":\"{model_type}\",\"class\":\"{class}\",")
}

fn line(model_type: &str, class: &str) -> Option<&'static str> {
    let start = start(model_type, class);
    lines().lines().find(|line| line.starts_with(&start))
}

/// Whether the forward pass of a type came along.
pub(super) fn known(model_type: &str, class: &str) -> bool {
    line(model_type, class).is_some()
}

/// Types and classes whose forward pass came along.
pub fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    lines().lines().filter_map(|line| {
        let mut words = line.split('"');
        Some((words.nth(3)?, words.nth(3)?))
    })
}

/// The program of a type, if the config is the one that it was learned with.
pub(super) fn find(
    config: &Map<String, Value>,
    model_type: &str,
    class: &str,
) -> Result<Option<Map<String, Value>>, ModelError> {
    let Some(mut found) = line(model_type, class).and_then(|line| serde_json::from_str::<Value>(line).ok()) else {
        return Ok(None);
    };
    if let Some((path, value, usual)) = found["defaults"].as_object().and_then(|usual| other(config, usual, "")) {
        let short = |value: &Value| value.to_string().chars().take(60).collect::<String>();
        return Err(ModelError::BadValue {
            path,
            value: short(&value),
            expected: format!(
                "{}, with which the forward pass of {model_type} was learned (for other values: vramcast learn config.json)",
                short(&usual)
            ),
        });
    }
    let mut program = found["program"].take();
    if let Some(stands) = found["classes"].as_u64() {
        let classes = config.get("num_classes").and_then(Value::as_u64).unwrap_or(0);
        if classes == 0 {
            return Err(ModelError::Unsupported {
                what: format!("running {model_type} without a head"),
                hint: "give num_classes, or learn it with `vramcast learn timm:NAME --out model.json`".into(),
            });
        }
        relabel(&mut program, &stands.to_string(), classes);
    }
    Ok(program.as_object_mut().map(std::mem::take))
}

/// Puts the number of classes where another stands for it: among sizes, and in expressions of them.
fn relabel(value: &mut Value, stands: &str, classes: u64) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| relabel(value, stands, classes)),
        Value::Object(values) => values.values_mut().for_each(|value| relabel(value, stands, classes)),
        Value::Number(number) if number.to_string() == stands => *value = classes.into(),
        Value::String(text) if text.contains(stands) => {
            let words = text.split_inclusive(|letter: char| !letter.is_ascii_digit());
            let put = |word: &str| match word.strip_prefix(stands) {
                Some(rest) if !rest.starts_with(|letter: char| letter.is_ascii_digit()) => format!("{classes}{rest}"),
                _ => word.to_owned(),
            };
            *text = words.map(put).collect();
        }
        _ => {}
    }
}

/// The first key that has another value than the class's.
fn other(given: &Map<String, Value>, usual: &Map<String, Value>, above: &str) -> Option<(String, Value, Value)> {
    usual.iter().find_map(|(key, usual)| {
        let value = given.get(key)?;
        let path = format!("{above}{key}");
        match (value, usual) {
            (Value::Object(value), Value::Object(usual)) => other(value, usual, &format!("{path}.")),
            // 1 and 1.0 are one number.
            _ if value == usual || (value.is_number() && value.as_f64() == usual.as_f64()) => None,
            _ => Some((path, value.clone(), usual.clone())),
        }
    })
}
