//! Reading `config.json`: typed access to keys, with limits, class defaults and clear errors.

use serde_json::{Map, Value};

use super::error::ModelError;

/// No size in a config may be larger: products of four still fit in 128 bits, and real models stay far below.
const MAX_SIZE: u64 = 1 << 32;
/// No model has more layers than this.
pub const MAX_LAYERS: u64 = 4096;

static EMPTY: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);

/// One object of a config, and where it stands.
#[derive(Debug, Clone)]
pub struct Config<'a> {
    object: &'a Map<String, Value>,
    path: String,
}

impl<'a> Config<'a> {
    /// The whole config.
    pub fn new(value: &'a Value) -> Result<Self, ModelError> {
        match value {
            Value::Object(object) => Ok(Self { object, path: String::new() }),
            other => Err(bad("config.json", other, "a JSON object")),
        }
    }

    /// All of it.
    pub(super) fn object(&self) -> &'a Map<String, Value> {
        self.object
    }

    /// `model_type`, empty when absent.
    pub fn model_type(&self) -> &'a str {
        self.str_or("model_type", "")
    }

    /// The value under a key; `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether a key is present and not `null`.
    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// A nested object; an absent one reads as empty, so that class defaults apply.
    pub fn section(&self, key: &str) -> Config<'a> {
        let object = self.get(key).and_then(Value::as_object).unwrap_or(&EMPTY);
        Config { object, path: self.at(key) }
    }

    /// Every key that is present.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.object.keys().map(String::as_str)
    }

    /// A size that must be present under one of these names.
    pub fn size(&self, keys: &[&str]) -> Result<u64, ModelError> {
        match self.size_of_any(keys)? {
            Some(size) => Ok(size),
            None => Err(ModelError::Missing {
                path: self.at(keys.first().copied().unwrap_or_default()),
                family: if self.model_type().is_empty() { "model".into() } else { self.model_type().into() },
            }),
        }
    }

    /// A size under one of these names, or the class default.
    pub fn size_or(&self, keys: &[&str], default: u64) -> Result<u64, ModelError> {
        Ok(self.size_of_any(keys)?.unwrap_or(default))
    }

    fn size_of_any(&self, keys: &[&str]) -> Result<Option<u64>, ModelError> {
        for key in keys {
            if let Some(value) = self.get(key) {
                return self.checked_size(&self.at(key), value).map(Some);
            }
        }
        Ok(None)
    }

    fn checked_size(&self, path: &str, value: &Value) -> Result<u64, ModelError> {
        // Some configs write 4096.0.
        let number =
            value.as_u64().or_else(|| value.as_f64().filter(|x| *x >= 0.0 && x.fract() == 0.0).map(|x| x as u64));
        match number {
            Some(number) if number <= MAX_SIZE => Ok(number),
            _ => Err(bad(path, value, "a whole number from 0 to 4294967296")),
        }
    }

    /// The number of layers under one of these names, or the class default; bounded.
    pub fn layers(&self, keys: &[&str], default: u64) -> Result<u64, ModelError> {
        let layers = self.size_or(keys, default)?;
        if layers > MAX_LAYERS {
            return Err(ModelError::BadValue {
                path: self.at(keys[0]),
                value: layers.to_string(),
                expected: format!("a number of layers up to {MAX_LAYERS}"),
            });
        }
        Ok(layers)
    }

    /// A list of sizes; absent reads as `None`.
    pub fn sizes(&self, key: &str) -> Result<Option<Vec<u64>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Some(list) = value.as_array() else { return Err(bad(&self.at(key), value, "a list of whole numbers")) };
        let sizes = list.iter().enumerate().map(|(i, item)| self.checked_size(&format!("{}[{i}]", self.at(key)), item));
        sizes.collect::<Result<Vec<_>, _>>().map(Some)
    }

    /// A list of strings; absent reads as `None`.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        list.map(Some).ok_or_else(|| bad(&self.at(key), value, "a list of strings"))
    }

    /// A flag, or the class default.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| bad(&self.at(key), value, "true or false")),
        }
    }

    /// A number, or the class default.
    pub fn number(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| bad(&self.at(key), value, "a number")),
        }
    }

    /// A string, or the class default (also where something else stands).
    pub fn str_or(&self, key: &str, default: &'a str) -> &'a str {
        self.get(key).and_then(Value::as_str).unwrap_or(default)
    }

    /// The error for a value this family cannot take.
    pub fn refuse(&self, key: &str, expected: &str) -> ModelError {
        bad(&self.at(key), self.get(key).unwrap_or(&Value::Null), expected)
    }

    fn at(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }
}

fn bad(path: &str, value: &Value, expected: &str) -> ModelError {
    let mut text = value.to_string();
    if text.len() > 80 {
        text = text.chars().take(77).collect::<String>() + "...";
    }
    ModelError::BadValue { path: path.to_owned(), value: text, expected: expected.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn errors_name_the_key_and_the_value() {
        let value = json!({"text_config": {"hidden_size": -4}});
        let config = Config::new(&value).unwrap().section("text_config");
        assert_eq!(
            config.size(&["hidden_size"]).unwrap_err().to_string(),
            "text_config.hidden_size: -4 is not a whole number from 0 to 4294967296"
        );
        assert!(
            config
                .size(&["vocab_size"])
                .unwrap_err()
                .to_string()
                .starts_with("text_config.vocab_size: the key is missing")
        );
    }

    #[test]
    fn null_reads_as_absent_and_names_are_tried_in_order() {
        let value = json!({"n_embd": 8, "head_dim": null});
        let config = Config::new(&value).unwrap();
        assert_eq!(config.size(&["hidden_size", "n_embd"]), Ok(8));
        assert_eq!(config.size_or(&["head_dim"], 64), Ok(64));
    }
}
