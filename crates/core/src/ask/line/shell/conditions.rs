//! Conditions of a script: `[ … ]`, `[[ … ]]` and `test`, where its text tells how they end.

use super::assignment;

/// Whether a command ends well; `None` where only a run tells.
pub(super) fn outcome(words: &[String]) -> Option<bool> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let inner = match words.as_slice() {
        ["true"] => return Some(true),
        ["false"] => return Some(false),
        // A card of NVIDIA's is what is simulated.
        ["command", "-v", program, ..] | ["which", program, ..] if is_of_cards(program) => {
            return Some(program.contains("nvidia"));
        }
        ["[", inner @ .., "]"] | ["[[", inner @ .., "]]"] | ["test", inner @ ..] => inner,
        all => return all.iter().all(|word| assignment(word).is_some()).then_some(true),
    };
    match inner {
        ["!", inner @ ..] => is(inner).map(|is| !is),
        inner => is(inner),
    }
}

fn is(words: &[&str]) -> Option<bool> {
    let number = |word: &str| value(word)?.parse::<i64>().ok();
    Some(match words {
        ["-n", word] | [word] => !value(word)?.is_empty(),
        ["-z", word] => value(word)?.is_empty(),
        [left, "=" | "==", right] => value(left)? == value(right)?,
        [left, "!=", right] => value(left)? != value(right)?,
        [left, "-eq", right] => number(left)? == number(right)?,
        [left, "-ne", right] => number(left)? != number(right)?,
        [left, "-gt", right] => number(left)? > number(right)?,
        [left, "-ge", right] => number(left)? >= number(right)?,
        [left, "-lt", right] => number(left)? < number(right)?,
        [left, "-le", right] => number(left)? <= number(right)?,
        ["-d" | "-e" | "-f", path] if path.contains("rocm") => false,
        _ => return None,
    })
}

fn is_of_cards(program: &str) -> bool {
    ["nvidia-smi", "rocm-smi", "rocminfo", "amd-smi", "npu-smi", "hl-smi"].contains(&program)
}

/// A word's value: what is not set is empty, and patterns and what commands would say are not known.
fn value(word: &str) -> Option<&str> {
    match is_unset(word) {
        true => Some(""),
        false => (!word.contains(['$', '*', '?'])).then_some(word),
    }
}

fn is_unset(word: &str) -> bool {
    let name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    word.strip_prefix('$').is_some_and(name)
}

/// Whether a condition rests on a variable that the script does not set.
pub(super) fn names_unset(said: &str) -> bool {
    said.split_whitespace().any(is_unset)
}
