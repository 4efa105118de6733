//! A config as a learned table looks at it: by paths, with what the class puts where a config says nothing.

use serde_json::{Map, Value};

use super::expression;

/// The numbers, flags and lists that a table asks for.
pub(super) struct Facts<'a> {
    /// The user's config.
    pub(super) config: &'a Map<String, Value>,
    /// What the class's own config has there.
    pub(super) defaults: &'a Map<String, Value>,
    /// What a key is where its section is there without it.
    pub(super) absent: &'a Map<String, Value>,
    /// Other names of keys.
    pub(super) aliases: &'a Map<String, Value>,
}

impl Facts<'_> {
    /// What stands under a path, or what the class has there; `null` is nothing.
    pub(super) fn get(&self, path: &str) -> Option<Value> {
        let given = self.given(path).filter(|value| !value.is_null());
        given.cloned().or_else(|| self.without(path)).filter(|value| !value.is_null())
    }

    fn given(&self, path: &str) -> Option<&Value> {
        let other = self.aliases.get(path).and_then(Value::as_str);
        at(self.config, path).or_else(|| at(self.config, other?))
    }

    fn without(&self, path: &str) -> Option<Value> {
        let section = path.rfind('.').map_or("", |dot| &path[..dot]);
        let there = section.is_empty() || at(self.config, section).is_some_and(Value::is_object);
        match self.absent.get(path).filter(|_| there) {
            Some(Value::String(text)) => {
                // An expression of keys that are there, or have defaults.
                let number = |name: &str| (name != path).then(|| self.fraction(name)).flatten();
                expression::value(text, &number).ok().map(Value::from)
            }
            Some(other) => Some(other.clone()),
            None => self.defaults.get(path).cloned(),
        }
    }

    /// A number under a path.
    pub(super) fn fraction(&self, path: &str) -> Option<[i128; 2]> {
        if path == "num_labels" {
            return Some([i128::from(self.labels()), 1]);
        }
        let value = self.get(path)?;
        match value.as_u64() {
            Some(whole) => Some([i128::from(whole), 1]),
            None => decimal(&value.as_f64()?.to_string()),
        }
    }

    /// Classes of a head: what `PreTrainedConfig.num_labels` says.
    fn labels(&self) -> u64 {
        let listed = self.config.get("id2label").and_then(Value::as_object).map(|labels| labels.len() as u64);
        listed.or_else(|| self.config.get("num_labels")?.as_u64()).unwrap_or(2)
    }

    /// Whether a config has what the class has under a path that was not followed.
    pub(super) fn is_default(&self, path: &str) -> bool {
        let default = self.defaults.get(path).unwrap_or(&Value::Null);
        let value = self.get(path).unwrap_or(Value::Null);
        value == *default || matches!((value.as_f64(), default.as_f64()), (Some(a), Some(b)) if a == b)
    }
}

/// What stands under a dotted path, `a.b[2]`.
fn at<'v>(config: &'v Map<String, Value>, path: &str) -> Option<&'v Value> {
    let mut found = None;
    for part in path.split('.') {
        let (name, index) = match part.split_once('[') {
            Some((name, index)) => (name, Some(index.strip_suffix(']')?.parse::<usize>().ok()?)),
            None => (part, None),
        };
        let mut value = match found {
            None => config.get(name)?,
            Some(section) => Value::get(section, name)?,
        };
        if let Some(index) = index {
            value = value.get(index)?;
        }
        found = Some(value);
    }
    found
}

/// A decimal number as the fraction that it is.
fn decimal(text: &str) -> Option<[i128; 2]> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let below = 10_i128.checked_pow(u32::try_from(part.len()).ok()?)?;
    let above = format!("{whole}{part}").parse::<i128>().ok()?;
    (above >= 0).then_some([above, below])
}
