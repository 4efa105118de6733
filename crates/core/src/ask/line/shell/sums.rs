//! Whole numbers that a script computes: `$((A * B / 2))`, `expr 16 / 4`.

use super::words::Variables;

/// Parentheses in each other.
const DEEPEST: usize = 32;

/// What a sum comes to, where everything in it is known.
pub(super) fn sum(text: &str, variables: &Variables) -> Option<i64> {
    let mut reader = Reader { rest: text, variables };
    let total = reader.total(0)?;
    reader.rest.trim().is_empty().then_some(total)
}

struct Reader<'a> {
    rest: &'a str,
    variables: &'a Variables,
}

impl Reader<'_> {
    fn sign(&mut self, signs: &[char]) -> Option<char> {
        self.rest = self.rest.trim_start();
        let sign = self.rest.chars().next().filter(|sign| signs.contains(sign))?;
        self.rest = &self.rest[sign.len_utf8()..];
        Some(sign)
    }

    fn total(&mut self, depth: usize) -> Option<i64> {
        let mut total = self.product(depth)?;
        while let Some(sign) = self.sign(&['+', '-']) {
            let next = self.product(depth)?;
            total = if sign == '+' { total.checked_add(next)? } else { total.checked_sub(next)? };
        }
        Some(total)
    }

    fn product(&mut self, depth: usize) -> Option<i64> {
        let mut total = self.factor(depth)?;
        while let Some(sign) = self.sign(&['*', '/', '%']) {
            let next = self.factor(depth)?;
            total = match sign {
                '*' => total.checked_mul(next)?,
                '/' => total.checked_div(next)?,
                _ => total.checked_rem(next)?,
            };
        }
        Some(total)
    }

    fn factor(&mut self, depth: usize) -> Option<i64> {
        if depth > DEEPEST {
            return None;
        }
        if self.sign(&['(']).is_some() {
            let inner = self.total(depth + 1)?;
            return self.sign(&[')']).map(|_| inner);
        }
        self.rest = self.rest.trim_start();
        let word = self.rest.trim_start_matches(['$', '{']);
        let end = word.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(word.len());
        let (word, rest) = word.split_at(end);
        self.rest = rest.trim_start_matches('}');
        word.parse().ok().or_else(|| self.variables.get(word)?.trim().parse().ok())
    }
}
