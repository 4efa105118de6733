//! What is wrong with a plan, as data: where, what, and the changes that would mend it.
//!
//! A fault names settings by their places in a plan (`batch.seq_len`), never by a flag: every interface puts its own words
//! in their place. In a text such a place stands in braces.

use std::ops::RangeInclusive;

use serde::Serialize;
use serde_json::Value;

use crate::dtype::DType;

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Fault {
    /// The setting at fault, by its place in a plan.
    pub path: String,
    /// What is wrong with it; other settings in braces.
    pub problem: String,
    /// Changes of which each mends it.
    pub remedies: Vec<Remedy>,
    /// Whether it could run, and only is not simulated.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unsupported: bool,
}

/// A change that mends a fault.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Remedy {
    /// Leave a setting out.
    Drop(String),
    /// Give a setting another value.
    Set(String, Value),
    /// Something that is no change of one setting, in words; settings in braces.
    Other(String),
}

impl Fault {
    /// Something wrong with a setting.
    pub fn new(path: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { path: path.into(), problem: problem.into(), remedies: Vec::new(), unsupported: false }
    }

    /// A value that is out of range or unknown.
    pub fn value(path: impl Into<String>, value: impl std::fmt::Display, expected: impl std::fmt::Display) -> Self {
        let (path, value) = (path.into(), shown(&value.to_string()));
        Self::new(path.clone(), format!("{{{path}}}: {value} is not {expected}"))
    }

    /// Something that this version does not simulate.
    pub fn unsupported(path: impl Into<String>, what: impl std::fmt::Display) -> Self {
        Self { unsupported: true, ..Self::new(path, format!("{what} is not supported yet")) }
    }

    /// A setting that would change nothing, and on what.
    pub fn no_effect(path: impl Into<String>, on: impl std::fmt::Display) -> Self {
        let path = path.into();
        Self::new(path.clone(), format!("{{{path}}} has no effect {on}")).or_drop(path)
    }

    /// Leaving a setting out mends it.
    pub fn or_drop(mut self, path: impl Into<String>) -> Self {
        self.remedies.push(Remedy::Drop(path.into()));
        self
    }

    /// Another value mends it.
    pub fn or_set(mut self, path: impl Into<String>, value: impl Into<Value>) -> Self {
        self.remedies.push(Remedy::Set(path.into(), value.into()));
        self
    }

    /// Something else mends it, in words.
    pub fn or(mut self, words: impl Into<String>) -> Self {
        self.remedies.push(Remedy::Other(words.into()));
        self
    }

    /// The problem in an interface's words.
    pub fn said(&self, words: &impl Words) -> String {
        worded(&self.problem, words)
    }

    /// The cure in an interface's words, where there is one.
    pub fn cure(&self, words: &impl Words) -> Option<String> {
        let one = |remedy: &Remedy| match remedy {
            Remedy::Drop(path) => format!("drop {}", words.setting(path)),
            Remedy::Set(path, value) => format!("use {}", words.change(path, value)),
            Remedy::Other(text) => worded(text, words),
        };
        let all: Vec<String> = self.remedies.iter().map(one).collect();
        (!all.is_empty()).then(|| all.join(", or "))
    }
}

/// How an interface speaks of settings: by flags, fields or keywords.
pub trait Words {
    /// The setting at a place in a plan.
    fn setting(&self, path: &str) -> String;
    /// A setting with a value.
    fn change(&self, path: &str, value: &Value) -> String;
}

/// A place without the name that was used for it, which may follow a `#`.
pub fn place(path: &str) -> &str {
    path.split('#').next().unwrap_or(path)
}

/// Places in a plan as they are: the words of the core itself.
#[derive(Debug, Clone, Copy)]
pub struct Places;

impl Words for Places {
    fn setting(&self, path: &str) -> String {
        place(path).to_owned()
    }

    fn change(&self, path: &str, value: &Value) -> String {
        match value {
            Value::String(text) => format!("{path} = {text}"),
            other => format!("{path} = {other}"),
        }
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.said(&Places))?;
        match self.cure(&Places) {
            Some(cure) => write!(formatter, "; {cure}"),
            None => Ok(()),
        }
    }
}

/// A text with its places in an interface's words.
fn worded(text: &str, words: &impl Words) -> String {
    let mut said = String::new();
    let mut rest = text;
    // A place is a word; other braces are somebody's own.
    let is_place = |path: &str| {
        let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '.' | '*' | '-' | '#');
        !path.is_empty() && path.chars().all(letter)
    };
    while let Some((before, after)) = rest.split_once('{') {
        said.push_str(before);
        match after.split_once('}').filter(|(path, _)| is_place(path)) {
            Some((path, after)) => {
                said.push_str(&words.setting(path));
                rest = after;
            }
            None => {
                said.push('{');
                rest = after;
            }
        }
    }
    said + rest
}

/// Faults as they are found, so that all come back at once.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Faults(Vec<Fault>);

impl Faults {
    /// One more; the same one once.
    pub fn add(&mut self, fault: Fault) {
        if !self.0.contains(&fault) {
            self.0.push(fault);
        }
    }

    /// One more where something is wrong.
    pub fn when(&mut self, wrong: bool, fault: impl FnOnce() -> Fault) {
        if wrong {
            self.0.push(fault());
        }
    }

    /// A number that is not in a range; the nearer end of it mends that.
    pub fn range(&mut self, path: &str, value: u64, allowed: RangeInclusive<u64>) {
        let (least, most) = (*allowed.start(), *allowed.end());
        self.when(!allowed.contains(&value), || {
            let expected = if least == 0 { format!("at most {most}") } else { format!("from {least} to {most}") };
            Fault::value(path, value, expected).or_set(path, value.clamp(least, most))
        });
    }

    /// A type that no weights are trained in.
    pub fn float(&mut self, path: &str, dtype: DType) {
        let wrong = !matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        self.when(wrong, || Fault::value(path, dtype.name(), "fp32, bf16 or fp16").or_set(path, "bf16"));
    }

    /// Those of a check.
    pub fn take(&mut self, checked: Result<(), Vec<Fault>>) {
        self.0.extend(checked.err().into_iter().flatten());
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them, or that there is none.
    pub fn end(self) -> Result<(), Vec<Fault>> {
        if self.0.is_empty() { Ok(()) } else { Err(self.0) }
    }
}

/// A value as a sentence has room for it: a file that was given may hold anything.
fn shown(value: &str) -> String {
    const MOST: usize = 120;
    let line = value.trim().lines().next().unwrap_or_default();
    let short: String = line.chars().take(MOST).collect();
    if short.len() == value.trim().len() { value.to_owned() } else { format!("{short}…") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_become_an_interfaces_words() {
        struct Flags;
        impl Words for Flags {
            fn setting(&self, path: &str) -> String {
                format!("--{}", path.replace('_', "-"))
            }

            fn change(&self, path: &str, value: &Value) -> String {
                format!("{} {}", self.setting(path), value.as_str().unwrap_or_default())
            }
        }
        let fault = Fault::new("clip", "{optimizer_in_backward} leaves no gradients to clip")
            .or_drop("clip")
            .or_set("attention", "sdpa");
        assert_eq!(fault.said(&Flags), "--optimizer-in-backward leaves no gradients to clip");
        assert_eq!(fault.cure(&Flags).as_deref(), Some("drop --clip, or use --attention sdpa"));
        assert_eq!(Fault::new("", "{clip}: {\"a\": {}} is {odd").said(&Flags), "--clip: {\"a\": {}} is {odd");
        assert_eq!(Fault::value("tp", 3, "a divisor of 32").to_string(), "tp: 3 is not a divisor of 32");
        let said = Fault::no_effect("tp", "on one card").to_string();
        assert_eq!(said, "tp has no effect on one card; drop tp");
    }

    #[test]
    fn all_come_back_at_once() {
        let mut faults = Faults::default();
        faults.when(true, || Fault::new("a", "wrong"));
        faults.when(false, || Fault::new("b", "right"));
        faults.take(Err(vec![Fault::new("c", "wrong too")]));
        assert_eq!(faults.end().unwrap_err().len(), 2);
        assert!(Faults::default().end().is_ok());
    }

    #[test]
    fn the_nearer_end_of_a_range_is_offered() {
        let mut faults = Faults::default();
        faults.range("beams", 0, 1..=1024);
        faults.range("beams", 2000, 1..=1024);
        faults.range("beams", 1024, 1..=1024);
        let said: Vec<String> = faults.end().unwrap_err().iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            ["beams: 0 is not from 1 to 1024; use beams = 1", "beams: 2000 is not from 1 to 1024; use beams = 1024"]
        );
    }
}
