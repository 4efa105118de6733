//! Plans as text: YAML, TOML, and the command line with the same answer.

use serde_json::{Map, Value};

use crate::failure::Failure;

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

/// The command line with the same answer.
pub(crate) fn command(command: &str, model: &str, words: &[String]) -> String {
    let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    format!("vramcast {command} {} {}", quoted(model), words.join(" ")).trim_end().to_owned() + "\n"
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
        let words = ["--batch-size=4".to_owned(), "--gpu=RTX 4090".to_owned(), "--freeze=it's".to_owned()];
        assert_eq!(command("train", "a/b", &[]), "vramcast train a/b\n");
        assert_eq!(
            command("train", "a/b", &words),
            "vramcast train a/b --batch-size=4 '--gpu=RTX 4090' '--freeze=it'\\''s'\n"
        );
    }
}
