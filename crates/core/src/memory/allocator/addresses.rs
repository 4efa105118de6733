//! Where segments lie.
//!
//! Of free blocks of one size the allocator takes the one at the lowest address, so where the driver puts a segment decides
//! which memory is used again, and through that how much is reserved. Read off memory snapshots of ten runs on an H200
//! (driver 580, CUDA 13): a segment goes to the smallest hole that holds it, at its beginning; when there is none the
//! driver asks the kernel for addresses in steps of 32 MiB, and the kernel hands them out from the top down.

use crate::plan::Addresses;

const MIB: u64 = 1 << 20;
/// What the driver asks the kernel for is a multiple of this.
const CHUNK: u64 = 32 * MIB;
/// Where the range that comes with the context lies; all others are below it.
const CONTEXT: u64 = 1 << 62;
/// What the context leaves free in and before its range of 512 MiB: start and size.
const CONTEXT_HOLES: [(u64, u64); 3] =
    [(CONTEXT - 6 * MIB, 6 * MIB), (CONTEXT, 414 * MIB), (CONTEXT + 490 * MIB, 22 * MIB)];

/// The addresses of a process on the card.
pub(super) struct AddressSpace {
    order: Addresses,
    /// Free ranges in what the kernel gave, by address.
    holes: Vec<Range>,
    /// What the kernel gave, by address.
    chunks: Vec<Range>,
    next: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    start: u64,
    size: u64,
}

impl Range {
    fn end(&self) -> u64 {
        self.start + self.size
    }
}

impl AddressSpace {
    pub(super) fn new(order: Addresses) -> Self {
        let hole = |(start, size)| Range { start, size };
        let lowest = Range { start: CONTEXT - CHUNK, size: 0 };
        Self { order, holes: CONTEXT_HOLES.map(hole).to_vec(), chunks: vec![lowest], next: 0 }
    }

    /// Addresses for a segment.
    pub(super) fn take(&mut self, size: u64) -> u64 {
        if self.order == Addresses::Ascending {
            // A gap keeps segments from looking adjacent.
            self.next += size + 2 * MIB;
            return self.next - size;
        }
        let fitting = self.holes.iter().enumerate().filter(|(_, hole)| hole.size >= size);
        let at = match fitting.min_by_key(|(_, hole)| hole.size) {
            Some((at, _)) => at,
            None => {
                let chunk = self.new_chunk(size.next_multiple_of(CHUNK));
                let at = self.holes.partition_point(|hole| hole.start < chunk.start);
                self.holes.insert(at, chunk);
                at
            }
        };
        let hole = &mut self.holes[at];
        let start = hole.start;
        *hole = Range { start: start + size, size: hole.size - size };
        if hole.size == 0 {
            self.holes.remove(at);
        }
        start
    }

    /// The highest gap between ranges that is large enough, or what is below all of them.
    fn new_chunk(&mut self, size: u64) -> Range {
        let gap = |at: usize| self.chunks[at].start - self.chunks[at - 1].end();
        let at = (1..self.chunks.len()).rev().find(|at| gap(*at) >= size).unwrap_or(0);
        let chunk = Range { start: self.chunks[at].start - size, size };
        self.chunks.insert(at, chunk);
        chunk
    }

    /// A segment goes back; a range without a segment goes back to the kernel.
    pub(super) fn give_back(&mut self, start: u64, size: u64) {
        if self.order == Addresses::Ascending {
            return;
        }
        let chunk = self.chunks.iter().position(|chunk| chunk.start <= start && start < chunk.end());
        let same = |range: &Range| {
            chunk.is_none_or(|at| self.chunks[at].start <= range.start && range.end() <= self.chunks[at].end())
        };
        let mut freed = Range { start, size };
        let mut at = self.holes.partition_point(|hole| hole.start < start);
        if let Some(next) = self.holes.get(at).filter(|next| freed.end() == next.start && same(next)) {
            freed.size += next.size;
            self.holes.remove(at);
        }
        if let Some(last) =
            at.checked_sub(1).map(|last| self.holes[last]).filter(|last| last.end() == start && same(last))
        {
            freed = Range { start: last.start, size: last.size + freed.size };
            at -= 1;
            self.holes.remove(at);
        }
        match chunk.filter(|chunk| self.chunks[*chunk] == freed) {
            Some(chunk) => drop(self.chunks.remove(chunk)),
            None => self.holes.insert(at, freed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_fill_holes_and_then_go_down() {
        let mut space = AddressSpace::new(Addresses::Driver);
        // The smallest hole that holds it; too large for any: a range of its own, and its rest is the smallest hole.
        assert_eq!(space.take(20 * MIB), CONTEXT + 490 * MIB);
        let large = space.take(446 * MIB);
        assert_eq!(large, CONTEXT - CHUNK - 448 * MIB);
        assert_eq!(space.take(2 * MIB), large + 446 * MIB);
        assert_eq!(space.take(2 * MIB), CONTEXT + 510 * MIB);
        assert_eq!(space.take(28 * MIB), CONTEXT);
        let lower = space.take(500 * MIB);
        assert_eq!(lower, large - 512 * MIB);
        // What goes back as a whole is handed out again, the highest first.
        space.give_back(large + 446 * MIB, 2 * MIB);
        space.give_back(large, 446 * MIB);
        assert_eq!(space.take(440 * MIB), large);
    }
}
