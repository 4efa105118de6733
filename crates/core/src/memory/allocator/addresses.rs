//! Where segments lie.
//!
//! Of free blocks of one size the allocator takes the one at the lowest address, so where the driver puts a segment decides
//! which memory is used again, and through that how much is reserved.

use super::driver::DriverAddresses;
use crate::plan::Addresses;

/// Where the addresses of a card end; only their order matters.
const TOP: u64 = 1 << 62;
/// Keeps segments from looking adjacent: one segment of the small pool (`kSmallBuffer`).
const GAP: u64 = 2 << 20;

/// The addresses of a process on the card.
#[derive(Debug)]
pub(super) enum AddressSpace {
    Driver(DriverAddresses),
    /// Where the next one begins.
    Ascending(u64),
}

impl AddressSpace {
    pub(super) fn new(order: Addresses) -> Self {
        match order {
            Addresses::Driver => Self::Driver(DriverAddresses::new(TOP)),
            Addresses::Ascending => Self::Ascending(GAP),
        }
    }

    /// Addresses for a segment.
    pub(super) fn take(&mut self, size: u64) -> u64 {
        match self {
            Self::Driver(driver) => driver.take(size),
            Self::Ascending(next) => {
                let start = *next;
                *next = start.saturating_add(size).saturating_add(GAP);
                start
            }
        }
    }

    /// A segment goes back.
    pub(super) fn give_back(&mut self, start: u64, size: u64) {
        if let Self::Driver(driver) = self {
            driver.give_back(start, size);
        }
    }
}
