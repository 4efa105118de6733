//! Text as lines of tokens: what stands in brackets is one line, however many it is written on.

/// A piece of a line.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// A name or a keyword.
    Name(String),
    /// A number as it is written.
    Number(String),
    /// A text; whether names may stand in its braces.
    Text(String, bool),
    /// A sign.
    Sign(&'static str),
}

impl Token {
    pub(super) fn is(&self, word: &str) -> bool {
        match self {
            Self::Name(name) => name == word,
            Self::Sign(sign) => *sign == word,
            _ => false,
        }
    }

    /// As it was written, or nearly so.
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Name(text) | Self::Number(text) => text.clone(),
            Self::Text(text, _) => format!("\"{text}\""),
            Self::Sign(sign) => (*sign).to_owned(),
        }
    }
}

/// A line with its indentation.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Line {
    pub(super) indent: usize,
    pub(super) tokens: Vec<Token>,
}

/// Signs, the longest first.
const SIGNS: [&str; 45] = [
    "**=", "//=", "<<=", ">>=", "...", "**", "//", "<<", ">>", "==", "!=", "<=", ">=", "->", ":=", "+=", "-=", "*=",
    "/=", "%=", "&=", "|=", "^=", "@=", "(", ")", "[", "]", "{", "}", ",", ":", ".", ";", "=", "+", "-", "*", "/", "%",
    "<", ">", "|", "&", "@",
];

/// Lines of a program.
pub(super) fn lines(text: &str) -> Vec<Line> {
    let letters: Vec<char> = text.chars().collect();
    let mut found = Vec::new();
    let (mut tokens, mut indent, mut depth, mut at) = (Vec::new(), 0, 0usize, 0);
    let mut fresh = true;
    while at < letters.len() {
        let letter = letters[at];
        match letter {
            '\n' if depth > 0 => at += 1,
            '\n' => {
                end(&mut found, indent, &mut tokens);
                (fresh, at) = (true, at + 1);
            }
            '\\' if letters.get(at + 1) == Some(&'\n') => at += 2,
            '\\' if letters.get(at + 1) == Some(&'\r') => at += 3,
            '#' => {
                while at < letters.len() && letters[at] != '\n' {
                    at += 1;
                }
            }
            _ if letter.is_whitespace() => {
                if fresh && depth == 0 {
                    let start = at;
                    while letters.get(at).is_some_and(|letter| *letter == ' ' || *letter == '\t') {
                        at += 1;
                    }
                    indent = at - start;
                    fresh = at == start;
                    at = at.max(start + 1);
                } else {
                    at += 1;
                }
            }
            _ => {
                // The first token of a line that has no space before it.
                if tokens.is_empty() && depth == 0 && (at == 0 || letters[at - 1] == '\n') {
                    indent = 0;
                }
                fresh = false;
                let (token, next) = token(&letters, at);
                match &token {
                    Token::Sign("(" | "[" | "{") => depth += 1,
                    Token::Sign(")" | "]" | "}") => depth = depth.saturating_sub(1),
                    Token::Sign(";") if depth == 0 => {
                        end(&mut found, indent, &mut tokens);
                        at = next;
                        continue;
                    }
                    _ => {}
                }
                tokens.push(token);
                at = next;
            }
        }
    }
    end(&mut found, indent, &mut tokens);
    found
}

fn end(found: &mut Vec<Line>, indent: usize, tokens: &mut Vec<Token>) {
    if !tokens.is_empty() {
        found.push(Line { indent, tokens: std::mem::take(tokens) });
    }
}

/// The token at a place, and where the next one may be.
fn token(letters: &[char], at: usize) -> (Token, usize) {
    let letter = letters[at];
    let run = |is: &dyn Fn(char) -> bool| {
        letters[at..].iter().position(|letter| !is(*letter)).map_or(letters.len(), |n| at + n)
    };
    if letter.is_ascii_digit() || letter == '.' && letters.get(at + 1).is_some_and(char::is_ascii_digit) {
        let mut next = run(&|letter| letter.is_ascii_alphanumeric() || letter == '.' || letter == '_');
        // `1e-5`
        if letters[next - 1].eq_ignore_ascii_case(&'e') && letters.get(next).is_some_and(|sign| "+-".contains(*sign)) {
            next += 1;
            while letters.get(next).is_some_and(char::is_ascii_digit) {
                next += 1;
            }
        }
        return (Token::Number(letters[at..next].iter().filter(|letter| **letter != '_').collect()), next);
    }
    if letter == '"' || letter == '\'' {
        return text(letters, at, "");
    }
    if letter.is_alphabetic() || letter == '_' {
        let next = run(&|letter| letter.is_alphanumeric() || letter == '_');
        let name: String = letters[at..next].iter().collect();
        if name.len() <= 2 && letters.get(next).is_some_and(|quote| *quote == '"' || *quote == '\'') {
            return text(letters, next, &name.to_lowercase());
        }
        return (Token::Name(name), next);
    }
    let found = SIGNS.iter().find(|sign| sign.chars().enumerate().all(|(n, sign)| letters.get(at + n) == Some(&sign)));
    found.map_or((Token::Sign("?"), at + 1), |sign| (Token::Sign(sign), at + sign.len()))
}

/// A text in quotes, with the letters that stood before them.
fn text(letters: &[char], at: usize, before: &str) -> (Token, usize) {
    let quote = letters[at];
    let long = letters.get(at + 1) == Some(&quote) && letters.get(at + 2) == Some(&quote);
    let width = if long { 3 } else { 1 };
    let closes = |at: usize| (0..width).all(|n| letters.get(at + n) == Some(&quote));
    let (mut at, mut text) = (at + width, String::new());
    while at < letters.len() && !closes(at) {
        match letters[at] {
            '\n' if !long => break,
            '\\' if !before.contains('r') => {
                at += 1;
                match letters.get(at) {
                    Some('n') => text.push('\n'),
                    Some('t') => text.push('\t'),
                    Some('\n') | None => {}
                    Some(other) => text.push(*other),
                }
            }
            letter => text.push(letter),
        }
        at += 1;
    }
    (Token::Text(text, before.contains('f')), (at + width).min(letters.len()))
}

/// Tokens between signs that stand in no brackets.
pub(super) fn parts<'t>(tokens: &'t [Token], sign: &str) -> Vec<&'t [Token]> {
    let (mut found, mut depth, mut start) = (Vec::new(), 0usize, 0);
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Sign("(" | "[" | "{") => depth += 1,
            Token::Sign(")" | "]" | "}") => depth = depth.saturating_sub(1),
            _ if depth == 0 && token.is(sign) => {
                found.push(&tokens[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if start < tokens.len() {
        found.push(&tokens[start..]);
    }
    found
}

/// The colon that ends a head, or stands behind a name.
pub(super) fn colon(tokens: &[Token]) -> Option<usize> {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Sign("(" | "[" | "{") => depth += 1,
            Token::Sign(")" | "]" | "}") => depth = depth.saturating_sub(1),
            Token::Sign(":") if depth == 0 => return Some(at),
            _ => {}
        }
    }
    None
}

pub(super) fn closing(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token {
            Token::Sign("(" | "[" | "{") => depth += 1,
            Token::Sign(")" | "]" | "}") => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}
