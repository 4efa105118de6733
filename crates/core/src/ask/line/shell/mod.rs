//! A shell script's text as lines of words: comments go, continued lines are joined, plain variables, functions and texts
//! that it writes itself are put in. Nothing is run.
//!
//! | module | what is in it |
//! |---|---|
//! | `words` | a line as words, and what stands for a `$` in it |
//! | `sums` | whole numbers that a script computes |
//! | `conditions` | `[ … ]` and its kin, as far as the text tells |
//! | `branches` | `if`, `while` and `case`: which of their bodies run |

mod branches;
mod conditions;
mod sums;
mod words;

use std::collections::BTreeMap;

use branches::Branches;
use words::{Join, Variables, joined, split, uncommented};

/// What stands in a script.
#[derive(Debug, Default, PartialEq)]
pub struct Script {
    /// Its commands, each as its words.
    pub lines: Vec<Vec<String>>,
    /// Files that it writes (`cat > FILE <<EOF`), by the names that it gives them.
    pub files: BTreeMap<String, String>,
    /// What was taken where a run would decide.
    pub notes: Vec<String>,
}

/// Lines of a script, each as its words.
pub fn lines(text: &str) -> Vec<Vec<String>> {
    script(text, &[]).lines
}

/// A script, and the arguments that it is called with.
pub fn script(text: &str, given: &[String]) -> Script {
    let mut walk = Walk::default();
    walk.hand(given);
    walk.commands(&logical(text), 0);
    // What is never called may be what a reader is after.
    let left: Vec<Vec<String>> =
        std::mem::take(&mut walk.functions).into_values().filter(|f| !f.1).map(|f| f.0).collect();
    left.iter().for_each(|body| walk.commands(body, MOST_CALLS));
    walk.script
}

/// `NAME=value`.
pub(super) fn assignment(word: &str) -> Option<(String, String)> {
    let (name, value) = word.split_once('=')?;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    (!name.is_empty() && name.chars().all(plain) && !name.starts_with(|c: char| c.is_ascii_digit()))
        .then(|| (name.to_owned(), value.to_owned()))
}

/// How deep functions may call each other.
const MOST_CALLS: usize = 4;
/// Commands of one script; a function may be called often.
const MOST_LINES: usize = 10_000;

const LONGEST_VALUE: usize = 1 << 16;

/// Words that stand before assignments.
const DECLARES: [&str; 5] = ["export", "declare", "local", "readonly", "typeset"];

#[derive(Default)]
struct Walk {
    variables: Variables,
    /// Bodies of functions, and whether they were called.
    functions: BTreeMap<String, (Vec<String>, bool)>,
    branches: Branches,
    script: Script,
}

impl Walk {
    fn commands(&mut self, lines: &[String], depth: usize) {
        let mut rest = lines.iter();
        while let Some(line) = rest.next() {
            let line = line.as_str();
            if self.script.lines.len() > MOST_LINES {
                return;
            }
            if let Some(options) = line.trim_start().strip_prefix("#SBATCH") {
                self.slurm(options);
                continue;
            }
            let ends = uncommented(line).trim_end().ends_with(";;");
            let line = self.branches.pattern(uncommented(line)).unwrap_or(line);
            let runs = self.branches.runs();
            if let Some(document) = document(line) {
                let body: Vec<&str> =
                    rest.by_ref().take_while(|next| next.trim() != document.end).map(String::as_str).collect();
                if runs {
                    self.written(&document, &body, depth);
                }
                continue;
            }
            if let Some((name, head)) = function(line) {
                let mut body: Vec<String> = Vec::from_iter(head.clone());
                if head.is_none() {
                    body.extend(rest.by_ref().take_while(|next| !next.starts_with('}')).cloned());
                }
                if runs {
                    self.functions.insert(name, (body, false));
                }
                continue;
            }
            if let Some((name, mut items)) = array(line) {
                while !items.trim_end().ends_with(')') {
                    let Some(next) = rest.next() else { break };
                    items.push(' ');
                    items.push_str(uncommented(next));
                }
                if !runs {
                    continue;
                }
                let items = items.trim_end().trim_end_matches(')').to_owned();
                let words: Vec<String> = split(&items, &self.variables).into_iter().flatten().collect();
                // `NAME+=(` adds to it.
                let before = self.variables.get(name.trim_end_matches('+')).filter(|_| name.ends_with('+')).cloned();
                let all = before.into_iter().chain(words).collect::<Vec<_>>().join(" ");
                self.keep(name.trim_end_matches('+').to_owned(), all);
                continue;
            }
            // How the command before ended, where the text tells.
            let (mut well, mut said) = (None, String::new());
            for (join, words) in joined(line, &self.variables) {
                let Some(words) = self.branches.turn(join, words) else { continue };
                let left_out = matches!((join, well), (Join::And, Some(false)) | (Join::Or, Some(true)));
                if left_out {
                    if conditions::names_unset(&said) {
                        let note = format!("{said}: what is not set in the script is taken as empty, so without ");
                        self.script.notes.push(note + &words.join(" "));
                    }
                    continue;
                }
                (well, said) = (conditions::outcome(&words), words.join(" "));
                self.command(words, depth);
            }
            if ends {
                self.branches.end_of_pattern();
            }
        }
    }

    /// One command: assignments are kept, functions are followed.
    fn command(&mut self, mut words: Vec<String>, depth: usize) {
        // `{` and its kin stand before commands.
        while words.first().is_some_and(|word| ["{", "(", "!", "$"].contains(&word.as_str())) {
            words.remove(0);
        }
        let Some(first) = words.first() else { return };
        if DECLARES.contains(&first.as_str()) {
            let assigned: Vec<_> = words.iter().skip(1).filter_map(|word| assignment(word)).collect();
            let exports = first == "export";
            assigned.into_iter().for_each(|(name, value)| self.keep(name, value));
            if exports {
                self.script.lines.push(words);
            }
            return;
        }
        if let [name, of, first, ..] = &words[1..]
            && words[0] == "for"
            && of == "in"
        {
            if words.len() > 4 {
                self.script.notes.push(format!("{name} goes through several values: {first} is taken"));
            }
            self.variables.insert(name.clone(), first.clone());
            return;
        }
        if depth < MOST_CALLS
            && let Some((body, called)) = self.functions.get_mut(first)
        {
            *called = true;
            let (body, given) = (body.clone(), words[1..].to_vec());
            let before = self.variables.clone();
            let around = std::mem::take(&mut self.branches);
            self.hand(&given);
            self.commands(&body, depth + 1);
            self.variables = before;
            self.branches = around;
            return;
        }
        let assigned: Vec<(String, String)> = words.iter().map_while(|word| self.added(word)).collect();
        if assigned.len() == words.len() {
            assigned.into_iter().for_each(|(name, value)| self.keep(name, value));
        } else {
            self.script.lines.push(words);
        }
    }

    /// Arguments of a script or a function.
    fn hand(&mut self, given: &[String]) {
        for (at, word) in given.iter().enumerate() {
            self.variables.insert((at + 1).to_string(), word.clone());
        }
        self.variables.insert("#".into(), given.len().to_string());
        if !given.is_empty() {
            self.variables.insert("@".into(), given.join(" "));
        }
    }

    /// A variable; one that doubles itself line by line is not followed for ever. What is not known does not take the place
    /// of what is where only a run tells that it is set.
    fn keep(&mut self, name: String, value: String) {
        let lost = self.branches.doubts() && value.contains('$') && self.variables.contains_key(&name);
        if value.len() <= LONGEST_VALUE && !lost {
            self.variables.insert(name, value);
        }
    }

    /// `NAME=value`, or `NAME+=more`.
    fn added(&self, word: &str) -> Option<(String, String)> {
        if let Some((name, more)) = word.split_once("+=").filter(|(name, _)| !name.contains('=')) {
            let (name, more) = assignment(&format!("{name}={more}"))?;
            return Some((name.clone(), format!("{}{more}", self.variables.get(&name).map_or("", String::as_str))));
        }
        assignment(word)
    }

    /// What SLURM is asked for is what it tells the job.
    fn slurm(&mut self, options: &str) {
        let mut told = Vec::new();
        let words: Vec<&str> = uncommented(options).split_whitespace().collect();
        let mut rest = words.iter().peekable();
        while let Some(word) = rest.next() {
            let (name, value) = match (word.split_once('='), word.split_at_checked(2)) {
                (Some((name, value)), _) => (name, value),
                // `-n4`
                (None, Some((name @ ("-n" | "-N" | "-G"), value))) if !value.is_empty() => (name, value),
                _ => (*word, *rest.next_if(|next| !next.starts_with('-')).unwrap_or(&"")),
            };
            let count = value.split(':').next_back().unwrap_or_default();
            let names: &[&str] = match name {
                "-N" | "--nodes" => &["SLURM_NNODES", "SLURM_JOB_NUM_NODES"],
                "-n" | "--ntasks" => &["SLURM_NTASKS", "SLURM_NPROCS"],
                "--ntasks-per-node" => &["SLURM_NTASKS_PER_NODE"],
                "--gres" | "--gpus-per-node" => &["SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"],
                "-G" | "--gpus" => &["SLURM_GPUS"],
                _ => &[],
            };
            if count.parse::<u64>().is_ok() {
                told.extend(names.iter().map(|name| ((*name).to_owned(), count.to_owned())));
            }
        }
        if !told.is_empty() {
            let words = told.iter().map(|(name, value)| format!("{name}={value}"));
            self.script.lines.push(std::iter::once("export".to_owned()).chain(words).collect());
            self.variables.extend(told);
        }
    }

    /// A text that goes on up to a word: into a variable, into a file, or a script of its own.
    fn written(&mut self, document: &Document, body: &[&str], depth: usize) {
        if let Some(name) = &document.variable {
            self.variables.insert(name.clone(), body.join(" "));
        }
        let expand =
            |line: &&str| if document.quoted { (*line).to_owned() } else { words::expand(line, &self.variables) };
        if let Some(name) = &document.file {
            let name = words::expand(name, &self.variables);
            let text = body.iter().map(expand).collect::<Vec<_>>().join("\n");
            // Of several branches of which a run takes one, the first.
            if !self.branches.doubts() || !self.script.files.contains_key(&name) {
                self.script.files.insert(name, text);
            }
        } else if document.runs && depth < MOST_CALLS {
            self.commands(&logical(&body.join("\n")), depth + 1);
        }
    }
}

/// Lines with those that go on put together: behind a `\`, and inside of quotes. A comment ends with its line.
fn logical(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let (mut whole, mut scan) = (String::new(), Scan::default());
    for line in text.lines() {
        whole.push_str(line);
        scan.feed(line);
        if scan.open.is_some() {
            whole.push('\n');
            continue;
        }
        // Spaces behind the `\` are a slip that is read over.
        let end = whole.trim_end();
        if end.ends_with('\\') && !end.ends_with("\\\\") && !scan.comment {
            whole.truncate(end.len() - 1);
            whole.push(' ');
            scan.before = ' ';
            continue;
        }
        found.push(std::mem::take(&mut whole));
        scan = Scan::default();
    }
    if !whole.is_empty() {
        found.push(whole);
    }
    found
}

/// What a reader of letters knows: the quote that is open, the letter before, and whether a comment began.
struct Scan {
    open: Option<char>,
    before: char,
    comment: bool,
}

impl Default for Scan {
    fn default() -> Self {
        Self { open: None, before: ' ', comment: false }
    }
}

impl Scan {
    fn feed(&mut self, line: &str) {
        let mut letters = line.chars();
        while let Some(letter) = letters.next() {
            match (letter, self.open) {
                ('\\', None | Some('"')) => drop(letters.next()),
                ('#', None) if self.before.is_whitespace() => {
                    self.comment = true;
                    return;
                }
                ('\'' | '"', None) => self.open = Some(letter),
                (quote, Some(now)) if quote == now => self.open = None,
                _ => {}
            }
            self.before = letter;
        }
    }
}

/// A text that goes on up to a word (`<<EOF`).
struct Document {
    end: String,
    /// Whether `$` stands for itself in it.
    quoted: bool,
    /// Where it goes: a variable that it is read into, a file, a shell.
    variable: Option<String>,
    file: Option<String>,
    runs: bool,
}

fn document(line: &str) -> Option<Document> {
    let (before, behind) = uncommented(line).split_once("<<")?;
    let word = behind.trim_start_matches(['-', ' ']).split_whitespace().next()?;
    let end = word.trim_matches(['\'', '"']).to_owned();
    let plain =
        !end.is_empty() && !behind.starts_with('<') && end.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let mut words = before.split_whitespace();
    let head = words.next().unwrap_or_default();
    let variable = Some(head).filter(|word| *word == "read").and_then(|_| words.next_back()).map(str::to_owned);
    let behind = behind.trim_start_matches(['-', ' ']).strip_prefix(word).unwrap_or_default();
    let named = |text: &str| {
        let name = text.split_once('>')?.1.trim_start_matches('>').split_whitespace().next()?;
        Some(name.trim_matches(['\'', '"']).to_owned())
    };
    let tee = || before.split_whitespace().skip(1).find(|word| !word.starts_with('-')).map(str::to_owned);
    let file = named(before).or_else(|| named(behind)).or_else(|| tee().filter(|_| head == "tee"));
    let runs = ["sbatch", "bash", "sh", "ssh", "srun"].contains(&head);
    plain.then(|| Document { quoted: end != word, end, variable, file, runs })
}

/// A function's name where a line begins one, and its body where it ends on the same line.
fn function(line: &str) -> Option<(String, Option<String>)> {
    let line = uncommented(line).trim();
    let head = line.strip_prefix("function ").unwrap_or(line);
    let (name, behind) = head.split_once('{')?;
    let bare = name.trim().trim_end_matches("()").trim();
    let marked = name.trim().ends_with("()") || head.len() < line.len();
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let body = behind.trim().strip_suffix('}').map(str::to_owned);
    (marked && !bare.is_empty() && bare.chars().all(plain) && (body.is_some() || behind.trim().is_empty()))
        .then(|| (bare.to_owned(), body))
}

/// The name of an array that a line begins, and what stands behind its parenthesis.
fn array(line: &str) -> Option<(String, String)> {
    let (name, items) = uncommented(line).trim_start().split_once("=(")?;
    let mut words = name.split_whitespace();
    let name = words.next_back()?;
    let declared = words.all(|word| DECLARES.contains(&word) || word.starts_with('-'));
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '+';
    (declared && name.chars().all(plain)).then(|| (name.to_owned(), items.to_owned()))
}

#[cfg(test)]
mod tests;
