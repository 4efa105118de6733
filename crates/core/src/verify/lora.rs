//! LoRA truth: trainable parameters by model, rank and targets, or that PEFT refuses.

use serde::Serialize;
use serde_json::Value;

use super::kinds::{Kind, Score};
use super::models::Pair;
use crate::model::{Inventory, Model};
use crate::plan::adapter::{AdaptedKind, AdapterLayout, LoraPlan};
use crate::source::catalogue;

/// Files of LoRA rows.
pub(super) const KIND: Kind = Kind {
    name: "lora",
    noun: "LoRA rows",
    looks: "one document whose `rows` have `target_modules` and what PEFT trains then",
    levels: &[],
    joined: false,
    rows: |file| {
        let rows = file.documents.first()?["rows"].as_array()?;
        rows.iter().all(|row| row.get("target_modules").is_some()).then(|| rows.clone())
    },
    score: |_, row| {
        let id = row["id"].as_str().unwrap_or_default();
        vec![match model(row, id).map(|model| score(row, &model)) {
            Err(why) => Score::skipped(id, &why),
            Ok(row) => Score::exact(id, (!row.ok).then(|| row.said()), &row),
        }]
    },
};

/// The model a row names, of the catalogue, or that it brings.
fn model(row: &Value, id: &str) -> Result<Model, String> {
    let entry = catalogue::find(id);
    let config = row.get("config").cloned().or_else(|| entry.as_ref().map(|entry| entry.config.clone()));
    let auto_class = row["auto_class"].as_str().map(str::to_owned).or_else(|| entry.and_then(|entry| entry.auto_class));
    let config = config.ok_or_else(|| format!("{id} is not in the catalogue and the row has no config"))?;
    Model::new(config, auto_class.as_deref()).map_err(|e| e.to_string())
}

/// How one row compares.
#[derive(Debug, Clone, Serialize)]
pub struct LoraRow {
    /// The model.
    pub id: String,
    /// The targets, as the row gives them.
    pub targets: Value,
    /// Whether everything is equal: the counts, or the refusal.
    pub ok: bool,
    /// Trainable parameters; absent where refused.
    pub trainable: Pair,
    /// Trainable tensors.
    pub tensors: Pair,
    /// Adapted modules.
    pub modules: Pair,
    /// Why ours is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Why PEFT refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_refusal: Option<String>,
}

impl LoraRow {
    fn said(&self) -> String {
        let Pair { predicted, expected } = self.trainable;
        let refused = self.refused.as_deref().unwrap_or_default();
        format!("{} trainable {predicted:?}, expected {expected:?} {refused}", self.targets)
    }
}

/// Scores one row of the file's `rows` on the model its `id` names.
pub fn score(row: &Value, model: &Model) -> LoraRow {
    let pair = |key: &str| Pair { predicted: None, expected: row[key].as_u64() };
    let mut scored = LoraRow {
        id: row["id"].as_str().unwrap_or("(no id)").to_owned(),
        targets: row["target_modules"].clone(),
        ok: false,
        trainable: pair("trainable_params"),
        tensors: pair("n_trainable_tensors"),
        modules: pair("n_adapted_modules"),
        refused: None,
        expected_refusal: row["error"].as_str().map(str::to_owned),
    };
    match predict(row, model) {
        Ok((layout, inventory)) => {
            scored.trainable.predicted = Some(layout.trainable());
            scored.tensors.predicted = Some(layout.trainable_tensors());
            scored.modules.predicted = Some(layout.adapted.len() as u64);
            let same = |pair: &Pair| pair.expected.is_none() || pair.predicted == pair.expected;
            let total = inventory.total();
            let total_is_right = row["base_total_params"].as_u64().is_none_or(|expected| expected == total);
            scored.ok = scored.expected_refusal.is_none()
                && total_is_right
                && [&scored.trainable, &scored.tensors, &scored.modules].into_iter().all(same)
                && names_are_right(row, &layout);
        }
        Err(why) => {
            scored.ok = scored.expected_refusal.is_some();
            scored.refused = Some(why);
        }
    }
    scored
}

fn predict(row: &Value, model: &Model) -> Result<(AdapterLayout, Inventory), String> {
    let mut config = row.as_object().cloned().unwrap_or_default();
    let known = ["r", "target_modules", "use_dora", "modules_to_save", "target_parameters", "bias", "rank_pattern"];
    config.retain(|key, _| known.contains(&key.as_str()) || key.starts_with("layers_") || key == "exclude_modules");
    if config.get("target_modules").is_some_and(|targets| targets == "peft-default") {
        config.remove("target_modules");
    }
    let (plan, _) = LoraPlan::from_adapter_config(&Value::Object(config)).map_err(|e| e.to_string())?;
    let inventory = model.inventory().map_err(|e| e.to_string())?;
    let model_type = model.config()["model_type"].as_str().unwrap_or_default();
    let layout = AdapterLayout::of_inventory(&plan, model_type, &inventory).map_err(|e| e.to_string())?;
    Ok((layout, inventory))
}

/// The row counts adapted modules by their last name; fused parameters are wrapped around one another, so those are left
/// to the totals.
fn names_are_right(row: &Value, layout: &AdapterLayout) -> bool {
    let Some(expected) = row["adapted_by_name"].as_object() else { return true };
    let mut ours = std::collections::BTreeMap::<&str, u64>::new();
    for module in layout.adapted.iter().filter(|m| !matches!(m.kind, AdaptedKind::Parameter { .. })) {
        *ours.entry(module.name.rsplit('.').next().unwrap_or_default()).or_default() += 1;
    }
    ours.iter().all(|(name, count)| expected.get(*name).and_then(Value::as_u64).is_some_and(|n| n >= *count))
}
