//! Names and what they hold: scopes, places inside of values, and what lines change that may not run.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::run::Runner;
use super::{ENVIRONMENT, ID, UNKNOWN, called, unknown, words};

/// What a value may hold (its parts, and its texts in pieces of 32 bytes), how deep, and what a whole program may keep.
const MOST_PARTS: usize = 4096;
const MOST_DEEP: usize = 64;
const MOST_KEPT: usize = 1_000_000;

pub(super) type Names = BTreeMap<String, Value>;

/// Lines that may run or not.
pub(super) struct Doubt {
    /// Whether others may run in their place; a loop's lines are taken to run.
    pub(super) branch: bool,
    /// What was there before them.
    calls: usize,
    scopes: usize,
    /// What they changed.
    touched: BTreeSet<(usize, String)>,
}

impl Doubt {
    /// Whether a call was there before the lines.
    pub(super) fn is_older(&self, call: usize) -> bool {
        call < self.calls
    }
}

/// How much a value holds; `None` where that is too much for one.
pub(super) fn weight(value: &Value) -> Option<usize> {
    fn add(value: &Value, depth: usize, sum: &mut usize) -> bool {
        *sum += 1;
        if let Value::String(text) = value {
            *sum += text.len() / 32;
        }
        let deeper = |inner: &Value, sum: &mut usize| depth < MOST_DEEP && add(inner, depth + 1, sum);
        *sum <= MOST_PARTS
            && match value {
                Value::Array(list) => list.iter().all(|inner| deeper(inner, sum)),
                Value::Object(object) => object.values().all(|inner| deeper(inner, sum)),
                _ => true,
            }
    }
    let mut sum = 0;
    add(value, 0, &mut sum).then_some(sum)
}

impl Runner {
    /// A value, unless it is too large to be kept.
    pub(super) fn kept(&mut self, value: Value, shown: &str) -> Value {
        let Some(weight) = weight(&value) else { return unknown(format!("{shown}, which is too large,")) };
        self.weight += weight;
        self.over |= self.weight > MOST_KEPT;
        if self.over { Value::Null } else { value }
    }

    /// Runs lines that may not run: what they change is not known behind them.
    pub(super) fn perhaps(&mut self, branch: bool, lines: impl FnOnce(&mut Self) -> Option<Value>) {
        let (calls, scopes) = (self.calls.len(), self.scopes.len());
        self.doubts.push(Doubt { branch, calls, scopes, touched: BTreeSet::new() });
        let left = lines(self).is_some();
        if let Some(may_leave) = self.left.last_mut() {
            *may_leave |= left;
        }
        let touched = self.doubts.pop().map(|doubt| doubt.touched).unwrap_or_default();
        for (at, name) in touched.into_iter().filter(|(at, _)| *at < scopes) {
            self.write(at, &name, unknown(name.clone()));
        }
    }

    /// `global` and `nonlocal`: whose names they are.
    pub(super) fn outer(&mut self, global: bool, names: impl Iterator<Item = String>) {
        let last = self.scopes.len() - 1;
        for name in names {
            let near = (0..last).rev().find(|at| self.scopes[*at].contains_key(&name)).unwrap_or(0);
            if let Some(outer) = self.outer.last_mut() {
                outer.insert(name, if global { 0 } else { near });
            }
        }
    }

    pub(super) fn set(&mut self, name: &str, value: Value) {
        let at = self.outer.last().and_then(|outer| outer.get(name)).copied().unwrap_or(self.scopes.len() - 1);
        self.write(at, name, value);
    }

    fn write(&mut self, at: usize, name: &str, value: Value) {
        let value = self.kept(value, name);
        let Some(scope) = self.scopes.get_mut(at) else { return };
        if let Some(doubt) = self.doubts.last_mut().filter(|_| scope.get(name) != Some(&value)) {
            doubt.touched.insert((at, name.to_owned()));
        }
        scope.insert(name.to_owned(), value);
    }

    /// Where a name is found.
    fn home(&self, name: &str) -> Option<usize> {
        let last = self.scopes.len() - 1;
        let near = self.outer.last().and_then(|outer| outer.get(name)).copied();
        let around = std::iter::successors(Some(last), |at| (*at > 0).then(|| self.frames[*at].parent));
        near.into_iter().chain(around).find(|at| self.scopes[*at].contains_key(name))
    }

    pub(super) fn name(&mut self, name: &str) -> Value {
        if name == "__name__" {
            return json!("__main__");
        }
        self.home(name).and_then(|at| self.scopes[at].get(name)).cloned().unwrap_or_else(|| unknown(name))
    }

    /// Sets `root.key` or `root["key"]`, or what is deeper.
    pub(super) fn place(&mut self, root: &str, keys: &[String], mut value: Value) {
        if keys.is_empty() {
            return self.alias(root, value);
        }
        let Some(at) = self.home(root) else { return };
        let Some(whole) = self.scopes[at].get(root).filter(|whole| words(whole).is_none()) else { return };
        // Calls on the way, and what is left of the way from there.
        let (mut calls, mut inner) = (Vec::new(), Some(whole));
        for (depth, key) in keys.iter().enumerate() {
            calls.extend(inner.and_then(|inner| inner.get(ID)?.as_u64()).map(|id| (id as usize, depth)));
            inner = inner.and_then(|inner| inner.get(key));
        }
        let shown = format!("{root}.{}", keys.join("."));
        if let Some(doubt) = self.doubts.last() {
            let young = match calls.first() {
                Some((id, 0)) => *id >= doubt.calls,
                _ => at >= doubt.scopes || doubt.touched.contains(&(at, root.to_owned())),
            };
            if !young {
                value = unknown(shown.clone());
            }
        }
        value = self.kept(value, &shown);
        for (id, depth) in calls {
            if let Some(call) = self.calls.get_mut(id) {
                let mut object = Value::Object(std::mem::take(call));
                put(&mut object, &keys[depth..], value.clone());
                *call = object.as_object().cloned().unwrap_or_default();
            }
        }
        let mut new = whole_of(&self.scopes[at], root);
        let fits = put(&mut new, keys, value) && weight(&new).is_some();
        if new.get(ID).is_none() || !fits {
            self.alias(root, if fits { new } else { unknown(root) });
        } else {
            self.scopes[at].insert(root.to_owned(), new);
        }
    }

    /// A new value of a list or an object: other names that may be the same one are not known any more.
    fn alias(&mut self, root: &str, value: Value) {
        let Some(at) = self.home(root) else { return self.set(root, value) };
        let old = whole_of(&self.scopes[at], root);
        let holds = old.as_array().is_some_and(|list| !list.is_empty())
            || old.as_object().is_some_and(|object| !object.is_empty() && !object.contains_key(UNKNOWN));
        let mut others = Vec::new();
        for (place, scope) in self.scopes.iter().enumerate().filter(|_| holds) {
            let same = scope.iter().filter(|(name, value)| (place, name.as_str()) != (at, root) && **value == old);
            others.extend(same.map(|(name, _)| (place, name.clone())));
        }
        others.into_iter().for_each(|(place, name)| self.write(place, &name, unknown(name.clone())));
        self.write(at, root, value);
    }

    /// Sets a variable of the environment.
    pub(super) fn set_variable(&mut self, name: &str, value: Value) {
        let sure = !self.doubts.iter().any(|doubt| doubt.branch);
        self.environment.insert(name.to_owned(), if sure { value.clone() } else { unknown(name) });
        let record = [("0", json!(name)), ("1", value)];
        self.keep(ENVIRONMENT, record.into_iter().map(|(key, value)| (key.to_owned(), value)).collect());
    }

    /// What calls around the environment give and set; `None` for others, and for variables of which nothing is known.
    pub(super) fn environ(&mut self, call: &str, arguments: &Map<String, Value>) -> Option<Value> {
        let first = arguments.get("0").filter(|value| words(value).is_none() && called(value).is_none());
        match (call, first) {
            ("os.environ.get" | "os.getenv", Some(Value::String(variable))) => {
                if let Some(set) = self.environment.get(variable) {
                    return Some(set.clone());
                }
                let usual = arguments.get("1").filter(|usual| words(usual).is_none())?.clone();
                self.say(format!("{variable}: taken as unset, so what stands behind it"));
                Some(usual)
            }
            ("os.environ.setdefault" | "os.putenv", Some(Value::String(variable))) => {
                self.set_variable(variable, arguments.get("1").cloned().unwrap_or_default());
                Some(Value::Null)
            }
            ("os.environ.update", _) => {
                let whole = first.and_then(Value::as_object).cloned().unwrap_or_default();
                let all = whole.iter().chain(arguments.iter().filter(|(key, _)| *key != "0"));
                all.for_each(|(name, value)| self.set_variable(name, value.clone()));
                Some(Value::Null)
            }
            _ => None,
        }
    }

    /// A method of a list or an object, and what it gives; what changes it in ways that are not followed leaves it unknown.
    pub(super) fn of_plain(
        &mut self,
        place: Option<&(String, Vec<String>)>,
        value: Value,
        method: &str,
        arguments: &Map<String, Value>,
    ) -> Option<Value> {
        let plain = |value: &Value| words(value).is_none() && called(value).is_none();
        let (first, second) = (arguments.get("0"), arguments.get("1"));
        let key = first.and_then(Value::as_str);
        let sure = !arguments.contains_key("**") && !arguments.contains_key("*");
        let mut given = Value::Null;
        let new = match (value, method) {
            (Value::Object(object), "get") => {
                return Some(object.get(key?).or(second).cloned().unwrap_or_default());
            }
            (value, "copy") => return Some(value),
            (_, "keys" | "items" | "values" | "index" | "count") => return None,
            (Value::Object(mut object), "update")
                if sure && first.is_none_or(|more| more.is_object() && plain(more)) =>
            {
                object.extend(first.and_then(Value::as_object).cloned().unwrap_or_default());
                object.extend(arguments.iter().filter(|(key, _)| *key != "0").map(|(k, v)| (k.clone(), v.clone())));
                Some(Value::Object(object))
            }
            (Value::Object(mut object), "setdefault") if key.is_some() => {
                let usual = second.cloned().unwrap_or_default();
                object.entry(key.unwrap_or_default()).or_insert(usual);
                Some(Value::Object(object))
            }
            (Value::Object(mut object), "pop") if key.is_some_and(|key| object.contains_key(key)) => {
                given = object.shift_remove(key.unwrap_or_default()).unwrap_or_default();
                Some(Value::Object(object))
            }
            // What was put in unseen is not known; without it the object is as it is.
            (Value::Object(object), "pop") if key.is_some() => {
                given = second.cloned().unwrap_or_else(|| unknown(format!("pop({})", key.unwrap_or_default())));
                Some(Value::Object(object))
            }
            (Value::Array(mut list), "append") if first.is_some() => {
                list.extend(first.cloned());
                Some(Value::Array(list))
            }
            (Value::Array(mut list), "extend") if first.is_some_and(Value::is_array) => {
                list.extend(first.and_then(Value::as_array).cloned().unwrap_or_default());
                Some(Value::Array(list))
            }
            _ => None,
        };
        let (root, keys) = place?;
        let known = new.is_some();
        self.place(root, keys, new.unwrap_or_else(|| unknown(format!("{root} behind {method}()"))));
        known.then_some(given)
    }
}

fn whole_of(scope: &Names, name: &str) -> Value {
    scope.get(name).cloned().unwrap_or_default()
}

/// Sets a value in an object's objects and lists; whether it could be set.
fn put(whole: &mut Value, keys: &[String], value: Value) -> bool {
    let Some((first, rest)) = keys.split_first() else { return false };
    match whole {
        Value::Object(object) if object.contains_key(UNKNOWN) => true,
        Value::Object(object) if rest.is_empty() => {
            object.insert(first.clone(), value);
            true
        }
        Value::Object(object) => put(object.entry(first.clone()).or_insert_with(|| json!({})), rest, value),
        Value::Array(list) => match first.parse().ok().and_then(|at: usize| list.get_mut(at)) {
            Some(one) if rest.is_empty() => {
                *one = value;
                true
            }
            Some(one) => put(one, rest, value),
            None => false,
        },
        _ => false,
    }
}
