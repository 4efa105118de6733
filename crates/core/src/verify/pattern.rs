//! The pattern grammar of the truth files: `layers.{0..31}.w`, `{0,3,7}`, `{3..47:4}`; several braces multiply.

/// No pattern in a truth file may stand for more names than this.
const MAX_NAMES: usize = 1_000_000;

/// All names a pattern stands for, or why it stands for none.
pub fn expand(pattern: &str) -> Result<Vec<String>, String> {
    let mut names = vec![String::new()];
    let mut rest = pattern;
    while let Some(open) = rest.find('{') {
        let close = rest[open..].find('}').ok_or_else(|| format!("{pattern}: a brace is not closed"))? + open;
        let indices = ranges(&rest[open + 1..close]).ok_or_else(|| format!("{pattern}: bad range"))?;
        if names.len().saturating_mul(indices.len()) > MAX_NAMES {
            return Err(format!("{pattern}: stands for too many names"));
        }
        let head = &rest[..open];
        names = names.iter().flat_map(|name| indices.iter().map(move |i| format!("{name}{head}{i}"))).collect();
        rest = &rest[close + 1..];
    }
    Ok(names.into_iter().map(|name| name + rest).collect())
}

fn ranges(text: &str) -> Option<Vec<u64>> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (range, step) = match part.split_once(':') {
            Some((range, step)) => (range, step.parse().ok().filter(|step| *step > 0)?),
            None => (part, 1),
        };
        match range.split_once("..") {
            None => all.push(range.parse().ok()?),
            Some((first, last)) => {
                let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
                if last.saturating_sub(first) as usize > MAX_NAMES {
                    return None;
                }
                all.extend((first..=last).step_by(step));
            }
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::expand;

    #[test]
    fn ranges_lists_steps_and_products() {
        assert_eq!(expand("a.{0..2}.b").unwrap(), ["a.0.b", "a.1.b", "a.2.b"]);
        assert_eq!(expand("{1,3..7:2}.{0..1}").unwrap().len(), 8);
        assert_eq!(expand("plain").unwrap(), ["plain"]);
        assert!(expand("a.{0..").is_err());
    }
}
