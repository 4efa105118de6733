//! Free blocks of a pool, found by best fit: the smallest size that is large enough, its lowest address.

use std::collections::VecDeque;

use super::MIN_BLOCK;
use super::pool::{BlockId, NONE};

/// Free blocks. A run frees thousands of blocks of a few sizes, so blocks of one size lie together, and a size that
/// runs out keeps its place for the next time.
pub(super) struct FreeList {
    classes: Vec<Class>,
    order: Order,
    /// Which places of the order have blocks.
    filled: Bits,
    /// How many classes have no block.
    empty: usize,
    /// The block that came last, outside of all classes: mostly what is left of one that was cut, whose neighbour comes back next.
    spare: Spare,
}

/// A size of none is no block.
#[derive(Clone, Copy)]
struct Spare {
    size: u64,
    address: u64,
    id: BlockId,
}

const NO_SPARE: Spare = Spare { size: 0, address: u64::MAX, id: NONE };

type ClassId = u32;

struct Class {
    size: u64,
    /// Where it is in the order.
    place: u32,
    /// The lowest address first. What is freed mostly lies beyond all others of its size, on either side.
    blocks: VecDeque<(u64, BlockId)>,
}

impl Class {
    /// Its size, and the lowest address of a block.
    #[inline]
    fn first(&self) -> (u64, u64) {
        (self.size, self.blocks.front().map_or(0, |(address, _)| *address))
    }
}

/// Finds the class of a size.
enum Order {
    /// Blocks of the small pool are so small that every size has its place: the class at each, if there is one.
    Direct(Box<[ClassId]>),
    /// The classes by size, and those of sizes asked for lately, by a hash of the size.
    Sorted(Vec<(u64, ClassId)>, Box<[(u64, ClassId); SLOTS]>),
}

const SLOTS: usize = 256;

impl FreeList {
    /// More sizes than this without a block are forgotten.
    const MOST_EMPTY: usize = 128;

    /// For blocks up to a size, or of any.
    pub(super) fn new(largest: Option<u64>) -> Self {
        let places = largest.map_or(0, |size| (size / MIN_BLOCK) as usize + 1);
        let order = match places {
            0 => Order::Sorted(Vec::new(), Box::new([(0, 0); SLOTS])),
            _ => Order::Direct(vec![NONE; places].into()),
        };
        Self { classes: Vec::new(), order, filled: Bits::new(places), empty: 0, spare: NO_SPARE }
    }

    /// Takes the block that fits best, unless `refuses` its size.
    #[inline]
    pub(super) fn take(&mut self, size: u64, refuses: impl Fn(u64) -> bool) -> Option<BlockId> {
        let best = self.best_fit(size);
        let Spare { size: spare, address, id } = self.spare;
        if spare >= size && best.is_none_or(|class| (spare, address) < self.classes[class].first()) {
            self.spare = if refuses(spare) { return None } else { NO_SPARE };
            return Some(id);
        }
        let best = best?;
        let Class { size: found, blocks, .. } = &mut self.classes[best];
        if refuses(*found) {
            return None;
        }
        let (_, taken) = blocks.pop_front()?;
        if blocks.is_empty() {
            self.ran_out(best);
        }
        Some(taken)
    }

    /// The class of the smallest blocks that are large enough.
    #[inline]
    fn best_fit(&mut self, size: u64) -> Option<usize> {
        let place = match &self.order {
            Order::Direct(_) => (size / MIN_BLOCK) as usize,
            Order::Sorted(..) => match self.find(size) {
                Ok(class) if !self.classes[class].blocks.is_empty() => return Some(class),
                Ok(class) => self.classes[class].place as usize,
                Err(place) => place,
            },
        };
        self.filled.next(place).map(|place| self.at(place))
    }

    /// The class of exactly this size, or where it would be in the order.
    #[inline]
    fn find(&mut self, size: u64) -> Result<usize, usize> {
        match &mut self.order {
            Order::Direct(places) => {
                let place = (size / MIN_BLOCK) as usize;
                if places[place] == NONE { Err(place) } else { Ok(places[place] as usize) }
            }
            Order::Sorted(sizes, lately) => {
                let (known, class) = lately[slot(size)];
                if known == size {
                    return Ok(class as usize);
                }
                let place = sizes.partition_point(|(known, _)| *known < size);
                let found = *sizes.get(place).filter(|(known, _)| *known == size).ok_or(place)?;
                lately[slot(size)] = found;
                Ok(found.1 as usize)
            }
        }
    }

    /// The class at a place that has one.
    #[inline]
    fn at(&self, place: usize) -> usize {
        match &self.order {
            Order::Direct(places) => places[place] as usize,
            Order::Sorted(sizes, _) => sizes[place].1 as usize,
        }
    }

    /// Puts the spare block where the others are.
    #[inline]
    fn settle(&mut self) {
        if self.spare.size > 0 {
            self.settle_spare();
        }
    }

    fn settle_spare(&mut self) {
        let Spare { size, address, id } = std::mem::replace(&mut self.spare, NO_SPARE);
        let class = self.find(size).unwrap_or_else(|place| self.new_class(size, place));
        self.insert_in(class, address, id);
    }

    /// Takes the block that fits best, or the next one in order as long as `better` prefers it.
    pub(super) fn take_while_better(
        &mut self,
        size: u64,
        better: impl Fn(BlockId, BlockId) -> bool,
    ) -> Option<BlockId> {
        self.settle();
        let from = self.find(size).map_or_else(|place| place, |class| self.classes[class].place as usize);
        let next = |(place, index): (usize, usize)| match self.classes[self.at(place)].blocks.len() - index {
            1 => self.filled.next(place + 1).map(|place| (place, 0)),
            _ => Some((place, index + 1)),
        };
        let id = |(place, index): (usize, usize)| self.classes[self.at(place)].blocks[index].1;
        let mut best = (self.filled.next(from)?, 0);
        while let Some(other) = next(best).filter(|other| better(id(best), id(*other))) {
            best = other;
        }
        let (class, taken) = (self.at(best.0), id(best));
        self.classes[class].blocks.remove(best.1);
        if self.classes[class].blocks.is_empty() {
            self.ran_out(class);
        }
        Some(taken)
    }

    #[inline]
    pub(super) fn insert(&mut self, size: u64, address: u64, id: BlockId) {
        self.settle();
        self.spare = Spare { size, address, id };
    }

    #[inline]
    fn insert_in(&mut self, class: usize, address: u64, id: BlockId) {
        let Class { blocks, place, .. } = &mut self.classes[class];
        match (blocks.front(), blocks.back()) {
            (None, _) => {
                self.empty -= 1;
                self.filled.set(*place as usize);
                blocks.push_back((address, id));
            }
            (Some(lowest), _) if address < lowest.0 => blocks.push_front((address, id)),
            (_, Some(highest)) if address < highest.0 => {
                let place = blocks.partition_point(|(known, _)| *known < address);
                blocks.insert(place, (address, id));
            }
            _ => blocks.push_back((address, id)),
        }
    }

    #[cold]
    fn new_class(&mut self, size: u64, at: usize) -> usize {
        let class = self.classes.len();
        match &mut self.order {
            Order::Direct(places) => places[at] = class as ClassId,
            Order::Sorted(sizes, _) => {
                sizes.insert(at, (size, class as ClassId));
                self.filled.insert(at);
                for (_, later) in &sizes[at + 1..] {
                    self.classes[*later as usize].place += 1;
                }
            }
        }
        self.classes.push(Class { size, place: at as u32, blocks: VecDeque::new() });
        self.empty += 1;
        class
    }

    #[inline]
    pub(super) fn remove(&mut self, size: u64, address: u64) {
        if self.spare.address == address {
            self.spare = NO_SPARE;
            return;
        }
        let Ok(class) = self.find(size) else { return };
        let blocks = &mut self.classes[class].blocks;
        // What merges is mostly what was freed last, which lies at an end.
        if blocks.front().is_some_and(|(known, _)| *known == address) {
            blocks.pop_front();
        } else if blocks.back().is_some_and(|(known, _)| *known == address) {
            blocks.pop_back();
        } else if let Ok(place) = blocks.binary_search_by_key(&address, |(known, _)| *known) {
            blocks.remove(place);
        } else {
            return;
        }
        if blocks.is_empty() {
            self.ran_out(class);
        }
    }

    /// A class has no block any more.
    #[inline]
    fn ran_out(&mut self, class: usize) {
        self.empty += 1;
        self.filled.clear(self.classes[class].place as usize);
        if self.empty > Self::MOST_EMPTY && matches!(self.order, Order::Sorted(..)) {
            self.forget_empty();
        }
    }

    #[cold]
    fn forget_empty(&mut self) {
        let Order::Sorted(order, lately) = &mut self.order else { return };
        self.classes.retain(|class| !class.blocks.is_empty());
        *order = self.classes.iter().enumerate().map(|(at, class)| (class.size, at as ClassId)).collect();
        order.sort_unstable();
        self.filled = Bits::default();
        for (place, (_, class)) in order.iter().enumerate() {
            self.classes[*class as usize].place = place as u32;
            self.filled.insert(place);
            self.filled.set(place);
        }
        **lately = [(0, 0); SLOTS];
        self.empty = 0;
    }

    /// Takes out all blocks of which `gone` is true.
    pub(super) fn remove_where(&mut self, gone: impl Fn(BlockId) -> bool) -> Vec<BlockId> {
        self.settle();
        let mut removed = Vec::new();
        for at in 0..self.classes.len() {
            let blocks = &mut self.classes[at].blocks;
            let before = blocks.len();
            removed.extend(blocks.iter().map(|(_, id)| *id).filter(|id| gone(*id)));
            blocks.retain(|(_, id)| !gone(*id));
            if before > 0 && blocks.is_empty() {
                self.empty += 1;
                self.filled.clear(self.classes[at].place as usize);
            }
        }
        self.forget_empty();
        removed
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.classes.iter().map(|class| class.blocks.len()).sum::<usize>() + usize::from(self.spare.size > 0)
    }
}

/// A growing row of bits.
#[derive(Default)]
struct Bits {
    words: Vec<u64>,
    /// Which words have a bit, of those that have a place here; the last place is for all the others.
    some: u64,
    len: usize,
}

impl Bits {
    fn new(len: usize) -> Self {
        Self { words: vec![0; len.div_ceil(64)], some: 0, len }
    }

    #[inline]
    fn set(&mut self, at: usize) {
        self.words[at / 64] |= 1 << (at % 64);
        self.some |= 1 << (at / 64).min(63);
    }

    #[inline]
    fn clear(&mut self, at: usize) {
        let word = &mut self.words[at / 64];
        *word &= !(1 << (at % 64));
        if *word == 0 && at < 63 * 64 {
            self.some &= !(1 << (at / 64));
        }
    }

    /// Puts a cleared bit in, and those after it one further.
    fn insert(&mut self, at: usize) {
        if self.len.is_multiple_of(64) {
            self.words.push(0);
        }
        self.len += 1;
        let low = (1 << (at % 64)) - 1;
        let mut carry = 0;
        for (index, word) in self.words.iter_mut().enumerate().skip(at / 64) {
            let stays = if index == at / 64 { low } else { 0 };
            let out = *word >> 63;
            *word = (*word & stays) | ((*word & !stays) << 1) | carry;
            carry = out;
            let place = index.min(63);
            self.some = self.some & !(u64::from(index < 63) << place) | (u64::from(*word != 0) << place);
        }
    }

    /// The first bit set at a place or after it.
    #[inline]
    fn next(&self, from: usize) -> Option<usize> {
        let mut at = from / 64;
        let mut word = *self.words.get(at)? & (u64::MAX << (from % 64));
        while word == 0 {
            at += 1;
            let later = self.some & (u64::MAX << at.min(63));
            if later == 0 {
                return None;
            }
            at = at.max(later.trailing_zeros() as usize);
            word = *self.words.get(at)?;
        }
        Some(at * 64 + word.trailing_zeros() as usize)
    }
}

/// Sizes are multiples of 512; a multiplicative hash spreads them.
#[inline]
fn slot(size: u64) -> usize {
    (size.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_far_out_are_found() {
        let mut bits = Bits::new(70 * 64);
        for at in [5, 62 * 64, 63 * 64 + 1, 66 * 64 + 3] {
            bits.set(at);
        }
        let found = |bits: &Bits| [0, 6, 62 * 64 + 1, 64 * 64, 67 * 64].map(|from| bits.next(from));
        assert_eq!(found(&bits), [Some(5), Some(62 * 64), Some(63 * 64 + 1), Some(66 * 64 + 3), None]);
        [62 * 64, 66 * 64 + 3].into_iter().for_each(|at| bits.clear(at));
        assert_eq!(found(&bits), [Some(5), Some(63 * 64 + 1), Some(63 * 64 + 1), None, None]);
    }

    #[test]
    fn bits_move_up_across_words() {
        let mut bits = Bits::default();
        (0..130).for_each(|at| bits.insert(at));
        [3, 63, 64, 129].into_iter().for_each(|at| bits.set(at));
        bits.insert(10);
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(at) = bits.next(from) {
            found.push(at);
            from = at + 1;
        }
        assert_eq!(found, [3, 64, 65, 130]);
    }
}
