//! "Did you mean": the ids and short names nearest to one that is unknown.

use super::{aliases, ids, repository};

/// Longer names are not typing mistakes; the limit keeps the work small.
const MAX_NAME: usize = 100;
/// How many suggestions help.
const MAX_SUGGESTIONS: usize = 5;

/// Names near the given one, best first; none when nothing is near.
///
/// A name counts as near when few letters differ, or when it shares most of its words (`llama`, `3`, `8b`).
/// Of several names for one model only the nearest is given.
pub fn suggest(name: &str) -> Vec<&'static str> {
    let wanted = name.trim().to_ascii_lowercase();
    if wanted.is_empty() || wanted.len() > MAX_NAME {
        return Vec::new();
    }
    let short = repository(&wanted);
    let short_names = aliases().iter().map(|(alias, id)| (alias.as_str(), id.as_str()));
    let mut ranked: Vec<(u64, usize, &'static str, &'static str)> = short_names
        .chain(ids().map(|id| (id, id)))
        .filter_map(|(candidate, id)| {
            let lower = candidate.to_ascii_lowercase();
            let whole = distance(&wanted, &lower);
            let tail = distance(short, repository(&lower));
            badness(whole.min(tail), short, repository(&lower)).map(|badness| (badness, candidate.len(), candidate, id))
        })
        .collect();
    crate::order::sort(&mut ranked);
    let mut seen: Vec<&str> = Vec::new();
    let mut names = Vec::new();
    for (_, _, candidate, id) in ranked {
        if !seen.contains(&id) {
            seen.push(id);
            names.push(candidate);
        }
        if names.len() == MAX_SUGGESTIONS {
            break;
        }
    }
    names
}

/// How far off, in thousandths, less what the shared words make good. `None` when it is not near at all.
fn badness(distance: usize, wanted: &str, candidate: &str) -> Option<u64> {
    let longest = wanted.len().max(candidate.len()).max(1);
    let (shared, total) = shared_words(wanted, candidate);
    let near = distance * 3 <= wanted.len().max(3);
    if !near && shared * 2 < total {
        return None;
    }
    let off = (distance * 1000 / longest) as u64;
    let made_good = (shared * 500 / total.max(1)) as u64;
    Some(off + 500 - made_good)
}

/// How many words two names share, of how many they have together.
fn shared_words(left: &str, right: &str) -> (usize, usize) {
    let (left, right) = (words(left), words(right));
    let shared = left.iter().filter(|word| right.contains(word)).count();
    (shared, left.len() + right.len() - shared)
}

/// The words of a name: separated by punctuation, and where letters turn into digits (`llama3` is two words).
fn words(name: &str) -> Vec<&str> {
    let mut words: Vec<&str> = Vec::new();
    for part in name.split(|c: char| !c.is_ascii_alphanumeric() && c != '.') {
        let starts_with_letter = part.starts_with(|c: char| c.is_ascii_alphabetic());
        match part.find(|c: char| c.is_ascii_digit()) {
            Some(digit) if starts_with_letter && digit > 1 => {
                let (letters, digits) = part.split_at(digit);
                words.extend([letters, digits]);
            }
            _ => words.push(part),
        }
    }
    words.retain(|word| !word.is_empty());
    crate::order::sort(&mut words);
    words.dedup();
    words
}

/// Levenshtein's edit distance over bytes.
fn distance(left: &str, right: &str) -> usize {
    let right = right.as_bytes();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (line, a) in left.bytes().enumerate() {
        let mut diagonal = line;
        let mut beside = line + 1;
        for (cell, b) in row.iter_mut().skip(1).zip(right) {
            let above = *cell;
            *cell = (above + 1).min(beside + 1).min(diagonal + usize::from(a != *b));
            diagonal = above;
            beside = *cell;
        }
        if let Some(first) = row.first_mut() {
            *first = line + 1;
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_distance() {
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("abc", ""), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("same", "same"), 0);
    }

    #[test]
    fn near_misses_find_their_model() {
        let best = |name: &str| suggest(name).first().copied().unwrap_or("nothing");
        assert_eq!(best("lama3-8b"), "llama3-8b");
        assert_eq!(best("mistral7b"), "mistral-7b");
        assert_eq!(best("meta-lama/Llama-2-7b-hf"), "meta-llama/Llama-2-7b-hf");
        assert_eq!(best("qwen-2.5-7b"), "qwen2.5-7b");
        assert_eq!(best("gpt3-175"), "gpt3-175b");
        assert_eq!(best("Mixtral-8x7B"), "mixtral-8x7b");
    }

    #[test]
    fn nonsense_finds_nothing() {
        assert_eq!(suggest("zzzzzzzzzzzzzz"), Vec::<&str>::new());
        assert_eq!(suggest(""), Vec::<&str>::new());
        assert_eq!(suggest(&"llama".repeat(100)), Vec::<&str>::new());
    }

    #[test]
    fn one_name_a_model() {
        let names = suggest("llama2-7b");
        let models: Vec<&str> = names.iter().map(|name| super::super::alias(name).unwrap_or(name)).collect();
        let mut unique = models.clone();
        crate::order::sort(&mut unique);
        unique.dedup();
        assert_eq!(unique.len(), models.len(), "{names:?}");
    }
}
