//! Plan files: the same plan as flags give, as JSON, TOML or YAML.

use std::path::Path;

use serde_json::Value;

use super::{Failure, Place};
use crate::estimate::start::File;

/// No plan file is larger.
const MAX_BYTES: u64 = 1 << 20;

/// Reads a plan file.
pub(super) fn read(path: &Path) -> Result<File, Failure> {
    let name = path.display().to_string();
    let size = std::fs::metadata(path).map_err(|e| Failure::bad_input(format!("{name}: {e}")))?.len();
    if size > MAX_BYTES {
        return Err(Failure::bad_input(format!("{name}: {size} bytes is too large for a plan file")));
    }
    let text = std::fs::read_to_string(path).map_err(|e| Failure::bad_input(format!("{name}: {e}")))?;
    parse(&text, name)
}

/// Reads a plan file's text; the name says which form it has.
pub(crate) fn parse(text: &str, name: String) -> Result<File, Failure> {
    let parsed = match Path::new(&name).extension().and_then(|extension| extension.to_str()) {
        Some("toml") => toml::from_str::<Value>(text).map_err(|e| e.to_string()),
        Some("yaml" | "yml") => serde_saphyr::from_str::<Value>(text).map_err(|e| e.to_string()),
        _ => serde_json::from_str::<Value>(text).map_err(|e| e.to_string()),
    };
    let bad = |problem: &str| Failure::bad_input(format!("{name}: {problem}")).at(Place::Plan(String::new()));
    let value = parsed.map_err(|e| bad(e.trim()))?;
    if !value.is_object() {
        return Err(bad("a plan file holds an object, see `vramcast schema`"));
    }
    Ok(File { name, value: of_report(value) })
}

/// The plan of a report (`--json`), with its model; anything else is a plan already.
fn of_report(mut value: Value) -> Value {
    let model = value.pointer("/model/name").cloned();
    let plan = if value["totals"].is_object() { value["plan"].take() } else { value.take() };
    let mut plan = match plan {
        Value::Object(mut object) if object.len() == 1 => match object.shift_remove_entry("train") {
            Some((_, inner)) => inner,
            None => object.shift_remove("infer").unwrap_or(Value::Object(object)),
        },
        other => other,
    };
    if let (Some(model), Some(object)) = (model, plan.as_object_mut()) {
        object.insert("model".into(), model);
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_report_is_a_plan_file_too() {
        let report = json!({"model": {"name": "gpt2"}, "totals": {}, "plan": {"train": {"clip": true}}});
        assert_eq!(of_report(report), json!({"clip": true, "model": "gpt2"}));
        assert_eq!(of_report(json!({"train": {"clip": true}})), json!({"clip": true}));
        assert_eq!(of_report(json!({"infer": {"new_tokens": 3}})), json!({"new_tokens": 3}));
        assert_eq!(of_report(json!({"clip": true})), json!({"clip": true}));
        assert_eq!(of_report(json!({"model": "gpt2"})), json!({"model": "gpt2"}));
    }
}
