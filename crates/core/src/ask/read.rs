//! From the words of a flag, or a value of Python or HTTP, to a tree that lies over a plan.

use serde_json::{Value, json};

use super::setting::{Kind, Setting};
use super::tree;
use crate::plan::Fault;

/// What stands behind a name.
#[derive(Debug, Clone, PartialEq)]
pub enum Given {
    /// Nothing: the flag stands alone.
    Bare,
    /// Words.
    Text(String),
    /// A value of another language; `null` says nothing.
    Value(Value),
}

/// The tree of a setting with what was given.
pub fn read(row: &Setting, given: &Given) -> Result<Value, Fault> {
    let text = match given {
        Given::Bare => None,
        Given::Text(text) => Some(text.clone()),
        Given::Value(value) => match (value, row.kind) {
            (Value::Null, _) => return Ok(json!({})),
            (Value::Bool(on), Kind::Switch) => return Ok(tree::of(row.path, json!(on))),
            (Value::Bool(on), Kind::Off) => return Ok(tree::of(row.path, json!(!on))),
            // Python's False on what is a word or a group of values: it is not asked for.
            (Value::Bool(false), Kind::Spelled(spelling)) if (spelling.read)("false").is_err() || row.is_switch() => {
                return Ok(json!({}));
            }
            (Value::Bool(false), Kind::Whole | Kind::Real | Kind::Text | Kind::Names | Kind::Choice(_)) => {
                return Ok(json!({}));
            }
            (Value::Bool(true), _) => None,
            (Value::Array(items), Kind::Names) => return Ok(tree::of(row.path, json!(items))),
            (Value::Array(items), _) => Some(items.iter().map(word).collect::<Vec<_>>().join(",")),
            // An object is a part of a plan already.
            (Value::Object(_), _) => return Ok(tree::of(row.path, value.clone())),
            (other, _) => Some(word(other)),
        },
    };
    // The name that was given, where a place has several.
    let expected = |value: &str, expected: &str| match row.flag {
        "" => Fault::value(row.path, value, expected),
        flag => Fault { path: row.path.into(), ..Fault::value(format!("{}#{flag}", row.path), value, expected) },
    };
    let needs = || Fault::new(row.path, format!("{{{}}} needs a value", row.path));
    match (row.kind, text.as_deref()) {
        (Kind::Refused(why), _) => {
            Err(Fault::new(row.path, format!("{{{}}} has no effect: {why}", row.path)).or_drop(row.path))
        }
        (Kind::Switch, None) => Ok(tree::of(row.path, json!(true))),
        (Kind::Off, None) => Ok(tree::of(row.path, json!(false))),
        (Kind::Switch | Kind::Off, Some(text)) => match truth(text) {
            Some(on) => Ok(tree::of(row.path, json!(on == matches!(row.kind, Kind::Switch)))),
            None => Err(expected(text, "true or false")),
        },
        (Kind::Spelled(spelling), text) => {
            if row.is_switch() && text.and_then(truth) == Some(false) {
                return Ok(json!({}));
            }
            let text = text.or(spelling.bare).ok_or_else(needs)?;
            (spelling.read)(text).map_err(|wanted| expected(text, &wanted))
        }
        (_, None) => Err(needs()),
        (Kind::Whole, Some(text)) => match whole(text) {
            Some(number) => Ok(tree::of(row.path, json!(number))),
            None => Err(expected(text, "a whole number, in digits alone (4096, 4_096) or thousands (4k)")),
        },
        (Kind::Real, Some(text)) => match text.parse::<f64>() {
            Ok(number) if number.is_finite() => Ok(tree::of(row.path, json!(number))),
            _ => Err(expected(text, "a number")),
        },
        (Kind::Text, Some(text)) => Ok(tree::of(row.path, json!(text))),
        (Kind::Names, Some(text)) => {
            let names: Vec<&str> = text.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
            Ok(tree::of(row.path, json!(names)))
        }
        (Kind::Choice(words), Some(text)) => {
            let known = words.iter().map(|(word, _)| *word).find(|word| is_word(word, text));
            let all = || words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
            known
                .map(|word| tree::of(row.path, json!(word)))
                .ok_or_else(|| expected(text, &format!("one of {}", all())))
        }
        // As the Trainer's `optim` says both at once.
        (Kind::Listed(_), Some("adamw_torch_fused")) if row.path == "optimizer.kind" => {
            Ok(json!({"optimizer": {"kind": "adamw", "implementation": "fused"}}))
        }
        // Plans know aliases that a list does not show.
        (Kind::Listed(_), Some(text)) => Ok(tree::of(row.path, json!(text.to_lowercase().replace('_', "-")))),
    }
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// `true`, and what people write for it.
pub fn truth(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Some(true),
        "false" | "0" | "no" | "off" => Some(false),
        _ => None,
    }
}

/// Digits, or a number of tokens as people write it: 4k is 4096.
fn whole(text: &str) -> Option<u64> {
    let text = text.trim().replace('_', "");
    match text.to_ascii_lowercase().strip_suffix('k') {
        Some(thousands) => thousands.parse::<u64>().ok()?.checked_mul(1024),
        None => text.parse().ok(),
    }
}

/// Whether a word is meant: case, dashes and torch's longer names do not matter.
fn is_word(word: &str, text: &str) -> bool {
    let plain = |text: &str| text.to_ascii_lowercase().replace('_', "-");
    let text = plain(text);
    let longer = match text.as_str() {
        "float32" | "f32" | "float" => "fp32",
        "bfloat16" => "bf16",
        "float16" | "f16" | "half" => "fp16",
        "flash-attention-2" => "flash2",
        "flash-attention-3" => "flash3",
        "flex-attention" => "flex",
        "current" => "tensorwise",
        "heuristic-transient" => "heuristic",
        other => other,
    };
    plain(word) == longer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ask::runner::Runner;
    use crate::ask::table;

    fn tree_of(name: &str, text: &str) -> Result<Value, String> {
        let row = table::called(name, Runner::OneCard).unwrap();
        read(row, &Given::Text(text.into())).map_err(|fault| fault.to_string())
    }

    #[test]
    fn words_become_values() {
        assert_eq!(tree_of("seq-len", "4k"), Ok(json!({"batch": {"seq_len": 4096}})));
        assert_eq!(tree_of("precision", "bf16-mixed"), Ok(json!({"weights": "fp32", "autocast": "bf16"})));
        assert_eq!(tree_of("attention", "flash_attention_2"), Ok(json!({"attention": "flash2"})));
        assert_eq!(tree_of("drop-outputs", "true"), Ok(json!({"keep_outputs": false})));
        assert_eq!(tree_of("lora", "false"), Ok(json!({})));
        assert_eq!(
            tree_of("seq-len", "long"),
            Err("batch.seq_len: long is not a whole number, in digits alone (4096, 4_096) or thousands (4k)".into())
        );
        for (text, bytes) in
            [("8", 8 << 30), ("23.5GiB", 47 << 29), ("24GB", 24_000_000_000_u64), ("512 MiB", 512 << 20)]
        {
            assert_eq!(tree_of("memory-limit", text), Ok(json!({"job": {"memory_limit": bytes}})), "{text}");
        }
        assert!(["0", "-1", "nan", "8 apples"].iter().all(|text| tree_of("memory-limit", text).is_err()));
        // Two lengths or one: nobody can tell.
        assert!(tree_of("seq-len", "4,096").is_err());
        assert!(tree_of("gradient-checkpointing", "sometimes").is_err());
        assert_eq!(tree_of("torch-compile", "true"), Ok(json!({"torch_compile": "model"})));
    }

    #[test]
    fn python_says_it_in_values() {
        let read =
            |name: &str, value: Value| read(table::called(name, Runner::OneCard).unwrap(), &Given::Value(value)).ok();
        assert_eq!(read("batch_size", json!(4)), Some(json!({"batch": {"batch_size": 4}})));
        assert_eq!(read("lora", json!(true)), Some(json!({"adapter": {"method": "lora"}})));
        assert_eq!(read("lora", json!(false)), Some(json!({})));
        assert_eq!(read("clip", json!(null)), Some(json!({})));
        let off = read("gradient_checkpointing", json!(false)).unwrap();
        assert_eq!(off["checkpointing"], "off");
        assert_eq!(read("freeze", json!(["a", "b"])), Some(json!({"frozen": ["a", "b"]})));
    }
}
