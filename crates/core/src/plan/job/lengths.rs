//! How long the samples of a data set are.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::packing::Sample;
use super::random::Twister;
use crate::plan::{Fault, Faults};

/// How long samples are, in tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Lengths {
    /// Of every sample, in the order of the data set.
    Samples(Vec<u64>),
    /// Of every sample, in two parts: a prompt that the loss may leave out, and its completion.
    Pairs(Vec<[u64; 2]>),
    /// Of all samples of each batch, batch by batch: no order is drawn.
    Batches(Vec<u64>),
    /// How many samples have which length.
    Histogram(BTreeMap<u64, u64>),
    /// The logarithm is normal: what text looks like.
    Lognormal(Normal),
    /// Normal.
    Normal(Normal),
    /// All alike, from the first to the second.
    Uniform([u64; 2]),
}

/// A mean and a deviation: of the logarithm for `lognormal`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Normal {
    /// The mean.
    pub mean: f64,
    /// The standard deviation.
    pub deviation: f64,
}

/// Samples that are drawn where only their distribution is known.
const DRAWN: usize = 4096;
/// A data set of more is counted (`histogram`), not listed.
const MOST: usize = 1 << 20;

impl Lengths {
    /// Refuses what is no length.
    pub(super) fn check(&self, faults: &mut Faults) {
        let path = "job.lengths";
        let count = match self {
            Self::Samples(all) | Self::Batches(all) => all.len(),
            Self::Pairs(all) => all.len(),
            Self::Histogram(counts) => counts.values().fold(0u64, |sum, n| sum.saturating_add(*n)) as usize,
            Self::Lognormal(normal) | Self::Normal(normal) => {
                let sound = normal.mean.is_finite() && (0.0..=1e6).contains(&normal.deviation);
                faults.when(!sound, || {
                    Fault::new(path, "mean and deviation are finite numbers, the deviation not negative")
                });
                1
            }
            Self::Uniform([from, to]) => {
                faults
                    .when(from > to, || Fault::value(path, format!("{from}-{to}"), "from the shortest to the longest"));
                1
            }
        };
        faults.when(count == 0, || Fault::new(path, "there is no sample in it").or_drop(path));
        faults.when(count > MOST, || Fault::value(path, count, format!("at most {MOST} samples")));
    }

    /// The samples as they are; drawn ones are no longer than `longest`.
    pub(super) fn samples(&self, seed: u64, longest: u64) -> Vec<Sample> {
        if let Self::Pairs(all) = self {
            let one = |[prompt, completion]: &[u64; 2]| Sample { tokens: prompt + completion, prompt: *prompt };
            return all.iter().map(one).collect();
        }
        self.tokens(seed, longest).into_iter().map(|tokens| Sample { tokens: tokens.max(1), prompt: 0 }).collect()
    }

    fn tokens(&self, seed: u64, longest: u64) -> Vec<u64> {
        let mut draw = Twister::python(seed);
        let cut = |length: f64| (length.max(1.0) as u64).min(longest.max(1));
        let drawn = |mut one: Box<dyn FnMut() -> u64 + '_>| (0..DRAWN).map(|_| one()).collect();
        match self {
            Self::Samples(all) | Self::Batches(all) => all.clone(),
            Self::Pairs(all) => all.iter().map(|pair| pair.iter().sum()).collect(),
            Self::Histogram(counts) => {
                counts.iter().flat_map(|(length, n)| std::iter::repeat_n(*length, (*n as usize).min(MOST))).collect()
            }
            Self::Lognormal(n) => drawn(Box::new(move || cut(draw.normal(n.mean, n.deviation).exp()))),
            Self::Normal(n) => drawn(Box::new(move || cut(draw.normal(n.mean, n.deviation)))),
            Self::Uniform([from, to]) => {
                let span = to.saturating_sub(*from) as f64 + 1.0;
                let one = move || from.saturating_add((draw.unit() * span) as u64).clamp(1, longest.max(1));
                drawn(Box::new(one))
            }
        }
    }

    /// As a flag spells it: `lognormal:6.0,0.9`, `normal:512,128`, `uniform:16-4096`, or numbers.
    pub fn parse(text: &str) -> Result<Self, String> {
        let expected =
            "lognormal:MEAN,DEVIATION (of the logarithm), normal:MEAN,DEVIATION, uniform:FROM-TO, or numbers";
        let pair = |text: &str| {
            let (mean, deviation) = text.split_once(',')?;
            Some(Normal { mean: mean.trim().parse().ok()?, deviation: deviation.trim().parse().ok()? })
        };
        let range = |text: &str| {
            let (from, to) = text.split_once('-')?;
            Some([from.trim().parse().ok()?, to.trim().parse().ok()?])
        };
        let found = match text.split_once(':') {
            Some(("lognormal", rest)) => pair(rest).map(Self::Lognormal),
            Some(("normal", rest)) => pair(rest).map(Self::Normal),
            Some(("uniform", rest)) => range(rest).map(Self::Uniform),
            Some(_) => None,
            None => Self::listed(text),
        };
        let no_number = || {
            let number = |line: &str| Self::listed(line).is_some() || line.trim().is_empty();
            // The first line may be the name of a column.
            let mut lines = text.lines().enumerate().skip(1).filter(|(_, line)| !number(line));
            lines.next().map_or_else(String::new, |(at, line)| format!(" (line {}: {})", at + 1, line.trim()))
        };
        let is_path = |text: &str| {
            text.contains(['/', '\\'])
                || text.rsplit_once('.').is_some_and(|(_, end)| {
                    end.len() <= 5 && end.starts_with(|first: char| first.is_ascii_alphabetic())
                })
        };
        found.ok_or_else(|| match text.contains('\n') {
            true => format!("a list of numbers{}; text is counted by --data FILE --tokenizer FILE", no_number()),
            false if is_path(text) => format!("a file that is there, nor {expected}"),
            false => expected.to_owned(),
        })
    }

    /// As a flag spells it, where one can.
    pub fn written(&self) -> Option<String> {
        Some(match self {
            Self::Samples(all) => all.iter().map(u64::to_string).collect::<Vec<_>>().join(","),
            Self::Histogram(counts) => serde_json::to_string(counts).ok()?,
            Self::Lognormal(n) => format!("lognormal:{},{}", n.mean, n.deviation),
            Self::Normal(n) => format!("normal:{},{}", n.mean, n.deviation),
            Self::Uniform([from, to]) => format!("uniform:{from}-{to}"),
            Self::Batches(_) | Self::Pairs(_) => return None,
        })
    }

    /// Numbers in a text, apart by commas or white space; a column may have a name.
    pub fn listed(text: &str) -> Option<Self> {
        let named = |first: &str| first.trim_matches('"').chars().all(|c| c.is_alphabetic() || c == '_');
        let text = text.split_once('\n').filter(|(first, _)| named(first.trim())).map_or(text, |(_, rest)| rest);
        let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
        let numbers: Option<Vec<u64>> = words.map(|word| word.parse().ok()).collect();
        numbers.filter(|numbers| !numbers.is_empty()).map(Self::Samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spelled_and_drawn() {
        assert_eq!(Lengths::parse("uniform:16-4096"), Ok(Lengths::Uniform([16, 4096])));
        assert_eq!(Lengths::parse("7, 9\n11"), Ok(Lengths::Samples(vec![7, 9, 11])));
        assert_eq!(Lengths::parse("length\n5\n6\n"), Ok(Lengths::Samples(vec![5, 6])));
        assert!(Lengths::parse("zipf:2").is_err() && Lengths::parse("").is_err());
        // int(random.Random(0).lognormvariate(6.0, 0.9)), three times, in Python.
        let drawn = Lengths::parse("lognormal:6.0,0.9").unwrap().tokens(0, 4096);
        assert_eq!((drawn.len(), &drawn[..3]), (DRAWN, &[341, 415, 756][..]));
        assert!(Lengths::Uniform([3, 5]).tokens(1, 4).iter().all(|length| (3..=4).contains(length)));
    }
}
