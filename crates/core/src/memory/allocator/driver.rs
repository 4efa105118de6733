//! Where the driver puts what `cudaMalloc` asks for.
//!
//! Read off memory snapshots of ten runs on an H200 (driver 580, CUDA 13): the driver takes addresses from the kernel in
//! chunks, multiples of 32 MiB, from the top down; a segment goes to the youngest chunk with a gap for it, there to the
//! lowest gap; a chunk without a segment goes back.
//!
//! The stand-in of a rehearsal (`crates/standin`) compiles this file as well, so it needs nothing but the standard library.

use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;
/// What the driver asks the kernel for is a multiple of this (snapshots: docs/open-constants.md).
const CHUNK: u64 = 32 * MIB;
/// The gaps that context and libraries leave in their chunks, the oldest chunk first: how far below the top they begin, and
/// how large they are. The chunks stay; all others are below. Taken for every card (docs/open-constants.md).
const CONTEXT_GAPS: [(u64, u64); 3] = [(22 * MIB, 22 * MIB), (512 * MIB, 414 * MIB), (518 * MIB, 6 * MIB)];
/// Where the context ends, below the top (docs/open-constants.md).
const CONTEXT: u64 = 544 * MIB;

/// The addresses of a process on the card.
#[derive(Debug)]
pub(super) struct DriverAddresses {
    /// By age, the oldest first; those that went back are empty.
    chunks: Vec<Chunk>,
    /// Which of the first `listed` chunks begins where: only what goes back is looked up.
    starts: BTreeMap<u64, usize>,
    listed: usize,
    /// The largest gap of each chunk, and of each half of them, and so on up: the youngest with room is found from the top.
    room: Vec<u64>,
    /// What went back to the kernel between chunks: start and size.
    holes: BTreeMap<u64, u64>,
    /// All below is free.
    bottom: u64,
}

#[derive(Debug)]
struct Chunk {
    start: u64,
    size: u64,
    /// Whether something else lies in it too.
    stays: bool,
    /// Free ranges, by address: start and size.
    gaps: Vec<(u64, u64)>,
}

impl DriverAddresses {
    /// A range that ends at `top`, a multiple of 32 MiB; it is filled downwards.
    pub(super) fn new(top: u64) -> Self {
        let mut space = Self {
            chunks: Vec::new(),
            starts: BTreeMap::new(),
            listed: 0,
            room: vec![0; 2],
            holes: BTreeMap::new(),
            bottom: top - CONTEXT,
        };
        for (start, size) in CONTEXT_GAPS.map(|(below, size)| (top - below, size)) {
            space.add(Chunk { start, size, stays: true, gaps: vec![(start, size)] });
        }
        space
    }

    /// Addresses for a segment.
    pub(super) fn take(&mut self, size: u64) -> u64 {
        let Some(at) = self.youngest_with_room(size) else {
            let whole = size.next_multiple_of(CHUNK);
            let start = self.ask_kernel(whole);
            let rest = Some((start + size, whole - size)).filter(|(_, rest)| *rest > 0);
            self.add(Chunk { start, size: whole, stays: false, gaps: rest.into_iter().collect() });
            return start;
        };
        let start = self.chunks[at].take(size).unwrap_or_default();
        self.note_room(at);
        start
    }

    /// A segment goes back.
    pub(super) fn give_back(&mut self, start: u64, size: u64) {
        let new = self.chunks.iter().enumerate().skip(self.listed);
        self.starts.extend(new.map(|(at, chunk)| (chunk.start, at)));
        self.listed = self.chunks.len();
        let Some((_, &at)) = self.starts.range(..=start).next_back() else { return };
        let chunk = &mut self.chunks[at];
        if !(chunk.start..chunk.start + chunk.size).contains(&start) {
            return;
        }
        chunk.give_back(start, size);
        if chunk.is_empty() {
            chunk.gaps.clear();
            let (start, size) = (chunk.start, chunk.size);
            self.starts.remove(&start);
            self.return_to_kernel(start, size);
        }
        self.note_room(at);
    }

    fn add(&mut self, chunk: Chunk) {
        let at = self.chunks.len();
        self.chunks.push(chunk);
        if self.chunks.len() > self.room.len() / 2 {
            let leaves = self.chunks.len().next_power_of_two();
            let mut room = vec![0; 2 * leaves];
            room[leaves..leaves + at].copy_from_slice(&self.room[self.room.len() / 2..][..at]);
            (1..leaves).rev().for_each(|place| room[place] = room[2 * place].max(room[2 * place + 1]));
            self.room = room;
        }
        self.note_room(at);
    }

    /// Writes a chunk's largest gap down, and what that changes further up.
    fn note_room(&mut self, at: usize) {
        let mut place = at + self.room.len() / 2;
        self.room[place] = self.chunks[at].gaps.iter().map(|(_, free)| *free).max().unwrap_or(0);
        while place > 1 {
            place /= 2;
            let most = self.room[2 * place].max(self.room[2 * place + 1]);
            if std::mem::replace(&mut self.room[place], most) == most {
                break;
            }
        }
    }

    fn youngest_with_room(&self, size: u64) -> Option<usize> {
        let leaves = self.room.len() / 2;
        let mut place = 1;
        if self.room[place] < size {
            return None;
        }
        while place < leaves {
            place = if self.room[2 * place + 1] >= size { 2 * place + 1 } else { 2 * place };
        }
        Some(place - leaves)
    }

    /// The highest hole that is large enough, at its end, or what is below all chunks.
    fn ask_kernel(&mut self, size: u64) -> u64 {
        let found =
            self.holes.iter().rev().find(|(_, length)| **length >= size).map(|(start, length)| (*start, *length));
        match found {
            Some((hole, length)) => {
                match length - size {
                    0 => self.holes.remove(&hole),
                    rest => self.holes.insert(hole, rest),
                };
                hole + length - size
            }
            None => {
                self.bottom -= size;
                self.bottom
            }
        }
    }

    /// A chunk goes back; holes that touch are one, and the lowest is no hole.
    fn return_to_kernel(&mut self, mut start: u64, mut size: u64) {
        if let Some(above) = self.holes.remove(&(start + size)) {
            size += above;
        }
        if let Some((&below, &length)) = self.holes.range(..start).next_back()
            && below + length == start
        {
            self.holes.remove(&below);
            (start, size) = (below, length + size);
        }
        if start == self.bottom {
            self.bottom += size;
        } else {
            self.holes.insert(start, size);
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

    const TOP: u64 = 1 << 40;

    #[test]
    fn segments_fill_the_youngest_chunk_and_then_go_down() {
        let mut space = DriverAddresses::new(TOP);
        // As the driver answered the first calls of a recorded run.
        let (middle, lowest) = (TOP - 512 * MIB, TOP - CONTEXT);
        let large = space.take(446 * MIB);
        assert_eq!(large, lowest - 448 * MIB);
        assert_eq!([space.take(20 * MIB), space.take(28 * MIB)], [middle, middle + 20 * MIB]);
        assert_eq!([space.take(2 * MIB), space.take(2 * MIB)], [large + 446 * MIB, middle - 6 * MIB]);
        let lower = space.take(500 * MIB);
        assert_eq!(lower, large - 512 * MIB);
        // What is empty goes back as a whole and is handed out again, the highest first.
        space.give_back(large + 446 * MIB, 2 * MIB);
        space.give_back(large, 446 * MIB);
        assert_eq!(space.take(440 * MIB), large);
        assert_eq!(space.take(8 * MIB), large + 440 * MIB);
    }
}
