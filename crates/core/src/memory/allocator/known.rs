//! Ranges of events that a pool has gone through before.
//!
//! Steps of a run and tokens of a generation are the same events again and again. What a pool does with a request follows from
//! its segments and from what of them is in use. So where both are as they were at the same event of such a range before, the
//! rest of the range goes the same way: its bytes are counted, and no block is looked for.

use std::rc::Rc;

use super::pool::{COUNTED, NONE};
use super::stretch::Stretches;
use super::{Allocator, Place};
use crate::memory::log::{Like, StorageId};

/// After so many events of a range pools are compared.
pub(super) const EVERY: usize = 64;

/// A pool that differs so often in a row is taken to do so to the end.
const LOST: usize = 2000;

/// Where a storage lies, and what it is billed with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Spot {
    address: u64,
    pub(super) size: u64,
}

/// How a pool stands.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// Behind which event its segments last changed, or a storage went that no range had made.
    pub(super) changed: usize,
    /// Storages of ranges that do not lie where those in their place did in the range before; how often in a row there were some.
    astray: usize,
    lost: usize,
    /// Whether the range goes on as the one before did.
    settled: bool,
    /// Storages that are counted and have no block.
    afloat: usize,
}

/// Which storages are where.
#[derive(Debug, Default)]
pub(super) struct Whereabouts {
    /// Where those lie that are only counted.
    spots: Vec<Spot>,
    /// Those that ranges made, and whether they are astray.
    made: Vec<Option<bool>>,
}

/// A range as it went.
#[derive(Debug, Clone)]
pub(super) struct Known {
    start: usize,
    /// Its storages, in the order they were made.
    pub(super) spots: Vec<Spot>,
    /// What of it need not be played one by one, since it was played beside another.
    pub(super) stretches: Option<Rc<Stretches>>,
}

impl Known {
    pub(super) fn at(start: usize, events: usize) -> Self {
        Self { start, spots: Vec::with_capacity(events / 2 + 1), stretches: None }
    }
}

impl Whereabouts {
    pub(super) fn new(storages: usize) -> Self {
        Self { spots: vec![Spot::default(); storages], made: vec![None; storages] }
    }
}

impl Allocator {
    /// Which pools are asked for the same in a range as in the one that it is like.
    pub(super) fn alike(&self, like: &Like) -> Vec<bool> {
        let mut same = vec![true; self.pools.len()];
        for (here, there) in &like.others {
            let (here, there) = (&self.places[here.0 as usize], &self.places[there.0 as usize]);
            let asked = |place: &Place| (self.rounded(place.bytes), place.pool, place.bytes == 0);
            if asked(here) != asked(there) {
                same[here.pool as usize] = false;
                same[there.pool as usize] = false;
            }
        }
        same
    }

    pub(super) fn begin_range(&mut self) {
        for standing in &mut self.standing {
            (standing.settled, standing.lost) = (false, 0);
        }
    }

    /// Whether comparing on would lead nowhere.
    pub(super) fn is_lost(&self) -> bool {
        self.standing.iter().any(|standing| standing.lost > LOST)
    }

    /// Where a storage lies that was just made.
    #[inline]
    pub(super) fn spot(&self, id: StorageId) -> Spot {
        let place = &self.places[id.0 as usize];
        let block = self.pools[place.pool as usize].blocks.get(place.block as usize);
        block.map(|block| Spot { address: block.address, size: block.size }).unwrap_or_default()
    }

    /// Settles pools that stand as they did when the range before had come as far.
    pub(super) fn compare(&mut self, known: Option<&Known>, same: &[bool], number: usize) {
        for (pool, standing) in self.standing.iter_mut().enumerate() {
            let stands = |known: &Known| standing.astray == 0 && standing.changed <= known.start + number * EVERY;
            standing.settled |= known.is_some_and(|known| same[pool] && stands(known));
            standing.lost = if standing.astray > 0 { standing.lost + 1 } else { 0 };
        }
        self.land_all(|standing| !standing.settled);
    }

    /// Which pools are settled.
    pub(super) fn settled(&self) -> Vec<bool> {
        self.standing.iter().map(|standing| standing.settled).collect()
    }

    /// Whether some pools are settled.
    #[inline]
    pub(super) fn are_settled(&self, pools: &[bool]) -> bool {
        self.standing.iter().zip(pools).all(|(standing, asked)| standing.settled || !asked)
    }

    /// Makes a storage of a range: whether there was room, and where. A settled pool has it where it was `before`.
    #[inline]
    pub(super) fn allocate_known(&mut self, id: StorageId, before: Option<&Spot>, index: usize) -> (bool, Spot) {
        let at = id.0 as usize;
        let (bytes, pool) = (self.places[at].bytes, self.places[at].pool as usize);
        if bytes == 0 {
            return (true, Spot::default());
        }
        if let Some(spot) = before.filter(|_| self.standing[pool].settled) {
            self.requested += bytes;
            self.allocated += spot.size;
            self.places[at].block = COUNTED;
            self.whereabouts.spots[at] = *spot;
            self.standing[pool].afloat += 1;
            return (true, *spot);
        }
        let fits = self.allocate(id, index);
        let spot = self.spot(id);
        let astray = before != Some(&spot);
        self.whereabouts.made[at] = Some(astray);
        self.standing[pool].astray += usize::from(astray);
        (fits, spot)
    }

    #[inline]
    pub(super) fn free_known(&mut self, id: StorageId, index: usize) {
        let at = id.0 as usize;
        let place = &mut self.places[at];
        let standing = &mut self.standing[place.pool as usize];
        match place.block {
            NONE => {}
            COUNTED => {
                place.block = NONE;
                self.requested -= place.bytes;
                self.allocated -= self.whereabouts.spots[at].size;
                standing.afloat -= 1;
            }
            _ => {
                match self.whereabouts.made[at].take() {
                    Some(astray) => standing.astray -= usize::from(astray),
                    None => standing.changed = index + 1,
                }
                self.free(id);
            }
        }
    }

    /// Gives storages of a pool that are only counted the blocks that they lie in.
    fn land(&mut self, pool: usize) {
        let afloat = |(at, place): (usize, &Place)| {
            let Spot { address, size } = self.whereabouts.spots[at];
            (place.block == COUNTED && place.pool as usize == pool).then_some((address, size, at))
        };
        let mut landing: Vec<_> = self.places.iter().enumerate().filter_map(afloat).collect();
        landing.sort_unstable();
        let taken = self.pools[pool].take_all_at(landing.iter().map(|(address, size, _)| (*address, *size)));
        for ((_, _, at), block) in landing.into_iter().zip(taken) {
            self.places[at].block = block;
            self.whereabouts.made[at] = Some(false);
        }
        self.standing[pool].afloat = 0;
    }

    /// Of some pools none has storages that are only counted.
    pub(super) fn land_all(&mut self, those: impl Fn(&Standing) -> bool) {
        for pool in 0..self.pools.len() {
            if self.standing[pool].afloat > 0 && those(&self.standing[pool]) {
                self.land(pool);
            }
        }
    }

    /// From an event on pools go their own way: what they do then is not compared.
    pub(super) fn leave_ranges(&mut self, at: usize) {
        for pool in 0..self.pools.len() {
            self.change(pool, at);
            self.standing[pool].astray = 0;
        }
        self.whereabouts.made.fill(None);
    }

    /// A pool's segments may change, or what is in use of it: it has all its blocks from here on.
    pub(super) fn change(&mut self, pool: usize, at: usize) {
        let standing = &mut self.standing[pool];
        standing.changed = at + 1;
        standing.settled = false;
        if standing.afloat > 0 {
            self.land(pool);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType;
    use crate::memory::allocator::{Replay, replay, run};
    use crate::memory::log::{Event, Like, Log, Storage, StorageId};
    use crate::memory::phase::{Phase, Work};
    use crate::model::Shape;
    use crate::plan::AllocatorOptions;
    use std::cell::RefCell;
    use std::rc::Rc;

    /// Numbers that are drawn (xorshift).
    struct Drawn(u64);

    impl Drawn {
        fn below(&mut self, limit: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 11) % limit
        }
    }

    fn storage(log: &mut Log, bytes: u64) -> StorageId {
        let shared = Rc::new(RefCell::new(Log::default()));
        let made = Storage::of_bytes(&shared, "test", bytes, Shape::from([1]), DType::U8);
        let id = StorageId(log.storages.len() as u32);
        log.storages.push(shared.borrow().storages[0]);
        drop(made);
        id
    }

    /// Tokens that hand storages on to the next: some of a storage's sizes grow, others come to life again.
    fn tokens(drawn: &mut Drawn) -> Log {
        let mut log = Log::default();
        let sizes = [512, 700, 5_000, 90_000, 600_000, 3 << 20, 30 << 20];
        log.phase(Phase::from(Work::Load));
        let weights: Vec<_> = (0..drawn.below(9)).map(|_| storage(&mut log, sizes[drawn.below(7) as usize])).collect();
        log.events.extend(weights.iter().map(|id| Event::Allocate(*id)));
        let size = |drawn: &mut Drawn| sizes[drawn.below(7) as usize] + 512 * drawn.below(3);
        let transient: Vec<_> = (0..4 + drawn.below(120)).map(|_| size(drawn)).map(|n| storage(&mut log, n)).collect();
        let (handed, grows) = ([size(drawn), size(drawn), 512], size(drawn));
        let order: Vec<u64> = transient.iter().map(|_| drawn.below(5)).collect();
        let (by, in_phases) = ([0, 64, 40_000][drawn.below(3) as usize], drawn.below(2) == 0);
        let mut begun: Vec<(usize, Vec<StorageId>)> = Vec::new();
        let mut carried: Vec<StorageId> = Vec::new();
        for token in 0..4 + drawn.below(12) {
            let begin = log.events.len();
            if in_phases {
                log.phase(Phase::from(Work::Load));
            }
            let mut new: Vec<_> = handed.iter().map(|bytes| storage(&mut log, *bytes)).collect();
            new.push(storage(&mut log, grows + token * by));
            let mut open = Vec::new();
            for (at, (id, turn)) in transient.iter().zip(&order).enumerate() {
                log.events.push(Event::Allocate(*id));
                open.push(*id);
                if at < 4 {
                    log.events.push(Event::Allocate(new[at]));
                }
                while *turn > 0 && open.len() as u64 > *turn {
                    let gone = open.remove((*turn as usize - 1).min(open.len() - 1));
                    log.events.push(Event::Free(gone));
                }
            }
            log.events.extend(carried.iter().chain(&open).map(|id| Event::Free(*id)));
            let events = log.events.len() - begin;
            if let Some((of, there)) = begun.len().checked_sub(2).map(|at| &begun[at])
                && token > 2
            {
                let others = new.iter().copied().zip(there.iter().copied()).collect();
                log.likes.push(Like { start: begin, events, of: *of, others });
            }
            carried.clone_from(&new);
            if token > 0 {
                begun.push((begin, new));
            }
        }
        log.end_phase();
        log
    }

    /// Steps behind weights that free all they make; behind the first one comes what stays.
    fn steps(drawn: &mut Drawn) -> Log {
        let mut log = Log::default();
        let sizes = [512, 5_000, 600_000, 3 << 20, 30 << 20];
        let any = |log: &mut Log, drawn: &mut Drawn| storage(log, sizes[drawn.below(5) as usize] + drawn.below(9));
        let stay = |log: &mut Log, drawn: &mut Drawn| {
            for _ in 0..drawn.below(9) {
                let id = any(log, drawn);
                log.events.push(Event::Allocate(id));
            }
        };
        log.phase(Phase::from(Work::Load));
        stay(&mut log, drawn);
        let (mut step, mut open) = (Vec::new(), Vec::new());
        for _ in 0..10 + drawn.below(250) {
            let id = any(&mut log, drawn);
            open.push(id);
            step.push(Event::Allocate(id));
            while drawn.below(3) == 0 && !open.is_empty() {
                step.push(Event::Free(open.swap_remove(drawn.below(open.len() as u64) as usize)));
            }
        }
        step.extend(open.into_iter().map(Event::Free));
        for number in 0..3 + drawn.below(3) {
            let (start, events) = (log.events.len(), step.len() + 2);
            if number > 1 {
                log.likes.push(Like { start, events, of: start - events, others: Vec::new() });
            }
            log.phase(Phase::from(Work::Load));
            log.events.extend(&step);
            if number == 0 {
                stay(&mut log, drawn);
            }
            log.end_phase();
        }
        log
    }

    #[test]
    fn ranges_that_are_known_change_nothing() {
        let (mut compared, mut left_out) = (0, 0);
        for seed in 1..800 {
            let drawn = &mut Drawn(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15));
            let log = if seed % 2 == 0 { tokens(drawn) } else { steps(drawn) };
            let mut plain = Log::default();
            (plain.events, plain.storages) = (log.events.clone(), log.storages.clone());
            for expandable_segments in [false, true] {
                let options = AllocatorOptions { expandable_segments, ..AllocatorOptions::default() };
                let whole: Replay = replay(&plain, options, None);
                for capacity in [None, Some(whole.peak_reserved() * (6 + seed % 5) / 10)] {
                    let one_by_one = replay(&plain, options, capacity);
                    let found = run(&log, options, capacity);
                    assert_eq!(found.result, one_by_one, "seed {seed}, room for {capacity:?}");
                    (compared, left_out) = (compared + log.likes.len(), left_out + found.left_out);
                }
            }
        }
        assert!(compared > 1000 && left_out > 300, "{compared} ranges were compared, {left_out} steps left out");
    }
}
