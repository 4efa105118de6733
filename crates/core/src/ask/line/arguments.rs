//! `--key value` as an object, in the way that Python's parsers take it.

use serde_json::{Map, Value, json};

/// What stands behind a program.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Parsed {
    /// Options, with underscores.
    pub(super) object: Map<String, Value>,
    /// Words that belong to no option.
    pub(super) plain: Vec<String>,
}

/// A word's value: a truth, a number, JSON, or itself.
pub(super) fn typed(text: &str) -> Value {
    match text {
        "True" | "true" => json!(true),
        "False" | "false" => json!(false),
        "None" | "null" => Value::Null,
        _ if text.starts_with(['{', '[']) => serde_json::from_str(text)
            .or_else(|_| serde_json::from_str(&text.replace('\'', "\"")))
            .unwrap_or_else(|_| text.into()),
        _ => match (text.parse::<u64>(), text.parse::<f64>()) {
            (Ok(whole), _) => json!(whole),
            _ if text.parse::<i64>().is_ok() => json!(text.parse::<i64>().unwrap_or_default()),
            (_, Ok(number)) if text.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '.') => json!(number),
            _ => text.into(),
        },
    }
}

/// Reads options.
pub(super) fn parse(words: &[String]) -> Parsed {
    let mut parsed = Parsed::default();
    let mut rest = words.iter().peekable();
    while let Some(word) = rest.next() {
        let Some(name) = option(word) else {
            parsed.plain.push(word.clone());
            continue;
        };
        let (name, inline) = match name.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (name, None),
        };
        let mut key = name.replace('-', "_");
        let value = match inline {
            Some(text) => typed(&text),
            None => {
                let mut values = Vec::new();
                while let Some(next) = rest.next_if(|next| option(next).is_none()) {
                    values.push(typed(next));
                    // A key=value behind one value is torchtune's own.
                    if rest.peek().is_some_and(|next| next.contains('=') && !next.starts_with(['{', '['])) {
                        break;
                    }
                }
                match values.len() {
                    0 => match key.strip_prefix("no_").filter(|bare| !bare.is_empty() && !KEPT.contains(&key.as_str()))
                    {
                        Some(bare) => {
                            key = bare.to_owned();
                            json!(false)
                        }
                        None => json!(true),
                    },
                    1 => values.remove(0),
                    _ => json!(values),
                }
            }
        };
        parsed.object.insert(key, value);
    }
    parsed
}

/// Options whose own name begins with `no_`.
const KEPT: [&str; 6] = ["no_cuda", "no_load_optim", "no_load_rng", "no_kv_offload", "no_op_offload", "no_mmap"];

/// An option's name; a negative number is none.
fn option(word: &str) -> Option<&str> {
    let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
    name.starts_with(|c: char| c.is_ascii_alphabetic()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read() {
        let words: Vec<String> =
            "train.py --bf16 True --lr=2e-5 --lora_target_modules q_proj v_proj --no-packing --gc-kwargs {'a':true} --x -1 --flag"
                .split(' ')
                .map(str::to_owned)
                .collect();
        let parsed = parse(&words);
        assert_eq!(parsed.plain, ["train.py"]);
        assert_eq!(
            Value::Object(parsed.object),
            json!({"bf16": true, "lr": 2e-5, "lora_target_modules": ["q_proj", "v_proj"], "packing": false,
                "gc_kwargs": {"a": true}, "x": -1, "flag": true})
        );
    }
}
