//! Plans as text: YAML, TOML, and the command line with the same answer.

use serde_json::{Map, Value};

use crate::cli::Failure;

/// A tree without the keys that say nothing.
pub(crate) fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(object) => {
            let kept = object.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(kept.map(|(key, value)| (key, without_nulls(value))).collect())
        }
        other => other,
    }
}

/// As TOML.
pub(crate) fn toml(value: &Value) -> Result<String, Failure> {
    toml::to_string(value).map_err(|error| Failure::bad_input(format!("the plan cannot be written as TOML: {error}")))
}

/// As YAML, a key a line.
pub(crate) fn yaml(value: &Value) -> String {
    let mut text = String::new();
    match value {
        Value::Object(object) if !object.is_empty() => block(object, 0, &mut text),
        other => text = format!("{other}\n"),
    }
    text
}

fn block(object: &Map<String, Value>, depth: usize, text: &mut String) {
    for (key, value) in object {
        *text += &format!("{:width$}{}:", "", scalar(key), width = depth * 2);
        match value {
            Value::Object(inner) if !inner.is_empty() => {
                text.push('\n');
                block(inner, depth + 1, text);
            }
            Value::String(word) => *text += &format!(" {}\n", scalar(word)),
            // JSON is YAML.
            other => *text += &format!(" {other}\n"),
        }
    }
}

/// A word as it is where YAML reads it as text, else quoted.
fn scalar(word: &str) -> String {
    let plain = word.starts_with(|c: char| c.is_ascii_alphabetic())
        && word.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
    let meant = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"];
    if plain && !meant.contains(&word.to_ascii_lowercase().as_str()) {
        word.to_owned()
    } else {
        Value::from(word).to_string()
    }
}

/// Flags and the places in a plan that they set, with how a value becomes the flag's.
type Flag = (&'static str, &'static [&'static str], fn(&Value) -> Option<String>);

fn number(value: &Value) -> Option<String> {
    value.as_u64().map(|number| format!(" {number}"))
}

fn word(value: &Value) -> Option<String> {
    value.as_str().map(|word| format!(" {}", quoted(word)))
}

fn yes(value: &Value) -> Option<String> {
    (value == &Value::Bool(true)).then(String::new)
}

const TRAIN: &[Flag] = &[
    ("--batch-size", &["batch", "batch_size"], number),
    ("--seq-len", &["batch", "seq_len"], number),
    ("--gradient-accumulation", &["gradient_accumulation"], number),
    ("--optimizer", &["optimizer", "kind"], word),
    ("--optimizer-implementation", &["optimizer", "implementation"], word),
    ("--optimizer-in-backward", &["optimizer_in_backward"], yes),
    ("--clip", &["clip"], yes),
    ("--gradient-checkpointing", &["checkpointing"], |value| (value == "full").then(String::new)),
    ("--liger", &["kernels"], |value| (value == "liger").then(String::new)),
    ("--drop-outputs", &["keep_outputs"], |value| (value == &Value::Bool(false)).then(String::new)),
    ("--keep-loss", &["keep_loss"], |value| (value == &Value::Bool(true)).then(String::new)),
    ("--gpu", &["gpu"], word),
];

const INFER: &[Flag] = &[
    ("--batch-size", &["batch", "batch_size"], number),
    ("--prompt", &["batch", "seq_len"], number),
    ("--new-tokens", &["new_tokens"], number),
    ("--beams", &["beams"], number),
    ("--cache", &["cache"], |value| value.as_str().filter(|how| *how == "static").map(|how| format!(" {how}"))),
    ("--sample", &["choice"], |value| (value == "sample").then(String::new)),
    ("--eager", &["attention"], |value| (value == "eager").then(String::new)),
    ("--dtype", &["weights"], word),
    ("--gpu", &["gpu"], word),
];

/// The command line: flags where there are any, and the rest as a plan file that the shell makes.
pub(crate) fn command(command: &str, model: &str, plan: Map<String, Value>) -> String {
    let mut line = format!("vramcast {command} {}", quoted(model));
    let mut rest = Value::Object(plan);
    for (flag, place, spelled) in if command == "train" { TRAIN } else { INFER } {
        let found = place.iter().try_fold(&rest, |value, key| value.get(key)).and_then(spelled);
        if let Some(value) = found {
            line += &format!(" {flag}{value}");
            remove(&mut rest, place);
        }
    }
    if rest.as_object().is_some_and(|rest| !rest.is_empty()) {
        line += &format!(" --plan <(echo {})", quoted(&rest.to_string()));
    }
    line + "\n"
}

/// Takes a value out of a tree, and what is empty after that.
fn remove(value: &mut Value, place: &[&str]) {
    let (Some(object), [first, rest @ ..]) = (value.as_object_mut(), place) else { return };
    if let Some(inner) = object.get_mut(*first) {
        remove(inner, rest);
        if rest.is_empty() || inner.as_object().is_some_and(Map::is_empty) {
            object.shift_remove(*first);
        }
    }
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./@:".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn plan() -> Value {
        json!({"model": "a/b-1.5", "batch": {"batch_size": 4, "mask": true}, "gpu": "RTX 4090", "frozen": ["x y", "1"],
            "weights": "bf16", "adapter": {"method": "lora", "targets": "all-linear", "dropout": 0.5}, "on": "no"})
    }

    #[test]
    fn files_read_back() {
        let text = yaml(&plan());
        assert!(text.contains("batch:\n  batch_size: 4\n") && text.contains("gpu: \"RTX 4090\"\n"), "{text}");
        assert_eq!(serde_saphyr::from_str::<Value>(&text).unwrap(), plan());
        assert_eq!(toml::from_str::<Value>(&toml(&plan()).unwrap()).unwrap(), plan());
        assert_eq!(without_nulls(json!({"a": null, "b": {"c": null, "d": 1}})), json!({"b": {"d": 1}}));
    }

    #[test]
    fn commands() {
        let line = |value: Value| command("train", "a/b", value.as_object().unwrap().clone());
        assert_eq!(line(json!({})), "vramcast train a/b\n");
        assert_eq!(
            line(json!({"batch": {"batch_size": 4}, "gpu": "RTX 4090", "clip": true, "checkpointing": "full"})),
            "vramcast train a/b --batch-size 4 --clip --gradient-checkpointing --gpu 'RTX 4090'\n"
        );
        assert_eq!(
            line(json!({"batch": {"batch_size": 4, "mask": true}, "frozen": ["it's"]})),
            "vramcast train a/b --batch-size 4 --plan <(echo '{\"batch\":{\"mask\":true},\"frozen\":[\"it'\\''s\"]}')\n"
        );
    }
}
