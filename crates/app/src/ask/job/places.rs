//! Where each value of a JSON file stands.

use std::collections::BTreeMap;

/// A line and a column, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub line: usize,
    pub column: usize,
}

/// Paths (`model.hidden_size`) and the places of their values. The text is JSON that has been read before.
pub(super) fn of(text: &str) -> BTreeMap<String, Place> {
    let mut scan = Scan { text: text.chars().collect(), at: 0, line: 1, column: 1, found: BTreeMap::new() };
    scan.value("");
    scan.found
}

struct Scan {
    text: Vec<char>,
    at: usize,
    line: usize,
    column: usize,
    found: BTreeMap<String, Place>,
}

impl Scan {
    fn peek(&self) -> Option<char> {
        self.text.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let character = self.peek()?;
        self.at += 1;
        if character == '\n' {
            (self.line, self.column) = (self.line + 1, 1);
        } else {
            self.column += 1;
        }
        Some(character)
    }

    fn space(&mut self) {
        while self.peek().is_some_and(|c| c.is_whitespace() || c == ',' || c == ':') {
            self.next();
        }
    }

    fn string(&mut self) -> String {
        let mut text = String::new();
        self.next();
        while let Some(character) = self.next() {
            match character {
                '"' => break,
                '\\' => text.extend(self.next()),
                other => text.push(other),
            }
        }
        text
    }

    fn value(&mut self, path: &str) {
        self.space();
        self.found.insert(path.to_owned(), Place { line: self.line, column: self.column });
        match self.peek() {
            Some('{') => {
                self.next();
                loop {
                    self.space();
                    if self.peek() != Some('"') {
                        break;
                    }
                    let key = self.string();
                    self.value(&if path.is_empty() { key } else { format!("{path}.{key}") });
                }
                self.next();
            }
            Some('[') => {
                self.next();
                for index in 0.. {
                    self.space();
                    if matches!(self.peek(), Some(']') | None) {
                        break;
                    }
                    self.value(&format!("{path}[{index}]"));
                }
                self.next();
            }
            Some('"') => drop(self.string()),
            _ => {
                while self.peek().is_some_and(|c| !c.is_whitespace() && !",}]".contains(c)) {
                    self.next();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_placed() {
        let places = of("{\n  \"a\": {\"b\": 1,\n    \"c\": \"x\\\"}\"},\n  \"d\": [1, {\"e\": 2}]\n}");
        assert_eq!(places["a.b"], Place { line: 2, column: 14 });
        assert_eq!(places["a.c"], Place { line: 3, column: 10 });
        assert_eq!(places["d[1].e"], Place { line: 4, column: 18 });
        assert_eq!(places[""], Place { line: 1, column: 1 });
    }
}
