//! Which samples come together, in which order: the sizes of every batch of a run.

use super::random::Twister;
use super::{Job, Order};
use crate::plan::Batch;

/// The sizes of one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sizes {
    /// Samples in it: the last of an epoch has what is left.
    pub samples: u64,
    /// Tokens of its longest, and so of all.
    pub longest: u64,
    /// Tokens that are no padding.
    pub real: u64,
}

impl Sizes {
    /// Whether anything is padding.
    pub fn padded(&self) -> bool {
        self.real < self.samples * self.longest
    }

    /// The batch of a plan with these sizes.
    pub fn of(&self, batch: &Batch) -> Batch {
        Batch {
            batch_size: self.samples,
            seq_len: self.longest,
            padded: batch.padded || self.padded(),
            mask: batch.mask || self.padded(),
            real_tokens: self.padded().then_some(self.real),
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
        let wanted = self.steps(batch, micro) as usize * micro.max(1) as usize;
        let whole = Sizes { samples: batch.batch_size, longest: batch.seq_len, real: batch.tokens() };
        let Some(lengths) = &self.lengths else { return vec![whole; wanted] };
        let samples = lengths.samples(self.seed, batch.seq_len);
        if matches!(lengths, super::Lengths::Batches(_)) {
            let one = |longest: u64| Sizes { longest, real: batch.batch_size * longest, ..whole };
            return samples.into_iter().map(one).cycle().take(wanted).collect();
        }
        let size = (batch.batch_size as usize).max(1);
        let mut found = Vec::with_capacity(wanted);
        for epoch in 0.. {
            let order = self.order(&samples, size * micro.max(1) as usize, epoch);
            found.extend(order.chunks(size).map(|ids| self.sizes(ids.iter().map(|id| samples[*id]))));
            if found.len() >= wanted || order.is_empty() {
                break;
            }
        }
        found.truncate(wanted);
        found
    }

    /// Steps that are run: those asked for, or an epoch.
    pub fn steps(&self, batch: &Batch, micro: u32) -> u32 {
        let epoch = || {
            let samples = match &self.lengths {
                Some(super::Lengths::Batches(all)) => return all.len() as u64 / u64::from(micro.max(1)),
                Some(lengths) => lengths.samples(self.seed, batch.seq_len).len() as u64,
                None => return u64::from(Self::ALIKE),
            };
            samples.div_ceil(batch.batch_size.max(1)).div_ceil(u64::from(micro.max(1)))
        };
        self.steps.unwrap_or_else(|| epoch().clamp(1, u64::from(Self::MOST_STEPS)) as u32)
    }

    fn sizes(&self, samples: impl Iterator<Item = u64> + Clone) -> Sizes {
        let longest = samples.clone().max().unwrap_or(1);
        let longest = longest.next_multiple_of(self.pad_to_multiple_of.unwrap_or(1).max(1));
        Sizes { samples: samples.clone().count() as u64, longest, real: samples.sum() }
    }

    /// The order samples come in.
    fn order(&self, samples: &[u64], step: usize, epoch: u64) -> Vec<usize> {
        // accelerate's SeedableRandomSampler: the seed and the number of the epoch.
        let mut draw = Twister::torch(self.seed.wrapping_add(epoch));
        match self.order {
            Order::Sequential => (0..samples.len()).collect(),
            Order::Shuffled => draw.permutation(samples.len()),
            Order::Grouped => grouped(samples, step, &mut draw),
        }
    }
}

/// `get_length_grouped_indices` of transformers: shuffled, then sorted within some fifty steps; the longest comes first.
fn grouped(samples: &[u64], step: usize, draw: &mut Twister) -> Vec<usize> {
    let many = (samples.len() / (step * 4)).clamp(1, 50) * step;
    let mut groups: Vec<Vec<usize>> = draw.permutation(samples.len()).chunks(many).map(<[usize]>::to_vec).collect();
    groups.iter_mut().for_each(|group| group.sort_by_key(|id| std::cmp::Reverse(samples[*id])));
    let longest = (0..groups.len()).rev().max_by_key(|at| samples[groups[*at][0]]);
    if let Some(at) = longest.filter(|at| *at > 0) {
        let (first, rest) = groups.split_at_mut(at);
        std::mem::swap(&mut first[0][0], &mut rest[0][0]);
    }
    groups.concat()
}

#[cfg(test)]
mod tests {
    use super::super::Lengths;
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
