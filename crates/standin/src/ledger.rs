//! Device memory: who holds which address, and how much is left.
//!
//! Addresses are numbers in a range that no mapping of the host reaches; each device has its own part of it. Nothing is
//! behind them.

use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::card::card;
use crate::places::DriverAddresses;

/// Pages of the driver: every allocation is rounded up to them (cuMemGetAllocationGranularity).
pub(crate) const PAGE: u64 = 2 << 20;
/// Where device 0 begins: below where Linux puts programs and far above where it puts anything else.
const BASE: u64 = 0x1000_0000_0000;
/// The part of one device: 4 TiB, enough for several reservations as large as any card.
const SPAN: u64 = 1 << 42;
/// Devices a process may see.
pub(crate) const DEVICES: usize = 16;

/// Memory of one device.
#[derive(Debug, Default)]
struct Device {
    /// Address and length of what was allocated or reserved.
    ranges: BTreeMap<u64, Range>,
    /// Where memory is put, from the end of the device's part downwards.
    places: Option<DriverAddresses>,
    /// Where the next reservation is tried, from its beginning upwards.
    next: u64,
    used: u64,
    peak: u64,
}

#[derive(Debug, Clone, Copy)]
struct Range {
    length: u64,
    /// Whether it holds memory, or only addresses.
    backed: bool,
}

/// The ledger of all devices.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    devices: [Device; DEVICES],
    /// Memory without an address: handle to device and size.
    handles: BTreeMap<u64, (usize, u64)>,
    /// Pages of the host: address to size.
    pub(crate) host: BTreeMap<usize, usize>,
    /// Calls that were refused because the card was full.
    refused: u64,
}

/// The ledger of this process.
pub(crate) fn ledger() -> MutexGuard<'static, Ledger> {
    static LEDGER: LazyLock<Mutex<Ledger>> = LazyLock::new(Mutex::default);
    LEDGER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The device an address belongs to.
pub(crate) fn device_of(address: u64) -> Option<usize> {
    let device = address.checked_sub(BASE)? / SPAN;
    (device < DEVICES as u64).then_some(device as usize)
}

impl Ledger {
    /// Takes memory; `None` when the card is full.
    pub(crate) fn allocate(&mut self, device: usize, bytes: u64) -> Option<u64> {
        let length = bytes.max(1).checked_next_multiple_of(PAGE).filter(|length| *length < SPAN / 2)?;
        self.take(device, length)?;
        let (start, memory) = (BASE + device as u64 * SPAN, &mut self.devices[device]);
        let places = memory.places.get_or_insert_with(|| DriverAddresses::new(start + SPAN));
        let address = places.take(length);
        if address < memory.next.max(start) {
            places.give_back(address, length);
            return self.give(device, length);
        }
        memory.ranges.insert(address, Range { length, backed: true });
        Some(address)
    }

    /// Takes addresses only.
    pub(crate) fn reserve(&mut self, device: usize, bytes: u64) -> Option<u64> {
        let length = bytes.max(1).checked_next_multiple_of(PAGE)?;
        let address = self.place(device, length)?;
        self.devices[device].ranges.insert(address, Range { length, backed: false });
        Some(address)
    }

    /// Ends an allocation or a reservation that begins at this address; false if there is none.
    pub(crate) fn free(&mut self, address: u64) -> bool {
        let Some(device) = device_of(address) else { return false };
        let Some(range) = self.devices[device].ranges.remove(&address) else { return false };
        if range.backed {
            if let Some(places) = &mut self.devices[device].places {
                places.give_back(address, range.length);
            }
            self.give(device, range.length);
        }
        true
    }

    /// Takes memory without an address (cuMemCreate).
    pub(crate) fn create(&mut self, device: usize, bytes: u64) -> Option<u64> {
        let length = bytes.checked_next_multiple_of(PAGE)?;
        self.take(device, length)?;
        let handle = crate::foreign::handle() as u64;
        self.handles.insert(handle, (device, length));
        Some(handle)
    }

    /// Gives it back (cuMemRelease).
    pub(crate) fn release(&mut self, handle: u64) {
        if let Some((device, length)) = self.handles.remove(&handle) {
            self.give(device, length);
        }
    }

    /// The range an address lies in.
    pub(crate) fn range(&self, address: u64) -> Option<(u64, u64)> {
        let (start, range) = self.devices[device_of(address)?].ranges.range(..=address).next_back()?;
        (address < start + range.length).then_some((*start, range.length))
    }

    /// What is free on a device.
    pub(crate) fn free_bytes(&self, device: usize) -> u64 {
        capacity().saturating_sub(self.devices[device].used)
    }

    /// What is allocated on a device now, and the most that ever was.
    pub(crate) fn usage(&self, device: usize) -> (u64, u64) {
        let device = &self.devices[device];
        (device.used, device.peak)
    }

    /// How often the card was full.
    pub(crate) fn refused(&self) -> u64 {
        self.refused
    }

    fn take(&mut self, device: usize, length: u64) -> Option<()> {
        let memory = &mut self.devices[device];
        let used = memory.used.checked_add(length)?;
        if used > capacity() {
            self.refused += 1;
            crate::journal::full(device, length, capacity().saturating_sub(memory.used), memory.used);
            return None;
        }
        memory.used = used;
        if used > memory.peak {
            memory.peak = used;
            crate::journal::grown(device, used);
        }
        Some(())
    }

    fn give(&mut self, device: usize, length: u64) -> Option<u64> {
        let memory = &mut self.devices[device];
        memory.used = memory.used.saturating_sub(length);
        None
    }

    /// Finds addresses for a reservation: upwards first, so that old ones are not soon used again, then in any gap.
    fn place(&mut self, device: usize, length: u64) -> Option<u64> {
        let (start, memory) = (BASE + device as u64 * SPAN, &mut self.devices[device]);
        let next = memory.next.max(start);
        if next + length <= start + SPAN {
            memory.next = next + length;
            return Some(next);
        }
        let mut candidate = start;
        for (&address, range) in &memory.ranges {
            if address - candidate >= length {
                return Some(candidate);
            }
            candidate = address + range.length;
        }
        (candidate + length <= start + SPAN).then_some(candidate)
    }
}

/// What a process can allocate on an empty card.
fn capacity() -> u64 {
    card().memory.saturating_sub(card().context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_in_pages() {
        let mut ledger = Ledger::default();
        let first = ledger.allocate(0, 1).unwrap();
        let second = ledger.allocate(0, PAGE + 1).unwrap();
        assert_eq!(ledger.usage(0), (3 * PAGE, 3 * PAGE));
        assert_eq!(ledger.range(second + PAGE), Some((second, 2 * PAGE)));
        assert_eq!((device_of(first), device_of(BASE - 1), device_of(7)), (Some(0), None, None));
        assert!(ledger.free(first) && !ledger.free(first) && !ledger.free(second + 1));
        assert_eq!(ledger.usage(0), (2 * PAGE, 3 * PAGE));
    }

    #[test]
    fn a_full_card_refuses() {
        let mut ledger = Ledger::default();
        let free = ledger.free_bytes(1);
        assert_eq!(ledger.allocate(1, free + 1), None);
        assert_eq!(ledger.refused(), 1);
        assert!(ledger.reserve(1, free * 2).is_some(), "addresses are not memory");
        let handle = ledger.create(1, free / PAGE * PAGE).unwrap();
        assert_eq!(ledger.create(1, PAGE), None);
        ledger.release(handle);
        assert_eq!(ledger.usage(1).0, 0);
        assert_eq!(device_of(ledger.allocate(1, 5).unwrap()), Some(1));
    }

    #[test]
    fn memory_and_reservations_do_not_meet() {
        let mut ledger = Ledger::default();
        assert!(ledger.reserve(0, SPAN - (1 << 30)).is_some());
        assert_eq!((ledger.allocate(0, SPAN), ledger.allocate(0, 2 << 30), ledger.usage(0).0), (None, None, 0));
        assert!(ledger.allocate(0, PAGE).is_some());
    }

    #[test]
    fn addresses_are_used_again_when_they_run_out() {
        let mut ledger = Ledger::default();
        let first = ledger.reserve(0, SPAN - PAGE).unwrap();
        let second = ledger.reserve(0, PAGE).unwrap();
        assert_eq!(ledger.reserve(0, PAGE), None);
        assert!(ledger.free(second));
        assert_eq!(ledger.reserve(0, 5), Some(second));
        assert!(ledger.free(first));
        assert_eq!(ledger.reserve(0, 5), Some(first));
    }
}
