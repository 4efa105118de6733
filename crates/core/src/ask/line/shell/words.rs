//! A line as words, as a shell splits it, with plain variables put in.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

use super::sums::sum;

pub(super) type Variables = BTreeMap<String, String>;

/// A line without its comment.
pub(super) fn uncommented(line: &str) -> &str {
    if line.trim_start().starts_with('#') { "" } else { line.split(" #").next().unwrap_or(line) }
}

/// What decides whether a command runs: nothing, or that the one before it did well (`&&`) or ill (`||`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Join {
    Always,
    And,
    Or,
}

/// Words of a line; `;`, `&&` and `|` begin another command.
pub(super) fn split(line: &str, variables: &Variables) -> Vec<Vec<String>> {
    joined(line, variables).into_iter().map(|(_, words)| words).collect()
}

/// Words of a line's commands, each with what stands before it.
pub(super) fn joined(line: &str, variables: &Variables) -> Vec<(Join, Vec<String>)> {
    let (mut commands, mut joins) = (vec![Vec::new()], vec![Join::Always]);
    let (mut word, mut open, mut started) = (String::new(), None, false);
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        match (letter, open) {
            ('\'', None) => (open, started) = (Some('\''), true),
            ('"', None) => (open, started) = (Some('"'), true),
            (quote, Some(now)) if quote == now => open = None,
            ('\\', None | Some('"')) => word.extend(letters.next()),
            ('$' | '`', None | Some('"')) => {
                let name = match letter {
                    '$' => variable(&mut letters),
                    _ => format!("({})", letters.by_ref().take_while(|letter| *letter != '`').collect::<String>()),
                };
                let value = value_of(&name, variables, 0);
                // Unquoted values and arrays are split again.
                let apart = open.is_none() || name.ends_with("[@]") || name == "@";
                if apart && value.contains(char::is_whitespace) {
                    for part in value.split_whitespace() {
                        if !word.is_empty() {
                            end(&mut commands, std::mem::take(&mut word));
                        }
                        word = part.to_owned();
                    }
                } else {
                    word.push_str(&value);
                }
                // `"${NAME[@]}"` of an empty array is no word.
                started =
                    if apart && value.is_empty() && word.is_empty() { false } else { started || !value.is_empty() };
            }
            // `<path to image>`: a place that is still to be filled in.
            ('<', _) if open.is_none() && word.is_empty() && placeholder(letters.clone()) => {
                word.push('<');
                word.extend(letters.by_ref().take_while(|letter| *letter != '>'));
                word.push('>');
            }
            ('#', None) if word.is_empty() && !started => break,
            (';' | '|' | '&', None) => {
                if started || !word.is_empty() {
                    end(&mut commands, std::mem::take(&mut word));
                }
                started = false;
                commands.push(Vec::new());
                joins.push(match (letter, letters.next_if_eq(&letter)) {
                    ('&', Some(_)) => Join::And,
                    ('|', Some(_)) => Join::Or,
                    _ => Join::Always,
                });
            }
            (space, None) if space.is_whitespace() => {
                if started || !word.is_empty() {
                    end(&mut commands, std::mem::take(&mut word));
                }
                started = false;
            }
            (other, _) => word.push(other),
        }
    }
    if started || !word.is_empty() {
        end(&mut commands, word);
    }
    let commands = joins.into_iter().zip(commands.into_iter().map(undirected));
    commands.filter(|(_, words)| !words.is_empty()).collect()
}

/// Whether what stands behind a `<` is a name for people.
fn placeholder(letters: Peekable<Chars<'_>>) -> bool {
    let mut named = 0;
    for letter in letters {
        match letter {
            '>' => return named > 0,
            letter if letter.is_ascii_alphanumeric() || " _-./".contains(letter) => {
                // `< FILE` reads one.
                if named == 0 && letter == ' ' {
                    return false;
                }
                named += 1;
            }
            _ => return false,
        }
    }
    false
}

fn end(commands: &mut [Vec<String>], word: String) {
    if let Some(words) = commands.last_mut() {
        words.push(word);
    }
}

/// Words without what sends output elsewhere.
fn undirected(words: Vec<String>) -> Vec<String> {
    let mut kept = Vec::new();
    let mut rest = words.into_iter();
    while let Some(word) = rest.next() {
        match word.trim_start_matches(|c: char| c.is_ascii_digit()) {
            ">" | ">>" | "<" | "<<<" => drop(rest.next()),
            other if other.starts_with('>') || !word.is_empty() && word.trim().is_empty() => {}
            _ => kept.push(word),
        }
    }
    kept
}

/// A text with its variables put in.
pub(super) fn expand(text: &str, variables: &Variables) -> String {
    expanded(text, variables, 0)
}

fn expanded(text: &str, variables: &Variables, depth: usize) -> String {
    let (mut whole, mut letters) = (String::new(), text.chars().peekable());
    while let Some(letter) = letters.next() {
        match letter {
            '\\' if letters.peek() == Some(&'$') => whole.extend(letters.next()),
            '$' => whole.push_str(&value_of(&variable(&mut letters), variables, depth)),
            _ => whole.push(letter),
        }
    }
    whole
}

/// The name behind a `$`, with what stands in its braces.
fn variable(letters: &mut Peekable<Chars<'_>>) -> String {
    let mut name = String::new();
    match letters.peek() {
        Some('{' | '(') => {
            let braces = letters.peek() == Some(&'{');
            let (opens, closes) = if braces { ('{', '}') } else { ('(', ')') };
            let mut depth = 0;
            for letter in letters.by_ref() {
                depth += i32::from(letter == opens) - i32::from(letter == closes);
                name.push(letter);
                if depth == 0 {
                    break;
                }
            }
            if braces {
                name = name.trim_start_matches('{').strip_suffix('}').unwrap_or_default().to_owned();
            }
        }
        Some('@' | '*') => {
            letters.next();
            name.push('@');
        }
        Some('#') => name.extend(letters.next()),
        _ => {
            while let Some(letter) = letters.next_if(|letter| letter.is_ascii_alphanumeric() || *letter == '_') {
                name.push(letter);
            }
        }
    }
    name
}

/// Defaults in defaults.
const DEEPEST: usize = 8;

fn value_of(whole: &str, variables: &Variables, depth: usize) -> String {
    if let Some(inner) = whole.strip_prefix('(') {
        return command(inner.strip_suffix(')').unwrap_or(inner), variables).unwrap_or_else(|| "$".into());
    }
    // `${#NAME[@]}`: how many there are.
    if let Some(name) = whole.strip_prefix('#').and_then(|name| name.strip_suffix("[@]")) {
        return variables.get(name).map_or_else(|| "$".into(), |items| items.split_whitespace().count().to_string());
    }
    let end = whole.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(whole.len());
    let (name, how) = if ["@", "#"].contains(&whole) { (whole, "") } else { whole.split_at(end) };
    let known = variables.get(name).cloned();
    let usual = [":-", ":=", "-", "="].iter().find_map(|sign| how.strip_prefix(sign));
    if let (None, Some(usual)) = (&known, usual) {
        return if depth < DEEPEST { expanded(usual.trim_matches('"'), variables, depth + 1) } else { String::new() };
    }
    if let Some(other) = how.strip_prefix(":+").or_else(|| how.strip_prefix('+')) {
        return if known.is_some() && depth < DEEPEST { expanded(other, variables, depth + 1) } else { String::new() };
    }
    let Some(known) = known else { return format!("${name}") };
    let item = how.strip_prefix('[').and_then(|at| at.strip_suffix(']')).and_then(|at| at.parse::<usize>().ok());
    match (item, how) {
        (Some(at), _) => known.split_whitespace().nth(at).unwrap_or_default().to_owned(),
        (_, "##*/") => known.rsplit('/').next().unwrap_or_default().to_owned(),
        (_, "%/*") => known.rsplit_once('/').map_or(known.as_str(), |(folder, _)| folder).to_owned(),
        _ => known,
    }
}

/// Of commands only those are followed that say where the script is, and sums of numbers.
fn command(inner: &str, variables: &Variables) -> Option<String> {
    if let Some(inner) = inner.strip_prefix('(') {
        return sum(inner.strip_suffix(')')?, variables).map(|sum| sum.to_string());
    }
    if ["dirname", "pwd", "BASH_SOURCE"].iter().any(|word| inner.contains(word)) {
        return Some(".".into());
    }
    // Inside of one another they are not followed.
    if inner.contains(['`', '(']) {
        return None;
    }
    let commands = split(inner, variables);
    let [first, rest @ ..] = commands.as_slice() else { return None };
    let text = first[1..].join(" ");
    match (first[0].as_str(), rest) {
        ("expr", []) => sum(&text, variables).map(|sum| sum.to_string()),
        ("echo", [bc]) if bc[0] == "bc" => sum(&text, variables).map(|sum| sum.to_string()),
        ("echo", []) => Some(text),
        // `echo $CUDA_VISIBLE_DEVICES | tr ',' '\n' | wc -l`
        ("echo", [.., last]) if last[0] == "wc" && text.contains(',') => Some(text.split(',').count().to_string()),
        // `echo $CUDA_VISIBLE_DEVICES | awk -F',' '{print NF}'`
        ("echo", [awk]) if awk[0] == "awk" && awk.iter().any(|word| word.contains("print NF")) => {
            Some(text.split([',', ' ']).filter(|part| !part.is_empty()).count().to_string())
        }
        ("basename", []) => first.get(1).map(|path| super::super::base(path).to_owned()),
        _ => None,
    }
}
