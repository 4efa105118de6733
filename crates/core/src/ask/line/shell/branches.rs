//! `if`, `while` and `case`: which of their bodies run, where the text tells. What only a run decides is walked through as
//! if it ran.

use super::words::Join;

/// What is open around a command.
enum Frame {
    /// Whether a condition was met so far; `None`: only a run tells.
    If {
        met: Option<bool>,
        runs: bool,
    },
    Loop {
        runs: bool,
    },
    /// The word, where it is known, and whether a pattern was met.
    Case {
        value: Option<String>,
        met: bool,
        runs: bool,
    },
}

impl Frame {
    fn runs(&self) -> bool {
        let (Self::If { runs, .. } | Self::Loop { runs } | Self::Case { runs, .. }) = self;
        *runs
    }
}

#[derive(Default)]
pub(super) struct Branches {
    open: Vec<Frame>,
    /// Whether `then` or `do` is still to come: the sense in which the condition counts.
    awaits: Option<Sense>,
}

#[derive(Clone, Copy, PartialEq)]
enum Sense {
    If,
    While,
    Until,
}

/// Whether a condition is met; what asks for an argument of the script that is not given is for its caller to say.
fn outcome(words: &[String]) -> Option<bool> {
    let argument = |word: &String| word.strip_prefix('$').is_some_and(|name| name.parse::<u8>().is_ok());
    let compares = words.iter().any(|word| ["=", "==", "!="].contains(&word.as_str()));
    let blank = words.iter().any(String::is_empty);
    if compares && !blank && words.iter().any(argument) { None } else { super::conditions::outcome(words) }
}

impl Branches {
    pub(super) fn runs(&self) -> bool {
        self.open.iter().all(Frame::runs)
    }

    /// Whether only a run tells that this place is come to.
    pub(super) fn doubts(&self) -> bool {
        self.open.iter().any(|frame| matches!(frame, Frame::If { met: None, .. }))
    }

    /// Takes a word that opens, turns or closes a body; what is left is a command that runs.
    pub(super) fn turn(&mut self, join: Join, mut words: Vec<String>) -> Option<Vec<String>> {
        loop {
            let first = words.first()?.as_str();
            match first {
                "if" | "while" | "until" => {
                    let sense = [("if", Sense::If), ("while", Sense::While), ("until", Sense::Until)];
                    self.awaits = sense.iter().find(|(word, _)| *word == first).map(|(_, sense)| *sense);
                    words.remove(0);
                    let told = self.runs().then(|| outcome(&words)).flatten();
                    self.open.push(match self.awaits {
                        Some(Sense::If) => Frame::If { met: told, runs: told != Some(false) },
                        sense => Frame::Loop { runs: told != Some(sense == Some(Sense::Until)) },
                    });
                    // `if torchrun …; then`: what is run to be judged runs.
                    return (told.is_none() && self.runs()).then_some(words);
                }
                "elif" => {
                    words.remove(0);
                    self.awaits = Some(Sense::If);
                    let told = outcome(&words);
                    if let Some(Frame::If { met, runs }) = self.open.last_mut() {
                        (*met, *runs) = match *met {
                            Some(true) => (Some(true), false),
                            Some(false) => (told, told != Some(false)),
                            None => (None, true),
                        };
                    }
                    return None;
                }
                "else" => {
                    if let Some(Frame::If { met, runs }) = self.open.last_mut() {
                        *runs = *met != Some(true);
                    }
                    words.remove(0);
                }
                "then" | "do" => {
                    self.awaits = None;
                    words.remove(0);
                }
                "fi" | "done" | "esac" => {
                    self.open.pop();
                    return None;
                }
                "for" | "select" => {
                    let runs = self.runs();
                    self.open.push(Frame::Loop { runs: true });
                    return runs.then_some(words);
                }
                "case" => {
                    let value = words.get(1).filter(|word| !word.contains('$')).cloned();
                    self.open.push(Frame::Case { value, met: false, runs: true });
                    return None;
                }
                _ if self.awaits.is_some() => {
                    self.condition(join, &words);
                    return None;
                }
                _ => return self.runs().then_some(words),
            }
        }
    }

    /// A further part of a condition: `&& [ … ]`, `|| [ … ]`.
    fn condition(&mut self, join: Join, words: &[String]) {
        let (told, sense) = (outcome(words), self.awaits);
        let both = |before: Option<bool>| match (join, before, told) {
            (Join::Or, Some(true), _) | (Join::Or, _, Some(true)) => Some(true),
            (Join::Or, Some(false), other) | (Join::Or, other, Some(false)) => other,
            (Join::And, Some(false), _) | (Join::And, _, Some(false)) => Some(false),
            (Join::And, Some(true), other) | (Join::And, other, Some(true)) => other,
            _ => None,
        };
        match self.open.last_mut() {
            Some(Frame::If { met, runs }) if sense == Some(Sense::If) => {
                *met = both(*met);
                *runs = *met != Some(false);
            }
            Some(Frame::Loop { runs }) if join == Join::And && told == Some(false) => {
                *runs = sense == Some(Sense::Until);
            }
            _ => {}
        }
    }

    /// A pattern of a `case` (`a|b) …`): what stands behind it; nothing where a line begins none.
    pub(super) fn pattern<'l>(&mut self, line: &'l str) -> Option<&'l str> {
        let Some(Frame::Case { value, met, runs }) = self.open.last_mut() else { return None };
        let (patterns, behind) = line.trim().trim_start_matches('(').split_once(')')?;
        let words = patterns.split('|').any(|pattern| pattern.trim().contains(char::is_whitespace));
        if words || patterns.contains(['(', '$', '=', '`', ';']) {
            return None;
        }
        *runs = match value {
            None => true,
            Some(value) => {
                let meets = !*met && patterns.split('|').any(|pattern| is_like(value, pattern.trim()));
                *met |= meets;
                meets
            }
        };
        Some(behind)
    }

    /// `;;`
    pub(super) fn end_of_pattern(&mut self) {
        if let Some(Frame::Case { value: Some(_), runs, .. }) = self.open.last_mut() {
            *runs = false;
        }
    }
}

/// Whether a word is as a pattern says: `*` is anything.
fn is_like(word: &str, pattern: &str) -> bool {
    let parts: Vec<String> = pattern.split('*').map(|part| part.replace(['"', '\''], "")).collect();
    let (first, last) = (&parts[0], &parts[parts.len() - 1]);
    if parts.len() == 1 {
        return word == first;
    }
    let Some(mut rest) = word.strip_prefix(first.as_str()) else { return false };
    for part in &parts[1..parts.len() - 1] {
        let Some(at) = rest.find(part.as_str()) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last.as_str())
}
