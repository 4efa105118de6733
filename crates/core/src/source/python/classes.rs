//! Classes of the file: their fields with defaults, whose children they are, and what a parser of arguments makes of them.

use serde_json::{Map, Value, json};

use super::names::Names;
use super::run::Runner;
use super::tokens::{Line, Token, closing, colon, parts};
use super::{called, unknown, words};

#[derive(Default, Clone)]
pub(super) struct Class {
    /// The classes that it is made of, the farthest last.
    bases: Vec<String>,
    fields: Names,
    methods: Vec<String>,
}

impl Class {
    /// The class of a library that it is a kind of, where that decides what it is for.
    fn kind(&self) -> Option<&String> {
        let decides = |base: &&String| ["Trainer", "Arguments", "Config"].iter().any(|end| base.ends_with(end));
        self.bases.iter().rev().find(decides)
    }
}

impl Runner {
    /// A class's head and body.
    pub(super) fn class(&mut self, tokens: &[Token], body: &[Line]) {
        let name = tokens.get(1).map(Token::shown).unwrap_or_default();
        let open = tokens.iter().position(|token| token.is("(")).unwrap_or(tokens.len());
        let heads = tokens.get(open + 1..closing(tokens, open)).unwrap_or_default();
        let mut class = Class::default();
        for head in parts(heads, ",").iter().filter(|head| !head.iter().any(|token| token.is("="))) {
            let Some(base) = head.last().map(Token::shown) else { continue };
            if let Some(own) = self.classes.get(&base) {
                class.fields.extend(own.fields.clone());
                class.methods.extend(own.methods.clone());
                class.bases.extend(own.bases.clone());
            }
            class.bases.insert(0, base);
        }
        let indent = body.first().map_or(0, |line| line.indent);
        for line in body.iter().filter(|line| line.indent == indent) {
            if let Some(at) = line.tokens.iter().position(|token| token.is("def")) {
                class.methods.extend(line.tokens.get(at + 1).map(Token::shown));
                continue;
            }
            let signs = parts(&line.tokens, "=");
            let [target, value] = signs.as_slice() else { continue };
            if let [Token::Name(field)] = &target[..colon(target).unwrap_or(target.len())] {
                let usual = self.values(value);
                class.fields.insert(field.clone(), default(usual, field));
            }
        }
        self.classes.insert(name, class);
    }

    /// A field of a class of the file.
    pub(super) fn field(&self, class: &Value, name: &str) -> Option<Value> {
        self.classes.get(words(class)?)?.fields.get(name).cloned()
    }

    /// What calling a class of the file gives: its fields, and what it is a kind of.
    pub(super) fn instance(&mut self, name: &str, given: &Map<String, Value>) -> Option<Value> {
        let class = self.classes.get(name)?.clone();
        let kind = class.kind();
        if class.fields.is_empty() && kind.is_none() {
            return None;
        }
        let mut all: Map<String, Value> = class.fields.clone().into_iter().collect();
        all.extend(given.clone());
        let called = kind.map_or(name, String::as_str).to_owned();
        if called.ends_with("Trainer") {
            let own = |names: &[&str]| class.methods.iter().find(|method| names.contains(&method.as_str())).cloned();
            if let Some(method) = own(&["compute_loss", "training_step", "compute_loss_func"]) {
                self.say(format!("{name}: its own {method} is not read: the task's usual one is simulated"));
            }
            let optimizes = ["create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"];
            if let Some(method) = own(&optimizes).filter(|_| !all.contains_key("optimizers")) {
                all.insert("optimizers".into(), unknown(format!("{name}.{method}")));
            }
        }
        Some(self.keep(&called, all))
    }

    /// What `HfArgumentParser((A, B)).parse_args_into_dataclasses()` gives: classes of the file with their defaults and what
    /// the line says; nothing where none of them stands in the file.
    pub(super) fn parsed(&mut self, parser: &Value) -> Option<Value> {
        called(parser).filter(|name| name.ends_with("Parser"))?;
        let named = parser.get("0").or_else(|| parser.get("dataclass_types"))?;
        let named: Vec<Value> = named.as_array().cloned().unwrap_or_else(|| vec![named.clone()]);
        let names: Vec<String> = named.iter().map(|name| words(name).map(str::to_owned).unwrap_or_default()).collect();
        if !names.iter().any(|name| self.classes.contains_key(name)) {
            return None;
        }
        let mut all = Vec::new();
        for name in &names {
            let Some(class) = self.classes.get(name) else {
                all.push(unknown(name.clone()));
                continue;
            };
            // What no other class of the file has is the library's.
            let others = |key: &String| {
                let others = names.iter().filter(|other| *other != name).filter_map(|other| self.classes.get(other));
                others.into_iter().any(|other| other.fields.contains_key(key))
            };
            let library = class.kind().is_some();
            let own = |(key, _): &(&String, &Value)| class.fields.contains_key(*key) || library && !others(key);
            let due = |(key, value): (&String, &Value)| {
                let needed = words(value) == Some(key.as_str());
                needed.then(|| (key.clone(), unknown(format!("--{key}, an argument that its line has to give,"))))
            };
            let mut given: Map<String, Value> = class.fields.iter().filter_map(due).collect();
            given.extend(self.given.iter().filter(own).map(|(key, value)| (key.clone(), value.clone())));
            self.say(format!("{name}: its defaults are taken where the line says nothing else"));
            let made = self.instance(name, &given);
            all.push(made.unwrap_or_else(|| unknown(name.clone())));
        }
        Some(json!(all))
    }
}

/// The default of `field(default=…)`, or what stands there.
fn default(value: Value, name: &str) -> Value {
    let is_field =
        called(&value).is_some_and(|call| call.rsplit('.').next().is_some_and(|call| call.to_lowercase() == "field"));
    if !is_field {
        return value;
    }
    let usual = value.get("default").or_else(|| value.get("0")).cloned();
    usual.unwrap_or_else(|| match value.get("default_factory").and_then(words) {
        Some("list") => json!([]),
        Some("dict") => json!({}),
        _ => unknown(name),
    })
}
