//! Where segments lie.
//!
//! Of free blocks of one size the allocator takes the one at the lowest address, so where the driver puts a segment decides
//! which memory is used again, and through that how much is reserved. Read off memory snapshots of ten runs on an H200
//! (driver 580, CUDA 13): the driver takes addresses from the kernel in chunks, multiples of 32 MiB, from the top down; a
//! segment goes to the youngest chunk with a gap for it, there to the lowest gap; a chunk without a segment goes back.

use crate::plan::Addresses;

const MIB: u64 = 1 << 20;
/// What the driver asks the kernel for is a multiple of this.
const CHUNK: u64 = 32 * MIB;
/// Where the chunks that come with the context begin; all others are below.
const CONTEXT: u64 = 1 << 62;
/// The gaps that context and libraries leave in their chunks, the oldest chunk first: start and size. The chunks stay.
const CONTEXT_GAPS: [(u64, u64); 3] =
    [(CONTEXT + 490 * MIB, 22 * MIB), (CONTEXT, 414 * MIB), (CONTEXT - 6 * MIB, 6 * MIB)];

/// The addresses of a process on the card.
pub(super) struct AddressSpace {
    order: Addresses,
    /// The oldest first.
    chunks: Vec<Chunk>,
    next: u64,
}

struct Chunk {
    start: u64,
    size: u64,
    /// Whether something else lies in it too.
    stays: bool,
    /// Free ranges, by address: start and size.
    gaps: Vec<(u64, u64)>,
}

impl AddressSpace {
    pub(super) fn new(order: Addresses) -> Self {
        let chunk = |(start, size)| Chunk { start, size, stays: true, gaps: vec![(start, size)] };
        Self { order, chunks: CONTEXT_GAPS.map(chunk).into(), next: 0 }
    }

    /// Addresses for a segment.
    pub(super) fn take(&mut self, size: u64) -> u64 {
        if self.order == Addresses::Ascending {
            // A gap keeps segments from looking adjacent.
            self.next += size + 2 * MIB;
            return self.next - size;
        }
        let known = self.chunks.iter_mut().rev().find_map(|chunk| chunk.take(size));
        known.unwrap_or_else(|| {
            let whole = size.next_multiple_of(CHUNK);
            let start = self.highest_hole(whole);
            let mut chunk = Chunk { start, size: whole, stays: false, gaps: vec![(start, whole)] };
            chunk.take(size);
            self.chunks.push(chunk);
            start
        })
    }

    /// Where a new chunk goes.
    fn highest_hole(&self, size: u64) -> u64 {
        let mut taken: Vec<(u64, u64)> = self.chunks.iter().map(|chunk| (chunk.start, chunk.size)).collect();
        taken.sort_unstable();
        let mut top = CONTEXT - CHUNK;
        taken.retain(|(start, _)| *start < top);
        for (start, length) in taken.into_iter().rev() {
            if top - (start + length) >= size {
                break;
            }
            top = start;
        }
        top - size
    }

    /// A segment goes back.
    pub(super) fn give_back(&mut self, start: u64, size: u64) {
        let within = |chunk: &Chunk| (chunk.start..chunk.start + chunk.size).contains(&start);
        let Some(at) = self.chunks.iter().position(within) else { return };
        self.chunks[at].give_back(start, size);
        if self.chunks[at].is_empty() {
            self.chunks.remove(at);
        }
    }
}

impl Chunk {
    /// The lowest gap that is long enough, from its beginning.
    fn take(&mut self, size: u64) -> Option<u64> {
        let at = self.gaps.iter().position(|(_, free)| *free >= size)?;
        let (start, free) = self.gaps[at];
        match free - size {
            0 => drop(self.gaps.remove(at)),
            rest => self.gaps[at] = (start + size, rest),
        }
        Some(start)
    }

    fn give_back(&mut self, start: u64, size: u64) {
        let at = self.gaps.partition_point(|(known, _)| *known < start);
        self.gaps.insert(at, (start, size));
        self.gaps.dedup_by(|next, gap| {
            let touches = gap.0 + gap.1 == next.0;
            gap.1 += if touches { next.1 } else { 0 };
            touches
        });
    }

    fn is_empty(&self) -> bool {
        !self.stays && self.gaps == [(self.start, self.size)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_fill_the_youngest_chunk_and_then_go_down() {
        let mut space = AddressSpace::new(Addresses::Driver);
        // As the driver answered the first calls of a recorded run.
        let large = space.take(446 * MIB);
        assert_eq!(large, CONTEXT - CHUNK - 448 * MIB);
        assert_eq!([space.take(20 * MIB), space.take(28 * MIB)], [CONTEXT, CONTEXT + 20 * MIB]);
        assert_eq!([space.take(2 * MIB), space.take(2 * MIB)], [large + 446 * MIB, CONTEXT - 6 * MIB]);
        let lower = space.take(500 * MIB);
        assert_eq!(lower, large - 512 * MIB);
        // What is empty goes back as a whole and is handed out again, the highest first.
        space.give_back(large + 446 * MIB, 2 * MIB);
        space.give_back(large, 446 * MIB);
        assert_eq!(space.take(440 * MIB), large);
        assert_eq!(space.take(8 * MIB), large + 440 * MIB);
    }
}
