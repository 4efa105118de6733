//! Which samples come together, in which order: the sizes of every batch of a run.

use super::packing::{Row, Sample};
use super::random::Twister;
use super::{Job, Lengths, Order};
use crate::plan::Batch;

/// The sizes of one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sizes {
    /// Rows in it: the last batch of an epoch has what is left, and one without padding has one.
    pub samples: u64,
    /// Tokens of its longest, and so of all.
    pub longest: u64,
    /// Tokens that are no padding.
    pub real: u64,
    /// Tokens that the loss counts.
    pub counted: u64,
    /// Samples that lie one after the other in its only row; `None`: rows are samples.
    pub documents: Option<u64>,
}

impl Sizes {
    /// Samples that are all alike and as long as can be.
    pub fn whole(batch: &Batch) -> Self {
        let (samples, longest) = (batch.batch_size, batch.seq_len);
        let counted = samples.saturating_mul(longest.saturating_sub(1));
        Self { samples, longest, real: batch.tokens(), counted, documents: None }
    }

    /// Whether anything is padding.
    pub fn padded(&self) -> bool {
        self.real < self.samples.saturating_mul(self.longest)
    }

    /// The batch of a plan with these sizes.
    pub fn of(&self, batch: &Batch) -> Batch {
        let padded = self.padded() && self.documents.is_none();
        Batch {
            batch_size: self.samples,
            seq_len: self.longest,
            padded: batch.padded || padded,
            // A row without padding has positions in a mask's place.
            mask: self.documents.is_none() && (batch.mask || padded),
            real_tokens: padded.then_some(self.real),
            documents: self.documents,
            // As many for each sample as the plan's batch has.
            images: batch.images.map(|[count, height, width]| {
                [(count.saturating_mul(self.samples) / batch.batch_size.max(1)).max(1), height, width]
            }),
            ..batch.clone()
        }
    }
}

impl Job {
    /// The batches of a run, so many as `micro` for each of its steps; what a plan's own batch is where no lengths are given.
    pub fn batches(&self, batch: &Batch, micro: u32) -> Vec<Sizes> {
        self.dealt(batch, micro, 1)
    }

    /// The same dealt out to cards in turn (`BatchSamplerShard` of accelerate): those of the card that sees the longest.
    pub(in crate::plan) fn dealt(&self, batch: &Batch, micro: u32, cards: usize) -> Vec<Sizes> {
        let micro = micro.max(1) as usize;
        let wanted = self.steps(batch, micro as u32, cards) as usize * micro;
        let all = self.drawn(batch, (wanted.saturating_mul(cards), micro), u64::MAX);
        of_fullest_card(&all, cards).take(wanted).collect()
    }

    /// The batches of an evaluation of so many samples dealt out to cards: each has as many, all of them whole (`even_batches`).
    pub(in crate::plan) fn evaluated_on(&self, batch: &Batch, rows: u64, cards: usize) -> Vec<Sizes> {
        let mut all = self.evaluated(batch, rows);
        if cards > 1 {
            if let Some(last) = all.last_mut().filter(|last| last.documents.is_none()) {
                last.samples = batch.batch_size;
            }
            let first: Vec<Sizes> = all.iter().copied().cycle().take(all.len().next_multiple_of(cards)).collect();
            all = of_fullest_card(&first, cards).collect();
        }
        all
    }

    /// The batches of an evaluation of so many samples: as in the data set, the last with what is left.
    pub fn evaluated(&self, batch: &Batch, rows: u64) -> Vec<Sizes> {
        let whole = rows.div_ceil(batch.batch_size.max(1)) as usize;
        let job = Self { order: Order::Sequential, ..self.clone() };
        let wanted = match &self.lengths {
            Some(Lengths::Batches(_)) | None => whole,
            Some(_) => usize::MAX,
        };
        let mut found = job.drawn(batch, (wanted, 1), rows);
        let left = rows % batch.batch_size.max(1);
        if wanted < usize::MAX && left > 0 {
            let longest = found.last().map_or(batch.seq_len, |last| last.longest);
            let last = Sizes::whole(&Batch { batch_size: left, seq_len: longest, ..batch.clone() });
            found.pop();
            found.push(if self.is_flat() { self.flat([Row::from(&last)]) } else { last });
        }
        found
    }

    /// So many batches, of the first `rows` samples; epochs follow each other unless those are all there are.
    fn drawn(&self, batch: &Batch, (wanted, micro): (usize, usize), rows: u64) -> Vec<Sizes> {
        let whole = Sizes::whole(batch);
        let Some(lengths) = &self.lengths else {
            let one = if self.is_flat() { self.flat([Row::from(&whole)]) } else { whole };
            return vec![one; wanted];
        };
        let mut samples = lengths.samples(self.seed, batch.seq_len);
        if matches!(lengths, Lengths::Batches(_)) {
            let one = |sample: Sample| {
                let longest = sample.tokens.min(batch.seq_len.max(1));
                Sizes::whole(&Batch { seq_len: longest, ..batch.clone() })
            };
            return samples.into_iter().map(one).cycle().take(wanted).collect();
        }
        let endless = rows == u64::MAX;
        if !endless && !samples.is_empty() {
            samples = samples.iter().copied().cycle().take(rows as usize).collect();
        }
        let rows = self.rows(&samples, batch.seq_len.max(1));
        let size = (batch.batch_size as usize).max(1);
        let mut found = Vec::new();
        for epoch in 0.. {
            let order = self.order(&rows, size * micro, epoch);
            found.extend(order.chunks(size).map(|ids| self.sizes(ids.iter().map(|id| rows[*id]))));
            if found.len() >= wanted || order.is_empty() || !endless {
                break;
            }
        }
        found.truncate(wanted);
        found
    }

    /// The rows of the data set: samples cut to `length`, or packed.
    fn rows(&self, samples: &[Sample], length: u64) -> Vec<Row> {
        match self.packing {
            Some(packing) => packing.rows(samples, length),
            None => {
                let rows = samples.iter().map(|sample| (sample, sample.part(0, length)));
                // TRL drops what is all prompt.
                rows.filter(|(sample, row)| sample.prompt == 0 || row.counted > 0).map(|(_, row)| row).collect()
            }
        }
    }

    /// Steps that are run: those asked for, or an epoch.
    fn steps(&self, batch: &Batch, micro: u32, cards: usize) -> u32 {
        let epoch = || {
            let rows = match &self.lengths {
                Some(Lengths::Batches(all)) => return all.len() as u64 / u64::from(micro.max(1)) / cards as u64,
                Some(lengths) => {
                    self.rows(&lengths.samples(self.seed, batch.seq_len), batch.seq_len.max(1)).len() as u64
                }
                None => return u64::from(Self::ALIKE),
            };
            rows.div_ceil(batch.batch_size.max(1)).div_ceil(cards as u64).div_ceil(u64::from(micro.max(1)))
        };
        let most = if self.repeats() { Self::MOST_ALIKE } else { u32::MAX };
        self.steps.unwrap_or_else(|| epoch().clamp(1, u64::from(Self::MOST_STEPS)) as u32).min(most)
    }

    fn sizes(&self, rows: impl Iterator<Item = Row> + Clone) -> Sizes {
        if self.is_flat() {
            return self.flat(rows);
        }
        let longest = self.multiple(rows.clone().map(|row| row.tokens).max().unwrap_or(1));
        let (samples, real) = (rows.clone().count() as u64, rows.clone().map(|row| row.tokens).sum());
        Sizes { samples, longest, real, counted: rows.map(|row| row.counted).sum(), documents: None }
    }

    /// All rows in one.
    fn flat(&self, rows: impl IntoIterator<Item = Row>) -> Sizes {
        let all = rows.into_iter().fold(Row::default(), |sum, row| Row {
            tokens: sum.tokens.saturating_add(row.tokens),
            counted: sum.counted.saturating_add(row.counted),
            documents: sum.documents + row.documents,
        });
        let longest = self.multiple(all.tokens.max(1));
        Sizes { samples: 1, longest, real: longest, counted: all.counted, documents: Some(all.documents) }
    }

    fn multiple(&self, tokens: u64) -> u64 {
        tokens.next_multiple_of(self.pad_to_multiple_of.unwrap_or(1).max(1))
    }

    /// The order samples come in.
    fn order(&self, samples: &[Row], step: usize, epoch: u64) -> Vec<usize> {
        // accelerate's SeedableRandomSampler: the seed and the number of the epoch.
        let mut draw = Twister::torch(self.seed.wrapping_add(epoch));
        match self.order {
            Order::Sequential => (0..samples.len()).collect(),
            Order::Shuffled => draw.permutation(samples.len()),
            Order::Grouped => grouped(samples, step, &mut draw),
        }
    }
}

/// Batches of the card that sees the longest, of those that are dealt out in turn.
fn of_fullest_card(all: &[Sizes], cards: usize) -> impl Iterator<Item = Sizes> {
    let size = |sizes: &Sizes| sizes.samples.saturating_mul(sizes.longest);
    let card = |card: usize| all.iter().skip(card).step_by(cards);
    let most = (0..cards).rev().max_by_key(|at| card(*at).map(size).max());
    card(most.unwrap_or(0)).copied()
}

/// `get_length_grouped_indices` of transformers: shuffled, then sorted within some fifty steps; the longest comes first.
fn grouped(samples: &[Row], step: usize, draw: &mut Twister) -> Vec<usize> {
    let many = (samples.len() / (step * 4)).clamp(1, 50) * step;
    let mut groups: Vec<Vec<usize>> = draw.permutation(samples.len()).chunks(many).map(<[usize]>::to_vec).collect();
    groups.iter_mut().for_each(|group| crate::order::sort_by_key(group, |id| std::cmp::Reverse(samples[*id].tokens)));
    let longest = (0..groups.len()).rev().max_by_key(|at| samples[groups[*at][0]].tokens);
    if let Some(at) = longest.filter(|at| *at > 0) {
        let (first, rest) = groups.split_at_mut(at);
        std::mem::swap(&mut first[0][0], &mut rest[0][0]);
    }
    groups.concat()
}

#[cfg(test)]
mod tests {
    use super::super::Packing;
    use super::*;

    fn batch(batch_size: u64) -> Batch {
        Batch { batch_size, seq_len: 100, ..Batch::default() }
    }

    #[test]
    fn batches_are_padded_to_their_longest() {
        let job = Job {
            lengths: Some(Lengths::Samples(vec![10, 30, 20, 500, 5])),
            order: Order::Sequential,
            pad_to_multiple_of: Some(8),
            ..Job::default()
        };
        let found = job.batches(&batch(2), 1);
        let sizes: Vec<(u64, u64, u64)> = found.iter().map(|one| (one.samples, one.longest, one.real)).collect();
        assert_eq!(sizes, [(2, 32, 40), (2, 104, 120), (1, 8, 5)]);
        assert!(found[0].padded() && found[0].of(&batch(2)).mask);
        // Another epoch begins where steps go on.
        assert_eq!(Job { steps: Some(4), ..job }.batches(&batch(2), 1)[3], found[0]);
    }

    #[test]
    fn flat_batches_have_one_row() {
        let lengths = Some(Lengths::Samples(vec![60, 50, 40, 500, 30]));
        let job = Job { lengths, order: Order::Sequential, packing: Some(Packing::Bfd), ..Job::default() };
        let found = job.batches(&batch(2), 1);
        // Rows of 100, 100 (60 and 40) and 80 (50 and 30).
        let sizes: Vec<_> = found.iter().map(|one| (one.samples, one.longest, one.counted, one.documents)).collect();
        assert_eq!(sizes, [(1, 200, 197, Some(3)), (1, 80, 78, Some(2))]);
        assert!(!found[0].padded() && !found[0].of(&Batch { mask: true, ..batch(2) }).mask);
        let alike = Job { packing: Some(Packing::Bfd), ..Job::default() };
        assert_eq!(alike.batches(&batch(4), 1)[0].documents, Some(4));
        // The first two samples do not fit into one row.
        assert_eq!(job.evaluated(&batch(1), 2).len(), 2);
    }

    #[test]
    fn the_longest_of_grouped_ones_comes_first() {
        let lengths: Vec<u64> = (1..=64).collect();
        let job = Job { lengths: Some(Lengths::Samples(lengths)), order: Order::Grouped, ..Job::default() };
        let found = job.batches(&batch(4), 1);
        assert_eq!((found.len(), found[0].longest), (16, 64));
        let padding = |all: &[Sizes]| -> u64 { all.iter().map(|one| one.samples * one.longest - one.real).sum() };
        let shuffled = Job { order: Order::Shuffled, ..job }.batches(&batch(4), 1);
        assert!(padding(&found) < padding(&shuffled));
    }
}
