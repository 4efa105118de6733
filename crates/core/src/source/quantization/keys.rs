//! Reading a `quantization_config`'s keys: null is absent, a wrong type is an error that names the key.

use serde_json::{Map, Value};

use super::QuantizationError;

/// An object of the config.
pub(super) struct Keys<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Keys<'a> {
    /// The value, unless it is absent or null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, QuantizationError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| bad(key, format!("should be {expected}"))),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, QuantizationError> {
        self.read(key, "a text", Value::as_str)
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, QuantizationError> {
        self.read(key, "true or false", Value::as_bool)
    }

    /// A whole number of at least one.
    pub(super) fn positive(&self, key: &str) -> Result<Option<u64>, QuantizationError> {
        self.read(key, "a whole number above zero", |value| value.as_u64().filter(|number| *number > 0))
    }

    /// A group size, where -1 and null mean the whole row.
    pub(super) fn group_size(&self, key: &str) -> Result<Option<u64>, QuantizationError> {
        if self.get(key).and_then(Value::as_i64) == Some(-1) { Ok(None) } else { self.positive(key) }
    }

    /// Bits of a packed integer.
    pub(super) fn bits(&self, key: &str, allowed: &[u64]) -> Result<Option<u64>, QuantizationError> {
        let problem = || format!("should be one of {allowed:?}");
        match self.positive(key)? {
            Some(bits) if !allowed.contains(&bits) => Err(bad(key, problem())),
            other => Ok(other),
        }
    }

    /// A list of texts; `None` when the key is absent, which is not the same as an empty list.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, QuantizationError> {
        self.read(key, "a list of names", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    /// The object under a key.
    pub(super) fn object(&self, key: &str) -> Result<Option<Keys<'a>>, QuantizationError> {
        Ok(self.read(key, "an object", Value::as_object)?.map(Keys))
    }
}

pub(super) fn bad(key: &str, problem: String) -> QuantizationError {
    QuantizationError::BadValue { key: key.to_owned(), problem }
}
