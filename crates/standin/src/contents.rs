//! What the host wrote to small pieces of device memory, so that it reads the same bytes back.
//!
//! Sizes, lengths, masks and counters decide what a program does next, and most of them come from the host. They are
//! kept per piece; the rest of the device reads as zero. A piece is forgotten when the hook sees that its memory belongs to
//! something else ([`vramcast_forget`]) or when something else is written over it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::foreign::host;
use crate::ledger::device_of;

/// Larger writes are weights and batches: nobody decides by reading those back.
pub(crate) const LARGEST: usize = 32 << 20;
/// How many bytes are kept in all; of the pieces that are not small, the oldest go first.
const ROOM: usize = 512 << 20;
/// What decides where a program goes is at most this large; it is kept as long as there is anything larger to drop.
pub(crate) const SMALL: usize = 64 << 10;

/// Small pieces of device memory with known contents. Pieces never overlap.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pieces: BTreeMap<u64, Piece>,
    /// How many were ever written.
    written: u64,
    /// Bytes of all pieces.
    held: usize,
}

#[derive(Debug)]
struct Piece {
    bytes: Vec<u8>,
    order: u64,
}

/// The contents of all devices.
pub(crate) fn contents() -> MutexGuard<'static, Contents> {
    static CONTENTS: LazyLock<Mutex<Contents>> = LazyLock::new(Mutex::default);
    CONTENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Contents {
    /// Remembers bytes, or, when they are many, that what was there is gone.
    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) {
        if bytes.len() > LARGEST {
            return self.forget(address, bytes.len() as u64);
        }
        // A write into a known piece changes that piece.
        if let Some((start, piece)) = self.pieces.range_mut(..=address).next_back() {
            let offset = (address - start) as usize;
            // Into a large one only from its beginning: else it is what an earlier owner of the memory left.
            let same = offset == 0 || piece.bytes.len() <= SMALL;
            if let Some(place) = piece.bytes.get_mut(offset..offset + bytes.len()).filter(|_| same) {
                return place.copy_from_slice(bytes);
            }
        }
        self.forget(address, bytes.len() as u64);
        while self.held + bytes.len() > ROOM {
            self.drop_older_half();
        }
        self.written += 1;
        self.held += bytes.len();
        self.pieces.insert(address, Piece { bytes: bytes.to_vec(), order: self.written });
    }

    /// The bytes at an address, if all of them are known.
    pub(crate) fn read(&self, address: u64, length: usize) -> Option<&[u8]> {
        let (start, piece) = self.pieces.range(..=address).next_back()?;
        let offset = (address - start) as usize;
        piece.bytes.get(offset..offset.checked_add(length)?)
    }

    /// Copies what is known of a range of the device to another; the rest becomes unknown.
    pub(crate) fn copy(&mut self, to: u64, from: u64, length: u64) {
        let known = usize::try_from(length).ok().and_then(|length| self.read(from, length)).map(<[u8]>::to_vec);
        match known {
            Some(bytes) => self.write(to, &bytes),
            None => self.forget(to, length),
        }
    }

    /// Forgets a range. What lies around it in a small piece stays; of a large piece only what lies before it.
    pub(crate) fn forget(&mut self, address: u64, length: u64) {
        let reach = address.saturating_sub(LARGEST as u64);
        let end = address.saturating_add(length);
        let touched: Vec<u64> = self
            .pieces
            .range(reach..end)
            .filter(|(start, piece)| *start + piece.bytes.len() as u64 > address)
            .map(|(start, _)| *start)
            .collect();
        for start in touched {
            let Some(mut piece) = self.pieces.remove(&start) else { continue };
            self.held -= piece.bytes.len();
            let behind = end.saturating_sub(start) as usize;
            if piece.bytes.len() <= SMALL && behind < piece.bytes.len() {
                let rest = Piece { bytes: piece.bytes[behind..].to_vec(), order: piece.order };
                self.held += rest.bytes.len();
                self.pieces.insert(end, rest);
            }
            if start < address {
                piece.bytes.truncate((address - start) as usize);
                self.held += piece.bytes.len();
                self.pieces.insert(start, piece);
            }
        }
    }

    fn drop_older_half(&mut self) {
        let any_large = self.pieces.values().any(|piece| piece.bytes.len() > SMALL);
        let droppable = |piece: &Piece| !any_large || piece.bytes.len() > SMALL;
        let mut orders: Vec<u64> =
            self.pieces.values().filter(|piece| droppable(piece)).map(|piece| piece.order).collect();
        orders.sort_unstable();
        let middle = orders.get(orders.len() / 2).copied().unwrap_or(0);
        self.pieces.retain(|_, piece| piece.order > middle || !droppable(piece));
        self.held = self.pieces.values().map(|piece| piece.bytes.len()).sum();
    }
}

/// Whether the hook follows values; until then every thread sees what was written.
static FOLLOWED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// While not set, a thread of a followed program reads zeros: a kernel's own counters, and all that autograd's threads
    /// read, must not be taken from older contents.
    static SEES: Cell<bool> = const { Cell::new(false) };
    /// How many elements the kernels of the running call choose; below zero: nothing is known of it.
    static COUNTED: Cell<i64> = const { Cell::new(-1) };
}

/// The bytes at an address as the calling thread may see them.
pub(crate) fn seen(address: u64, length: usize) -> Option<Vec<u8>> {
    let sees = SEES.get() || !FOLLOWED.load(Ordering::Relaxed);
    if sees { contents().read(address, length).map(<[u8]>::to_vec) } else { None }
}

/// What the hook says a kernel of the calling thread would have counted.
pub(crate) fn counted() -> Option<u64> {
    u64::try_from(COUNTED.get()).ok()
}

exports! {
    // The call that follows chooses so many elements; below zero: no longer.
    fn vramcast_count(count: i64) { COUNTED.set(count) }

    // The hook follows values in this thread, and says when they may be seen.
    fn vramcast_blind(blind: i32) {
        FOLLOWED.store(true, Ordering::Relaxed);
        SEES.set(blind == 0);
    }

    // The memory at an address belongs to something new.
    fn vramcast_forget(address: u64) {
        if device_of(address).is_some() {
            contents().forget(address, 512);
        }
    }

    // The hook knows what a kernel would have written.
    fn vramcast_write(address: u64, bytes: *const c_void, length: usize) {
        if device_of(address).is_some() {
            contents().write(address, host(bytes, length));
        }
    }

    // Reads as a copy to the host does.
    fn vramcast_read(address: u64, out: *mut c_void, length: usize) {
        let known = contents().read(address, length).map(<[u8]>::to_vec);
        crate::foreign::host_mut(out, length).copy_from_slice(&known.unwrap_or_else(|| vec![0; length]))
    }

    // Whether the bytes at an address are known: 1 or 0.
    fn vramcast_known(address: u64, length: usize) -> i32 {
        i32::from(contents().read(address, length).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let mut contents = Contents::default();
        contents.write(1000, &[1, 2, 3, 4]);
        assert_eq!(contents.read(1001, 2), Some(&[2, 3][..]));
        assert_eq!((contents.read(1003, 2), contents.read(999, 1)), (None, None));
        contents.write(1002, &[9]);
        assert_eq!(contents.read(1000, 4), Some(&[1, 2, 9, 4][..]));
        contents.copy(2000, 1000, 4);
        assert_eq!(contents.read(2000, 4), Some(&[1, 2, 9, 4][..]));
    }

    #[test]
    fn overlaps_and_large_writes_forget() {
        let mut contents = Contents::default();
        contents.write(1000, &[1; 8]);
        contents.write(1004, &[2; 8]);
        assert_eq!((contents.read(1000, 4), contents.read(1004, 8)), (Some(&[1; 4][..]), Some(&[2; 8][..])));
        contents.write(900, &vec![0; LARGEST + 1]);
        assert_eq!(contents.read(1004, 1), None);
        contents.write(1, &[1]);
        contents.copy(1, 5000, 1);
        assert_eq!(contents.read(1, 1), None, "a copy of the unknown is unknown");
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut contents = Contents::default();
        let large = vec![1; LARGEST];
        let count = 2 * ROOM / LARGEST;
        contents.write(1 << 60, &[7]);
        for index in 0..count as u64 {
            contents.write(index * LARGEST as u64, &large);
        }
        assert!(contents.held <= ROOM);
        assert!(contents.read((count as u64 - 1) * LARGEST as u64, LARGEST).is_some());
        assert!(contents.read(0, 1).is_none());
        assert_eq!(contents.read(1 << 60, 1), Some(&[7][..]), "what is small stays");
    }
}
