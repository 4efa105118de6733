//! Whole numbers as expressions of others, as `tools/learn` writes them: `2*d_model`, `kv_heads*(hidden/heads)`,
//! `(image/patch)^2+1`. A product is rounded down at its end, as Python's `//` and `int` do.

/// What a name stands for: a fraction, since a config may say 4.0 or 0.5.
pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Option<[i128; 2]>;

/// What an expression is worth, or which part of it has no value.
pub(super) fn value(text: &str, lookup: Lookup<'_>) -> Result<u64, String> {
    let mut reader = Reader { text, place: 0, depth: 0, lookup };
    let sum = reader.sum()?;
    if reader.place < text.len() {
        return Err(format!("{text}: unexpected {:?}", &text[reader.place..]));
    }
    u64::try_from(sum).map_err(|_| format!("{text} is {sum}"))
}

/// How deep parentheses may be.
const DEEPEST: u32 = 16;

struct Reader<'a> {
    text: &'a str,
    place: usize,
    depth: u32,
    lookup: Lookup<'a>,
}

impl Reader<'_> {
    fn next(&self) -> Option<u8> {
        self.text.as_bytes().get(self.place).copied()
    }

    fn takes(&mut self, byte: u8) -> bool {
        let found = self.next() == Some(byte);
        self.place += usize::from(found);
        found
    }

    fn too_large(&self) -> String {
        format!("{}: the numbers are too large", self.text)
    }

    fn sum(&mut self) -> Result<i128, String> {
        let mut sum = self.product()?;
        loop {
            sum = if self.takes(b'+') {
                sum.checked_add(self.product()?)
            } else if self.takes(b'-') {
                sum.checked_sub(self.product()?)
            } else {
                return Ok(sum);
            }
            .ok_or_else(|| self.too_large())?;
        }
    }

    fn product(&mut self) -> Result<i128, String> {
        let [mut up, mut down] = self.power()?;
        loop {
            let [a, b] = if self.takes(b'*') {
                self.power()?
            } else if self.takes(b'/') {
                let [a, b] = self.power()?;
                [b, a]
            } else {
                break;
            };
            (up, down) = match (up.checked_mul(a), down.checked_mul(b)) {
                (Some(up), Some(down)) => (up, down),
                _ => return Err(self.too_large()),
            };
        }
        if down == 0 { Err(format!("{}: division by zero", self.text)) } else { Ok(up.div_euclid(down)) }
    }

    fn power(&mut self) -> Result<[i128; 2], String> {
        let [up, down] = self.atom()?;
        if !self.takes(b'^') {
            return Ok([up, down]);
        }
        let [exponent, _] = self.atom()?;
        let exponent = u32::try_from(exponent).map_err(|_| self.too_large())?;
        let both = (up.checked_pow(exponent), down.checked_pow(exponent));
        if let (Some(up), Some(down)) = both { Ok([up, down]) } else { Err(self.too_large()) }
    }

    fn atom(&mut self) -> Result<[i128; 2], String> {
        if self.takes(b'(') {
            self.depth += 1;
            if self.depth > DEEPEST {
                return Err(format!("{}: too many parentheses", self.text));
            }
            let inner = self.sum()?;
            self.depth -= 1;
            return if self.takes(b')') { Ok([inner, 1]) } else { Err(format!("{}: ) is missing", self.text)) };
        }
        let rest = &self.text[self.place..];
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '[' | ']');
        let word = &rest[..rest.find(|c: char| !is_name(c)).unwrap_or(rest.len())];
        self.place += word.len();
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return word.parse().map(|number| [number, 1]).map_err(|_| format!("{word} is no number"));
        }
        (self.lookup)(word).ok_or_else(|| {
            if word.is_empty() { format!("{}: a number is missing", self.text) } else { word.to_owned() }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worth(text: &str) -> Result<u64, String> {
        let names = |name: &str| match name {
            "hidden" => Some([96, 1]),
            "heads" => Some([7, 1]),
            "ratio" => Some([7, 2]),
            "vision.sizes[1]" => Some([5, 1]),
            _ => None,
        };
        value(text, &names)
    }

    #[test]
    fn products_round_down_at_their_end() {
        assert_eq!(worth("hidden*(hidden/heads)"), Ok(96 * 13));
        assert_eq!(worth("hidden/heads*2"), Ok(27));
        assert_eq!(worth("hidden*ratio"), Ok(336));
        assert_eq!(worth("(hidden/heads)^2+1"), Ok(170));
        assert_eq!(worth("3*vision.sizes[1]-1"), Ok(14));
    }

    #[test]
    fn what_has_no_value_is_named() {
        assert_eq!(worth("width"), Err("width".into()));
        assert!(worth("1-2").is_err() && worth("(1").is_err() && worth("1)").is_err() && worth("2/0").is_err());
        assert!(worth(&"(".repeat(10_000)).is_err() && worth("hidden^hidden^hidden").is_err() && worth("").is_err());
    }
}
