//! What is asked: layers of values, whoever brings them, as one tree over a framework's defaults.

use serde_json::{Value, json};

use super::read::{self, Given};
use super::runner::{Runner, Scope};
use super::setting::Kind;
use super::{deduce, table, tree};
use crate::model::Assumption;
use crate::plan::{Fault, Faults, Framework, InferPlan, ServePlan, TaskKind, TrainPlan};

/// What a plan is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// Training.
    #[default]
    Train,
    /// Generation and serving.
    Infer,
}

/// Layers as a door takes them: whole trees (files, a request's plan), lowest first, then names with values.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// What for.
    pub task: Task,
    /// Whose defaults lie below everything.
    pub framework: Option<String>,
    /// Parts of plans.
    pub trees: Vec<Value>,
    /// Flags or keywords, and what stands behind them.
    pub named: Vec<(String, Given)>,
    /// What a report should say about how this was read.
    pub notes: Vec<String>,
    /// Whether settings that whoever runs does not have are let through: formulas take any.
    pub lenient: bool,
}

/// What is asked, in one tree.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// What for.
    pub task: Task,
    /// Who runs it.
    pub runner: Runner,
    /// Whose defaults lie below.
    pub framework: Option<String>,
    /// Every value that was asked for.
    pub stated: Value,
    /// What a report should say about how this was read.
    pub notes: Vec<String>,
}

impl Asked {
    /// What stands behind a name.
    pub fn names(&self, name: &str) -> Option<&Given> {
        self.named.iter().rev().find(|(known, _)| known == name).map(|(_, given)| given)
    }

    /// What a model of an unknown type shall be taken for: the model is found before the rest is settled.
    pub fn assumed(&self) -> Result<Option<Assumption>, Fault> {
        let named = match self.names("assume") {
            Some(Given::Text(text)) => Some(json!(text)),
            Some(Given::Value(value)) => Some(value.clone()),
            _ => None,
        };
        let in_trees = || self.trees.iter().rev().find_map(|tree| tree.get("assume")).cloned();
        let Some(value) = named.or_else(in_trees).filter(|value| !value.is_null()) else { return Ok(None) };
        let known = value.as_str().and_then(Assumption::find);
        known.map(Some).ok_or_else(|| Fault::value("assume", value, "decoder"))
    }

    fn laid(&self) -> Value {
        let mut stated = json!({});
        for tree in &self.trees {
            let mut tree = tree.clone();
            plain_names(&mut tree);
            tree::lay(&mut stated, &tree);
        }
        stated
    }

    fn deduced(&self, stated: &Value) -> Result<Runner, Fault> {
        match self.task {
            Task::Train => {
                deduce::trainer(stated, &self.named, self.framework.as_deref().or_else(|| self.own_framework(stated)))
            }
            Task::Infer => deduce::server(stated, &self.named),
        }
    }

    /// The framework whose trainer runs the task that is asked for.
    fn own_framework(&self, stated: &Value) -> Option<&'static str> {
        let named = self.named.iter().rev().find_map(|(name, given)| match given {
            Given::Text(text) if name == "task" => Some(text.as_str()),
            _ => None,
        });
        let kind = named.or_else(|| tree::get(stated, "objective.kind").and_then(Value::as_str))?;
        TaskKind::called(kind)?.framework()
    }

    /// A file's adapters, and the quantised base that only they can be trained on, go where somebody types that they are off.
    fn without_adapters(&mut self, stated: &mut Value) {
        let typed = |name: &str| matches!(self.names(name), Some(given @ Given::Text(_)) if is_off(given));
        let Some(off) = ["lora", "qlora"].into_iter().find(|name| typed(name)) else { return };
        for part in ["adapter", "quantization"] {
            if let Some(said) = stated.get_mut(part).filter(|said| !said.is_null()) {
                *said = Value::Null;
                self.notes.push(format!("{part} of the file is left out: --{off} is off"));
            }
        }
    }

    /// The option of adapters that is given where LoRA is said to be off.
    fn beside_no_lora(&self, runner: Runner) -> Option<String> {
        self.names("lora").filter(|given| is_off(given))?;
        let option = |(name, given): &(String, Given)| {
            let row = table::called(name, runner)?;
            (row.path.starts_with("adapter.") && !says_nothing(given)).then(|| row.path.to_owned())
        };
        let method = ["peft-method", "peft_method", "qlora"]
            .iter()
            .any(|name| self.names(name).is_some_and(|given| !is_off(given)));
        self.named.iter().find_map(option).filter(|_| !method)
    }

    /// Lays what only says more of something, where that is asked for. What is switched off of something that is not there is
    /// off already; all else has no effect.
    fn join_details(&self, stated: &mut Value, details: Vec<Named>, usual: &Value, faults: &mut Faults) {
        let framework = self.framework.as_deref().and_then(|name| Framework::find(name).ok());
        let before = stated.clone();
        for one in details {
            let Some((whole, without)) = one.needs(usual) else { continue };
            // Other defaults of a framework hold where there is such a thing.
            let makes = |key: &str| [".scheme", ".method", ""].iter().any(|end| key.strip_suffix(end) == Some(&whole));
            let chosen = framework.as_ref().is_some_and(|own| own.defaults.iter().any(|one| makes(&one.key)));
            if chosen || tree::get(&before, &whole).is_some_and(|value| !value.is_null()) {
                join(stated, one.tree);
            } else if let (Some(without), Some(row)) = (without, one.row.filter(|_| !one.is_off)) {
                let path = format!("{}#{}", row.path, row.flag);
                let fault = Fault { path: row.path.into(), ..Fault::no_effect(path, without) };
                faults.add(match whole.as_str() {
                    "quantization" => fault.or_set("quantization", json!({"scheme": "nf4", "double": false})),
                    "assistant.model" => fault.or("name one by {assistant.model}"),
                    _ => fault.or("name one by {adapter#peft-method}"),
                });
            }
        }
    }

    fn simplest(&self) -> Runner {
        if self.task == Task::Train { Runner::OneCard } else { Runner::Transformers }
    }

    /// Who would run it; the simplest one where what is asked names nobody that is known.
    pub fn runner(&self) -> Runner {
        self.deduced(&self.laid()).unwrap_or_else(|_| self.simplest())
    }

    /// The layers as one.
    pub fn request(mut self) -> Result<Request, Vec<Fault>> {
        let mut stated = self.laid();
        if self.framework.is_none() && self.task == Task::Train {
            self.framework = self.own_framework(&stated).map(str::to_owned);
        }
        self.without_adapters(&mut stated);
        let mut faults = Faults::default();
        let runner = self.deduced(&stated).unwrap_or_else(|fault| {
            faults.add(fault);
            self.simplest()
        });
        // One of them would quietly win.
        let other = self.names("peft-method").or_else(|| self.names("peft_method")).and_then(|given| match given {
            Given::Text(text) => Some(text.as_str()),
            Given::Value(value) => value.as_str(),
            Given::Bare => None,
        });
        let lora = self.names("lora").is_some_and(|given| !says_nothing(given));
        if let Some(other) = other.filter(|other| lora && *other != "lora") {
            let fault = Fault::new("adapter", format!("--lora and --peft-method {other} are both given"));
            faults.add(fault.or("leave one of them out"));
        }
        if let Some(other) = self.beside_no_lora(runner) {
            let problem = format!("{{adapter#lora}} is off, and {{{other}}} is an option of adapters");
            faults.add(Fault {
                path: "adapter".into(),
                ..Fault::new("adapter#lora", problem).or_drop(other).or_drop("adapter#lora")
            });
        }
        let usual = usual(self.task, runner);
        let (apart, plain): (Vec<Named>, Vec<Named>) =
            named(&self, runner, &mut faults).into_iter().partition(|one| one.needs(&usual).is_some());
        for layer in plain {
            // Names that may be given several times add up within a layer.
            join(&mut stated, layer.tree);
        }
        self.join_details(&mut stated, apart, &usual, &mut faults);
        // Against a framework's defaults a null counts.
        if self.framework.is_none() {
            drop_idle(&mut stated, &usual);
        }
        let mut request = Request { task: self.task, runner, framework: self.framework, stated, notes: self.notes };
        request.place();
        faults.end()?;
        Ok(request)
    }
}

impl Request {
    /// Puts the engine's own place where `*` stands.
    fn place(&mut self) {
        let Some(engine) = self.stated.pointer_mut("/parallel/engine").and_then(Value::as_object_mut) else { return };
        let Some(options) = engine.shift_remove("*") else { return };
        let above = tree::of(self.runner.place(), options);
        tree::lay(&mut self.stated, &above);
    }
}

/// What a name says.
struct Named {
    row: Option<&'static super::Setting>,
    tree: Value,
    /// A switch that is turned off.
    is_off: bool,
}

/// Settings that say more of something and do not ask for it: what they begin with, what must be there, and what is said else.
const DETAILS: [(&str, &str, &str); 3] = [
    ("quantization.", "quantization", "without quantised weights"),
    ("assistant.", "assistant.model", "where no other model drafts"),
    ("adapter.virtual_tokens", "adapter.method", "without a PEFT method that has virtual tokens"),
];

impl Named {
    /// The part of a plan that must be there for it, and what is said where it is not.
    fn needs(&self, usual: &Value) -> Option<(String, Option<&'static str>)> {
        let path = self.row?.path;
        let detail = DETAILS.iter().find(|(begin, whole, _)| path.starts_with(begin) && path != *whole);
        if let Some((_, whole, without)) = detail {
            return Some(((*whole).to_owned(), Some(without)));
        }
        let ends = path.match_indices('.').map(|(at, _)| &path[..at]);
        // What is as usual throughout is not written: of such a part nothing inside is there either.
        let absent = |part: &&str| tree::get(usual, part).map_or(part.contains('.'), Value::is_null);
        ends.filter(|_| self.is_off).find(absent).map(|part| (part.to_owned(), None))
    }
}

/// Trees of the names, those that stand for several values first.
fn named(asked: &Asked, runner: Runner, faults: &mut Faults) -> Vec<Named> {
    let scope = if asked.task == Task::Train { Scope::TRAIN } else { Scope::INFER };
    let mut found: Vec<(u8, Named)> = Vec::new();
    let mut said: Vec<(&super::Setting, Value)> = Vec::new();
    for (name, given) in &asked.named {
        if *given == Given::Value(Value::Null) {
            continue;
        }
        if name == "set" {
            match assignment(given) {
                Ok(tree) => found.push((3, Named { row: None, tree, is_off: false })),
                Err(fault) => faults.add(fault),
            }
            continue;
        }
        let Some(row) = table::called(name, runner).filter(|row| row.scope.meets(scope)) else {
            faults.add(
                Fault::new(name.clone(), format!("{name} is no setting of {}", runner.title()))
                    .or("`vramcast list settings` shows them"),
            );
            continue;
        };
        let honoured = row.scope.has(runner) || asked.lenient || says_nothing(given);
        match read::read(row, given) {
            Ok(tree) if honoured => {
                contradicted(row, &tree, &mut said, faults);
                found.push((rank(row), Named { row: Some(row), tree, is_off: row.is_switch() && is_off(given) }));
            }
            Ok(tree) if is_usual(&tree) => {}
            Ok(_) => faults.add(without_effect(row, runner, scope)),
            Err(fault) => faults.add(fault),
        }
    }
    let shares = |tree: &Value| Some(tree.get("tensor_split")?.as_array()?.len());
    let counts: Vec<usize> = found.iter().filter_map(|(_, one)| shares(&one.tree)).collect();
    if let [first, .., last] = counts[..]
        && first != last
    {
        let problem = format!("{{tensor_split}} has not one share for each card: {first} and {last}");
        faults.add(Fault::new("tensor_split", problem).or("leave the number of cards out, the shares say it"));
    }
    // The sort is stable: among alike ones the order is the user's.
    crate::order::sort_by_key(&mut found, |(rank, _)| *rank);
    found.into_iter().map(|(_, one)| one).collect()
}

/// Two names of one place that say different things: one of them would quietly win.
fn contradicted<'r>(
    row: &'r super::Setting,
    tree: &Value,
    said: &mut Vec<(&'r super::Setting, Value)>,
    faults: &mut Faults,
) {
    let Some(value) = tree::get(tree, row.path).filter(|value| !value.is_null() && !value.is_object()) else { return };
    // A number of cards and their shares are two things to say; that they fit each other is seen where both are known.
    let both =
        |other: &super::Setting| other.path == row.path && other.flag != row.flag && rank(other).min(rank(row)) > 0;
    if let Some((other, before)) = said.iter().find(|(other, before)| both(other) && before != value) {
        let [one, two] = [other.flag, row.flag].map(|flag| format!("{}#{flag}", row.path));
        let problem = format!("{{{one}}} means {before} here, and {{{two}}} {value}");
        faults.add(Fault { path: row.path.into(), ..Fault::new(two, problem).or("leave one of them out") });
    }
    said.push((row, value.clone()));
}

/// How early a name is laid: what stands for several values first, and a number of cards below their shares.
fn rank(row: &super::Setting) -> u8 {
    match row.kind {
        Kind::Spelled(_) if row.path == "tensor_split" && row.flag == "gpus" => 0,
        Kind::Spelled(_) => 1,
        _ => 2,
    }
}

/// What a plan holds where nobody asks for anything.
fn usual(task: Task, runner: Runner) -> Value {
    let tree = match (task, runner) {
        (Task::Train, _) => serde_json::to_value(TrainPlan::default()),
        (Task::Infer, Runner::Transformers) => serde_json::to_value(InferPlan::default()),
        (Task::Infer, _) => serde_json::to_value(ServePlan::default()),
    };
    tree.unwrap_or_default()
}

/// Nulls where a plan holds null anyway say nothing: words such as `--precision bf16` reset what a file below them said.
fn drop_idle(stated: &mut Value, usual: &Value) {
    let Some(object) = stated.as_object_mut() else { return };
    object.retain(|key, value| !(value.is_null() && usual.get(key).is_some_and(Value::is_null)));
    for (key, value) in object.iter_mut() {
        usual.get(key).into_iter().for_each(|usual| drop_idle(value, usual));
    }
}

fn is_off(given: &Given) -> bool {
    match given {
        Given::Text(text) => read::truth(text) == Some(false),
        Given::Value(value) => *value == json!(false),
        Given::Bare => false,
    }
}

pub(super) fn says_nothing(given: &Given) -> bool {
    matches!(given, Given::Value(Value::Null | Value::Bool(false)))
}

/// Whether a tree only says that there is one of something.
fn is_usual(tree: &Value) -> bool {
    tree::leaves(tree).iter().all(|(path, value)| {
        path.starts_with("parallel.") && !path.starts_with("parallel.engine.") && *value == json!(1)
    })
}

/// A setting that whoever runs does not have, and who has it.
fn without_effect(row: &super::Setting, runner: Runner, scope: Scope) -> Fault {
    let on = match runner {
        Runner::OneCard => "without several cards".to_owned(),
        other => format!("on {}", other.title()),
    };
    // The name that was given, where a place has several.
    let path = table::placed(row.path, runner);
    if path.starts_with("objective.") && runner.trains() {
        let what = format!("{{{path}}} on {}", runner.title());
        return Fault::unsupported(path.clone(), what).or_drop(path).or("run on one card, or under DDP");
    }
    if path == "torch_compile" && runner.trains() {
        return uncompiled(runner);
    }
    let fault = Fault { path: path.clone(), ..Fault::no_effect(format!("{path}#{}", row.flag), on) };
    let who: Vec<Runner> = row.scope.runners().filter(|one| scope.has(*one)).collect();
    if let (Runner::Transformers, [first, _, _, _, ..]) = (runner, who.as_slice()) {
        return fault.or(format!("name an engine that has it, such as --engine {}", first.name()));
    }
    if who.is_empty() || who.len() > 3 || who.contains(&Runner::OneCard) {
        return fault;
    }
    let engine = |fault: Fault, one: &Runner| match one.trains() {
        true => {
            let read = table::called("engine", Runner::OneCard)
                .and_then(|row| read::read(row, &Given::Text(one.name().into())).ok())
                .and_then(|mut tree| tree::take(&mut tree, "parallel.engine"));
            fault.or_set("parallel.engine", read.unwrap_or_default())
        }
        false => fault.or_set("engine", one.name()),
    };
    who.iter().fold(fault, engine)
}

/// Compiled graphs under an engine that they are not modelled for.
pub(super) fn uncompiled(runner: Runner) -> Fault {
    let fault = Fault::unsupported("torch_compile", format!("torch.compile on {}", runner.title()));
    fault.or_drop("torch_compile").or("run on one card, or under FSDP2")
}

/// `PATH=VALUE`.
fn assignment(given: &Given) -> Result<Value, Fault> {
    let text = match given {
        Given::Text(text) => text.clone(),
        Given::Value(Value::Object(object)) => {
            let mut tree = json!({});
            object.iter().for_each(|(path, value)| tree::set(&mut tree, path, value.clone()));
            return Ok(tree);
        }
        _ => String::new(),
    };
    let (path, value) = text.split_once('=').filter(|(path, _)| !path.is_empty()).ok_or_else(|| {
        Fault::new("set", "a setting and its value are written PATH=VALUE, such as quantization.threshold=0")
    })?;
    // A version such as 2.6 is no number.
    let value = match serde_json::from_str(value) {
        Ok(Value::Number(_)) if path.starts_with("stack.") => Value::String(value.to_owned()),
        Ok(value) => value,
        Err(_) => Value::String(value.to_owned()),
    };
    Ok(tree::of(path, value))
}

/// Lays a tree over another; lists of names add up.
fn join(below: &mut Value, above: Value) {
    let mut above = above;
    for path in ["frozen", "parallel.engine.*.ignored"] {
        let (Some(old), Some(new)) = (tree::get(below, path), tree::get(&above, path)) else { continue };
        if let (Some(old), Some(new)) = (old.as_array(), new.as_array()) {
            let all: Vec<Value> = old.iter().chain(new.iter().filter(|name| !old.contains(name))).cloned().collect();
            tree::set(&mut above, path, json!(all));
        }
    }
    tree::lay(below, &above);
}

/// An engine that stands as a bare word, and an adapter without its method.
fn plain_names(tree: &mut Value) {
    if let Some(name) = tree::get(tree, "parallel.engine").and_then(Value::as_str).map(str::to_owned)
        && let Some(row) = table::called("engine", Runner::OneCard)
        && let Ok(written) = read::read(row, &Given::Text(name))
    {
        tree::take(tree, "parallel.engine");
        tree::lay(tree, &written);
    }
    // A key that plans up to now held and that follows from the mesh.
    tree::take(tree, "parallel.communicators");
}

#[cfg(test)]
mod tests;
