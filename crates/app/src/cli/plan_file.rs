//! Plan files: the same plan as flags give, as JSON, TOML or YAML.

use std::path::Path;

use serde_json::Value;

use super::Failure;

/// No plan file is larger.
const MAX_BYTES: u64 = 1 << 20;

/// Reads a plan file into a JSON value.
pub(super) fn read(path: &Path) -> Result<Value, Failure> {
    let shown = path.display();
    let size = std::fs::metadata(path).map_err(|e| Failure::bad_input(format!("{shown}: {e}")))?.len();
    if size > MAX_BYTES {
        return Err(Failure::bad_input(format!("{shown}: {size} bytes is too large for a plan file")));
    }
    let text = std::fs::read_to_string(path).map_err(|e| Failure::bad_input(format!("{shown}: {e}")))?;
    let parsed = match path.extension().and_then(|e| e.to_str()) {
        Some("toml") => toml::from_str::<Value>(&text).map_err(|e| e.to_string()),
        Some("yaml" | "yml") => serde_saphyr::from_str::<Value>(&text).map_err(|e| e.to_string()),
        _ => serde_json::from_str::<Value>(&text).map_err(|e| e.to_string()),
    };
    let value = parsed.map_err(|e| Failure::bad_input(format!("{shown}: {}", e.trim())))?;
    if !value.is_object() {
        return Err(Failure::bad_input(format!("{shown}: a plan file holds an object, see `vramcast schema`")));
    }
    Ok(value)
}
