//! Free blocks of a pool, found by best fit: the smallest size that is large enough, its lowest address.

use std::collections::VecDeque;

use super::pool::{BlockId, NONE};

/// Free blocks. A run frees thousands of blocks of a few sizes, so blocks of one size lie together, and a size that
/// runs out keeps its place for the next time.
pub(super) struct FreeList {
    classes: Vec<Class>,
    /// The classes by size.
    order: Vec<(u64, ClassId)>,
    /// Which places of the order have blocks.
    filled: Bits,
    /// The class of a size asked for lately, by a hash of the size.
    lately: [(u64, ClassId); SLOTS],
    /// How many classes have no block.
    empty: usize,
    /// The block that came last, outside of all classes: mostly what is left of one that was cut, whose neighbour comes back next.
    spare: Option<Spare>,
}

/// Its size, address and number.
type Spare = (u64, u64, BlockId);

type ClassId = u32;

const SLOTS: usize = 256;

struct Class {
    size: u64,
    /// Where it is in the order.
    place: u32,
    /// The lowest address first. What is freed mostly lies beyond all others of its size, on either side.
    blocks: VecDeque<(u64, BlockId)>,
}

impl Default for FreeList {
    fn default() -> Self {
        Self {
            classes: Vec::new(),
            order: Vec::new(),
            filled: Bits::default(),
            lately: [(0, 0); SLOTS],
            empty: 0,
            spare: None,
        }
    }
}

impl FreeList {
    /// More sizes than this without a block are forgotten.
    const MOST_EMPTY: usize = 128;

    /// Takes the block that fits best, unless `refuses` its size.
    #[inline]
    pub(super) fn take(&mut self, size: u64, refuses: impl Fn(u64) -> bool) -> Option<BlockId> {
        let class = self.best_fit(size);
        if let Some((spare, address, id)) = self.spare.filter(|(spare, ..)| *spare >= size) {
            let first = |class: &Class| (class.size, class.blocks.front().map_or(0, |(address, _)| *address));
            if class.is_none_or(|class| (spare, address) < first(&self.classes[class])) {
                self.spare = self.spare.filter(|_| refuses(spare));
                return (!refuses(spare)).then_some(id);
            }
        }
        let class = class.filter(|class| !refuses(self.classes[*class].size))?;
        let taken = self.classes[class].blocks.pop_front().map_or(NONE, |(_, id)| id);
        self.ran_out(class);
        Some(taken)
    }

    /// Puts the spare block where the others are.
    #[inline]
    fn settle(&mut self) {
        if let Some((size, address, id)) = self.spare.take() {
            let class = self.class(size).unwrap_or_else(|| self.new_class(size));
            self.insert_in(class, address, id);
        }
    }

    /// Takes the block that fits best, or the next one in order as long as `better` prefers it.
    pub(super) fn take_while_better(
        &mut self,
        size: u64,
        better: impl Fn(BlockId, BlockId) -> bool,
    ) -> Option<BlockId> {
        self.settle();
        let class = |place: usize| self.order[place].1 as usize;
        let next = |(place, index): (usize, usize)| match self.classes[class(place)].blocks.len() - index {
            1 => self.filled.next(place + 1).map(|place| (place, 0)),
            _ => Some((place, index + 1)),
        };
        let id = |(place, index): (usize, usize)| self.classes[class(place)].blocks[index].1;
        let from = self.order.partition_point(|(known, _)| *known < size);
        let mut best = (self.filled.next(from)?, 0);
        while let Some(other) = next(best).filter(|other| better(id(best), id(*other))) {
            best = other;
        }
        let (class, taken) = (class(best.0), id(best));
        self.classes[class].blocks.remove(best.1);
        self.ran_out(class);
        Some(taken)
    }

    #[inline]
    fn best_fit(&mut self, size: u64) -> Option<usize> {
        let from = match self.class(size) {
            Some(class) if !self.classes[class].blocks.is_empty() => return Some(class),
            Some(class) => self.classes[class].place as usize,
            None => self.order.partition_point(|(known, _)| *known < size),
        };
        self.filled.next(from).map(|place| self.order[place].1 as usize)
    }

    /// The class of exactly this size.
    #[inline]
    fn class(&mut self, size: u64) -> Option<usize> {
        let (known, class) = self.lately[slot(size)];
        if known == size && size > 0 {
            return Some(class as usize);
        }
        let at = self.order.partition_point(|(known, _)| *known < size);
        let &(_, class) = self.order.get(at).filter(|(known, _)| *known == size)?;
        self.lately[slot(size)] = (size, class);
        Some(class as usize)
    }

    #[inline]
    pub(super) fn insert(&mut self, size: u64, address: u64, id: BlockId) {
        self.settle();
        self.spare = Some((size, address, id));
    }

    #[inline]
    fn insert_in(&mut self, class: usize, address: u64, id: BlockId) {
        let Class { blocks, place, .. } = &mut self.classes[class];
        if blocks.is_empty() {
            self.empty -= 1;
            self.filled.set(*place as usize, true);
        }
        insert_ascending(blocks, (address, id));
    }

    #[cold]
    fn new_class(&mut self, size: u64) -> usize {
        let class = self.classes.len();
        let at = self.order.partition_point(|(known, _)| *known < size);
        self.classes.push(Class { size, place: at as u32, blocks: VecDeque::new() });
        self.order.insert(at, (size, class as ClassId));
        self.filled.insert(at);
        for (_, later) in &self.order[at + 1..] {
            self.classes[*later as usize].place += 1;
        }
        self.empty += 1;
        class
    }

    #[inline]
    pub(super) fn remove(&mut self, size: u64, address: u64) {
        if self.spare.is_some_and(|(_, spare, _)| spare == address) {
            self.spare = None;
            return;
        }
        let Some(class) = self.class(size) else { return };
        let blocks = &mut self.classes[class].blocks;
        if let Ok(place) = blocks.binary_search_by_key(&address, |(known, _)| *known) {
            blocks.remove(place);
            self.ran_out(class);
        }
    }

    #[inline]
    fn ran_out(&mut self, class: usize) {
        if self.classes[class].blocks.is_empty() {
            self.empty += 1;
            self.filled.set(self.classes[class].place as usize, false);
            if self.empty > Self::MOST_EMPTY {
                self.forget_empty();
            }
        }
    }

    #[cold]
    fn forget_empty(&mut self) {
        self.classes.retain(|class| !class.blocks.is_empty());
        self.order = self.classes.iter().enumerate().map(|(at, class)| (class.size, at as ClassId)).collect();
        self.order.sort_unstable();
        self.filled = Bits::default();
        for (place, (_, class)) in self.order.iter().enumerate() {
            self.classes[*class as usize].place = place as u32;
            self.filled.insert(place);
            self.filled.set(place, true);
        }
        self.lately = [(0, 0); SLOTS];
        self.empty = 0;
    }

    /// Takes out all blocks of which `gone` is true.
    pub(super) fn remove_where(&mut self, gone: impl Fn(BlockId) -> bool) -> Vec<BlockId> {
        self.settle();
        let mut removed = Vec::new();
        for class in &mut self.classes {
            removed.extend(class.blocks.iter().map(|(_, id)| *id).filter(|id| gone(*id)));
            class.blocks.retain(|(_, id)| !gone(*id));
        }
        self.forget_empty();
        removed
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.classes.iter().map(|class| class.blocks.len()).sum::<usize>() + usize::from(self.spare.is_some())
    }
}

/// A growing row of bits.
#[derive(Default)]
struct Bits {
    words: Vec<u64>,
    len: usize,
}

impl Bits {
    fn set(&mut self, at: usize, value: bool) {
        let (word, bit) = (&mut self.words[at / 64], 1 << (at % 64));
        if value { *word |= bit } else { *word &= !bit }
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
        }
    }

    /// The first bit set at a place or after it.
    fn next(&self, from: usize) -> Option<usize> {
        let first = self.words.get(from / 64)? & (u64::MAX << (from % 64));
        let rest = self.words.iter().enumerate().skip(from / 64 + 1).map(|(at, word)| (at, *word));
        let (at, word) = std::iter::once((from / 64, first)).chain(rest).find(|(_, word)| *word != 0)?;
        Some(at * 64 + word.trailing_zeros() as usize)
    }
}

/// Sizes are multiples of 512; a multiplicative hash spreads them.
#[inline]
fn slot(size: u64) -> usize {
    (size.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize
}

#[inline]
fn insert_ascending(blocks: &mut VecDeque<(u64, BlockId)>, block: (u64, BlockId)) {
    match (blocks.front(), blocks.back()) {
        (Some(lowest), _) if block.0 < lowest.0 => blocks.push_front(block),
        (_, Some(highest)) if block.0 < highest.0 => {
            let place = blocks.partition_point(|(known, _)| *known < block.0);
            blocks.insert(place, block);
        }
        _ => blocks.push_back(block),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_move_up_across_words() {
        let mut bits = Bits::default();
        (0..130).for_each(|at| bits.insert(at));
        [3, 63, 64, 129].into_iter().for_each(|at| bits.set(at, true));
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
