//! Samples joined into rows, as TRL's `pack_dataset` does it (trl 1.16, data_utils.py).

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

/// How samples are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// Best fit, the longest first; what is longer than a row is cut.
    Bfd,
    /// The same; what is longer than a row goes on in others.
    BfdSplit,
    /// One after the other, cut wherever a row is full.
    Wrapped,
}

/// Rows that `datasets` hands to a function at a time (`Dataset.map(batched=True)`): packing never joins across them.
const MAPPED: usize = 1000;

/// One row of a data set: what it has of tokens, of tokens that the loss counts, and of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Row {
    pub(super) tokens: u64,
    pub(super) counted: u64,
    pub(super) documents: u64,
}

impl From<&super::Sizes> for Row {
    /// All samples of a batch that are alike.
    fn from(sizes: &super::Sizes) -> Self {
        Self { tokens: sizes.real, counted: sizes.counted, documents: sizes.samples }
    }
}

/// A sample: its tokens, and how many at its beginning the loss leaves out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    pub(super) tokens: u64,
    pub(super) prompt: u64,
}

impl Sample {
    /// The part from `start` up to `end`, as a row whose first token predicts nothing.
    pub(super) fn part(self, start: u64, end: u64) -> Row {
        let end = end.min(self.tokens);
        let counted = end.saturating_sub(self.prompt.max(start + 1));
        Row { tokens: end.saturating_sub(start), counted, documents: 1 }
    }
}

impl Packing {
    /// Whether rows keep the ends of their samples, which makes TRL run without padding.
    pub fn keeps_ends(self) -> bool {
        self != Self::Wrapped
    }

    /// The rows that samples become, each of at most `length` tokens.
    pub(super) fn rows(self, samples: &[Sample], length: u64) -> Vec<Row> {
        let length = length.max(1);
        samples.chunks(MAPPED).flat_map(|samples| self.pack(samples, length)).collect()
    }

    fn pack(self, samples: &[Sample], length: u64) -> Vec<Row> {
        match self {
            Self::Bfd => best_fit(samples.iter().map(|sample| sample.part(0, length)).collect(), length),
            Self::BfdSplit => {
                let pieces = |sample: &Sample| {
                    let sample = *sample;
                    (0..sample.tokens.div_ceil(length)).map(move |at| sample.part(at * length, (at + 1) * length))
                };
                best_fit(samples.iter().flat_map(pieces).collect(), length)
            }
            Self::Wrapped => wrapped(samples, length),
        }
    }
}

/// Each piece into the row that has just enough room left, the one that has had it longest.
fn best_fit(mut pieces: Vec<Row>, length: u64) -> Vec<Row> {
    pieces.retain(|piece| piece.tokens > 0);
    crate::order::sort_by_key(&mut pieces, |piece| std::cmp::Reverse(piece.tokens));
    let mut rows: Vec<Row> = Vec::new();
    let mut room: BTreeMap<u64, VecDeque<usize>> = BTreeMap::new();
    for piece in pieces {
        let found = room.range_mut(piece.tokens..).find_map(|(left, rows)| Some((*left, rows.pop_front()?)));
        let (left, at) = found.unwrap_or_else(|| {
            rows.push(Row::default());
            (length, rows.len() - 1)
        });
        let row = &mut rows[at];
        *row = Row {
            tokens: row.tokens + piece.tokens,
            counted: row.counted + piece.counted,
            documents: row.documents + 1,
        };
        if room.get(&left).is_some_and(VecDeque::is_empty) {
            room.remove(&left);
        }
        if left > piece.tokens {
            room.entry(left - piece.tokens).or_default().push_back(at);
        }
    }
    rows
}

/// All tokens in a line, cut where a row is full: ends of samples are forgotten, so only a row's first token predicts nothing.
fn wrapped(samples: &[Sample], length: u64) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut row = Row { documents: 1, ..Row::default() };
    for sample in samples {
        let mut at = 0;
        while at < sample.tokens {
            let end = sample.tokens.min(at + (length - row.tokens));
            let first = u64::from(row.tokens == 0);
            row.counted += end.saturating_sub(sample.prompt.max(at + first));
            row.tokens += end - at;
            at = end;
            if row.tokens == length {
                rows.push(row);
                row = Row { documents: 1, ..Row::default() };
            }
        }
    }
    rows.extend((row.tokens > 0).then_some(row));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(how: Packing, lengths: &[u64], length: u64) -> Vec<(u64, u64)> {
        let samples: Vec<Sample> = lengths.iter().map(|tokens| Sample { tokens: *tokens, prompt: 0 }).collect();
        how.rows(&samples, length).iter().map(|row| (row.tokens, row.documents)).collect()
    }

    #[test]
    fn rows_are_those_of_trl() {
        // The example in the text of `pack_dataset`.
        assert_eq!(rows(Packing::Bfd, &[5, 2, 3, 1], 4), [(4, 1), (4, 2), (2, 1)]);
        assert_eq!(rows(Packing::BfdSplit, &[5, 2, 3, 1], 4), [(4, 1), (4, 2), (3, 2)]);
        assert_eq!(rows(Packing::Wrapped, &[5, 2, 3, 1], 4), [(4, 1), (4, 1), (3, 1)]);
        // A thousand samples at a time.
        assert_eq!(rows(Packing::Wrapped, &[1; 1001], 1000).len(), 2);
    }

    #[test]
    fn the_loss_leaves_prompts_and_first_tokens_out() {
        let samples = [Sample { tokens: 6, prompt: 4 }, Sample { tokens: 3, prompt: 0 }];
        let counted = |how: Packing, length| how.rows(&samples, length).iter().map(|row| row.counted).sum::<u64>();
        assert_eq!(counted(Packing::Bfd, 16), 2 + 2);
        assert_eq!(counted(Packing::Wrapped, 16), 2 + 3);
        assert_eq!(counted(Packing::BfdSplit, 5), 1 + 2);
    }
}
