//! Plans as trees of JSON, and places in them.

use serde_json::{Map, Value};

/// What stands at a place, its parts joined by dots.
pub fn get<'a>(tree: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(tree, |value, key| value.get(key))
}

/// Puts a value at a place; objects on the way are made.
pub fn set(tree: &mut Value, path: &str, value: Value) {
    let (first, rest) = path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)));
    if !tree.is_object() {
        *tree = Value::Object(Map::new());
    }
    let Some(object) = tree.as_object_mut() else { return };
    match rest {
        None => drop(object.insert(first.to_owned(), value)),
        Some(rest) => set(object.entry(first).or_insert(Value::Null), rest, value),
    }
}

/// A tree with one value.
pub fn of(path: &str, value: Value) -> Value {
    let mut tree = Value::Object(Map::new());
    set(&mut tree, path, value);
    tree
}

/// Takes the value at a place out, and what is empty after that.
pub fn take(tree: &mut Value, path: &str) -> Option<Value> {
    let object = tree.as_object_mut()?;
    match path.split_once('.') {
        None => object.shift_remove(path),
        Some((first, rest)) => {
            let inner = object.get_mut(first)?;
            let taken = take(inner, rest);
            if taken.is_some() && inner.as_object().is_some_and(Map::is_empty) {
                object.shift_remove(first);
            }
            taken
        }
    }
}

/// Places whose object has one key that says which of several it is: another one replaces it.
const ONE_OF: [&str; 5] =
    ["parallel.engine", "cache", "job.lengths", "parallel.engine.megatron.split", "parallel.engine.megatron.recompute"];

/// Lays one tree over another. An adapter of another method, and another engine, replace the one below.
pub fn lay(below: &mut Value, above: &Value) {
    lay_at(below, above, "");
}

fn lay_at(below: &mut Value, above: &Value, path: &str) {
    let (Value::Object(inner), Value::Object(over)) = (&mut *below, above) else {
        *below = above.clone();
        return;
    };
    // Options without a method are of whichever is named later.
    let replaces = inner.get("method").zip(over.get("method")).is_some_and(|(below, above)| below != above);
    // A card of one's own takes nothing from the usual one.
    if replaces || path == "gpu" {
        *below = above.clone();
        return;
    }
    if ONE_OF.contains(&path) && !over.contains_key("*") {
        inner.retain(|key, _| over.contains_key(key) || key == "*");
    }
    for (key, value) in over {
        let place = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        lay_at(inner.entry(key).or_insert(Value::Null), value, &place);
    }
}

/// Every value that is no object (or an empty one), with its place.
pub fn leaves(tree: &Value) -> Vec<(String, Value)> {
    let mut found = Vec::new();
    walk("", tree, &mut found);
    found
}

fn walk(path: &str, value: &Value, found: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(object) if !object.is_empty() || path.is_empty() => {
            for (key, value) in object {
                let place = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                walk(&place, value, found);
            }
        }
        other => found.push((path.to_owned(), other.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn trees_lie_over_each_other() {
        let mut below = json!({"a": {"b": 1, "c": 2}, "adapter": {"method": "lora", "rank": 8}, "gpu": {"name": "x"}});
        lay(&mut below, &json!({"a": {"b": 3}, "adapter": {"method": "other", "x": 1}, "gpu": {"memory": 1}}));
        assert_eq!(below, json!({"a": {"b": 3, "c": 2}, "adapter": {"method": "other", "x": 1}, "gpu": {"memory": 1}}));
        let mut below = json!({"parallel": {"engine": {"fsdp2": {"wrap": "root"}}}});
        lay(&mut below, &json!({"parallel": {"engine": {"ddp": {}}}}));
        assert_eq!(below, json!({"parallel": {"engine": {"ddp": {}}}}));
    }

    #[test]
    fn places() {
        let mut tree = of("a.b", json!(1));
        set(&mut tree, "a.c", json!({}));
        assert_eq!(get(&tree, "a.b"), Some(&json!(1)));
        assert_eq!(leaves(&tree), [("a.b".to_owned(), json!(1)), ("a.c".to_owned(), json!({}))]);
        assert_eq!(take(&mut tree, "a.b"), Some(json!(1)));
        assert_eq!(take(&mut tree, "a.c"), Some(json!({})));
        assert_eq!(tree, json!({}));
    }
}
