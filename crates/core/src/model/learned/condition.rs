//! Conditions of a learned table: in which layers, and under which flags, a parameter is there.

use serde_json::Value;

use super::facts::Facts;

/// Where a condition is asked.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// Which layer of its list.
    pub(super) index: u64,
    /// Layers of the list.
    pub(super) count: u64,
}

/// Whether all parts of a condition hold, or which could not be answered.
pub(super) fn holds(text: &str, place: Place, lists: &Value, facts: &Facts<'_>) -> Result<bool, String> {
    for part in text.split('&').filter(|part| !part.is_empty()) {
        if !one(part, place, lists, facts)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn one(text: &str, place: Place, lists: &Value, facts: &Facts<'_>) -> Result<bool, String> {
    // `layer_types[i]="full_attention"`: the entry of this layer.
    if let Some((path, rest)) = text.split_once("[i]") {
        let entry = entry(path, place, lists, facts)?;
        let wanted: Value = serde_json::from_str(rest.get(1..).unwrap_or_default()).map_err(|_| text.to_owned())?;
        return Ok((entry == wanted) == rest.starts_with('='));
    }
    // `i@indices`: the layer is in a list.
    if let Some(path) = text.strip_prefix("i@").or_else(|| text.strip_prefix("i!")) {
        let list = facts.get(path).ok_or_else(|| path.to_owned())?;
        let found = list.as_array().is_some_and(|list| list.contains(&Value::from(place.index)));
        return Ok(found == text.starts_with("i@"));
    }
    let number = |name: &str| match name {
        "i" => Some([i128::from(place.index), 1]),
        "n" => Some([i128::from(place.count), 1]),
        other => facts.fraction(other),
    };
    let sum = |text: &str| super::expression::value(text, &number);
    for operator in [">=", "<", ">", "=", "!"] {
        let Some((left, right)) = text.split_once(operator) else { continue };
        if let "true" | "false" = right {
            let flag = facts.get(left).unwrap_or(Value::Bool(false));
            return Ok((flag == Value::Bool(right == "true")) == (operator == "="));
        }
        let left = match left.split_once('%') {
            Some((above, below)) => sum(above)?.checked_rem(sum(below)?).ok_or_else(|| text.to_owned())?,
            None => sum(left)?,
        };
        let right = sum(right)?;
        return Ok(match operator {
            ">=" => left >= right,
            "<" => left < right,
            ">" => left > right,
            "=" => left == right,
            _ => left != right,
        });
    }
    Err(text.to_owned())
}

/// The entry of a layer in a list of the config, or what the class puts there.
fn entry(path: &str, place: Place, lists: &Value, facts: &Facts<'_>) -> Result<Value, String> {
    let given = facts.get(path).filter(|list| list.as_array().is_some_and(|list| list.len() as u64 == place.count));
    if let Some(entry) = given.as_ref().and_then(|list| list.get(place.index as usize)) {
        return Ok(entry.clone());
    }
    for row in lists[path].as_array().into_iter().flatten() {
        let rule = row[1].as_str().unwrap_or_default();
        if !rule.contains("[i]") && holds(rule, place, lists, facts)? {
            return Ok(row[0].clone());
        }
    }
    Err(path.to_owned())
}
