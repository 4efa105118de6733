//! A shell script's text as lines of words: comments go, continued lines are joined, plain variables are put in.

use std::collections::BTreeMap;

/// Lines of a script, each as its words.
pub fn lines(text: &str) -> Vec<Vec<String>> {
    let joined = text.replace("\\\r\n", " ").replace("\\\n", " ");
    let mut variables: BTreeMap<String, String> = BTreeMap::new();
    let mut found = Vec::new();
    let mut rest = joined.lines();
    while let Some(line) = rest.next() {
        // A text in quotes may go on over several lines.
        let mut line = line.to_owned();
        while is_open(&line)
            && let Some(next) = rest.next()
        {
            line.push('\n');
            line.push_str(next);
        }
        let line = line.as_str();
        if let Some((name, end)) = document(line) {
            let body: Vec<&str> = rest.by_ref().take_while(|next| next.trim() != end).collect();
            if let Some(name) = name {
                variables.insert(name, body.join(" "));
            }
            continue;
        }
        if let Some((name, mut items)) = array(line) {
            while !items.trim_end().ends_with(')') {
                let Some(next) = rest.next() else { break };
                items.push(' ');
                items.push_str(uncommented(next));
            }
            let items = items.trim_end().trim_end_matches(')').to_owned();
            let words: Vec<String> = split(&items, &variables).into_iter().flatten().collect();
            // `NAME+=(` adds to it.
            let before = variables.get(name.trim_end_matches('+')).filter(|_| name.ends_with('+')).cloned();
            let all = before.into_iter().chain(words).collect::<Vec<_>>().join(" ");
            variables.insert(name.trim_end_matches('+').to_owned(), all);
            continue;
        }
        for words in split(line, &variables) {
            let assigned: Vec<(String, String)> = words.iter().map_while(|word| assignment(word)).collect();
            let exported = words.first().is_some_and(|word| word == "export");
            if exported {
                variables.extend(words.iter().skip(1).filter_map(|word| assignment(word)));
                found.push(words);
            } else if assigned.len() == words.len() {
                variables.extend(assigned);
            } else if !words.is_empty() {
                found.push(words);
            }
        }
    }
    found
}

/// Whether a quote is left open.
fn is_open(line: &str) -> bool {
    let mut open = None;
    let mut letters = line.chars();
    let mut before = ' ';
    while let Some(letter) = letters.next() {
        match (letter, open) {
            ('\\', None | Some('"')) => drop(letters.next()),
            ('#', None) if before.is_whitespace() => return false,
            ('\'' | '"', None) => open = Some(letter),
            (quote, Some(now)) if quote == now => open = None,
            _ => {}
        }
        before = letter;
    }
    open.is_some()
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

/// A text that goes on up to a word (`<<EOF`): the variable that it is read into, where it is, and the word.
fn document(line: &str) -> Option<(Option<String>, String)> {
    let (before, behind) = uncommented(line).split_once("<<")?;
    let end: String =
        behind.trim_start_matches(['-', ' ']).split_whitespace().next()?.trim_matches(['\'', '"']).to_owned();
    let plain =
        !end.is_empty() && !behind.starts_with('<') && end.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let mut words = before.split_whitespace();
    let name = words.next().filter(|word| *word == "read").and_then(|_| words.next_back()).map(str::to_owned);
    plain.then_some((name, end))
}

/// The name of an array that a line begins, and what stands behind its parenthesis.
fn array(line: &str) -> Option<(String, String)> {
    let (name, items) = uncommented(line).trim_start().split_once("=(")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '+';
    (!name.is_empty() && name.chars().all(plain)).then(|| (name.to_owned(), items.to_owned()))
}

/// A line without its comment.
fn uncommented(line: &str) -> &str {
    if line.trim_start().starts_with('#') { "" } else { line.split(" #").next().unwrap_or(line) }
}

/// `NAME=value`.
pub(super) fn assignment(word: &str) -> Option<(String, String)> {
    let (name, value) = word.split_once('=')?;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    (!name.is_empty() && name.chars().all(plain) && !name.starts_with(|c: char| c.is_ascii_digit()))
        .then(|| (name.to_owned(), value.to_owned()))
}

/// Words of a line as a shell splits them; `;`, `&&` and `|` begin another command.
fn split(line: &str, variables: &BTreeMap<String, String>) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let (mut word, mut open, mut started) = (String::new(), None, false);
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        match (letter, open) {
            ('\'', None) => (open, started) = (Some('\''), true),
            ('"', None) => (open, started) = (Some('"'), true),
            (quote, Some(now)) if quote == now => open = None,
            ('\\', None | Some('"')) => word.extend(letters.next()),
            ('$', None | Some('"')) => {
                let name = variable(&mut letters);
                let value = value_of(&name, variables);
                // Unquoted values and arrays are split again.
                if (open.is_none() || name.ends_with("[@]")) && value.contains(' ') {
                    for part in value.split_whitespace() {
                        if !word.is_empty() {
                            end(&mut commands, std::mem::take(&mut word));
                        }
                        word = part.to_owned();
                    }
                } else {
                    word.push_str(&value);
                }
                started |= !value.is_empty();
            }
            ('#', None) if word.is_empty() && !started => break,
            (';' | '|' | '&', None) => {
                if started || !word.is_empty() {
                    end(&mut commands, std::mem::take(&mut word));
                }
                started = false;
                commands.push(Vec::new());
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
    let commands = commands.into_iter().map(undirected);
    commands.filter(|words| !words.is_empty()).collect()
}

fn end(commands: &mut [Vec<String>], word: String) {
    if let Some(words) = commands.last_mut() {
        words.push(word);
    }
}

/// The name behind a `$`, with what stands in its braces.
fn variable(letters: &mut std::iter::Peekable<std::str::Chars<'_>>) -> String {
    let mut name = String::new();
    match letters.peek() {
        Some('{') => {
            letters.next();
            name.extend(letters.by_ref().take_while(|letter| *letter != '}'));
        }
        Some('(') => {
            let mut depth = 0;
            for letter in letters.by_ref() {
                depth += i32::from(letter == '(') - i32::from(letter == ')');
                name.push(letter);
                if depth == 0 {
                    break;
                }
            }
        }
        _ => {
            while let Some(letter) = letters.next_if(|letter| letter.is_ascii_alphanumeric() || *letter == '_') {
                name.push(letter);
            }
        }
    }
    name
}

fn value_of(name: &str, variables: &BTreeMap<String, String>) -> String {
    // Of commands only those are followed that say where the script is, and sums of numbers.
    if let Some(inner) = name.strip_prefix('(') {
        let here = ["dirname", "pwd", "BASH_SOURCE"].iter().any(|word| inner.contains(word));
        let sum = inner.strip_prefix('(').and_then(|sum| arithmetic(sum.trim_end_matches(')'), variables));
        return sum.map_or_else(|| if here { "." } else { "$" }.to_owned(), |sum| sum.to_string());
    }
    let (name, usual) = match name.split_once(":-").or_else(|| name.split_once(":=")) {
        Some((name, usual)) => (name, Some(usual)),
        None => (name, None),
    };
    let array = name.trim_end_matches("[@]").trim_end_matches("[*]");
    match variables.get(array).or_else(|| variables.get(name)) {
        Some(value) => value.clone(),
        None => usual.map_or_else(|| format!("${array}"), |usual| usual.trim_start_matches('$').to_owned()),
    }
}

/// Whole numbers and variables that are added, subtracted, multiplied or divided, without further parentheses.
fn arithmetic(text: &str, variables: &BTreeMap<String, String>) -> Option<i64> {
    let number = |word: &str| {
        let word = word.trim().trim_start_matches('$').trim_start_matches('{').trim_end_matches('}');
        word.parse::<i64>().ok().or_else(|| variables.get(word)?.trim().parse().ok())
    };
    let product = |text: &str| {
        let mut rest = text.split_inclusive(['*', '/']);
        let mut total = number(rest.clone().next()?.trim_end_matches(['*', '/']))?;
        let mut sign = rest.next()?.chars().next_back();
        for word in rest {
            let value = number(word.trim_end_matches(['*', '/']))?;
            total = if sign == Some('/') { total.checked_div(value)? } else { total.checked_mul(value)? };
            sign = word.chars().next_back();
        }
        Some(total)
    };
    let mut total = 0i64;
    let mut sign = '+';
    for word in text.split_inclusive(['+', '-']) {
        let value = product(word.trim_end_matches(['+', '-']))?;
        total = if sign == '-' { total.checked_sub(value)? } else { total.checked_add(value)? };
        sign = word.chars().next_back().unwrap_or('+');
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_becomes_lines() {
        let text = "#!/bin/bash\nN=${1:-4}\nMODEL=\"org/my model\"\nexport A=1 # why\n\ntorchrun --nproc_per_node $N \\\n  train.py --model \"$MODEL\" --x '{\"a\": 1}' && echo done\n";
        let lines = lines(text);
        assert_eq!(lines[0], ["export", "A=1"]);
        assert_eq!(
            lines[1],
            ["torchrun", "--nproc_per_node", "4", "train.py", "--model", "org/my model", "--x", "{\"a\": 1}"]
        );
        assert_eq!(lines[2], ["echo", "done"]);
        let arrays = super::lines("ARGS=(\n  --a 1 # one\n  --b\n)\nARGS+=(--c 2)\ntorchrun x.py \"${ARGS[@]}\"\n");
        assert_eq!(arrays, [["torchrun", "x.py", "--a", "1", "--b", "--c", "2"]]);
        let here = super::lines("N=4\nD=$(cd \"$(dirname \"$0\")\" && pwd)\nW=$(($N*2 + 1))\nrun $D/x.py $W $(date)\n");
        assert_eq!(here, [["run", "./x.py", "9", "$"]]);
    }
}
