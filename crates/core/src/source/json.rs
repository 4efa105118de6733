//! JSON as Python writes it: `config.json` files on the hub hold `NaN`, `Infinity` and now and then a byte-order mark.

use serde_json::Value;

/// Longest config we read. The longest on the hub (tens of thousands of labels) are a few MB.
pub const MAX_CONFIG_BYTES: usize = 32 << 20;

/// Why a text was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// It is longer than any config.
    #[error("{bytes} bytes long, at most {MAX_CONFIG_BYTES} are allowed")]
    TooLong {
        /// How long it is.
        bytes: usize,
    },
    /// It is not JSON; the message has line and column.
    #[error("not JSON: {0}")]
    Syntax(String),
}

/// Reads a JSON text. `NaN` and the infinities, which JSON has no numbers for, become `null`.
pub fn parse(bytes: &[u8]) -> Result<Value, JsonError> {
    if bytes.len() > MAX_CONFIG_BYTES {
        return Err(JsonError::TooLong { bytes: bytes.len() });
    }
    let text = std::str::from_utf8(bytes).map_err(|error| JsonError::Syntax(error.to_string()))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    serde_json::from_str(text).or_else(|error| match without_python_numbers(text) {
        Some(cleaned) => serde_json::from_str(&cleaned).map_err(|error| JsonError::Syntax(error.to_string())),
        None => Err(JsonError::Syntax(error.to_string())),
    })
}

/// The text with Python's three extra numbers replaced outside of strings, or `None` when it has none.
fn without_python_numbers(text: &str) -> Option<String> {
    let mut cleaned = String::with_capacity(text.len());
    let mut rest = text;
    let mut replaced = false;
    while let Some(start) = rest.find(['"', 'N', 'I', '-']) {
        let (before, from) = rest.split_at(start);
        cleaned.push_str(before);
        let number = ["NaN", "-Infinity", "Infinity"].iter().find(|number| from.starts_with(**number));
        let taken = match number {
            Some(number) => {
                cleaned.push_str("null");
                replaced = true;
                number.len()
            }
            None => {
                let length = if from.starts_with('"') { string_length(from) } else { 1 };
                cleaned.push_str(from.get(..length)?);
                length
            }
        };
        rest = from.get(taken..)?;
    }
    cleaned.push_str(rest);
    replaced.then_some(cleaned)
}

/// Length of the string literal the text begins with, quotes included.
fn string_length(text: &str) -> usize {
    let mut escaped = false;
    for (index, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return index + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn python_numbers_become_null() {
        let text = r#"{"a": [0.0, Infinity, -Infinity, -1], "NaN": "NaN \" Infinity", "b": NaN}"#;
        assert_eq!(
            parse(text.as_bytes()).unwrap(),
            json!({"a": [0.0, null, null, -1], "NaN": "NaN \" Infinity", "b": null})
        );
    }

    #[test]
    fn a_byte_order_mark_is_skipped() {
        assert_eq!(parse("\u{feff}{}".as_bytes()).unwrap(), json!({}));
    }

    #[test]
    fn errors_have_a_place() {
        assert_eq!(parse(b"{\"a\": }").unwrap_err().to_string(), "not JSON: expected value at line 1 column 7");
        assert!(parse(b"[NaN").is_err());
        assert!(parse(b"\"NaN\\").is_err());
        assert!(parse("é\"Nä".as_bytes()).is_err());
        assert!(parse(&vec![b'['; 1000]).unwrap_err().to_string().contains("recursion limit"));
        assert!(parse(&[0xff]).is_err());
    }
}
