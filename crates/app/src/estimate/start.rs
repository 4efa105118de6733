//! Where a plan starts from: a framework's defaults, then the content of a plan file.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use vramcast_core::dtype::DType;
use vramcast_core::plan::framework::change;
use vramcast_core::plan::{Batch, Framework, Gpus, InferPlan, Origin, Situation, TrainPlan, import, provenance};

use crate::cli::model::{Found, positions, too_long};
use crate::cli::{Failure, Place};

/// The content of a plan file, and what to call it.
pub(crate) struct File {
    /// What messages call it.
    pub(crate) name: String,
    /// What stands in it.
    pub(crate) value: Value,
}

/// A plan before flags.
pub(crate) struct Start {
    /// The plan.
    pub(crate) plan: TrainPlan,
    /// The model a file names.
    pub(crate) model: Option<String>,
    /// What a report should say.
    pub(crate) notes: Vec<String>,
    /// Whether the file says how long samples are.
    pub(crate) states_length: bool,
    /// Whether the file names the card.
    pub(crate) names_card: bool,
    /// Where the card comes from, when neither a flag nor a file names it.
    pub(crate) card_from: Option<String>,
    profile: Option<(Framework, Situation)>,
    from_file: bool,
}

impl Start {
    /// The plan of a framework and a file; `asked` is what kind of run flags ask for.
    pub(crate) fn read(
        file: Option<File>,
        framework: Option<&str>,
        asked: Situation,
        cards: impl Fn() -> Result<Gpus, Failure>,
    ) -> Result<Self, Failure> {
        let mut start = Self {
            plan: TrainPlan::default(),
            model: None,
            notes: Vec::new(),
            states_length: false,
            names_card: file.as_ref().is_some_and(|file| file.value.get("gpu").is_some()),
            card_from: None,
            profile: None,
            from_file: file.is_some(),
        };
        let imported = match &file {
            Some(file) => import::read(&file.value).map_err(|error| {
                Failure::bad_input(format!("{}: {error}", file.name)).at(Place::Plan(String::new()))
            })?,
            None => None,
        };
        let situation = match (&imported, asked) {
            (Some(imported), Situation::Full) => imported.situation,
            (None, Situation::Full) => file.as_ref().map_or(Situation::Full, |file| situation_of(&file.value)),
            (_, asked) => asked,
        };
        if let Some(name) = framework.or(imported.as_ref().map(|imported| imported.framework)) {
            let framework = Framework::find(name)?;
            start.plan = framework.apply(&start.plan, situation)?;
            start.notes.extend(framework.notes.iter().cloned());
            start.profile = Some((framework, situation));
        }
        let Some(mut file) = file else { return Ok(start) };
        if let Some(imported) = imported {
            start.plan = change(&start.plan, imported.changes.iter().map(|(key, value)| (key.as_str(), value)))?;
            start.states_length = imported.changes.iter().any(|(key, _)| key == "batch.seq_len");
            start.model = imported.model;
            start.notes.extend(imported.notes.iter().map(|note| format!("{}: {note}", file.name)));
        } else {
            start.states_length = states_length(&file.value);
            start.model = take_model(&mut file)?;
            start.plan = lay_over(&start.plan, file, cards)?;
        }
        Ok(start)
    }

    /// Where every value of the finished plan comes from.
    pub(crate) fn provenance(&self, plan: &TrainPlan) -> Vec<Origin> {
        let chosen = self.profile.as_ref().map(|(framework, situation)| framework.provenance(plan, *situation));
        let mut origins = provenance::trace(plan, self.from_file.then_some(&self.plan), &chosen.unwrap_or_default());
        if let Some(from) = &self.card_from {
            origins.iter_mut().filter(|origin| origin.key == "gpu.name").for_each(|origin| origin.from = from.clone());
        }
        origins
    }

    /// Fits the plan to the model: samples that nobody gave a length are no longer than the model can take.
    pub(crate) fn settle(&mut self, plan: &mut TrainPlan, found: &Found, stated: bool) -> Result<(), Failure> {
        let most = found.model.as_ref().and_then(positions);
        if let Some(most) = most.filter(|most| *most < plan.batch.seq_len) {
            if stated || self.states_length {
                let place = Place::Plan("/batch/seq_len".into());
                return Err(too_long(&found.name, plan.batch.seq_len, most).at(place));
            }
            plan.batch.seq_len = most;
            self.notes.push(format!("the model has {most} positions: samples are {most} tokens long"));
        }
        Ok(())
    }
}

/// The plan of generation that flags are applied to: what the config says about weights, then a file.
pub(crate) fn generation(
    file: Option<File>,
    stored: Option<DType>,
    cards: impl Fn() -> Result<Gpus, Failure>,
) -> Result<(InferPlan, Option<String>), Failure> {
    let batch = Batch { seq_len: 1024, ..Batch::default() };
    let plan = InferPlan { batch, weights: stored.unwrap_or(DType::BF16), ..InferPlan::default() };
    let Some(mut file) = file else { return Ok((plan, None)) };
    let model = take_model(&mut file)?;
    Ok((lay_over(&plan, file, cards)?, model))
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

fn states_length(file: &Value) -> bool {
    file.pointer("/batch/seq_len").is_some()
}

/// The model that stands in a plan file.
fn take_model(file: &mut File) -> Result<Option<String>, Failure> {
    match file.value.as_object_mut().and_then(|object| object.shift_remove("model")) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) => Ok(Some(name)),
        Some(other) => {
            Err(Failure::bad_input(format!("{}: model: {other} is not a name", file.name))
                .at(Place::Plan("/model".into())))
        }
    }
}

/// A plan file of our own over a plan; `gpu` may be a name.
fn lay_over<Plan: Serialize + DeserializeOwned>(
    plan: &Plan,
    mut file: File,
    cards: impl Fn() -> Result<Gpus, Failure>,
) -> Result<Plan, Failure> {
    let broken = |error: serde_json::Error| Failure::bad_input(error.to_string());
    if let Some(name) = file.value.get("gpu").and_then(Value::as_str) {
        let card = cards()?.find(name).map_err(|error| Failure::from(error).at(Place::Plan("/gpu".into())))?;
        file.value["gpu"] = serde_json::to_value(card).map_err(broken)?;
    }
    let mut whole = serde_json::to_value(plan).map_err(broken)?;
    if file.value.get("gpu").is_some() {
        // A card of one's own takes nothing from the usual one.
        whole["gpu"] = Value::Null;
    }
    merge(&mut whole, &file.value);
    let read: Plan = serde_path_to_error::deserialize(whole).map_err(|error| {
        let (shown, path) = (error.path().to_string(), pointer(error.path()));
        let problem = error.into_inner();
        let within = if path.is_empty() { String::new() } else { format!("{shown}: ") };
        Failure::bad_input(format!("{}: {within}{problem}", file.name))
            .hint("`vramcast schema` prints what a plan may hold")
            .at(Place::Plan(path))
    })?;
    match list_for_object(&file.value, &serde_json::to_value(&read).map_err(broken)?, "") {
        None => Ok(read),
        Some(place) => {
            Err(Failure::bad_input(format!("{}: {place} is a list, not an object", file.name)).at(Place::Plan(place)))
        }
    }
}

/// Where a file has a list for an object: serde would take its values in order.
fn list_for_object(file: &Value, read: &Value, place: &str) -> Option<String> {
    match (file, read) {
        (Value::Array(_), Value::Object(_)) => Some(place.to_owned()),
        (Value::Object(file), Value::Object(read)) => {
            file.iter().find_map(|(key, value)| list_for_object(value, read.get(key)?, &format!("{place}/{key}")))
        }
        _ => None,
    }
}

/// A path as a JSON pointer.
pub(crate) fn pointer(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    let mut pointer = String::new();
    for segment in path.iter() {
        match segment {
            Segment::Seq { index } => pointer += &format!("/{index}"),
            Segment::Map { key } | Segment::Enum { variant: key } => {
                pointer += &format!("/{}", key.replace('~', "~0").replace('/', "~1"));
            }
            Segment::Unknown => {}
        }
    }
    pointer
}

/// Lays one tree over another; an adapter of another method replaces the one below.
pub(crate) fn merge(below: &mut Value, above: &Value) {
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

    fn place(value: Value) -> Option<Place> {
        let file = File { name: "plan".into(), value };
        let start = Start::read(Some(file), None, Situation::Full, || Ok(Gpus::embedded()));
        start.err().and_then(|failure| failure.place().cloned())
    }

    #[test]
    fn mistakes_have_a_place() {
        let at = |pointer: &str| Some(Place::Plan(pointer.into()));
        assert_eq!(place(json!({"batch": {"seq_len": "long"}})), at("/batch/seq_len"));
        assert_eq!(place(json!({"batch": {"nothing": 1}})), at("/batch/nothing"));
        assert_eq!(place(json!({"gpu": "no such card"})), at("/gpu"));
        assert_eq!(place(json!({"parallel": {"engine": {"fsdp2": {"wrap": 3}}}})), at("/parallel/engine/fsdp2/wrap"));
        assert_eq!(place(json!({"gpu": {"name": "mine"}})), at("/gpu"));
        assert_eq!(place(json!({"batch": [1, 2]})), at("/batch"));
        assert_eq!(place(json!({"parallel": {"mesh": [1], "engine": {"ddp": {}}}})), at("/parallel/mesh"));
        assert_eq!(place(json!({"batch": {"seq_len": 5}, "gpu": {"name": "mine", "memory": 1}})), None);
    }
}
