//! Calls: of functions of the file, of Python's own, and those that are kept.

use serde_json::{Map, Value, json};

use super::{DEPTH, Function, Runner};
use crate::source::python::expression::truth;
use crate::source::python::names::{Names, weight};
use crate::source::python::tokens::{Token, parts};
use crate::source::python::{CALL, ID, called, unknown, words};

impl Runner {
    /// A call: of a function of the file, of Python's own, or one that is kept.
    pub(in crate::source::python) fn call(&mut self, name: &str, arguments: Map<String, Value>) -> Value {
        let short = name.rsplit('.').next().unwrap_or(name);
        let own = !arguments.contains_key("self");
        if let Some(function) = self.functions.get(name).cloned().filter(|_| own) {
            return self.enter(name, &function, arguments);
        }
        let first = arguments.get("0");
        let known = first.filter(|value| words(value).is_none() && called(value).is_none());
        match (name, known) {
            ("dict", None) if first.is_none() => return Value::Object(arguments),
            ("int", Some(value)) => {
                let text = value.as_str().and_then(|text| text.trim().parse::<i64>().ok());
                if let Some(number) = text.or_else(|| value.as_f64().map(|number| number as i64)) {
                    return json!(number);
                }
            }
            ("float", Some(value)) => {
                if let Some(number) = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok()) {
                    return json!(number);
                }
            }
            ("str", Some(value)) => {
                if let Some(text) =
                    value.as_str().map(str::to_owned).or_else(|| value.as_f64().map(|_| value.to_string()))
                {
                    return json!(text);
                }
            }
            ("bool", Some(value)) => {
                if let Some(is) = truth(value) {
                    return json!(is);
                }
            }
            ("list" | "tuple", Some(value)) if value.is_array() => return value.clone(),
            ("len", Some(Value::Array(list))) => return json!(list.len()),
            _ => {}
        }
        if let Some(value) = self.environ(name, &arguments) {
            return value;
        }
        if matches!(short, "parse_args_into_dataclasses" | "parse_args_and_config")
            && let Some(all) = arguments.get("self").cloned().and_then(|parser| self.parsed(&parser))
        {
            return all;
        }
        if own && let Some(made) = self.instance(name, &arguments) {
            return made;
        }
        // A card is what is simulated.
        if matches!(short, "is_bf16_supported" | "is_bfloat16_supported") || name == "torch.cuda.is_available" {
            return json!(true);
        }
        if matches!(name, "torch.backends.mps.is_available" | "torch.xpu.is_available" | "torch.mps.is_available") {
            return json!(false);
        }
        if short == "set_defaults" {
            self.defaults.extend(arguments.clone().into_iter().filter(|(key, _)| key != "self"));
        }
        // `LLM(**vars(args))`: the defaults that the program sets itself; the others are the tool's own.
        let parsed = |value: &Value| called(value).is_some_and(|call| call.contains("parse_args"));
        if name == "vars" && arguments.get("0").is_some_and(parsed) {
            let mut all = self.defaults.clone();
            all.extend(self.given.clone());
            let shown: Vec<&str> = all.keys().map(|key| key.as_str()).collect();
            self.notes.push(format!("arguments of the command line are at their defaults: {}", shown.join(", ")));
            return Value::Object(all.into_iter().collect());
        }
        if short == "add_argument" {
            let names = ["0", "1"].iter().filter_map(|at| arguments.get(*at)?.as_str());
            let name = names.max_by_key(|name| name.len());
            // An option that is not said and has no default is None; one that has to be said is not known.
            let free = name.is_some_and(|name| name.starts_with('-'))
                && arguments.get("required").is_none_or(|is| *is == false);
            let usual = arguments.get("default").cloned().or_else(|| match arguments.get("action") {
                Some(Value::String(action)) => Some(json!(action == "store_false")),
                _ => free.then_some(Value::Null),
            });
            let due = || name.map(|name| unknown(format!("{name}, an argument that its line has to give,")));
            if let (Some(usual), Some(name)) = (usual.or_else(due), name) {
                self.defaults.insert(name.trim_start_matches('-').replace('-', "_"), usual);
            }
        }
        let id = |value: &Value| value.get(ID).and_then(Value::as_u64).map(|id| id as usize);
        let first = arguments.get("0").and_then(id);
        match (name, first.and_then(|first| self.calls.get(first)).cloned()) {
            ("setattr", Some(_)) => self.set_on(first.unwrap_or_default(), &arguments),
            ("replace" | "dataclasses.replace" | "copy.copy" | "copy.deepcopy" | "deepcopy", Some(mut old)) => {
                let name = old.shift_remove(CALL).and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default();
                old.extend(arguments.into_iter().filter(|(key, _)| key != "0"));
                return self.keep(&name, old);
            }
            _ => {}
        }
        let mut arguments = arguments;
        if short == "requires_grad_" && own {
            let root = name.split('.').next().unwrap_or(name);
            let whole = (name.to_owned(), self.name(root));
            let (shown, whose) = self.loops.get(root).cloned().unwrap_or(whole);
            arguments.insert("1".into(), json!(shown));
            arguments.insert("self".into(), whose);
        }
        self.keep(name, arguments)
    }

    /// Keeps a call; its value.
    pub(in crate::source::python) fn keep(&mut self, name: &str, arguments: Map<String, Value>) -> Value {
        let mut call = Map::new();
        call.insert(CALL.into(), json!(name));
        let held: Vec<(String, Value)> =
            arguments.into_iter().map(|(key, value)| (key.clone(), self.kept(value, &key))).collect();
        call.extend(held);
        // Each of them may be small enough, and all of them together be too much.
        if weight(&Value::Object(call.clone())).is_none() {
            call.iter_mut()
                .filter(|(key, value)| *key != CALL && (value.is_object() || value.is_array()))
                .for_each(|(key, value)| *value = unknown(format!("{key}, which is too large,")));
        }
        let mut value = call.clone();
        value.insert(ID.into(), json!(self.calls.len()));
        self.unsure.push(self.doubts.iter().any(|doubt| doubt.branch));
        self.calls.push(call);
        Value::Object(value)
    }

    /// `setattr(args, name, value)`.
    fn set_on(&mut self, id: usize, arguments: &Map<String, Value>) {
        let (key, value) = (arguments.get("1").and_then(Value::as_str), arguments.get("2").cloned());
        let sure = !self.doubts.iter().any(|doubt| doubt.is_older(id));
        let value = value.filter(|_| sure && key.is_some()).unwrap_or_else(|| unknown("setattr(…)"));
        let value = self.kept(value, "setattr(…)");
        if let Some(call) = self.calls.get_mut(id) {
            call.insert(key.unwrap_or("**").to_owned(), value);
        }
    }

    /// A method of what a call returned.
    pub(in crate::source::python) fn method(
        &mut self,
        receiver: Value,
        name: &str,
        mut arguments: Map<String, Value>,
    ) -> Value {
        arguments.insert("self".into(), receiver);
        self.call(name, arguments)
    }

    fn enter(&mut self, name: &str, function: &Function, arguments: Map<String, Value>) -> Value {
        if self.scopes.len() > DEPTH {
            return unknown(format!("{name}()"));
        }
        if !self.entered.iter().any(|known| known == name) {
            self.entered.push(name.to_owned());
        }
        let mut scope = Names::new();
        for (at, parameter) in parts(&function.parameters, ",").iter().enumerate() {
            let Some(name) = parameter.iter().find_map(|token| match token {
                Token::Name(name) => Some(name.clone()),
                _ => None,
            }) else {
                continue;
            };
            let given = arguments.get(&name).or_else(|| arguments.get(&at.to_string())).cloned();
            let given = given.or_else(|| function.first.clone().filter(|_| at == 0));
            let usual = parts(parameter, "=").get(1).map(|tokens| self.values(tokens));
            let value = self.kept(given.or(usual).unwrap_or_else(|| unknown(name.clone())), &name);
            scope.insert(name, value);
        }
        let parent = self.frames.iter().position(|frame| frame.number == function.within).unwrap_or(0);
        self.open(scope, parent);
        let value = self.block(&function.body);
        // Functions in it that only others call (`dataset.map(tokenize)`): their names are this one's.
        let number = self.opened_last();
        let waits = |name: &&String| {
            !self.entered.contains(name) && self.functions.get(*name).is_some_and(|one| one.within == number)
        };
        for name in self.order.iter().filter(waits).cloned().collect::<Vec<_>>() {
            self.call(&name, Map::new());
        }
        self.scopes.pop();
        self.frames.pop();
        self.outer.pop();
        match self.left.pop() {
            Some(true) => unknown(format!("{name}()")),
            _ => value.unwrap_or(Value::Null),
        }
    }
}
