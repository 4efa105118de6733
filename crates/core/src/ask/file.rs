//! Plan files, reports and files of other tools, as layers of a request.

use serde_json::{Map, Value, json};

use super::line::{self, serving};
use super::read::Given;
use super::request::Task;
use super::resolve::faults_of;
use super::tree;
use crate::plan::import::{self, Beside, Imported};
use crate::plan::parallel::DeepSpeedFile;
use crate::plan::placement::Placement;
use crate::plan::{AdapterPlan, Fault};

/// What stands in a file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Content {
    /// What the plan is for, where the file says it.
    pub task: Option<Task>,
    /// The model it names.
    pub model: Option<String>,
    /// Its `config.json`, where the file tells sizes and no name.
    pub config: Option<Value>,
    /// The transformers class that loads it, where the file says it.
    pub auto_class: Option<String>,
    /// Whose defaults hold where the file is silent.
    pub framework: Option<String>,
    /// Part of a plan.
    pub tree: Value,
    /// DeepSpeed's configuration that it holds or names.
    pub deepspeed: Option<Value>,
    /// Settings by the names of their flags, as lines of serving engines have them.
    pub named: Vec<(String, Given)>,
    /// What was not read, or was read in another sense.
    pub notes: Vec<String>,
    /// Roles on shared cards, in a plan's place.
    pub placement: Option<Placement>,
}

/// Keys that only a plan of generation has.
const GENERATION: [&str; 10] = [
    "new_tokens",
    "stop_after",
    "cache",
    "beams",
    "choice",
    "forced_length",
    "assistant",
    "prompt_lookup",
    "accepted",
    "device_map",
];

/// Keys of plan files beside the places of settings.
const OUTSIDE: [&str; 9] = ["model", "framework", "task", "train", "infer", "serve", "stack", "loss", "assistant"];

impl Content {
    /// A plan of our own, a report, or a file of another tool that refers to no other file.
    pub fn read(value: Value) -> Result<Self, Vec<Fault>> {
        Self::read_beside(value, &Beside::default())
    }

    /// A plan of our own, a report, or a file of another tool.
    pub fn read_beside(value: Value, beside: &Beside<'_>) -> Result<Self, Vec<Fault>> {
        let Value::Object(_) = &value else {
            return Err(vec![Fault::new("", "a plan file holds an object, see `vramcast schema`")]);
        };
        if value.get("totals").is_some_and(Value::is_object) {
            return Ok(Self::of_report(value));
        }
        if let Some(imported) = import::read(&value, beside)? {
            return Ok(Self::of_imported(imported));
        }
        if let Some(object) = value.as_object().filter(|object| serving::is_file(object)) {
            return serving::file(object);
        }
        if let Some(words) = line::containers::words(&value) {
            return line::read(&words, beside.open, beside.without);
        }
        Self::recognise(&value)?;
        Self::own(value)
    }

    /// What another tool's file comes to.
    pub fn of_imported(imported: Imported) -> Self {
        let mut tree = json!({});
        for (path, value) in imported.changes {
            tree::set(&mut tree, &path, value);
        }
        let said = imported.unsimulated.into_iter().map(|what| format!("not simulated: {what}"));
        Self {
            task: Some(if imported.generates { Task::Infer } else { Task::Train }),
            model: imported.model,
            config: imported.config,
            framework: imported.framework.map(str::to_owned),
            tree,
            deepspeed: imported.deepspeed,
            notes: imported.notes.into_iter().chain(said).collect(),
            placement: imported.placement,
            ..Self::default()
        }
    }

    /// Roles on shared cards, with what is to be said of their file.
    pub fn take_placement(&mut self) -> Option<Placement> {
        let mut placement = self.placement.take()?;
        placement.notes.append(&mut self.notes);
        Some(placement)
    }

    /// Refuses a file that holds no key of a plan: what it says would be lost.
    fn recognise(value: &Value) -> Result<(), Vec<Fault>> {
        let ours = |key: &String| {
            let places = super::table::all().map(|row| row.path.split('.').next().unwrap_or_default());
            OUTSIDE.iter().copied().chain(places).any(|known| known == key)
        };
        let Some(object) = value.as_object().filter(|object| !object.is_empty()) else { return Ok(()) };
        // One of ours among many others is a coincidence.
        if object.keys().filter(|key| ours(key)).count() * 3 > object.len() {
            return Ok(());
        }
        let keys: Vec<&str> = object.keys().take(3).map(String::as_str).collect();
        let problem = format!(
            "its kind is not known: {} {} no key of a plan",
            keys.join(", "),
            if keys.len() == 1 { "is" } else { "are" }
        );
        Err(vec![Fault::new("", problem).or(format!("give {}", import::kinds::READ))])
    }

    /// A plan of our own: its keys are places, beside the model, a framework and the kind.
    fn own(mut tree: Value) -> Result<Self, Vec<Fault>> {
        let mut task = None;
        if let Some(object) = tree.as_object_mut().filter(|object| object.len() == 1) {
            for (key, kind) in [("train", Task::Train), ("infer", Task::Infer), ("serve", Task::Infer)] {
                if let Some(inner) = object.get_mut(key).map(Value::take) {
                    (tree, task) = (inner, Some(kind));
                    break;
                }
            }
        }
        let mut text = |key: &str| match tree.as_object_mut().and_then(|object| object.shift_remove(key)) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(name)) => Ok(Some(name)),
            Some(other) => Err(vec![Fault::new(key, format!("{{{key}}}: {other} is not a name"))]),
        };
        let (model, framework, kind) = (text("model")?, text("framework")?, text("task")?);
        task = match kind.as_deref() {
            Some("train") => Some(Task::Train),
            Some("infer") => Some(Task::Infer),
            Some(other) => return Err(vec![Fault::value("task", other, "train or infer")]),
            None => task,
        };
        let generates = GENERATION.iter().any(|key| tree.get(key).is_some());
        let serves = tree.get("engine").is_some_and(Value::is_string);
        if generates || serves {
            task = task.or(Some(Task::Infer));
        }
        Ok(Self { task, model, framework, tree, ..Self::default() })
    }

    /// A report as the request it answered; an older one without it, as its plan.
    fn of_report(mut report: Value) -> Self {
        let model = report.pointer("/model/name").and_then(Value::as_str).map(str::to_owned);
        let kinds = [("train", Task::Train), ("infer", Task::Infer), ("serve", Task::Infer)];
        let found = kinds.into_iter().find(|(key, _)| report["plan"].get(key).is_some());
        let task = found.map(|(_, task)| task);
        if let Some(request) = report.get_mut("request").filter(|request| request.is_object()) {
            let framework = request["framework"].as_str().map(str::to_owned);
            return Self { task, model, framework, tree: request["settings"].take(), ..Self::default() };
        }
        let tree = found.map_or_else(|| Value::Object(Map::new()), |(key, _)| report["plan"][key].take());
        Self { task, model, tree, ..Self::default() }
    }

    /// DeepSpeed's own configuration; `hidden_size` fills in what is `auto`.
    pub fn of_deepspeed(document: &Value, hidden_size: Option<u64>) -> Result<Self, Vec<Fault>> {
        const AT: &str = "parallel.engine.*";
        let file = DeepSpeedFile::read(document, hidden_size)
            .map_err(|error| faults_of(error, "parallel.engine.deepspeed"))?;
        let mut tree = json!({});
        let mut put = |path: &str, value: Option<Value>| {
            if let Some(value) = value {
                tree::set(&mut tree, path, value);
            }
        };
        put(&format!("{AT}.zero"), serde_json::to_value(&file.engine.zero).ok());
        put(&format!("{AT}.grad_accum_dtype"), file.engine.grad_accum_dtype.map(|dtype| json!(dtype.name())));
        put("weights", file.weights.map(|dtype| json!(dtype.name())));
        put("batch.batch_size", file.batch_size.map(Into::into));
        put("gradient_accumulation", file.gradient_accumulation.map(Into::into));
        put("clip", file.clip.then(|| json!(true)));
        Ok(Self { tree, notes: file.notes, ..Self::default() })
    }

    /// PEFT's `adapter_config.json`.
    pub fn of_adapter(config: &Value) -> Result<Self, Vec<Fault>> {
        let (adapter, ignored) =
            AdapterPlan::from_adapter_config(config).map_err(|error| faults_of(error, "adapter"))?;
        let notes = ignored.iter().map(|key| format!("adapter_config.json: {key} has no effect on memory")).collect();
        let mut tree = json!({"adapter": adapter});
        // The file says nothing of it: whoever trains decides.
        if tree::get(&tree, "adapter.dtype").is_some_and(Value::is_null) {
            tree::take(&mut tree, "adapter.dtype");
        }
        Ok(Self { tree, notes, ..Self::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_and_plans_are_read_alike() {
        let read = |value: Value| Content::read(value).unwrap();
        let report = json!({"model": {"name": "gpt2"}, "totals": {}, "plan": {"train": {"clip": true}}});
        let content = read(report);
        assert_eq!(
            (content.model.as_deref(), content.task, content.tree),
            (Some("gpt2"), Some(Task::Train), json!({"clip": true}))
        );
        let asked = json!({"model": {"name": "gpt2"}, "totals": {}, "plan": {"infer": {"beams": 1}},
            "request": {"settings": {"beams": 2}}});
        assert_eq!((read(asked.clone()).task, read(asked).tree), (Some(Task::Infer), json!({"beams": 2})));
        assert_eq!(read(json!({"train": {"clip": true}})).tree, json!({"clip": true}));
        assert_eq!(read(json!({"new_tokens": 3})).task, Some(Task::Infer));
        let named = read(json!({"model": "gpt2", "framework": "trl", "clip": true}));
        assert_eq!((named.framework.as_deref(), named.tree), (Some("trl"), json!({"clip": true})));
        assert!(Content::read(json!({"model": 3})).is_err() && Content::read(json!([1])).is_err());
    }
}
