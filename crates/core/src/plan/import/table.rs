//! What a format's keys mean, as a table: every key is honoured, harmless, said or refused.

use serde_json::Value;

/// What a key comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sense {
    /// A whole number at a place in a plan.
    Whole(&'static str),
    /// Honoured by the reader's own code: which settings follow from it.
    Read(&'static str),
    /// It changes no memory, and why.
    Harmless(&'static str),
    /// It is not simulated; the answer stands, and says what runs in its place.
    Said(&'static str),
    /// The file is refused where it is set, and why.
    Refused(&'static str),
}

/// Some keys of one meaning, with spaces between them. A key that ends in `*` stands for all that begin so; parts of nested ones
/// are joined by dots.
#[derive(Debug, Clone, Copy)]
pub struct Row(pub &'static str, pub Sense);

impl Row {
    /// Its keys.
    pub fn keys(&self) -> impl Iterator<Item = &'static str> {
        self.0.split_whitespace()
    }
}

/// A format.
#[derive(Debug, Clone, Copy)]
pub struct Format {
    /// As notes and faults call it.
    pub title: &'static str,
    /// The version whose keys and defaults these are.
    pub version: &'static str,
    /// Where they were read.
    pub source: &'static str,
    /// Its keys.
    pub keys: &'static [&'static [Row]],
}

impl Format {
    /// What a key means; one that is named counts more than a beginning.
    pub fn sense(&self, key: &str) -> Option<Sense> {
        let named = |known: &str| known == key;
        let begins = |known: &str| known.strip_suffix('*').is_some_and(|start| key.starts_with(start));
        let find =
            |is: &dyn Fn(&str) -> bool| self.keys.iter().flat_map(|rows| rows.iter()).find(|row| row.keys().any(is));
        find(&named).or_else(|| find(&begins)).map(|row| row.1)
    }

    /// The known key that looks most like another one.
    pub fn nearest(&self, key: &str) -> Option<&'static str> {
        let known = self.keys.iter().flat_map(|rows| rows.iter()).flat_map(Row::keys);
        let near = known.filter(|known| !known.ends_with('*')).map(|known| (distance(known, key), known)).min()?;
        (near.0 <= 2 && near.0 < key.len() / 2).then_some(near.1)
    }
}

/// How many letters must change to make one word of another.
pub(crate) fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().take(80).collect(), other.chars().take(80).collect());
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.iter().enumerate() {
        let mut before = i;
        row[0] = i + 1;
        for (j, b) in other.iter().enumerate() {
            let changed = before + usize::from(a != b);
            before = row[j + 1];
            row[j + 1] = changed.min(before + 1).min(row[j] + 1);
        }
    }
    row[other.len()]
}

/// Whether a value says that something is not wanted.
pub(super) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => ["", "none", "null", "no", "false", "off"].contains(&text.to_lowercase().as_str()),
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::Bool(true) => false,
    }
}

/// A value in few words.
pub(super) fn shown(value: &Value) -> String {
    // Braces mark settings in a fault's words.
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned).replace(['{', '}'], "");
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// Values that are no objects, with their places; an empty object is one.
pub(super) fn leaves<'a>(value: &'a Value, place: &str, found: &mut Vec<(String, &'a Value)>) {
    match value {
        Value::Object(object) if !object.is_empty() || place.is_empty() => {
            for (key, value) in object {
                let place = if place.is_empty() { key.clone() } else { format!("{place}.{key}") };
                leaves(value, &place, found);
            }
        }
        other => found.push((place.to_owned(), other)),
    }
}
