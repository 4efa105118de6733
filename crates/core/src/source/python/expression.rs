//! Expressions as values. What takes running is unknown, with its words.

use serde_json::{Map, Number, Value, json};

use super::names::weight;
use super::run::Runner;
use super::tokens::Token;
use super::{CALL, ENVIRONMENT, called, unknown, words};

/// How deep brackets may stand in each other.
const DEPTH: usize = 60;

/// What the values of names in one expression may hold together.
const MOST_PARTS: usize = 250_000;
/// The longest text.
const MOST_BYTES: usize = 1 << 16;

/// Reads an expression from tokens.
pub(super) struct Reader<'t, 'r> {
    pub(super) tokens: &'t [Token],
    pub(super) at: usize,
    depth: usize,
    held: usize,
    runner: &'r mut Runner,
}

/// Operators between two values, by how tightly they bind.
const OPERATORS: [(&str, u8); 22] = [
    ("or", 1),
    ("and", 2),
    ("in", 4),
    ("not", 4),
    ("is", 4),
    ("<", 4),
    (">", 4),
    ("<=", 4),
    (">=", 4),
    ("==", 4),
    ("!=", 4),
    ("|", 5),
    ("&", 6),
    ("<<", 7),
    (">>", 7),
    ("+", 8),
    ("-", 8),
    ("*", 9),
    ("/", 9),
    ("//", 9),
    ("%", 9),
    ("**", 11),
];

impl<'t, 'r> Reader<'t, 'r> {
    pub(super) fn new(tokens: &'t [Token], runner: &'r mut Runner) -> Self {
        Self { tokens, at: 0, depth: 0, held: 0, runner }
    }

    fn next_is(&self, word: &str) -> bool {
        self.tokens.get(self.at).is_some_and(|token| token.is(word))
    }

    fn take(&mut self, word: &str) -> bool {
        let is = self.next_is(word);
        self.at += usize::from(is);
        is
    }

    fn since(&self, start: usize) -> String {
        let end = self.at.min(self.tokens.len());
        let mut text = String::new();
        for token in &self.tokens[start.min(end)..end] {
            let plain = matches!(token, Token::Sign("." | "(" | ")" | "[" | "]")) || text.ends_with(['.', '(', '[']);
            if !text.is_empty() && !plain {
                text.push(' ');
            }
            text += &token.shown();
            if text.len() > 320 {
                break;
            }
        }
        text.chars().take(80).collect()
    }

    /// Several values with commas between them are a list.
    pub(super) fn values(&mut self) -> Value {
        let first = self.value();
        if !self.next_is(",") {
            return first;
        }
        let mut all = vec![first];
        while self.take(",") && self.at < self.tokens.len() && !self.next_is("=") && !self.next_is(")") {
            all.push(self.value());
        }
        Value::Array(all)
    }

    /// One value, with `a if b else c`.
    pub(super) fn value(&mut self) -> Value {
        let start = self.at;
        self.depth += 1;
        if self.depth > DEPTH {
            self.at = self.tokens.len();
            return unknown("…");
        }
        if self.next_is("lambda") {
            self.skip();
            self.depth -= 1;
            return unknown("lambda");
        }
        self.take("await");
        let mut value = self.binary(0);
        if self.take("if") {
            let condition = self.binary(0);
            let other = if self.take("else") { self.value() } else { Value::Null };
            value = match truth(&condition) {
                Some(true) => value,
                Some(false) => other,
                None if value == other => value,
                None => unknown(self.since(start)),
            };
        }
        self.depth -= 1;
        value
    }

    /// Up to the end of what brackets and commas bound.
    fn skip(&mut self) {
        let mut open = 0usize;
        while let Some(token) = self.tokens.get(self.at) {
            match token {
                Token::Sign("(" | "[" | "{") => open += 1,
                Token::Sign(")" | "]" | "}") if open == 0 => return,
                Token::Sign(")" | "]" | "}") => open -= 1,
                Token::Sign(",") if open == 0 => return,
                _ => {}
            }
            self.at += 1;
        }
    }

    fn binary(&mut self, least: u8) -> Value {
        let start = self.at;
        let mut left = self.unary();
        loop {
            let found = self.tokens.get(self.at).and_then(|token| OPERATORS.iter().find(|(sign, _)| token.is(sign)));
            let Some((sign, strength)) = found.filter(|(_, strength)| *strength > least) else { return left };
            self.at += 1;
            let turned = match *sign {
                "is" => self.take("not"),
                "not" => self.take("in"),
                _ => false,
            };
            // Powers are read from the right.
            let right = self.binary(if *sign == "**" { strength - 1 } else { *strength });
            let known = operate(sign, &left, &right);
            let known = if turned { known.and_then(|value| truth(&value)).map(|is| json!(!is)) } else { known };
            left = known.unwrap_or_else(|| unknown(self.since(start)));
        }
    }

    fn unary(&mut self) -> Value {
        let start = self.at;
        if self.take("not") {
            let value = self.binary(3);
            return truth(&value).map_or_else(|| unknown(self.since(start)), |is| json!(!is));
        }
        for sign in ["-", "+", "*", "**"] {
            if self.take(sign) {
                let value = self.binary(10);
                let turned = match (sign, &value) {
                    ("-", Value::Number(number)) => number.as_i64().and_then(i64::checked_neg).map_or_else(
                        || number.as_f64().map_or(Value::Null, |number| json!(-number)),
                        |number| json!(number),
                    ),
                    ("+", Value::Number(_)) => value,
                    _ => unknown(self.since(start)),
                };
                return turned;
            }
        }
        self.primary()
    }

    fn primary(&mut self) -> Value {
        let start = self.at;
        let mut value = self.atom();
        // What a method is called on, where that is known, and where it stands.
        let mut receiver = None;
        let mut place = match self.tokens.get(start) {
            Some(Token::Name(root)) if self.at == start + 1 => Some((root.clone(), Vec::new())),
            _ => None,
        };
        loop {
            if self.take(".") {
                let Some(Token::Name(name)) = self.tokens.get(self.at) else { return value };
                self.at += 1;
                let found = self.runner.attribute(&value, name);
                let known = value.is_array() || value.is_object() && words(&value).is_none();
                receiver = (found.is_none() && known).then(|| (value.clone(), name.clone(), place.clone()));
                if let Some((_, keys)) = &mut place {
                    keys.push(name.clone());
                }
                value = found.unwrap_or_else(|| unknown(self.since(start)));
            } else if self.take("(") {
                place = None;
                let method = std::mem::take(&mut receiver);
                let name = words(&value)
                    .map_or_else(|| self.since(start).trim_end_matches('(').trim().to_owned(), str::to_owned);
                let object = called(&value).is_some() || value.is_object() && words(&value).is_none();
                // Where rows are cut is said to the tokenizer itself.
                let cuts = called(&value).is_some_and(|made| made.contains("Tokenizer") || made.contains("Processor"));
                let arguments = self.arguments();
                value = match method {
                    Some((receiver, method, _)) if called(&receiver).is_some() => {
                        self.runner.method(receiver, &method, arguments)
                    }
                    Some((receiver, method, place)) => {
                        let given = self.runner.of_plain(place.as_ref(), receiver, &method, &arguments);
                        given.unwrap_or_else(|| unknown(self.since(start)))
                    }
                    None if cuts => self.runner.keep("tokenizer", arguments),
                    None if object => unknown(self.since(start)),
                    None => self.runner.call(&name, arguments),
                };
            } else if self.take("[") {
                let index = if self.next_is("]") { Value::Null } else { self.values() };
                while self.at < self.tokens.len() && !self.next_is("]") {
                    self.at += 1;
                }
                self.take("]");
                let key = index.as_str().map(str::to_owned).or_else(|| index.as_u64().map(|at| at.to_string()));
                place = place.zip(key).map(|((root, mut keys), key)| {
                    keys.push(key);
                    (root, keys)
                });
                let found = match (&value, &index) {
                    (Value::Array(list), Value::Number(at)) => {
                        let length = i64::try_from(list.len()).unwrap_or(i64::MAX);
                        let at = at.as_i64().map(|at| if at < 0 { at.saturating_add(length) } else { at });
                        at.and_then(|at| list.get(usize::try_from(at).ok()?))
                    }
                    (Value::Object(object), Value::String(key)) if words(&value).is_none() => object.get(key),
                    (_, Value::String(key)) if words(&value) == Some(ENVIRONMENT) => self.runner.environment.get(key),
                    _ => None,
                };
                value = found.cloned().unwrap_or_else(|| unknown(self.since(start)));
            } else {
                return value;
            }
        }
    }

    /// Arguments up to the closing bracket.
    fn arguments(&mut self) -> Map<String, Value> {
        let mut found = Map::new();
        let mut place = 0;
        while self.at < self.tokens.len() && !self.take(")") {
            if self.take("**") {
                match self.value() {
                    Value::Object(more) if !more.contains_key(CALL) && !more.contains_key(super::UNKNOWN) => {
                        found.extend(more)
                    }
                    other => drop(found.insert("**".into(), other)),
                }
            } else if let (Some(Token::Name(name)), Some(Token::Sign("="))) =
                (self.tokens.get(self.at), self.tokens.get(self.at + 1))
            {
                self.at += 2;
                let value = self.value();
                found.insert(name.clone(), value);
            } else {
                let value = self.value();
                found.insert(place.to_string(), value);
                place += 1;
                // `f(x for x in y)`
                if self.next_is("for") {
                    self.comprehension();
                }
            }
            if !self.take(",") && !self.next_is(")") {
                self.skip();
                self.take(",");
            }
        }
        found
    }

    fn comprehension(&mut self) {
        while self.at < self.tokens.len() && !(self.next_is(")") || self.next_is("]") || self.next_is("}")) {
            self.skip();
            self.take(",");
        }
    }

    fn atom(&mut self) -> Value {
        let start = self.at;
        let Some(token) = self.tokens.get(self.at) else { return Value::Null };
        self.at += 1;
        match token {
            Token::Number(text) => number(text).unwrap_or_else(|| unknown(text)),
            Token::Text(text, named) => {
                let mut whole = self.filled(text, *named);
                while let Some(Token::Text(more, named)) = self.tokens.get(self.at) {
                    self.at += 1;
                    whole = whole.zip(self.filled(more, *named)).map(|(first, second)| first + &second);
                }
                whole.map_or_else(|| unknown(self.since(start)), Value::String)
            }
            Token::Name(name) => match name.as_str() {
                "True" => json!(true),
                "False" => json!(false),
                "None" => Value::Null,
                _ => {
                    let value = self.runner.name(name);
                    self.held += weight(&value).unwrap_or(0);
                    if self.held > MOST_PARTS { unknown(name) } else { value }
                }
            },
            Token::Sign("(") => {
                if self.take(")") {
                    return json!([]);
                }
                let value = self.values();
                if self.next_is("for") {
                    self.comprehension();
                    self.take(")");
                    return unknown(self.since(start));
                }
                self.take(")");
                value
            }
            Token::Sign("[") => self.list(start),
            Token::Sign("{") => self.object(start),
            _ => unknown(token.shown()),
        }
    }

    fn list(&mut self, start: usize) -> Value {
        let mut all = Vec::new();
        while self.at < self.tokens.len() && !self.take("]") {
            all.push(self.value());
            if self.next_is("for") {
                self.comprehension();
                self.take("]");
                return unknown(self.since(start));
            }
            if !self.take(",") && !self.next_is("]") {
                self.at += 1;
            }
        }
        Value::Array(all)
    }

    fn object(&mut self, start: usize) -> Value {
        let mut object = Map::new();
        while self.at < self.tokens.len() && !self.take("}") {
            if self.take("**") {
                if let Value::Object(more) = self.value() {
                    object.extend(more);
                }
            } else {
                let key = self.value();
                let value = if self.take(":") { self.value() } else { Value::Null };
                if self.next_is("for") {
                    self.comprehension();
                    self.take("}");
                    return unknown(self.since(start));
                }
                if let Some(key) = key.as_str().map(str::to_owned).or_else(|| key.as_u64().map(|key| key.to_string())) {
                    object.insert(key, value);
                }
            }
            if !self.take(",") && !self.next_is("}") {
                self.at += 1;
            }
        }
        Value::Object(object)
    }

    /// A text with the values of names in its braces.
    fn filled(&mut self, text: &str, named: bool) -> Option<String> {
        if !named {
            return Some(text.to_owned());
        }
        let (mut filled, mut rest) = (String::new(), text);
        while let Some((before, behind)) = rest.split_once('{') {
            let (name, after) = behind.split_once('}')?;
            let value = self.runner.name(name.trim());
            filled += before;
            match &value {
                Value::String(text) => filled += text,
                Value::Number(number) => filled += &number.to_string(),
                _ => return None,
            }
            rest = after;
        }
        Some(filled + rest).filter(|text| text.len() <= MOST_BYTES)
    }
}

fn number(text: &str) -> Option<Value> {
    let whole = match text.get(..2).map(str::to_lowercase).as_deref() {
        Some("0x") => u64::from_str_radix(&text[2..], 16).ok(),
        Some("0b") => u64::from_str_radix(&text[2..], 2).ok(),
        _ => text.parse().ok(),
    };
    whole.map(|whole| json!(whole)).or_else(|| text.parse::<f64>().ok().and_then(Number::from_f64).map(Value::Number))
}

/// Whether a value counts as true; `None` where it is not known.
pub(super) fn truth(value: &Value) -> Option<bool> {
    match value {
        Value::Null => Some(false),
        Value::Bool(is) => Some(*is),
        Value::Number(number) => Some(number.as_f64() != Some(0.0)),
        Value::String(text) => Some(!text.is_empty()),
        Value::Array(list) => Some(!list.is_empty()),
        Value::Object(object) if object.contains_key(CALL) || object.contains_key(super::UNKNOWN) => None,
        Value::Object(object) => Some(!object.is_empty()),
    }
}

pub(super) fn operate(sign: &str, left: &Value, right: &Value) -> Option<Value> {
    match sign {
        "or" => return truth(left).map(|is| if is { left.clone() } else { right.clone() }),
        "and" => return truth(left).map(|is| if is { right.clone() } else { left.clone() }),
        _ => {}
    }
    truth(left).and(truth(right))?;
    match sign {
        "==" | "is" => return Some(json!(same(left, right))),
        "!=" => return Some(json!(!same(left, right))),
        "in" | "not" => {
            return match (left, right) {
                (Value::String(part), Value::String(whole)) => Some(json!(whole.contains(part.as_str()))),
                (_, Value::Array(list)) => Some(json!(list.iter().any(|one| same(one, left)))),
                (Value::String(key), Value::Object(object)) => Some(json!(object.contains_key(key))),
                _ => None,
            };
        }
        _ => {}
    }
    match (sign, left, right) {
        ("+", Value::String(one), Value::String(other)) => {
            return (one.len() + other.len() <= MOST_BYTES).then(|| json!(format!("{one}{other}")));
        }
        ("+", Value::Array(one), Value::Array(other)) => {
            let both = Value::Array(one.iter().chain(other).cloned().collect());
            return weight(&both).map(|_| both);
        }
        ("|", Value::Object(one), Value::Object(other)) => {
            let all = one.iter().chain(other).map(|(key, value)| (key.clone(), value.clone()));
            return Some(Value::Object(all.collect()));
        }
        _ => {}
    }
    let whole = |sign: &str, a: i64, b: i64| -> Option<i64> {
        match sign {
            "+" => a.checked_add(b),
            "-" => a.checked_sub(b),
            "*" => a.checked_mul(b),
            // Python rounds down, and the remainder has the divisor's sign.
            "//" => Some(a.checked_div(b)? - i64::from(a % b != 0 && (a % b < 0) != (b < 0))),
            "%" => a.checked_rem(b).map(|rest| if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }),
            "**" => a.checked_pow(u32::try_from(b).ok()?),
            "<<" => a.checked_mul(2i64.checked_pow(u32::try_from(b).ok()?)?),
            ">>" => a.checked_shr(u32::try_from(b).ok()?),
            _ => None,
        }
    };
    if let (Some(a), Some(b)) = (left.as_i64(), right.as_i64())
        && let Some(value) = whole(sign, a, b)
    {
        return Some(json!(value));
    }
    let (a, b) = (left.as_f64()?, right.as_f64()?);
    Some(match sign {
        "<" => json!(a < b),
        ">" => json!(a > b),
        "<=" => json!(a <= b),
        ">=" => json!(a >= b),
        "+" => json!(a + b),
        "-" => json!(a - b),
        "*" => json!(a * b),
        "/" if b != 0.0 => json!(a / b),
        "//" if b != 0.0 && !(left.is_i64() && right.is_i64()) => json!((a / b).floor()),
        "**" => json!(a.powf(b)),
        _ => return None,
    })
}

fn same(one: &Value, other: &Value) -> bool {
    one == other || one.as_f64().is_some() && one.as_f64() == other.as_f64()
}
