//! One pool of blocks: best fit, splitting, merging.

use super::free_list::FreeList;
use super::{MIB, MIN_BLOCK, SMALL_SIZE};
use crate::plan::AllocatorOptions;

/// A block, by its place in the pool's list.
pub(super) type BlockId = u32;
pub(super) const NONE: BlockId = u32::MAX;

/// Requests of this size and above get a segment of their own (`kMinLargeAlloc`).
const MIN_LARGE: u64 = 10 * MIB;
/// What smaller ones of the large pool come from (`kLargeBuffer`).
const LARGE_BUFFER: u64 = 20 * MIB;
/// Segments of the small pool (`kSmallBuffer`), and what large segments are rounded to (`kRoundLarge`).
const SMALL_BUFFER: u64 = 2 * MIB;

#[derive(Debug, Clone, Copy)]
struct Block {
    address: u64,
    size: u64,
    before: BlockId,
    after: BlockId,
    free: bool,
}

/// Blocks of one pool.
pub(super) struct Pool {
    small: bool,
    options: AllocatorOptions,
    blocks: Vec<Block>,
    unused: Vec<BlockId>,
    free: FreeList,
    next_address: u64,
    /// The last block of the growing segment.
    tail: BlockId,
    pub(super) reserved: u64,
}

impl Pool {
    pub(super) fn new(small: bool, options: AllocatorOptions) -> Self {
        Self {
            small,
            options,
            blocks: Vec::new(),
            unused: Vec::new(),
            free: FreeList::default(),
            next_address: 0,
            tail: NONE,
            reserved: 0,
        }
    }

    /// What the pool would take from the driver for a request that no free block fits.
    pub(super) fn growth(&self, size: u64) -> u64 {
        if self.options.expandable_segments {
            let page = self.page();
            return (size - self.free_tail().min(size)).div_ceil(page) * page;
        }
        match size {
            _ if size <= SMALL_SIZE => SMALL_BUFFER,
            _ if size < MIN_LARGE => LARGE_BUFFER,
            _ => size.div_ceil(SMALL_BUFFER) * SMALL_BUFFER,
        }
    }

    fn free_tail(&self) -> u64 {
        match self.blocks.get(self.tail as usize) {
            Some(block) if block.free => block.size,
            _ => 0,
        }
    }

    /// A free block for a request, where there is one, and the size it is billed with.
    pub(super) fn take(&mut self, size: u64) -> Option<(BlockId, u64)> {
        let limit = self.options.max_split_size.filter(|_| !self.options.expandable_segments);
        let refuses = |found: u64| {
            limit.is_some_and(|limit| {
                (size < limit && found >= limit) || (size >= limit && found >= size + LARGE_BUFFER)
            })
        };
        let id = self.free.take(size, refuses)?;
        Some(self.cut(id, size))
    }

    /// A block for a request, and the size it is billed with.
    pub(super) fn allocate(&mut self, size: u64) -> (BlockId, u64) {
        match self.take(size) {
            Some(found) => found,
            None => {
                let id = self.grow(size);
                self.cut(id, size)
            }
        }
    }

    /// Cuts a block down to a request.
    fn cut(&mut self, id: BlockId, size: u64) -> (BlockId, u64) {
        let block = self.blocks[id as usize];
        let rest = block.size - size;
        let splits = if self.small || self.options.expandable_segments {
            rest >= MIN_BLOCK
        } else {
            rest > SMALL_SIZE && self.options.max_split_size.is_none_or(|limit| size < limit)
        };
        if splits {
            let tail = Block { address: block.address + size, size: rest, before: id, after: block.after, free: true };
            let rest_id = self.add(tail);
            if block.after != NONE {
                self.blocks[block.after as usize].before = rest_id;
            }
            if self.tail == id {
                self.tail = rest_id;
            }
            self.blocks[id as usize].after = rest_id;
            self.blocks[id as usize].size = size;
            self.insert(rest_id);
        }
        self.blocks[id as usize].free = false;
        (id, self.blocks[id as usize].size)
    }

    fn grow(&mut self, size: u64) -> BlockId {
        let growth = self.growth(size);
        self.reserved += growth;
        if !self.options.expandable_segments {
            let block = Block { address: self.next_address, size: growth, before: NONE, after: NONE, free: true };
            // A gap keeps segments from looking adjacent.
            self.next_address += growth + SMALL_BUFFER;
            return self.add(block);
        }
        if self.free_tail() > 0 {
            let tail = self.tail;
            self.remove_free(tail);
            self.blocks[tail as usize].size += growth;
            self.next_address += growth;
            return tail;
        }
        let block = Block { address: self.next_address, size: growth, before: self.tail, after: NONE, free: true };
        self.next_address += growth;
        let id = self.add(block);
        if self.tail != NONE {
            let tail = self.tail;
            self.blocks[tail as usize].after = id;
        }
        self.tail = id;
        id
    }

    /// Gives a block back and merges it with free neighbours; returns the size it was billed with.
    pub(super) fn free(&mut self, id: BlockId) -> u64 {
        let size = self.blocks[id as usize].size;
        self.blocks[id as usize].free = true;
        for neighbour in [self.blocks[id as usize].before, self.blocks[id as usize].after] {
            if neighbour != NONE && self.blocks[neighbour as usize].free {
                self.remove_free(neighbour);
                self.absorb(id, neighbour);
            }
        }
        self.insert(id);
        size
    }

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
        if self.tail == neighbour {
            self.tail = id;
        }
        self.unused.push(neighbour);
    }

    /// Segments that are free as a whole go back to the driver.
    pub(super) fn release_unused(&mut self) {
        if self.options.expandable_segments {
            return self.unmap_free_pages();
        }
        let blocks = &self.blocks;
        let whole = |id: BlockId| blocks[id as usize].before == NONE && blocks[id as usize].after == NONE;
        let gone = self.free.remove_where(whole);
        self.reserved -= gone.iter().map(|id| self.blocks[*id as usize].size).sum::<u64>();
        self.unused.extend(gone);
    }

    /// Of a growing segment, pages that are free as a whole go back (`unmap_block`). Addresses are plenty: what was in the
    /// middle is not mapped again, the end grows instead.
    fn unmap_free_pages(&mut self) {
        let page = self.page();
        for id in self.free.remove_where(|_| true) {
            let Block { address, size, before, after, .. } = self.blocks[id as usize];
            let (start, end) = (address.next_multiple_of(page), (address + size) / page * page);
            if end <= start {
                self.insert(id);
                continue;
            }
            self.reserved -= end - start;
            let last = self.tail == id;
            let right = address + size - end;
            if right > 0 {
                let rest = self.add(Block { address: end, size: right, before: NONE, after, free: true });
                self.link_before(after, rest);
                self.tail = if last { rest } else { self.tail };
                self.insert(rest);
            } else {
                self.link_before(after, NONE);
            }
            if start > address {
                self.blocks[id as usize].size = start - address;
                self.blocks[id as usize].after = NONE;
                self.insert(id);
            } else {
                if before != NONE {
                    self.blocks[before as usize].after = NONE;
                }
                self.unused.push(id);
            }
            if last && right == 0 {
                self.next_address = start;
                self.tail = if start > address { id } else { before };
            }
        }
    }

    fn link_before(&mut self, block: BlockId, before: BlockId) {
        if block != NONE {
            self.blocks[block as usize].before = before;
        }
    }

    /// What a growing segment grows by.
    fn page(&self) -> u64 {
        if self.small { SMALL_BUFFER } else { LARGE_BUFFER }
    }

    fn add(&mut self, block: Block) -> BlockId {
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

    fn insert(&mut self, id: BlockId) {
        let block = self.blocks[id as usize];
        self.free.insert(block.size, block.address, id);
    }

    fn remove_free(&mut self, id: BlockId) {
        let block = self.blocks[id as usize];
        self.free.remove(block.size, block.address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_blocks_keep_a_small_rest_and_split_a_large_one() {
        let mut pool = Pool::new(false, AllocatorOptions::default());
        // 17.5 MiB gets a segment of 18 MiB and is billed all of it: the rest is not worth splitting.
        let (first, billed) = pool.allocate(17 * MIB + MIB / 2);
        assert_eq!((billed, pool.reserved), (18 * MIB, 18 * MIB));
        pool.free(first);
        let (_, billed) = pool.allocate(4 * MIB);
        assert_eq!((billed, pool.reserved), (4 * MIB, 18 * MIB));
    }

    #[test]
    fn neighbours_merge_again() {
        let mut pool = Pool::new(true, AllocatorOptions::default());
        let blocks: Vec<_> = (0..4).map(|_| pool.allocate(512 * 1024).0).collect();
        assert_eq!(pool.reserved, 2 * MIB);
        for block in blocks {
            pool.free(block);
        }
        assert_eq!(pool.free.len(), 1);
        pool.release_unused();
        assert_eq!(pool.reserved, 0);
    }

    #[test]
    fn an_expandable_segment_gives_free_pages_back() {
        let options = AllocatorOptions { expandable_segments: true, ..Default::default() };
        let mut pool = Pool::new(false, options);
        let blocks: Vec<_> = (0..5).map(|_| pool.allocate(30 * MIB).0).collect();
        assert_eq!(pool.reserved, 160 * MIB);
        pool.free(blocks[1]);
        pool.free(blocks[2]);
        // From 30 to 90 MiB is free, and from 150 to 160: the pages from 40 to 80 go.
        pool.release_unused();
        assert_eq!(pool.reserved, 120 * MIB);
        pool.free(blocks[0]);
        pool.free(blocks[3]);
        pool.free(blocks[4]);
        pool.release_unused();
        assert_eq!(pool.reserved, 0);
        let (_, billed) = pool.allocate(30 * MIB);
        assert_eq!((billed, pool.reserved), (30 * MIB, 40 * MIB));
    }

    #[test]
    fn an_expandable_segment_grows_by_pages() {
        let options = AllocatorOptions { expandable_segments: true, ..Default::default() };
        let mut pool = Pool::new(false, options);
        let (first, billed) = pool.allocate(17 * MIB + 512);
        assert_eq!((billed, pool.reserved), (17 * MIB + 512, 20 * MIB));
        let (_, _) = pool.allocate(10 * MIB);
        assert_eq!(pool.reserved, 40 * MIB);
        pool.free(first);
    }
}
