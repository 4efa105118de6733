//! Plans as text: YAML, TOML, and the command line with the same answer.

use serde_json::{Map, Value};

use vramcast_core::ask::{spell, tree};

use crate::failure::Failure;

/// As TOML.
pub(crate) fn toml(value: &Value) -> Result<String, Failure> {
    if let Some((path, _)) = tree::leaves(value).into_iter().find(|(_, value)| value.is_null()) {
        return Err(Failure::bad_input(format!("{path} is null here, and TOML has no null")).hint("use YAML or JSON"));
    }
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
    let first = ["vramcast", command, model].map(str::to_owned);
    spell::line(&[&first, words].concat()) + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Door;
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
        let reset = json!({"batch": {"seq_len": 8}, "autocast": null});
        assert_eq!(serde_saphyr::from_str::<Value>(&yaml(&reset)).unwrap(), reset);
        assert!(toml(&reset).unwrap_err().message(Door::Http).contains("autocast"));
    }

    #[test]
    fn commands() {
        let words = ["--batch-size", "4", "--gpu", "RTX 4090", "--freeze", "it's"].map(str::to_owned);
        assert_eq!(command("train", "a/b", &[]), "vramcast train a/b\n");
        assert_eq!(
            command("train", "a/b", &words),
            "vramcast train a/b --batch-size 4 --gpu 'RTX 4090' --freeze 'it'\\''s'\n"
        );
    }
}
