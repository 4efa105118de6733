//! The kinds of truth in one table: how a file of each looks, and how its rows are scored.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Serialize;
use serde_json::{Value, json};

use super::ledger::Measure;
use super::summary::{self, Group};
use super::{engine, external, jobs, ledger, lora, models};
use crate::source::json as python_json;

/// All kinds. A new one is an entry here.
pub const KINDS: &[Kind] = &[models::KIND, lora::KIND, ledger::KIND, jobs::KIND, engine::KIND, external::KIND];

/// A kind of truth.
#[derive(Debug)]
pub struct Kind {
    /// Its name.
    pub name: &'static str,
    /// What its rows are called.
    pub noun: &'static str,
    /// How a file of it looks, for people.
    pub looks: &'static str,
    /// What its rows compare; nothing where they are right or wrong.
    pub levels: &'static [&'static str],
    /// Whether the files of a folder are one set.
    pub joined: bool,
    /// The rows of a file, if it is of this kind.
    pub(super) rows: fn(&File) -> Option<Vec<Value>>,
    /// Scores a row beside what its document says of all: one score, several, or none where it repeats another.
    pub(super) score: fn(&Value, &Value) -> Vec<Score>,
}

/// What is in a file: one document, or one a line.
#[derive(Debug, Clone)]
pub struct File {
    /// The documents.
    pub documents: Vec<Value>,
}

/// A row beside its prediction.
#[derive(Debug, Clone)]
pub struct Score {
    /// The row.
    pub id: String,
    /// What kind of row, where a set has several.
    pub group: String,
    /// What the kind's levels are.
    pub levels: [Measure; 3],
    /// What came of it.
    pub outcome: Outcome,
    /// All of it, as documents show it.
    pub document: Value,
}

impl Score {
    /// A row that is not scored, and why.
    pub(super) fn skipped(id: &str, why: &str) -> Self {
        let document = json!({"id": id, "skipped": why});
        let outcome = Outcome::Skipped(why.to_owned());
        Self { id: id.to_owned(), group: String::new(), levels: Default::default(), outcome, document }
    }

    /// A row that is right or wrong as a whole.
    pub(super) fn exact(id: &str, wrong: Option<String>, row: &impl Serialize) -> Self {
        let document = serde_json::to_value(row).unwrap_or_default();
        let outcome = wrong.map_or(Outcome::Good, Outcome::Wrong);
        Self { id: id.to_owned(), group: String::new(), levels: Default::default(), outcome, document }
    }
}

/// What came of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// As it should be.
    Good,
    /// Off, and how.
    Wrong(String),
    /// Not scored, and why.
    Skipped(String),
}

/// A file that was recognised.
#[derive(Debug)]
pub struct Truth {
    /// Where it is.
    pub path: String,
    /// What it is.
    pub kind: &'static Kind,
    /// Its rows.
    pub rows: Vec<Value>,
    /// What the document of the rows says besides them.
    head: Value,
}

impl Truth {
    /// Recognises a file by its contents.
    pub fn read(path: &str, text: &str) -> Result<Self, String> {
        // Truth is written by Python, which allows `Infinity` and `NaN`.
        let parse = |text: &str| python_json::parse(text.as_bytes());
        let documents = match parse(text) {
            Ok(document) => vec![document],
            Err(_) => {
                let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
                let broken = |(at, error): (usize, String)| match at {
                    // Not even its first line is JSON: no broken ledger, but another kind of file.
                    0 => format!("{path}: {}", unknown(text)),
                    at => format!("{path}: line {}: {error}", at + 1),
                };
                let parsed = lines.map(|(at, line)| parse(line).map_err(|e| broken((at, e.to_string()))));
                parsed.collect::<Result<_, _>>()?
            }
        };
        let file = File { documents };
        let found = KINDS.iter().find_map(|kind| Some((kind, (kind.rows)(&file)?)));
        let Some((kind, rows)) = found else {
            return Err(format!("{path}: {}", unknown("")));
        };
        let mut head = file.documents.into_iter().next().filter(|first| first["rows"].is_array()).unwrap_or_default();
        head.as_object_mut().and_then(|document| document.remove("rows"));
        Ok(Self { path: path.to_owned(), kind, rows, head })
    }

    /// Leaves only the rows whose `id` contains a text.
    pub fn retain(&mut self, text: &str) {
        self.rows.retain(|row| row["id"].as_str().is_some_and(|id| id.contains(text)));
    }

    fn score(&self, row: &Value) -> Vec<Score> {
        let mut scores = (self.kind.score)(&self.head, row);
        // A row is scored, or it says why it is not: both ways round.
        let expected = [&row["expected_skip"], &row["not_comparable"], &self.head["expected_skip"]];
        let expected = expected.into_iter().any(Value::is_string);
        for score in &mut scores {
            score.outcome = match &score.outcome {
                Outcome::Skipped(why) if !expected => Outcome::Wrong(format!("turned skipped: {why}")),
                Outcome::Good if expected => {
                    Outcome::Wrong("scored, though it says that it is not: drop its `expected_skip`".into())
                }
                _ => continue,
            };
        }
        scores
    }
}

/// What to say of a file of no known kind.
fn unknown(text: &str) -> String {
    let is_log = ["vllm", "KV cache"].iter().any(|mark| text.contains(mark));
    let looks = if is_log { "a log of vLLM, which is " } else { "" };
    let known: Vec<String> = KINDS.iter().map(|kind| format!("{}: {}", kind.name, kind.looks)).collect();
    format!("{looks}not of a kind that can be scored; these are: {}", known.join("; "))
}

/// A scored file.
#[derive(Debug, Serialize)]
pub struct Set {
    /// Where it is.
    pub path: String,
    /// What it is.
    pub kind: &'static str,
    /// The kind.
    #[serde(skip)]
    pub of: &'static Kind,
    /// Its rows.
    #[serde(serialize_with = "documents")]
    pub rows: Vec<Score>,
    /// All in a few numbers.
    pub summary: Summary,
}

/// A set in a few numbers.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// Rows.
    pub rows: usize,
    /// Rows that were scored.
    pub scored: usize,
    /// Rows that are as they should be.
    pub ok: usize,
    /// Rows that are not scored and say why.
    pub expected_skips: usize,
    /// Errors by kind of row.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<Group>,
}

fn documents<S: serde::Serializer>(rows: &[Score], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rows.iter().map(|row| &row.document))
}

impl Set {
    fn of(truth: &Truth, rows: Vec<Score>) -> Self {
        let count = |wanted: fn(&Outcome) -> bool| rows.iter().filter(|row| wanted(&row.outcome)).count();
        let expected_skips = count(|outcome| matches!(outcome, Outcome::Skipped(_)));
        let unscored = rows.iter().filter(|row| row.document.get("skipped").is_some()).count();
        let mut scored: Vec<(&str, [Measure; 3])> = Vec::new();
        if !truth.kind.levels.is_empty() {
            let with_both = rows.iter().filter(|row| row.document.get("skipped").is_none());
            scored.extend(with_both.map(|row| (row.group.as_str(), row.levels)));
        }
        let summary = Summary {
            rows: rows.len(),
            scored: rows.len() - unscored,
            ok: count(|outcome| *outcome == Outcome::Good),
            expected_skips,
            groups: summary::by_group(&scored),
        };
        Self { path: truth.path.clone(), kind: truth.kind.name, of: truth.kind, rows, summary }
    }

    /// Rows that are not as they should be: the row and why.
    pub fn wrong(&self) -> impl Iterator<Item = (&str, &str)> {
        self.rows.iter().filter_map(|row| match &row.outcome {
            Outcome::Wrong(why) => Some((row.id.as_str(), why.as_str())),
            _ => None,
        })
    }

    /// Whether every row is scored and close enough, or says why it is not scored.
    pub fn is_good(&self) -> bool {
        self.summary.ok + self.summary.expected_skips == self.summary.rows
    }

    /// Why rows are not scored, and how many for each reason.
    pub fn skipped(&self) -> std::collections::BTreeMap<&str, usize> {
        let mut reasons = std::collections::BTreeMap::new();
        for why in self.rows.iter().filter_map(|row| row.document["skipped"].as_str()) {
            *reasons.entry(why).or_default() += 1;
        }
        reasons
    }

    /// One line that says what came of it.
    pub fn headline(&self) -> String {
        let Summary { rows, scored, ok, expected_skips, .. } = self.summary;
        match self.of.levels {
            [] => format!("{}: {ok} of {rows} {} exact", self.path, self.of.noun),
            levels => {
                let part =
                    |count: usize, what: &str| if count > 0 { format!(", {count} {what}") } else { String::new() };
                let off = if levels.len() > 1 { scored.saturating_sub(ok) } else { 0 };
                let turned = rows.saturating_sub(scored + expected_skips);
                let parts = [
                    part(expected_skips, "skipped as recorded"),
                    part(off, "OFF BY TOO MUCH"),
                    part(turned, "TURNED SKIPPED"),
                ];
                format!("{}: {scored} of {rows} {} scored{}", self.path, self.of.noun, parts.concat())
            }
        }
    }
}

/// Scores files, on so many threads; the answer does not depend on how many.
pub fn score(mut truths: Vec<Truth>, threads: usize) -> Vec<Set> {
    join(&mut truths);
    let jobs: Vec<(usize, &Value)> =
        truths.iter().enumerate().flat_map(|(at, truth)| truth.rows.iter().map(move |row| (at, row))).collect();
    let next = AtomicUsize::new(0);
    let mut scores: Vec<Vec<Score>> = Vec::new();
    scores.resize_with(jobs.len(), Vec::new);
    std::thread::scope(|scope| {
        let worker = || {
            let mut done = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some((truth, row)) = jobs.get(at) else { return done };
                done.push((at, truths[*truth].score(row)));
            }
        };
        let handles: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(worker)).collect();
        for handle in handles {
            match handle.join() {
                Ok(done) => done.into_iter().for_each(|(at, score)| scores[at] = score),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    let mut scores = scores.into_iter();
    truths.iter().map(|truth| Set::of(truth, scores.by_ref().take(truth.rows.len()).flatten().collect())).collect()
}

/// Files that are one set together, in the place of the first; its path is their folder.
fn join(truths: &mut Vec<Truth>) {
    let folder = |path: &str| path.rsplit_once('/').map_or(".", |(folder, _)| folder).to_owned();
    let mut joined: Vec<Truth> = Vec::new();
    for truth in truths.drain(..) {
        let own = folder(&truth.path);
        match joined.iter_mut().find(|known| {
            truth.kind.joined && known.kind.name == truth.kind.name && (known.path == own || folder(&known.path) == own)
        }) {
            Some(known) => {
                known.path = own;
                known.rows.extend(truth.rows);
            }
            None => joined.push(truth),
        }
    }
    *truths = joined;
}

/// A document of all sets.
pub fn document(sets: &[Set]) -> Value {
    json!({"schema": 1, "sets": sets})
}
