//! `model.safetensors.index.json`: which tensor lies in which file.
//!
//! The file names come from strangers and become paths and URLs, so anything but a plain relative path is refused.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Longest index we read. The largest on the hub (over 100,000 tensors) are about 10 MB.
pub const MAX_INDEX_BYTES: usize = 64 << 20;
/// Most shards of one model; the largest published has a few hundred.
pub const MAX_SHARDS: usize = 10_000;

/// Why an index was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// It is longer than any index.
    #[error("the index is {bytes} bytes long, at most {MAX_INDEX_BYTES} are allowed")]
    TooLong {
        /// How long it is.
        bytes: usize,
    },
    /// It is not JSON of the right shape.
    #[error("broken index: {0}")]
    Syntax(String),
    /// It names no tensor.
    #[error("broken index: its `weight_map` is empty")]
    Empty,
    /// It names too many files.
    #[error("broken index: it names {shards} files, at most {MAX_SHARDS} are allowed")]
    TooManyShards {
        /// How many it names.
        shards: usize,
    },
    /// A file name that would leave the model's folder.
    #[error("broken index: `{file}`, given for tensor `{tensor}`, is not a plain relative path")]
    UnsafeName {
        /// The tensor it is given for.
        tensor: String,
        /// The name.
        file: String,
    },
}

/// What an index says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    /// `metadata.total_size`: bytes of all tensors, where it is given as a number.
    pub total_size: Option<u64>,
    /// File of each tensor, by tensor name.
    pub weight_map: BTreeMap<String, String>,
    /// The files, each once, sorted.
    pub files: Vec<String>,
}

/// Reads an index.
pub fn parse(text: &[u8]) -> Result<Index, IndexError> {
    if text.len() > MAX_INDEX_BYTES {
        return Err(IndexError::TooLong { bytes: text.len() });
    }
    let raw: Raw = serde_json::from_slice(text).map_err(|error| IndexError::Syntax(error.to_string()))?;
    if raw.weight_map.is_empty() {
        return Err(IndexError::Empty);
    }
    if let Some((tensor, file)) = raw.weight_map.iter().find(|(_, file)| !is_safe(file)) {
        return Err(IndexError::UnsafeName { tensor: tensor.clone(), file: file.clone() });
    }
    let mut files: Vec<String> = raw.weight_map.values().cloned().collect();
    crate::order::sort(&mut files);
    files.dedup();
    if files.len() > MAX_SHARDS {
        return Err(IndexError::TooManyShards { shards: files.len() });
    }
    Ok(Index { total_size: raw.metadata.get("total_size").and_then(whole), weight_map: raw.weight_map, files })
}

/// Whether a name is a relative path that stays below its folder, on every system.
pub fn is_safe(file: &str) -> bool {
    !file.is_empty()
        && file.len() <= 255
        && !file.contains(['\\', ':'])
        && !file.chars().any(char::is_control)
        && file.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

/// Some repositories were saved with `total_size` as a float (`1.3e10`).
fn whole(value: &serde_json::Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let float = value.as_f64()?;
        (float.fract() == 0.0 && (0.0..9.0e15).contains(&float)).then_some(float as u64)
    })
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default)]
    metadata: serde_json::Map<String, serde_json::Value>,
    weight_map: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_files_once() {
        let index = parse(
            br#"{"metadata":{"total_size":1.5e3,"total_parameters":750},
                 "weight_map":{"b":"model-2.safetensors","a":"model-1.safetensors","c":"model-1.safetensors"}}"#,
        )
        .unwrap();
        assert_eq!(index.total_size, Some(1500));
        assert_eq!(index.files, ["model-1.safetensors", "model-2.safetensors"]);
        assert_eq!(index.weight_map["c"], "model-1.safetensors");
    }

    #[test]
    fn refuses_names_that_escape() {
        for name in ["../x", "/etc/passwd", "a/../../b", "c:\\x", "a\\b", "", "a//b", "./a", "a\u{0}b", "http://x/y"] {
            let text = serde_json::json!({"weight_map": {"w": name}}).to_string();
            let error = parse(text.as_bytes()).unwrap_err();
            assert_eq!(error, IndexError::UnsafeName { tensor: "w".into(), file: name.into() });
        }
        assert!(is_safe("sub/model-00001-of-00002.safetensors"));
    }

    #[test]
    fn refuses_what_is_not_an_index() {
        assert_eq!(parse(br#"{"weight_map":{}}"#).unwrap_err(), IndexError::Empty);
        assert!(parse(b"{}").unwrap_err().to_string().contains("weight_map"));
        assert!(parse(br#"{"weight_map":{"a":1}}"#).is_err());
        assert!(parse(&vec![b'['; 10_000]).is_err());
    }
}
