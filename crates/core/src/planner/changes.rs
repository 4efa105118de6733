//! How one plan becomes another, as a JSON merge patch (RFC 7396).

use serde::Serialize;
use serde_json::{Map, Value};

/// The patch that turns one plan into another.
pub fn between<Plan: Serialize>(before: &Plan, after: &Plan) -> Value {
    let value = |plan: &Plan| serde_json::to_value(plan).unwrap_or_default();
    patch(&value(before), &value(after)).unwrap_or_else(|| Value::Object(Map::new()))
}

fn patch(before: &Value, after: &Value) -> Option<Value> {
    match (before, after) {
        _ if before == after => None,
        (Value::Object(before), Value::Object(after)) => {
            let gone = before.keys().filter(|key| !after.contains_key(*key)).map(|key| (key.clone(), Value::Null));
            let changed = after.iter().filter_map(|(key, value)| {
                let old = before.get(key).unwrap_or(&Value::Null);
                // Another card is another card in all it has, also over a plan that names none.
                let new = if key == "gpu" { Some(value.clone()).filter(|_| value != old) } else { patch(old, value) };
                Some((key.clone(), new?))
            });
            Some(Value::Object(gone.chain(changed).collect()))
        }
        _ => Some(after.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn patches() {
        let before = json!({"a": 1, "b": {"c": 2, "d": 3}, "e": {"x": 1}, "f": null});
        let after = json!({"a": 1, "b": {"c": 2, "d": 4}, "e": {"y": 1}, "f": {"g": 1}});
        let expected = json!({"b": {"d": 4}, "e": {"x": null, "y": 1}, "f": {"g": 1}});
        assert_eq!(patch(&before, &after), Some(expected));
        assert_eq!(between(&before, &before), json!({}));
        let card = |name: &str| json!({"gpu": {"name": name, "memory": 1}});
        assert_eq!(patch(&card("a"), &card("b")), Some(card("b")));
    }
}
