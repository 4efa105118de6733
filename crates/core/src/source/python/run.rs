//! Statements in reading order: assignments, functions of the file, branches as far as their conditions are known.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::expression::{Reader, truth};
use super::tokens::{Line, Token};
use super::{CALL, Program, UNKNOWN, called, unknown, words};

/// How many lines a program may run, and how deep its functions may call each other.
const MOST_LINES: usize = 20_000;
const DEPTH: usize = 12;
/// The number of a call among those that are kept, in its value.
const ID: &str = "#";

type Names = BTreeMap<String, Value>;

#[derive(Clone)]
struct Function {
    parameters: Vec<Token>,
    body: Vec<Line>,
}

/// The state of a program.
#[derive(Default)]
pub(super) struct Runner {
    scopes: Vec<Names>,
    functions: BTreeMap<String, Function>,
    order: Vec<String>,
    entered: Vec<String>,
    calls: Vec<Map<String, Value>>,
    /// Arguments of its line.
    given: Map<String, Value>,
    /// Defaults of arguments that the program parses.
    defaults: Names,
    notes: Vec<String>,
    lines: usize,
}

/// Runs a program, then the functions that nobody called.
pub(super) fn program(lines: &[Line], given: &Map<String, Value>) -> Program {
    let mut runner = Runner { scopes: vec![Names::new()], given: given.clone(), ..Runner::default() };
    runner.block(lines);
    let mut functions = Vec::new();
    for name in runner.order.clone() {
        if runner.entered.contains(&name) && !runner.plain(&name) {
            continue;
        }
        let before = runner.calls.len();
        let again = runner.entered.contains(&name);
        let value = runner.call(&name, Map::new());
        if again {
            runner.calls.truncate(before);
        }
        if runner.plain(&name) {
            functions.push((name, bare(value)));
        }
    }
    let calls = runner.calls.into_iter().map(|call| call.into_iter().map(|(key, value)| (key, bare(value))).collect());
    runner.notes.dedup();
    Program { calls: calls.collect(), functions, notes: runner.notes }
}

/// A value without the numbers of its calls.
fn bare(value: Value) -> Value {
    match value {
        Value::Object(object) => Value::Object(
            object.into_iter().filter(|(key, _)| key != ID).map(|(key, value)| (key, bare(value))).collect(),
        ),
        Value::Array(list) => Value::Array(list.into_iter().map(bare).collect()),
        other => other,
    }
}

impl Runner {
    fn plain(&self, name: &str) -> bool {
        self.functions.get(name).is_some_and(|function| function.parameters.is_empty())
    }

    /// The lines of a block; what it returns.
    fn block(&mut self, lines: &[Line]) -> Option<Value> {
        let mut at = 0;
        // Whether a branch of the present chain was taken for sure.
        let mut taken = false;
        while let Some(line) = lines.get(at) {
            self.lines += 1;
            if self.lines > MOST_LINES {
                return None;
            }
            let inner = lines[at + 1..].iter().take_while(|next| next.indent > line.indent).count();
            let body = &lines[at + 1..at + 1 + inner];
            at += 1 + inner;
            let word = match &line.tokens[0] {
                Token::Name(name) if name == "async" && line.tokens.len() > 1 => line.tokens[1].shown(),
                Token::Name(name) => name.clone(),
                _ => String::new(),
            };
            // What stands behind a colon on the same line.
            let one = colon(&line.tokens).map(|at| line.tokens[at + 1..].to_vec()).filter(|rest| !rest.is_empty());
            let short: Vec<Line> = one.map(|tokens| Line { indent: line.indent + 1, tokens }).into_iter().collect();
            let body = if body.is_empty() { short.as_slice() } else { body };
            match word.as_str() {
                "def" => self.define(&line.tokens, body),
                "class" | "import" | "from" | "pass" | "assert" | "raise" | "del" | "global" | "nonlocal" | "break"
                | "continue" => {}
                "return" => {
                    return Some(if line.tokens.len() > 1 { self.values(&line.tokens[1..]) } else { Value::Null });
                }
                "if" | "elif" => {
                    if word == "if" {
                        taken = false;
                    } else if taken {
                        continue;
                    }
                    let end = colon(&line.tokens).unwrap_or(line.tokens.len());
                    let condition = self.values(&line.tokens[1..end]);
                    match truth(&condition) {
                        Some(true) => {
                            taken = true;
                            if let Some(value) = self.block(body) {
                                return Some(value);
                            }
                        }
                        Some(false) => {}
                        None => self.perhaps(body),
                    }
                }
                "else" if taken => {}
                "else" => {
                    let sure = !self.was_unknown(lines, at - 1 - inner);
                    if !sure {
                        self.perhaps(body);
                    } else if let Some(value) = self.block(body) {
                        return Some(value);
                    }
                }
                "for" => {
                    let end = line.tokens.iter().position(|token| token.is("in")).unwrap_or(1);
                    line.tokens[1..end].iter().for_each(|token| self.set(&token.shown(), unknown(token.shown())));
                    self.perhaps(body);
                }
                "while" | "except" | "match" | "case" => self.perhaps(body),
                "with" | "try" | "finally" => {
                    if word == "with" {
                        let end = colon(&line.tokens).unwrap_or(line.tokens.len());
                        self.values(&line.tokens[1..end]);
                    }
                    if let Some(value) = self.block(body) {
                        return Some(value);
                    }
                }
                _ => self.statement(&line.tokens),
            }
        }
        None
    }

    /// Whether the branches before an `else` had conditions that are not known.
    fn was_unknown(&mut self, lines: &[Line], at: usize) -> bool {
        let indent = lines[at].indent;
        for line in lines[..at].iter().rev().filter(|line| line.indent == indent) {
            let word = line.tokens[0].shown();
            if !["if", "elif"].contains(&word.as_str()) {
                return true;
            }
            let end = colon(&line.tokens).unwrap_or(line.tokens.len());
            let before = self.calls.len();
            let condition = self.values(&line.tokens[1..end]);
            self.calls.truncate(before);
            if truth(&condition).is_none() {
                return true;
            }
            if word == "if" {
                return false;
            }
        }
        true
    }

    /// Lines that may run: what they change is not known behind them.
    fn perhaps(&mut self, lines: &[Line]) {
        let before = self.scopes.last().cloned().unwrap_or_default();
        self.block(lines);
        if let Some(scope) = self.scopes.last_mut() {
            for (name, value) in scope.iter_mut() {
                if before.get(name) != Some(value) {
                    *value = unknown(name.clone());
                }
            }
        }
    }

    fn values(&mut self, tokens: &[Token]) -> Value {
        Reader::new(tokens, self).values()
    }

    fn define(&mut self, tokens: &[Token], body: &[Line]) {
        let name = tokens.iter().skip_while(|token| !token.is("def")).nth(1).map(Token::shown).unwrap_or_default();
        let open = tokens.iter().position(|token| token.is("(")).unwrap_or(tokens.len());
        let close = closing(tokens, open);
        let parameters = tokens.get(open + 1..close).unwrap_or_default().to_vec();
        if !self.functions.contains_key(&name) {
            self.order.push(name.clone());
        }
        self.functions.insert(name, Function { parameters, body: body.to_vec() });
    }

    fn statement(&mut self, tokens: &[Token]) {
        let signs = parts(tokens, "=");
        if let [targets @ .., value] = signs.as_slice()
            && !targets.is_empty()
        {
            let value = self.values(value);
            for target in targets {
                // `name: Type = value`
                let end = colon(target).unwrap_or(target.len());
                self.assign(&target[..end], value.clone());
            }
            return;
        }
        let step = tokens.iter().position(|token| ["+=", "-=", "*=", "//=", "/="].iter().any(|sign| token.is(sign)));
        match step {
            Some(at) => {
                let words: String = tokens.iter().map(Token::shown).collect();
                self.assign(&tokens[..at], unknown(words));
            }
            None => drop(self.values(tokens)),
        }
    }

    fn assign(&mut self, target: &[Token], value: Value) {
        let names = parts(target, ",");
        if names.len() > 1 {
            for (at, name) in names.iter().enumerate() {
                let part = value.as_array().and_then(|list| list.get(at)).cloned();
                let shown: String = name.iter().map(Token::shown).collect();
                self.assign(name, part.unwrap_or_else(|| unknown(shown)));
            }
            return;
        }
        let Some(Token::Name(root)) = target.first() else { return };
        // `a.b.c` and `a["b"]`
        let keys: Vec<String> = target[1..]
            .iter()
            .filter_map(|token| match token {
                Token::Name(name) | Token::Text(name, _) => Some(name.clone()),
                _ => None,
            })
            .collect();
        if keys.is_empty() {
            self.set(root, value);
            return;
        }
        let mut whole = self.name(root);
        if words(&whole).is_some() {
            return;
        }
        let id = whole.get(ID).and_then(Value::as_u64);
        put(&mut whole, &keys, value.clone());
        if let Some(call) = id.and_then(|id| self.calls.get_mut(id as usize)) {
            let mut object = Value::Object(std::mem::take(call));
            put(&mut object, &keys, value);
            *call = object.as_object().cloned().unwrap_or_default();
        }
        self.set(root, whole);
    }

    fn set(&mut self, name: &str, value: Value) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name.to_owned(), value);
        }
    }

    pub(super) fn name(&mut self, name: &str) -> Value {
        if name == "__name__" {
            return json!("__main__");
        }
        let own = self.scopes.last().and_then(|scope| scope.get(name));
        own.or_else(|| self.scopes.first()?.get(name)).cloned().unwrap_or_else(|| unknown(name))
    }

    /// `value.name`; `None` where that is not known.
    pub(super) fn attribute(&mut self, value: &Value, name: &str) -> Option<Value> {
        // Arguments that were parsed are what they are by default.
        if called(value).is_some_and(|call| call.contains("parse_args") || call.contains("parse_known_args")) {
            if let Some(given) = self.given.get(name) {
                return Some(given.clone());
            }
            let usual = self.defaults.get(name)?.clone();
            self.notes.push(format!("args.{name}: its default is taken"));
            return Some(usual);
        }
        if words(value).is_some() {
            return None;
        }
        value.get(name).filter(|_| name != ID).cloned()
    }

    /// A call: of a function of the file, of Python's own, or one that is kept.
    pub(super) fn call(&mut self, name: &str, arguments: Map<String, Value>) -> Value {
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
            ("os.environ.get" | "os.getenv", Some(Value::String(variable))) => {
                if let Some(usual) = arguments.get("1").filter(|usual| words(usual).is_none()) {
                    self.notes.push(format!("{variable}: taken as unset, so what stands behind it"));
                    return usual.clone();
                }
            }
            _ => {}
        }
        if matches!(short, "is_bf16_supported" | "is_bfloat16_supported") {
            return json!(true);
        }
        if short == "add_argument" {
            let usual = arguments.get("default").cloned().or_else(|| {
                arguments.get("action").and_then(Value::as_str).map(|action| json!(action == "store_false"))
            });
            let names = ["0", "1"].iter().filter_map(|at| arguments.get(*at)?.as_str());
            if let (Some(usual), Some(name)) = (usual, names.max_by_key(|name| name.len())) {
                self.defaults.insert(name.trim_start_matches('-').replace('-', "_"), usual);
            }
        }
        let mut call = Map::new();
        call.insert(CALL.into(), json!(name));
        call.extend(arguments);
        let mut value = call.clone();
        value.insert(ID.into(), json!(self.calls.len()));
        self.calls.push(call);
        Value::Object(value)
    }

    /// A method of what a call returned.
    pub(super) fn method(&mut self, receiver: Value, name: &str, mut arguments: Map<String, Value>) -> Value {
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
            let usual = parts(parameter, "=").get(1).map(|tokens| self.values(tokens));
            scope.insert(name.clone(), given.or(usual).unwrap_or_else(|| unknown(name)));
        }
        self.scopes.push(scope);
        let value = self.block(&function.body);
        self.scopes.pop();
        value.unwrap_or(Value::Null)
    }
}

/// Tokens between signs that stand in no brackets.
fn parts<'t>(tokens: &'t [Token], sign: &str) -> Vec<&'t [Token]> {
    let (mut found, mut depth, mut start) = (Vec::new(), 0usize, 0);
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Sign("(" | "[" | "{") => depth += 1,
            Token::Sign(")" | "]" | "}") => depth = depth.saturating_sub(1),
            _ if depth == 0 && token.is(sign) => {
                found.push(&tokens[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if start < tokens.len() {
        found.push(&tokens[start..]);
    }
    found
}

/// The colon that ends a head, or stands behind a name.
fn colon(tokens: &[Token]) -> Option<usize> {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Sign("(" | "[" | "{") => depth += 1,
            Token::Sign(")" | "]" | "}") => depth = depth.saturating_sub(1),
            Token::Sign(":") if depth == 0 => return Some(at),
            _ => {}
        }
    }
    None
}

fn closing(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token {
            Token::Sign("(" | "[" | "{") => depth += 1,
            Token::Sign(")" | "]" | "}") => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}

/// Sets a value in an object's objects.
fn put(whole: &mut Value, keys: &[String], value: Value) {
    let Some((first, rest)) = keys.split_first() else { return };
    let Some(object) = whole.as_object_mut() else { return };
    if object.contains_key(UNKNOWN) {
        return;
    }
    if rest.is_empty() {
        object.insert(first.clone(), value);
    } else {
        put(object.entry(first.clone()).or_insert_with(|| json!({})), rest, value);
    }
}
