//! One pool of blocks: best fit, splitting, merging.
//!
//! `expandable.rs` has the rules of a growing segment.

use std::collections::BTreeMap;

use super::addresses::AddressSpace;
use super::free_list::FreeList;
use super::{MIB, MIN_BLOCK, SMALL_SIZE};
use crate::plan::AllocatorOptions;

/// A block, by its place in the pool's list.
pub(super) type BlockId = u32;
pub(super) const NONE: BlockId = u32::MAX;
/// In place of a block: the storage lives, but only its bytes are counted.
pub(super) const COUNTED: BlockId = u32::MAX - 1;

/// Requests of this size and above get a segment of their own (`kMinLargeAlloc`).
const MIN_LARGE: u64 = 10 * MIB;
/// What smaller ones of the large pool come from (`kLargeBuffer`).
pub(super) const LARGE_BUFFER: u64 = 20 * MIB;
/// Segments of the small pool (`kSmallBuffer`), and what large segments are rounded to (`kRoundLarge`).
pub(super) const SMALL_BUFFER: u64 = 2 * MIB;

#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) before: BlockId,
    pub(super) after: BlockId,
    pub(super) state: State,
}

impl Block {
    fn end(&self) -> u64 {
        self.address + self.size
    }
}

/// What a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Used,
    Free,
    /// Addresses of a growing segment without memory behind them.
    Unmapped,
}

/// Blocks of one pool.
pub(super) struct Pool {
    pub(super) small: bool,
    /// Whether its segment grows.
    grows: bool,
    /// The least that is cut off a block and is one of its own.
    least_rest: u64,
    /// Larger blocks are not cut, and are not for what is smaller (`max_split_size`).
    largest_cut: u64,
    pub(super) blocks: Vec<Block>,
    unused: Vec<BlockId>,
    pub(super) free: FreeList,
    /// Addresses without memory, lowest first.
    pub(super) unmapped: BTreeMap<u64, BlockId>,
    pub(super) reserved: u64,
}

impl Pool {
    pub(super) fn new(small: bool, options: AllocatorOptions) -> Self {
        let grows = options.expandable_segments;
        let mut pool = Self {
            small,
            grows,
            least_rest: if small || grows { MIN_BLOCK } else { SMALL_SIZE + 1 },
            largest_cut: options.max_split_size.unwrap_or(u64::MAX),
            blocks: Vec::new(),
            unused: Vec::new(),
            free: FreeList::new((small && !grows).then_some(SMALL_BUFFER)),
            unmapped: BTreeMap::new(),
            reserved: 0,
        };
        if grows {
            pool.open_segment();
        }
        pool
    }

    /// What the pool would take from the driver for a request that no free block fits.
    pub(super) fn growth(&self, size: u64) -> u64 {
        match size {
            _ if self.grows => self.expansion(size),
            _ if size <= SMALL_SIZE => SMALL_BUFFER,
            _ if size < MIN_LARGE => LARGE_BUFFER,
            _ => size.div_ceil(SMALL_BUFFER) * SMALL_BUFFER,
        }
    }

    /// A free block for a request, where there is one, and the size it is billed with.
    #[inline]
    pub(super) fn take(&mut self, size: u64) -> Option<(BlockId, u64)> {
        let limit = self.largest_cut;
        let id = if self.grows {
            self.take_least_expandable(size)
        } else {
            let refuses = |found| found >= limit && (size < limit || found - size >= LARGE_BUFFER);
            self.free.take(size, refuses)
        }?;
        Some((id, self.cut(id, size)))
    }

    /// A block for a request, and the size it is billed with.
    pub(super) fn allocate(&mut self, size: u64, space: &mut AddressSpace) -> (BlockId, u64) {
        match self.take(size) {
            Some(found) => found,
            None => {
                let id = if self.grows { self.expand(size) } else { self.new_segment(size, space) };
                (id, self.cut(id, size))
            }
        }
    }

    /// Cuts a block down to a request; returns the size it is billed with.
    #[inline]
    fn cut(&mut self, id: BlockId, size: u64) -> u64 {
        let block = &mut self.blocks[id as usize];
        block.state = State::Used;
        let found = block.size;
        // Segments that grow are cut whatever is asked for.
        if found - size < self.least_rest || (size >= self.largest_cut && !self.small && !self.grows) {
            return found;
        }
        let rest = self.split(id, size, State::Free);
        self.insert(rest);
        size
    }

    /// Cuts a block down to a size; the rest is a block of its own.
    #[inline]
    pub(super) fn split(&mut self, id: BlockId, size: u64, state: State) -> BlockId {
        let block = self.blocks[id as usize];
        let (address, rest) = (block.address + size, block.size - size);
        let rest_id = self.add(Block { address, size: rest, before: id, after: block.after, state });
        if block.after != NONE {
            self.blocks[block.after as usize].before = rest_id;
        }
        self.blocks[id as usize].after = rest_id;
        self.blocks[id as usize].size = size;
        rest_id
    }

    fn new_segment(&mut self, size: u64, space: &mut AddressSpace) -> BlockId {
        let growth = self.growth(size);
        self.reserved += growth;
        let (address, state) = (space.take(growth), State::Free);
        self.add(Block { address, size: growth, before: NONE, after: NONE, state })
    }

    /// Gives a block back and merges it with free neighbours; returns the size it was billed with.
    #[inline]
    pub(super) fn free(&mut self, id: BlockId) -> u64 {
        let Block { mut address, size, mut before, mut after, .. } = self.blocks[id as usize];
        let mut whole = size;
        if let Some(&other) = self.blocks.get(before as usize)
            && other.state == State::Free
        {
            self.free.remove(other.size, other.address);
            self.unused.push(before);
            (address, whole, before) = (other.address, whole + other.size, other.before);
            if before != NONE {
                self.blocks[before as usize].after = id;
            }
        }
        if let Some(&other) = self.blocks.get(after as usize)
            && other.state == State::Free
        {
            self.free.remove(other.size, other.address);
            self.unused.push(after);
            (whole, after) = (whole + other.size, other.after);
            if after != NONE {
                self.blocks[after as usize].before = id;
            }
        }
        self.blocks[id as usize] = Block { address, size: whole, before, after, state: State::Free };
        self.free.insert(whole, address, id);
        size
    }

    /// Uses ranges that are free, in the order of their addresses.
    pub(super) fn take_all_at(&mut self, ranges: impl Iterator<Item = (u64, u64)>) -> Vec<BlockId> {
        let mut free = self.free.remove_where(|_| true);
        free.sort_unstable_by_key(|id| self.blocks[*id as usize].address);
        let mut free = free.into_iter();
        let mut next = free.next();
        let mut taken = Vec::new();
        for (address, size) in ranges {
            // What ends before it is nobody's.
            while let Some(id) = next.filter(|id| self.blocks[*id as usize].end() <= address) {
                self.insert(id);
                next = free.next();
            }
            let Some(mut id) = next else { break };
            let before = address - self.blocks[id as usize].address;
            if before > 0 {
                let rest = self.split(id, before, State::Free);
                self.insert(id);
                id = rest;
            }
            next = if self.blocks[id as usize].size > size {
                Some(self.split(id, size, State::Free))
            } else {
                free.next()
            };
            self.blocks[id as usize].state = State::Used;
            taken.push(id);
        }
        next.into_iter().chain(free).for_each(|id| self.insert(id));
        taken
    }

    /// Takes neighbours in the same state in.
    #[inline]
    pub(super) fn merge(&mut self, id: BlockId) {
        let Block { before, after, state, .. } = self.blocks[id as usize];
        for neighbour in [before, after] {
            if neighbour != NONE && self.blocks[neighbour as usize].state == state {
                self.take_out(neighbour);
                self.absorb(id, neighbour);
            }
        }
    }

    #[inline]
    fn absorb(&mut self, id: BlockId, neighbour: BlockId) {
        let other = self.blocks[neighbour as usize];
        let block = &mut self.blocks[id as usize];
        block.size += other.size;
        if other.address < block.address {
            block.address = other.address;
            block.before = other.before;
            if other.before != NONE {
                self.blocks[other.before as usize].after = id;
            }
        } else {
            block.after = other.after;
            if other.after != NONE {
                self.blocks[other.after as usize].before = id;
            }
        }
        self.unused.push(neighbour);
    }

    /// Segments that are free as a whole go back to the driver.
    pub(super) fn release_unused(&mut self, space: &mut AddressSpace) {
        if self.grows {
            return self.unmap_free_pages();
        }
        let blocks = &self.blocks;
        let whole = |id: BlockId| blocks[id as usize].before == NONE && blocks[id as usize].after == NONE;
        let gone = self.free.remove_where(whole);
        for id in gone {
            let Block { address, size, .. } = self.blocks[id as usize];
            self.reserved -= size;
            space.give_back(address, size);
            self.unused.push(id);
        }
    }

    #[inline]
    pub(super) fn add(&mut self, block: Block) -> BlockId {
        match self.unused.pop() {
            Some(id) => {
                self.blocks[id as usize] = block;
                id
            }
            None => {
                self.blocks.push(block);
                self.blocks.len() as BlockId - 1
            }
        }
    }

    /// Puts a block where blocks of its state are found.
    #[inline]
    pub(super) fn insert(&mut self, id: BlockId) {
        let Block { size, address, state, .. } = self.blocks[id as usize];
        match state {
            State::Free => self.free.insert(size, address, id),
            State::Unmapped => drop(self.unmapped.insert(address, id)),
            State::Used => {}
        }
    }

    #[inline]
    pub(super) fn take_out(&mut self, id: BlockId) {
        let Block { size, address, state, .. } = self.blocks[id as usize];
        match state {
            State::Free => self.free.remove(size, address),
            State::Unmapped => drop(self.unmapped.remove(&address)),
            State::Used => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Addresses;

    #[test]
    fn large_blocks_keep_a_small_rest_and_split_a_large_one() {
        let space = &mut AddressSpace::new(Addresses::Driver);
        let mut pool = Pool::new(false, AllocatorOptions::default());
        // 17.5 MiB gets a segment of 18 MiB and is billed all of it: the rest is not worth splitting.
        let (first, billed) = pool.allocate(17 * MIB + MIB / 2, space);
        assert_eq!((billed, pool.reserved), (18 * MIB, 18 * MIB));
        pool.free(first);
        let (_, billed) = pool.allocate(4 * MIB, space);
        assert_eq!((billed, pool.reserved), (4 * MIB, 18 * MIB));
    }

    #[test]
    fn neighbours_merge_again() {
        let space = &mut AddressSpace::new(Addresses::Driver);
        let mut pool = Pool::new(true, AllocatorOptions::default());
        let blocks: Vec<_> = (0..4).map(|_| pool.allocate(512 * 1024, space).0).collect();
        assert_eq!(pool.reserved, 2 * MIB);
        for block in blocks {
            pool.free(block);
        }
        assert_eq!(pool.free.len(), 1);
        pool.release_unused(space);
        assert_eq!(pool.reserved, 0);
    }

    #[test]
    fn an_expandable_segment_gives_free_pages_back() {
        let space = &mut AddressSpace::new(Addresses::Driver);
        let options = AllocatorOptions { expandable_segments: true, ..Default::default() };
        let mut pool = Pool::new(false, options);
        let blocks: Vec<_> = (0..5).map(|_| pool.allocate(30 * MIB, space).0).collect();
        assert_eq!(pool.reserved, 160 * MIB);
        pool.free(blocks[1]);
        pool.free(blocks[2]);
        // From 30 to 90 MiB is free, and from 150 to 160: the pages from 40 to 80 go.
        pool.release_unused(space);
        assert_eq!(pool.reserved, 120 * MIB);
        pool.free(blocks[0]);
        pool.free(blocks[3]);
        pool.free(blocks[4]);
        pool.release_unused(space);
        assert_eq!(pool.reserved, 0);
        let (_, billed) = pool.allocate(30 * MIB, space);
        assert_eq!((billed, pool.reserved), (30 * MIB, 40 * MIB));
    }

    #[test]
    fn an_expandable_segment_grows_by_pages() {
        let space = &mut AddressSpace::new(Addresses::Driver);
        let options = AllocatorOptions { expandable_segments: true, ..Default::default() };
        let mut pool = Pool::new(false, options);
        let (first, billed) = pool.allocate(17 * MIB + 512, space);
        assert_eq!((billed, pool.reserved), (17 * MIB + 512, 20 * MIB));
        let (_, _) = pool.allocate(10 * MIB, space);
        assert_eq!(pool.reserved, 40 * MIB);
        pool.free(first);
    }
}
