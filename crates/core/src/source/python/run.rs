//! Statements in reading order: assignments, functions of the file, branches as far as their conditions are known.

mod calls;

use std::collections::BTreeMap;
use std::rc::Rc;

use serde_json::{Map, Value, json};

use super::classes::Class;
use super::expression::{Reader, operate, truth};
use super::names::{Doubt, Names};
use super::tokens::{Line, Token, closing, colon, parts};
use super::{ARGUMENTS, ID, Link, Program, called, unknown, words};

/// How many lines a program may run (long ones count as several), how deep its functions may call each other, and how deep
/// blocks may stand in each other.
const MOST_LINES: usize = 20_000;
const DEPTH: usize = 12;
const BLOCKS: usize = 100;

struct Function {
    parameters: Vec<Token>,
    body: Vec<Line>,
    /// What its first parameter is handed where a caller leaves it out (accelerate's `find_executable_batch_size`).
    first: Option<Value>,
    /// The scope that it stands in.
    within: usize,
}

/// Which scope it is, of all that were ever opened, and the place of the one around it.
#[derive(Clone, Copy)]
pub(super) struct Frame {
    number: usize,
    pub(super) parent: usize,
}

/// The state of a program.
#[derive(Default)]
pub(super) struct Runner {
    pub(super) scopes: Vec<Names>,
    pub(super) frames: Vec<Frame>,
    opened: usize,
    /// Names of each scope that are those of another.
    pub(super) outer: Vec<BTreeMap<String, usize>>,
    /// Whether each scope's lines may have returned before their end.
    pub(super) left: Vec<bool>,
    pub(super) doubts: Vec<Doubt>,
    functions: BTreeMap<String, Rc<Function>>,
    pub(super) classes: BTreeMap<String, Class>,
    /// Variables of the environment that the program sets.
    pub(super) environment: Names,
    order: Vec<String>,
    entered: Vec<String>,
    pub(super) calls: Vec<Map<String, Value>>,
    /// Of each call, whether a branch that may not run holds it.
    unsure: Vec<bool>,
    /// What loops go through, by the names of its parts.
    loops: BTreeMap<String, (String, Value)>,
    /// Arguments of its line.
    pub(super) given: Map<String, Value>,
    /// Defaults of arguments that the program parses.
    defaults: Names,
    /// What the next function's first parameter is handed by what stands before it.
    handed: Option<Value>,
    notes: Vec<String>,
    lines: usize,
    blocks: usize,
    pub(super) weight: usize,
    /// Whether it is more than is followed.
    pub(super) over: bool,
}

/// Runs a program, then the functions that nobody called.
pub(super) fn program(lines: &[Line], given: &Map<String, Value>) -> Program {
    let mut runner = Runner { given: given.clone(), ..Runner::default() };
    runner.open(Names::new(), 0);
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
            runner.unsure.truncate(before);
        }
        if runner.plain(&name) {
            functions.push((name, bare(value)));
        }
    }
    let links = runner.calls.iter().zip(&runner.unsure).map(|(call, unsure)| Link {
        unsure: *unsure,
        inside: crate::order::map(call.iter().map(|(key, value)| (key.clone(), inside(value)))),
    });
    let links = links.collect();
    let calls = runner.calls.into_iter().map(|call| call.into_iter().map(|(key, value)| (key, bare(value))).collect());
    runner.notes.dedup();
    let defaults = crate::order::map(runner.defaults);
    Program { calls: calls.collect(), links, functions, defaults, notes: runner.notes, over: runner.over }
}

/// The numbers of the calls in a value.
fn inside(value: &Value) -> Vec<usize> {
    let own = value.get(ID).and_then(Value::as_u64).map(|id| id as usize);
    let parts: Vec<&Value> = match value {
        Value::Object(object) => object.values().collect(),
        Value::Array(list) => list.iter().collect(),
        _ => Vec::new(),
    };
    own.into_iter().chain(parts.into_iter().flat_map(inside)).collect()
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

/// A chain of `if`, `elif` and `else`: none was taken yet, one may have been, one was.
#[derive(Clone, Copy, PartialEq)]
enum Chain {
    Open,
    Perhaps,
    Taken,
}

impl Runner {
    fn plain(&self, name: &str) -> bool {
        self.functions.get(name).is_some_and(|function| function.parameters.is_empty())
    }

    /// A scope, for the whole program or for a function.
    fn open(&mut self, names: Names, parent: usize) {
        self.scopes.push(names);
        self.frames.push(Frame { number: self.opened, parent });
        self.opened += 1;
        self.outer.push(BTreeMap::new());
        self.left.push(false);
    }

    /// The number of the scope that lines run in.
    fn opened_last(&self) -> usize {
        self.frames.last().map_or(0, |frame| frame.number)
    }

    /// The lines of a block; what it returns.
    fn block(&mut self, lines: &[Line]) -> Option<Value> {
        self.blocks += 1;
        self.over |= self.blocks > BLOCKS;
        let value = self.run(lines);
        self.blocks -= 1;
        value
    }

    fn run(&mut self, lines: &[Line]) -> Option<Value> {
        let mut at = 0;
        let mut chain = Chain::Open;
        while let Some(line) = lines.get(at) {
            self.lines += 1 + line.tokens.len() / 64;
            self.over |= self.lines > MOST_LINES;
            if self.over {
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
                "class" => self.class(&line.tokens, body),
                "import" | "from" | "pass" | "assert" | "raise" | "del" | "break" | "continue" => {}
                "global" | "nonlocal" => {
                    let names = line.tokens[1..].iter().filter(|token| !token.is(",")).map(Token::shown);
                    self.outer(word == "global", names);
                }
                "return" => {
                    return Some(if line.tokens.len() > 1 { self.values(&line.tokens[1..]) } else { Value::Null });
                }
                "if" | "elif" => {
                    if word == "if" {
                        chain = Chain::Open;
                    } else if chain == Chain::Taken {
                        continue;
                    }
                    let end = colon(&line.tokens).unwrap_or(line.tokens.len());
                    let condition = self.values(&line.tokens[1..end]);
                    match (truth(&condition), chain) {
                        (Some(false), _) => {}
                        (Some(true), Chain::Open) => {
                            chain = Chain::Taken;
                            if let Some(value) = self.block(body) {
                                return Some(value);
                            }
                        }
                        (known, _) => {
                            chain = if known.is_some() { Chain::Taken } else { Chain::Perhaps };
                            self.perhaps(true, |runner| runner.block(body));
                        }
                    }
                }
                "else" => match chain {
                    Chain::Taken => {}
                    Chain::Perhaps => self.perhaps(true, |runner| runner.block(body)),
                    Chain::Open => {
                        if let Some(value) = self.block(body) {
                            return Some(value);
                        }
                    }
                },
                "for" => {
                    let end = line.tokens.iter().position(|token| token.is("in")).unwrap_or(1);
                    let stop = colon(&line.tokens).unwrap_or(line.tokens.len());
                    let through = line.tokens.get(end + 1..stop).unwrap_or_default();
                    let text: String = through.iter().take(40).map(Token::shown).collect();
                    let whose = through.first().map(|token| self.name(&token.shown())).unwrap_or_default();
                    self.values(through);
                    for token in line.tokens[1..end].iter().filter(|token| matches!(token, Token::Name(_))) {
                        self.set(&token.shown(), unknown(token.shown()));
                        self.loops.insert(token.shown(), (text.clone(), whose.clone()));
                    }
                    chain = Chain::Perhaps;
                    self.perhaps(false, |runner| runner.block(body));
                }
                "while" | "except" | "match" | "case" => {
                    chain = Chain::Perhaps;
                    self.perhaps(word != "while", |runner| runner.block(body));
                }
                "with" | "try" | "finally" => {
                    chain = Chain::Perhaps;
                    if word == "with" {
                        let end = colon(&line.tokens).unwrap_or(line.tokens.len());
                        self.values(&line.tokens[1..end]);
                        let named = line.tokens[..end].windows(2).filter(|two| two[0].is("as"));
                        named.for_each(|two| self.set(&two[1].shown(), unknown(two[1].shown())));
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

    pub(super) fn values(&mut self, tokens: &[Token]) -> Value {
        Reader::new(tokens, self).values()
    }

    pub(super) fn say(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    fn define(&mut self, tokens: &[Token], body: &[Line]) {
        let name = tokens.iter().skip_while(|token| !token.is("def")).nth(1).map(Token::shown).unwrap_or_default();
        let open = tokens.iter().position(|token| token.is("(")).unwrap_or(tokens.len());
        let close = closing(tokens, open);
        let parameters = tokens.get(open + 1..close).unwrap_or_default().to_vec();
        if !self.functions.contains_key(&name) {
            self.order.push(name.clone());
        }
        let first = self.handed.take();
        let within = self.opened_last();
        self.functions.insert(name, Rc::new(Function { parameters, body: body.to_vec(), first, within }));
    }

    fn statement(&mut self, tokens: &[Token]) {
        if tokens.first().is_some_and(|token| token.is("@")) {
            let value = self.values(&tokens[1..]);
            let sized = called(&value).is_some_and(|name| name.ends_with("find_executable_batch_size"));
            self.handed = value.get("starting_batch_size").filter(|_| sized).cloned();
            return;
        }
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
        let step = |token: &Token| match token {
            Token::Sign(sign) if sign.len() > 1 => sign.strip_suffix('=').filter(|sign| !"=!<>:".contains(*sign)),
            _ => None,
        };
        match tokens.iter().enumerate().find_map(|(at, token)| Some((at, step(token)?))) {
            Some((at, sign)) => {
                let (old, new) = (self.values(&tokens[..at]), self.values(&tokens[at + 1..]));
                let shown: String = tokens.iter().map(Token::shown).collect();
                self.assign(&tokens[..at], operate(sign, &old, &new).unwrap_or_else(|| unknown(shown)));
            }
            None => drop(self.values(tokens)),
        }
    }

    fn assign(&mut self, target: &[Token], value: Value) {
        // `(a, b) = …`, `[a] = …`
        let around = target.first().is_some_and(|token| token.is("(") || token.is("["));
        if around && closing(target, 0) + 1 == target.len() {
            return self.assign(&target[1..target.len() - 1], value);
        }
        let names = parts(target, ",");
        if names.len() > 1 || target.last().is_some_and(|token| token.is(",")) {
            // Unsloth's gives the model and its tokenizer.
            let loaded = called(&value).is_some_and(|name| name.ends_with("from_pretrained"));
            for (at, name) in names.iter().enumerate() {
                let part = value.as_array().and_then(|list| list.get(at)).or((loaded && at == 0).then_some(&value));
                let shown: String = name.iter().map(Token::shown).collect();
                self.assign(name, part.cloned().unwrap_or_else(|| unknown(shown)));
            }
            return;
        }
        let Some(Token::Name(root)) = target.first() else { return };
        if target.len() == 1 {
            self.set(root, value);
            return;
        }
        // `a.b.c`, `a["b"]` and `a[0]`
        let (mut keys, mut at) = (Vec::new(), 1);
        while at < target.len() {
            if let (Token::Sign("."), Some(Token::Name(name))) = (&target[at], target.get(at + 1)) {
                keys.push(name.clone());
                at += 2;
                continue;
            }
            let close = closing(target, at);
            let inner = target.get(at + 1..close).unwrap_or_default();
            let index = if colon(inner).is_some() { Value::Null } else { self.values(inner) };
            match index.as_str().map(str::to_owned).or_else(|| index.as_u64().map(|at| at.to_string())) {
                Some(key) => keys.push(key),
                None => {
                    let shown: String = target.iter().map(Token::shown).collect();
                    return self.place(root, &keys, unknown(shown));
                }
            }
            at = close + 1;
        }
        if let ("os", [environ, name]) = (root.as_str(), keys.as_slice())
            && environ == "environ"
        {
            return self.set_variable(name, value);
        }
        if keys.last().is_some_and(|key| key == "requires_grad") {
            let whole = (format!("{root}.{}", keys.join(".")), self.name(root));
            let (shown, whose) = self.loops.get(root).cloned().unwrap_or(whole);
            let record = [("0", value), ("1", json!(shown)), ("self", whose)];
            self.call("requires_grad", record.into_iter().map(|(key, value)| (key.to_owned(), value)).collect());
            return;
        }
        self.place(root, &keys, value);
    }

    /// `value.name`; `None` where that is not known.
    pub(super) fn attribute(&mut self, value: &Value, name: &str) -> Option<Value> {
        // Arguments that were parsed are what they are by default.
        if called(value).is_some_and(|call| call.contains("parse_args") || call.contains("parse_known_args")) {
            if let Some(given) = self.given.get(name) {
                return Some(given.clone());
            }
            let usual = self.defaults.get(name)?.clone();
            if words(&usual).is_none() {
                self.notes.push(format!("args.{name}: its default is taken"));
            }
            return Some(usual);
        }
        // A program by itself is started without arguments.
        if (words(value), name) == (Some("sys"), "argv") {
            return Some(self.given.get(ARGUMENTS).cloned().unwrap_or_else(|| json!([""])));
        }
        if words(value).is_some() {
            return self.field(value, name);
        }
        if (called(value), name) == (Some("torch.device"), "type") {
            return value.get("0")?.as_str().map(|device| json!(device.split(':').next()));
        }
        // Copies of a call's value may be older than the call's own.
        let own = value.get(ID).and_then(|id| self.calls.get(id.as_u64()? as usize)?.get(name));
        own.or_else(|| value.get(name)).filter(|_| name != ID).cloned()
    }
}
