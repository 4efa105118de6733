//! Model truth: exact parameter counts, tensor names and shapes, cache bytes and active parameters.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::kinds::{Kind, Score};
use super::pattern;
use crate::model::{Model, Shape};

/// Files of one model each.
pub(super) const KIND: Kind = Kind {
    name: "models",
    noun: "models",
    looks: "a model a file, with `tensors` and `total_params`",
    levels: &[],
    joined: true,
    rows: |file| match file.documents.as_slice() {
        [model] if model["tensors"].is_array() && model["total_params"].is_u64() => Some(vec![model.clone()]),
        _ => None,
    },
    score: |_, truth| {
        let row = score(truth);
        vec![Score::exact(&row.id, (!row.ok).then(|| row.said()), &row)]
    },
};

/// How one model compares with its truth file.
#[derive(Debug, Clone, Serialize)]
pub struct ModelRow {
    /// The model.
    pub id: String,
    /// Its `model_type`.
    pub model_type: String,
    /// Whether everything is equal.
    pub ok: bool,
    /// Total parameters.
    pub params: Pair,
    /// Tensors by name and shape.
    pub tensors: Tensors,
    /// Cache bytes per token in bf16.
    pub kv_bytes_per_token: Pair,
    /// Parameters active per token.
    pub active_params: Pair,
    /// Why there is no prediction at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl ModelRow {
    fn said(&self) -> String {
        let Tensors { missing, extra, reshaped } = &self.tensors;
        let mut parts: Vec<String> = self.error.iter().cloned().collect();
        for (what, names) in [("missing", missing), ("extra", extra), ("reshaped", reshaped)] {
            parts.extend(names.first().map(|first| format!("{} tensors {what} ({first})", names.len())));
        }
        for (what, pair) in [("kv", self.kv_bytes_per_token), ("active", self.active_params)] {
            if pair.predicted.unwrap_or(0) != pair.expected.unwrap_or(0) {
                parts.push(format!("{what} {:?} for {:?}", pair.predicted, pair.expected));
            }
        }
        format!("({}) {}", self.model_type, parts.join("; "))
    }
}

/// A predicted and an expected number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// Ours.
    pub predicted: Option<u64>,
    /// The truth's.
    pub expected: Option<u64>,
}

/// Differences between two lists of tensors; at most a few names of each are kept.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Tensors {
    /// In the truth only.
    pub missing: Vec<String>,
    /// In the prediction only.
    pub extra: Vec<String>,
    /// In both with different shapes: `name: ours, theirs`.
    pub reshaped: Vec<String>,
}

/// Scores one truth file.
pub fn score(truth: &Value) -> ModelRow {
    let number = |value: &Value| value.as_u64();
    let mut row = ModelRow {
        id: truth["id"].as_str().unwrap_or("(no id)").to_owned(),
        model_type: truth["model_type"].as_str().unwrap_or_default().to_owned(),
        ok: false,
        params: Pair { predicted: None, expected: number(&truth["total_params"]) },
        tensors: Tensors::default(),
        kv_bytes_per_token: Pair { predicted: None, expected: number(&truth["kv_cache_bytes_per_token_bf16"]) },
        active_params: Pair { predicted: None, expected: number(&truth["active_params"]) },
        error: None,
    };
    if let Err(error) = compare(truth, &mut row) {
        row.error = Some(error);
    }
    let same = |pair: &Pair| pair.predicted == pair.expected;
    // A model without a cache has null or 0 in the truth, and 0 here; of class defaults neither was recorded.
    let recorded = truth["source"] != "class defaults";
    let recorded = |pair: &Pair| recorded || pair.expected.is_some();
    let same_cache = row.kv_bytes_per_token.predicted.unwrap_or(0) == row.kv_bytes_per_token.expected.unwrap_or(0);
    row.ok = row.error.is_none()
        && same(&row.params)
        && (same_cache || !recorded(&row.kv_bytes_per_token))
        && (same(&row.active_params) || !recorded(&row.active_params))
        && row.tensors == Tensors::default();
    row
}

fn compare(truth: &Value, row: &mut ModelRow) -> Result<(), String> {
    let model = Model::new(truth["config"].clone(), truth["auto_class"].as_str()).map_err(|e| e.to_string())?;
    if let Some(note) = model.notes().first() {
        return Err(note.clone());
    }
    let inventory = model.inventory().map_err(|e| e.to_string())?;
    row.params.predicted = Some(inventory.total());
    row.kv_bytes_per_token.predicted = Some(inventory.cache_bytes_per_token(2));
    row.active_params.predicted = inventory.active();
    let expected = expected_tensors(truth)?;
    let mut ours: BTreeMap<&str, Shape> = inventory.parameters.iter().map(|p| (p.name.as_str(), p.shape)).collect();
    for (name, shape) in &expected {
        match ours.remove(name.as_str()) {
            None => row.tensors.missing.push(format!("{name} {shape:?}")),
            Some(own) if own != *shape => row.tensors.reshaped.push(format!("{name}: {own:?}, {shape:?}")),
            Some(_) => {}
        }
    }
    row.tensors.extra = ours.iter().map(|(name, shape)| format!("{name} {shape:?}")).collect();
    Ok(())
}

fn expected_tensors(truth: &Value) -> Result<BTreeMap<String, Shape>, String> {
    let mut tensors = BTreeMap::new();
    for entry in truth["tensors"].as_array().ok_or("the truth file has no list under \"tensors\"")? {
        let (Some(text), Some(sizes)) = (entry[0].as_str(), entry[1].as_array()) else {
            return Err(format!("tensors: {entry} is not a pair of a pattern and a shape"));
        };
        let sizes: Option<Vec<u64>> = sizes.iter().map(Value::as_u64).collect();
        let shape = Shape::new(&sizes.ok_or_else(|| format!("tensors: {text} has a bad shape"))?);
        tensors.extend(pattern::expand(text)?.into_iter().map(|name| (name, shape)));
    }
    Ok(tensors)
}
