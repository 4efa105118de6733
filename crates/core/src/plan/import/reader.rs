//! Reading another tool's keys one by one, so that none is dropped silently.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::table::{self, Format, Sense};
use super::{Beside, Imported};
use crate::plan::{Fault, Faults};
use crate::source::python;

/// A tool's keys, those that were read already, and what they come to.
pub(super) struct Reader<'a> {
    format: &'static Format,
    value: &'a Value,
    leaves: Vec<(String, &'a Value)>,
    seen: BTreeSet<String>,
    /// Whoever can open what the file refers to.
    pub(super) beside: &'a Beside<'a>,
    /// Places in the plan and their values, the later ones above.
    pub(super) changes: Vec<(String, Value)>,
    /// What a report should say.
    pub(super) notes: Vec<String>,
    /// Keys that are not simulated although they may change memory.
    pub(super) unsimulated: Vec<String>,
    /// What is wrong.
    pub(super) faults: Faults,
}

impl<'a> Reader<'a> {
    pub(super) fn new(format: &'static Format, value: &'a Value, beside: &'a Beside<'a>) -> Self {
        let mut leaves = Vec::new();
        table::leaves(value, "", &mut leaves);
        let (changes, notes, unsimulated) = (Vec::new(), Vec::new(), Vec::new());
        let mut reader = Self {
            format,
            value,
            leaves,
            seen: BTreeSet::new(),
            beside,
            changes,
            notes,
            unsimulated,
            faults: Faults::default(),
        };
        let under = |key: &str, without: &str| {
            key == without || key.strip_prefix(without).is_some_and(|rest| rest.starts_with('.'))
        };
        for without in beside.without {
            let hit: Vec<String> =
                reader.leaves.iter().map(|(key, _)| key.clone()).filter(|key| under(key, without)).collect();
            if hit.is_empty() {
                reader.faults.add(Fault::new("", format!("{without} is to be left out, and is not in the file")));
            } else {
                reader.unsimulated.push(format!("{without}: left out as asked"));
            }
            reader.leaves.retain(|(key, _)| !under(key, without));
        }
        reader
    }

    /// Whose file it is.
    pub(super) fn title(&self) -> &'static str {
        self.format.title
    }

    /// A key's value; absent and null are the same.
    pub(super) fn get(&mut self, key: &str) -> Option<&'a Value> {
        if self.beside.without.iter().any(|without| without == key) {
            return None;
        }
        self.seen.insert(key.to_owned());
        let mut value = self.value;
        // A key may hold dots itself where a command line was read.
        if let Some(found) = value.get(key) {
            value = found;
        } else {
            for part in key.split('.') {
                value = value.get(part)?;
            }
        }
        // A program may compute it.
        if let Some(words) = python::words(value) {
            self.faults.add(unread(key, words));
            return None;
        }
        Some(value).filter(|value| !value.is_null())
    }

    /// All of it.
    pub(super) fn value(&self) -> &'a Value {
        self.value
    }

    /// Whether the file has a key at all.
    pub(super) fn has(&self, key: &str) -> bool {
        self.value.get(key).is_some()
    }

    /// A part of the file, all of whose keys count as read.
    pub(super) fn part(&mut self, key: &str) -> Option<&'a Value> {
        let before = format!("{key}.");
        let inside: Vec<String> = self
            .leaves
            .iter()
            .filter(|(known, _)| known.starts_with(&before))
            .map(|(known, _)| known.clone())
            .collect();
        self.seen.extend(inside);
        self.get(key)
    }

    /// A switch: `true`, and what is written where one may be.
    pub(super) fn is_on(&mut self, key: &str) -> bool {
        self.get(key).is_some_and(|value| {
            let word = value.as_str().map(str::to_lowercase);
            *value == true || matches!(word.as_deref(), Some("true" | "yes" | "1" | "on"))
        })
    }

    /// A switch that is said either way.
    pub(super) fn switch(&mut self, key: &str) -> Option<bool> {
        let value = self.get(key)?;
        let word = value.as_str().map(str::to_lowercase);
        match word.as_deref() {
            Some("true" | "yes" | "1" | "on") => Some(true),
            Some("false" | "no" | "0" | "off") => Some(false),
            _ => value.as_bool(),
        }
    }

    pub(super) fn text(&mut self, key: &str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
    }

    /// A number, also where YAML took one such as 2e-5 for a text.
    pub(super) fn real(&mut self, key: &str) -> Option<f64> {
        self.get(key).and_then(|value| value.as_f64().or_else(|| value.as_str()?.trim().parse().ok()))
    }

    pub(super) fn number(&mut self, key: &str) -> Option<u64> {
        let value = self.get(key)?;
        let whole = whole(value);
        if whole.is_none() {
            self.faults.add(not_whole(key, value));
        }
        whole
    }

    pub(super) fn set(&mut self, place: &str, value: impl Into<Value>) {
        self.changes.push((place.into(), value.into()));
    }

    /// What was set at a place.
    pub(super) fn was_set(&self, place: &str) -> Option<&Value> {
        self.changes.iter().rev().find(|(known, _)| known == place).map(|(_, value)| value)
    }

    /// Whether the file names an engine that spreads a model.
    pub(super) fn spreads(&self) -> bool {
        self.changes.iter().any(|(place, _)| place.starts_with("parallel.engine"))
    }

    /// A whole number to a place of the plan.
    pub(super) fn number_to(&mut self, key: &str, place: &str) {
        if let Some(number) = self.number(key) {
            self.set(place, number);
        }
    }

    pub(super) fn real_to(&mut self, key: &str, place: &str) {
        if let Some(number) = self.real(key) {
            self.set(place, number);
        }
    }

    /// Names given as a list or with commas between them; `all` and `all-linear` are every linear.
    pub(super) fn targets_to(&mut self, key: &str, place: &str) {
        let Some(value) = self.get(key) else { return };
        let names: Vec<&str> = match value {
            Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
            // Signs of a regular expression make it one, and its commas its own.
            Value::String(text) if is_pattern(text) => vec![text],
            Value::String(text) => text.split([',', ' ']).map(str::trim).filter(|name| !name.is_empty()).collect(),
            _ => Vec::new(),
        };
        match names.as_slice() {
            [] => {}
            ["all" | "all-linear" | "all_linear"] => self.set(place, "all-linear"),
            [one] if is_pattern(one) => self.set(place, json!(one)),
            _ => self.set(place, json!(names)),
        }
    }

    /// Refuses a key's value by name.
    pub(super) fn refuse(&mut self, key: &str, value: &str, cure: &str) {
        self.faults.add(Fault::unsupported("", format!("{key}: {value}")).or(cure));
    }

    /// Says that something the file asks for is not simulated, and what is in its place.
    pub(super) fn say(&mut self, key: &str, instead: &str) {
        self.unsimulated.push(format!("{key}: {instead}"));
    }

    /// The document that a key holds or refers to.
    pub(super) fn referred(&mut self, key: &str) -> Option<Value> {
        match self.part(key)? {
            Value::String(name) => match (self.beside.open)(name) {
                Ok(document) => Some(document),
                Err(_) if name.contains('$') => {
                    self.faults.add(open(key, name));
                    None
                }
                Err(problem) => {
                    // A file that is there and cannot be read is the one that was meant.
                    let missing = problem.starts_with("there is no such file");
                    if let Some((tool, document)) =
                        super::shipped::named(name).filter(|_| missing && key == "deepspeed")
                    {
                        self.notes
                            .push(format!("{name} is not here: the one of that name that comes with {tool} is taken"));
                        return Some(document);
                    }
                    self.faults.add(Fault::new("", format!("{key}: {name}: {problem}")));
                    None
                }
            },
            inline => Some(inline.clone()),
        }
    }

    /// What is left after a tool's own keys: by the table of the format.
    fn rest(&mut self) {
        let seen = |reader: &Self, key: &str| {
            reader.seen.contains(key) || key.match_indices('.').any(|(at, _)| reader.seen.contains(&key[..at]))
        };
        // What a call is called is no key of its own.
        let counts = |reader: &Self, key: &str, value: &Value| {
            !value.is_null() && !seen(reader, key) && !key.ends_with(&format!(".{}", python::CALL))
        };
        let left: Vec<(String, &Value)> =
            self.leaves.iter().filter(|(key, value)| counts(self, key, value)).cloned().collect();
        for (key, value) in left {
            let unknown = key.strip_suffix(".?").map(str::to_owned);
            let key = unknown.clone().unwrap_or(key);
            match self.format.sense(&key) {
                // A key that the reader's code reads beside others only.
                Some(Sense::Read(_) | Sense::Harmless(_)) => {}
                Some(Sense::Whole("batch.batch_size")) if value.as_u64() == Some(0) => {
                    self.faults.add(Fault::new("", format!("{key}: 0 is no batch")).or("use 1 or more"));
                }
                Some(_) if table::is_off(value) => {}
                Some(Sense::Whole(_) | Sense::Refused(_)) if unknown.is_some() => {
                    self.faults.add(unread(&key, &table::shown(value)));
                }
                Some(Sense::Whole(place)) => match whole(value) {
                    Some(number) => self.set(place, number),
                    None => self.faults.add(not_whole(&key, value)),
                },
                Some(Sense::Said(instead)) => self.unsimulated.push(format!("{key}: {instead}")),
                Some(Sense::Refused(why)) => {
                    let fault = Fault::unsupported("", format!("{key}: {}", table::shown(value)));
                    let why = if why.is_empty() { "leave it out" } else { why };
                    self.faults.add(fault.or(why));
                }
                // What a name says plainly is no small thing: the answer would be of another run.
                None if self.beside.script && decides(&key, value) && !table::is_off(value) => self.own(&key, value),
                None if self.beside.script => self.unsimulated.push(format!("{key}: an argument of the script's own")),
                None => {
                    let Format { title, version, .. } = self.format;
                    let near = self.format.nearest(&key).map(|near| format!(" ({near} is one)")).unwrap_or_default();
                    let problem = format!("{key} is no key of {title} {version} that is known here{near}");
                    self.faults.add(Fault::new("", problem).or("leave it out: what it changes is not known"));
                }
            }
        }
    }

    /// Refuses what a script calls in its own way where its name says plainly that it decides memory.
    pub(super) fn own(&mut self, key: &str, value: &Value) {
        let problem = format!("{key}: {}, an argument of the script's own, decides memory", table::shown(value));
        let cure = format!("say it by flags (--lora, --qlora, --quantization), and leave it out: --without {key}");
        self.faults.add(Fault::new("", problem).or(cure));
    }

    /// What the file comes to.
    pub(super) fn finish(
        mut self,
        framework: Option<&'static str>,
        model: Option<String>,
    ) -> Result<Imported, Vec<Fault>> {
        self.rest();
        self.faults.end()?;
        Ok(Imported {
            format: self.format.title,
            framework,
            model,
            changes: self.changes,
            notes: self.notes,
            unsimulated: self.unsimulated,
            ..Imported::default()
        })
    }
}

/// Whether an argument of a script's own speaks of adapters or quantised weights; ranks and places of what is not asked
/// for are no such thing.
fn decides(key: &str, value: &Value) -> bool {
    let key = key.to_ascii_lowercase();
    let whole = ["lora", "qlora", "q_lora", "lora_enable", "lora_dim", "lora_r", "lora_rank", "use_peft", "quantize"];
    let parts = ["use_lora", "use_qlora", "enable_lora", "peft_lora", "load_in_", "_4bit", "_8bit"];
    // LLaVA's `--bits 16` is none.
    let bits = ["bits", "quantization_bit"].contains(&key.as_str()) && value.as_u64().is_some_and(|bits| bits < 16);
    bits || whole.contains(&key.as_str()) || parts.iter().any(|part| key.contains(part))
}

fn not_whole(key: &str, value: &Value) -> Fault {
    let shown = table::shown(value);
    if shown.contains('$') {
        return open(key, &shown);
    }
    Fault::new("", format!("{key}: {shown} is not a whole number"))
}

/// What a script leaves to its caller or to a run.
fn open(key: &str, words: &str) -> Fault {
    let problem = format!("{key}: {words}: the script's text does not tell it");
    Fault::new("", problem).or("give the script's arguments behind its name: vramcast fit -- bash SCRIPT ARGUMENTS")
}

/// What a program computes, and its text does not tell.
pub(crate) fn unread(key: &str, words: &str) -> Fault {
    let words = words.replace(['{', '}'], "");
    Fault::new("", format!("{key}: {words} is not known without running the program"))
        .or(format!("say it by a flag, and leave it out: --without {key}"))
}

/// Two keys of which only one may be set.
pub(crate) fn both(one: &str, other: &str) -> Fault {
    Fault::new("", format!("{one} and {other} are both set: they contradict each other")).or("leave one of them out")
}

/// Whether a name is a regular expression.
fn is_pattern(text: &str) -> bool {
    text.contains(['*', '(', '|', '\\', '[', '$', '^'])
}

/// A whole number, in whichever way it is written.
pub(super) fn whole(value: &Value) -> Option<u64> {
    let real = |number: f64| (number.fract() == 0.0 && (0.0..1e18).contains(&number)).then_some(number as u64);
    value.as_u64().or_else(|| value.as_f64().and_then(real)).or_else(|| {
        let text = value.as_str()?.replace('_', "");
        text.parse().ok().or_else(|| text.parse().ok().and_then(real))
    })
}
