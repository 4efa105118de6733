//! `--framework` and `--plan`: where a plan starts from before flags change it.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;
use vramcast_core::plan::framework::change;
use vramcast_core::plan::{Framework, Gpus, Origin, Situation, TrainPlan, import, provenance};

use super::{Failure, plan_file};

/// Where a plan starts from.
#[derive(Debug, Args)]
pub(super) struct StartArguments {
    /// A plan as JSON, TOML or YAML (`vramcast schema`), or a file of axolotl, LLaMA-Factory, TRL or transformers'
    /// Trainer, known by its keys; flags override it.
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Start from a framework's defaults: hf-trainer, trl, unsloth, axolotl or llama-factory; see `vramcast list
    /// frameworks`.
    #[arg(long, value_name = "NAME")]
    framework: Option<String>,
}

/// A plan before flags.
pub(super) struct Start {
    /// The plan.
    pub(super) plan: TrainPlan,
    /// The model a file names.
    pub(super) model: Option<String>,
    /// What a report should say.
    pub(super) notes: Vec<String>,
    /// Whether a file names the card.
    pub(super) names_card: bool,
    /// Where the card comes from, when neither a flag nor a file names it.
    pub(super) card_from: Option<String>,
    profile: Option<(Framework, Situation)>,
    from_file: bool,
}

impl Start {
    /// Where every value of the finished plan comes from.
    pub(super) fn provenance(&self, plan: &TrainPlan) -> Vec<Origin> {
        let chosen = self.profile.as_ref().map(|(framework, situation)| framework.provenance(plan, *situation));
        let mut origins = provenance::trace(plan, self.from_file.then_some(&self.plan), &chosen.unwrap_or_default());
        if let Some(from) = &self.card_from {
            origins.iter_mut().filter(|origin| origin.key == "gpu.name").for_each(|origin| origin.from = from.clone());
        }
        origins
    }
}

impl StartArguments {
    /// Whether a file was given.
    pub(super) fn has_file(&self) -> bool {
        self.plan.is_some()
    }

    /// The plan that flags are applied to; `asked` is what kind of run the flags ask for.
    pub(super) fn read(&self, asked: Situation, cards: impl Fn() -> Result<Gpus, Failure>) -> Result<Start, Failure> {
        let mut start = Start {
            plan: TrainPlan::default(),
            model: None,
            notes: Vec::new(),
            names_card: false,
            card_from: None,
            profile: None,
            from_file: self.has_file(),
        };
        let mut file = self.plan.as_deref().map(plan_file::read).transpose()?;
        start.names_card = file.as_ref().is_some_and(|file| file.get("gpu").is_some());
        let imported = match (&self.plan, &file) {
            (Some(path), Some(value)) => {
                import::read(value).map_err(|error| Failure::bad_input(format!("{}: {error}", path.display())))?
            }
            _ => None,
        };
        let situation = match (&imported, asked) {
            (Some(imported), Situation::Full) => imported.situation,
            (None, Situation::Full) => file.as_ref().map_or(Situation::Full, situation_of),
            (_, asked) => asked,
        };
        let name = self.framework.as_deref().or(imported.as_ref().map(|imported| imported.framework));
        if let Some(name) = name {
            let framework = Framework::find(name)?;
            start.plan = framework.apply(&start.plan, situation)?;
            start.notes.extend(framework.notes.iter().cloned());
            start.profile = Some((framework, situation));
        }
        if let Some(imported) = imported {
            start.plan = change(&start.plan, imported.changes.iter().map(|(key, value)| (key.as_str(), value)))?;
            start.model = imported.model;
            let shown = self.plan.as_deref().map(|path| path.display().to_string()).unwrap_or_default();
            start.notes.extend(imported.notes.iter().map(|note| format!("{shown}: {note}")));
        } else if let (Some(path), Some(value)) = (&self.plan, &mut file) {
            start.model = own(path, value, &mut start.plan, cards)?;
        }
        Ok(start)
    }
}

/// What kind of run a plan file of our own describes.
fn situation_of(file: &Value) -> Situation {
    let has = |key: &str| file.get(key).is_some_and(|value| !value.is_null());
    match (has("adapter"), has("quantization")) {
        (_, true) => Situation::Quantised,
        (true, _) => Situation::Adapter,
        _ => Situation::Full,
    }
}

/// A plan file of our own over a plan; `gpu` may be a name, and `model` may stand in it.
fn own(
    path: &Path,
    value: &mut Value,
    plan: &mut TrainPlan,
    cards: impl Fn() -> Result<Gpus, Failure>,
) -> Result<Option<String>, Failure> {
    let model = value.as_object_mut().and_then(|object| object.remove("model"));
    let model = match model {
        None | Some(Value::Null) => None,
        Some(Value::String(name)) => Some(name),
        Some(other) => return Err(Failure::bad_input(format!("{}: model: {other} is not a name", path.display()))),
    };
    if let Some(name) = value.get("gpu").and_then(Value::as_str) {
        let card = cards()?.find(name)?;
        value["gpu"] = serde_json::to_value(card).map_err(|e| Failure::bad_input(e.to_string()))?;
    }
    let mut whole = serde_json::to_value(&*plan).map_err(|e| Failure::bad_input(e.to_string()))?;
    merge(&mut whole, value);
    *plan = serde_json::from_value(whole).map_err(|e| {
        Failure::bad_input(format!("{}: {e}", path.display())).hint("`vramcast schema` prints what a plan may hold")
    })?;
    Ok(model)
}

/// Lays one tree over another; an adapter of another method replaces the one below.
fn merge(below: &mut Value, above: &Value) {
    match (below, above) {
        (Value::Object(below), Value::Object(above))
            if above.get("method").is_none() || above.get("method") == below.get("method") =>
        {
            for (key, value) in above {
                merge(below.entry(key).or_insert(Value::Null), value);
            }
        }
        (below, above) => *below = above.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn files_lie_over_defaults() {
        let mut below = json!({"a": {"b": 1, "c": 2}, "adapter": {"method": "lora", "rank": 8}});
        merge(&mut below, &json!({"a": {"b": 3}, "adapter": {"method": "other", "x": 1}}));
        assert_eq!(below, json!({"a": {"b": 3, "c": 2}, "adapter": {"method": "other", "x": 1}}));
    }
}
