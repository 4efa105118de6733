//! Where the driver puts what `cudaMalloc` asks for.
//!
//! torch's allocator takes, of several free blocks of one size, the one at the lowest address, so which block is used next
//! depends on where the driver puts its segments. Seen on an H200 with driver 580 (108 of 108 addresses of a random
//! sequence of calls): addresses are taken in chunks, each a multiple of 32 MiB; a request goes to the youngest chunk with
//! a gap for it, there to the lowest gap; a new chunk goes to the highest hole that holds it with room for its alignment;
//! a chunk that is empty is given back. What the context holds takes part in it.

use std::collections::BTreeMap;

/// Chunks are multiples of this, and lie at multiples of it.
const CHUNK: u64 = 32 << 20;
/// Pages of the host, in which the hole for a chunk is looked for.
const HOST_PAGE: u64 = 4 << 10;
/// Chunks that the context has begun: how far below the top, and how much of it is taken.
const BEGUN: [(u64, u64); 2] = [(CHUNK, 10 << 20), (0x2200_0000, 26 << 20)];
/// Other mappings of the process: how far below the top, and how long.
const OTHERS: [(u64, u64); 2] = [(0x600_0000, 0x400_0000), (0x4000_0000, 0x2600_0000)];

/// The addresses of one device.
#[derive(Debug)]
pub(crate) struct Places {
    /// The end of the range; it is filled downwards.
    top: u64,
    /// In the order in which they were made.
    chunks: Vec<Chunk>,
}

#[derive(Debug)]
struct Chunk {
    start: u64,
    length: u64,
    /// Address and length of what lies in it.
    pieces: BTreeMap<u64, u64>,
}

impl Chunk {
    /// The lowest gap that is long enough.
    fn gap(&self, length: u64) -> Option<u64> {
        let mut free = self.start;
        for (&address, &taken) in &self.pieces {
            if address - free >= length {
                return Some(free);
            }
            free = address + taken;
        }
        (self.start + self.length - free >= length).then_some(free)
    }
}

impl Places {
    /// A device whose addresses end at `top`, a multiple of 32 MiB.
    pub(crate) fn new(top: u64) -> Self {
        let begun = BEGUN.map(|(below, taken)| {
            let start = top - below;
            Chunk { start, length: CHUNK, pieces: BTreeMap::from([(start, taken)]) }
        });
        Self { top, chunks: begun.into() }
    }

    /// Finds a place that lies above `bottom`.
    pub(crate) fn take(&mut self, length: u64, bottom: u64) -> Option<u64> {
        let found = self.chunks.iter_mut().rev().find_map(|chunk| Some((chunk.gap(length)?, chunk)));
        if let Some((address, chunk)) = found {
            chunk.pieces.insert(address, length);
            return Some(address);
        }
        let whole = length.checked_next_multiple_of(CHUNK)?;
        let start = self.hole(whole).filter(|start| *start >= bottom)?;
        self.chunks.push(Chunk { start, length: whole, pieces: BTreeMap::from([(start, length)]) });
        Some(start)
    }

    /// Gives a place back.
    pub(crate) fn give(&mut self, address: u64) {
        for chunk in &mut self.chunks {
            chunk.pieces.remove(&address);
        }
        self.chunks.retain(|chunk| !chunk.pieces.is_empty());
    }

    /// The highest hole for a chunk of this length, which must also hold what alignment may cost.
    fn hole(&self, length: u64) -> Option<u64> {
        let needed = length.checked_add(CHUNK - HOST_PAGE)?;
        let others = OTHERS.map(|(below, length)| (self.top - below, length));
        let mut taken: Vec<(u64, u64)> = self.chunks.iter().map(|chunk| (chunk.start, chunk.length)).collect();
        taken.extend(others);
        taken.sort_unstable();
        let mut top = self.top;
        for (start, length) in taken.into_iter().rev() {
            if top.saturating_sub(start + length) >= needed {
                break;
            }
            top = top.min(start);
        }
        top.checked_sub(needed)?.checked_next_multiple_of(CHUNK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: u64 = 0x7f38_5600_0000;
    const MIB: u64 = 1 << 20;

    /// The first calls of the recorded sequence, as the driver answered them.
    #[test]
    fn places_are_those_of_the_driver() {
        let mut places = Places::new(TOP);
        let mut take = |mib: u64| places.take(mib * MIB, 0).unwrap();
        let first: Vec<u64> = [2, 20, 20, 2, 2, 50, 20, 2].into_iter().map(&mut take).collect();
        let answered = [0x35a0, 0x54a0, 0x4e00, 0x4f40, 0x4f60, 0x4a00, 0x4800, 0x4940];
        assert_eq!(first, answered.map(|place| 0x7f38_0000_0000 + (place << 16)));
        places.give(first[1]);
        places.give(first[4]);
        let mut take = |mib: u64| places.take(mib * MIB, 0).unwrap();
        assert_eq!([take(34), take(20)], [0x7f38_4400_0000, 0x7f38_4620_0000]);
        assert_eq!(take(100), 0x7f38_3c00_0000);
    }

    #[test]
    fn an_empty_chunk_goes_and_its_hole_serves_smaller_ones() {
        let mut places = Places::new(TOP);
        let large = places.take(1026 * MIB, 0).unwrap();
        let below = places.take(4096 * MIB, 0).unwrap();
        assert_eq!(large - below, 4096 * MIB);
        places.give(large);
        // The hole is exactly as long as the chunk, and alignment might need more.
        let again = places.take(1026 * MIB, 0).unwrap();
        assert!(again < below);
        assert_eq!(places.take(512 * MIB, 0).unwrap(), large + 1056 * MIB - 512 * MIB);
        assert_eq!(places.take(1 << 50, 0), None);
    }
}
