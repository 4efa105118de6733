//! A segment that grows (`expandable_segments:True`): one range of addresses per pool, larger than any card, whose pages get
//! memory when they are needed and lose it when cached memory is given back.

use super::pool::{Block, BlockId, LARGE_BUFFER, NONE, Pool, SMALL_BUFFER, State};

/// More addresses than any run needs.
const ADDRESSES: u64 = 1 << 60;

impl Pool {
    pub(super) fn open_segment(&mut self) {
        let all = Block { address: 0, size: ADDRESSES, before: NONE, after: NONE, state: State::Unmapped };
        let id = self.add(all);
        self.insert(id);
    }

    /// What memory comes in.
    fn page(&self) -> u64 {
        if self.small { SMALL_BUFFER } else { LARGE_BUFFER }
    }

    /// The best fit; a block that can grow counts with what it can grow to, so a larger one that cannot goes first
    /// (`get_free_block`).
    pub(super) fn take_least_expandable(&mut self, size: u64) -> Option<BlockId> {
        let blocks = &self.blocks;
        let room = |id: BlockId| {
            let Block { size, after, .. } = blocks[id as usize];
            let next = blocks.get(after as usize).filter(|next| next.state == State::Unmapped);
            size + next.map_or(0, |next| next.size)
        };
        self.free.take_while_better(size, |best, next| room(next) < room(best))
    }

    /// Makes a free block that is large enough, the first place that has the addresses: free ones before and after pages
    /// without memory count (`try_allocate_expandable_block`).
    pub(super) fn expand(&mut self, size: u64) -> BlockId {
        let mut id = self.place(size);
        if self.blocks[id as usize].state == State::Unmapped {
            self.map(id, size);
        }
        while self.blocks[id as usize].size < size {
            let missing = size - self.blocks[id as usize].size;
            id = self.blocks[id as usize].after;
            self.map(id, missing);
        }
        self.take_out(id);
        id
    }

    /// Gives the beginning of a block memory, page by page (`map_block`).
    fn map(&mut self, id: BlockId, size: u64) {
        self.take_out(id);
        let mapped = size.min(self.blocks[id as usize].size).next_multiple_of(self.page());
        if mapped < self.blocks[id as usize].size {
            let rest = self.split(id, mapped, State::Unmapped);
            self.insert(rest);
        }
        self.reserved += self.blocks[id as usize].size;
        self.blocks[id as usize].state = State::Free;
        self.merge(id);
        self.insert(id);
    }

    /// What a request would take from the driver.
    pub(super) fn expansion(&self, size: u64) -> u64 {
        let (mut id, mut missing, mut growth) = (self.place(size), size, 0);
        while missing > 0 && id != NONE {
            let Block { size, after, state, .. } = self.blocks[id as usize];
            let part = missing.min(size);
            if state == State::Unmapped {
                growth += part.next_multiple_of(self.page());
            }
            missing -= part;
            id = after;
        }
        growth
    }

    /// The first of the neighbouring blocks that a request fits in, lowest address first.
    fn place(&self, size: u64) -> BlockId {
        let state = |id: BlockId| self.blocks.get(id as usize).map_or(State::Used, |block| block.state);
        let starts = self.unmapped.values().map(|id| {
            let before = self.blocks[*id as usize].before;
            if state(before) == State::Free { before } else { *id }
        });
        let fits = |start: &BlockId| {
            let (mut id, mut found) = (*start, 0);
            while found < size && state(id) != State::Used {
                found += self.blocks[id as usize].size;
                id = self.blocks[id as usize].after;
            }
            found >= size
        };
        // The last range of addresses is larger than any request.
        starts.into_iter().find(fits).unwrap_or(NONE)
    }

    /// Pages that are free as a whole lose their memory (`unmap_block`).
    pub(super) fn unmap_free_pages(&mut self) {
        let page = self.page();
        for mut id in self.free.remove_where(|_| true) {
            let Block { address, size, .. } = self.blocks[id as usize];
            let (start, end) = (address.next_multiple_of(page), (address + size) / page * page);
            if end <= start {
                self.insert(id);
                continue;
            }
            if start > address {
                let rest = self.split(id, start - address, State::Free);
                self.insert(id);
                id = rest;
            }
            if end < address + size {
                let rest = self.split(id, end - start, State::Free);
                self.insert(rest);
            }
            self.reserved -= end - start;
            self.blocks[id as usize].state = State::Unmapped;
            self.merge(id);
            self.insert(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::MIB;
    use super::super::addresses::AddressSpace;
    use super::*;
    use crate::plan::{Addresses, AllocatorOptions};

    fn pool() -> (Pool, AddressSpace) {
        let options = AllocatorOptions { expandable_segments: true, ..AllocatorOptions::default() };
        (Pool::new(false, options), AddressSpace::new(Addresses::Driver))
    }

    #[test]
    fn a_block_that_can_grow_is_taken_last() {
        let (mut pool, mut space) = pool();
        let mut take = |pool: &mut Pool, mib: u64| pool.allocate(mib * MIB, &mut space).0;
        let large = take(&mut pool, 40);
        let used = take(&mut pool, 30);
        // Free are 40 MiB at the beginning, and the last 10 of the pages in use, which fit 8 MiB better but can grow.
        pool.free(large);
        let small = take(&mut pool, 8);
        assert_eq!(pool.blocks[small as usize].address, 0);
        assert_eq!((pool.blocks[used as usize].address, pool.reserved), (40 * MIB, 80 * MIB));
    }

    #[test]
    fn pages_in_the_middle_get_their_memory_back_first() {
        let (mut pool, mut space) = pool();
        let mut take = |pool: &mut Pool, mib: u64| pool.allocate(mib * MIB, &mut space).0;
        let [_, middle, _] = [20, 60, 20].map(|mib| take(&mut pool, mib));
        pool.free(middle);
        pool.unmap_free_pages();
        assert_eq!(pool.reserved, 40 * MIB);
        // 50 MiB fit where 60 were: three pages again, and 10 MiB of the last are left over.
        let again = take(&mut pool, 50);
        assert_eq!((pool.blocks[again as usize].address, pool.reserved), (20 * MIB, 100 * MIB));
    }
}
