//! For which architectures the program's kernels were compiled.
//!
//! CUB asks which of the versions in its binary runs, and has code for no other: an L40S (8.9) runs what was compiled for
//! 8.6. Every library registers its binaries when it is loaded; their headers name the architectures.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::card::card;
use crate::foreign::get;

/// The magic numbers of the wrapper that the compiler writes (`fatbinary_section.h`) and of what it points to.
const WRAPPER: u32 = 0x4662_43b1;
const BINARY: u32 = 0xba55_ed50;
/// Kind of an entry that holds machine code.
const MACHINE_CODE: u16 = 2;

/// Kernels by the address of their stub on the host, with the architecture that runs.
static KERNELS: LazyLock<Mutex<HashMap<usize, i32>>> = LazyLock::new(Mutex::default);

fn at<T: Copy + Default>(start: *const u8, offset: usize) -> T {
    get(start.wrapping_add(offset).cast::<T>())
}

/// The architectures of a registered binary that has machine code.
fn architectures(wrapper: *const c_void) -> Vec<i32> {
    let wrapper = wrapper.cast::<u8>();
    if wrapper.is_null() || at::<u32>(wrapper, 0) != WRAPPER {
        return Vec::new();
    }
    let binary = at::<usize>(wrapper, 8) as *const u8;
    if binary.is_null() || at::<u32>(binary, 0) != BINARY {
        return Vec::new();
    }
    let (mut offset, mut found) = (usize::from(at::<u16>(binary, 6)), Vec::new());
    let end = offset.saturating_add(at::<u64>(binary, 8) as usize);
    while offset + 32 <= end {
        let entry = binary.wrapping_add(offset);
        if at::<u16>(entry, 0) == MACHINE_CODE {
            found.push(at::<u32>(entry, 28) as i32);
        }
        let length = (at::<u32>(entry, 4) as usize).saturating_add(at::<u64>(entry, 8) as usize);
        if length == 0 {
            break;
        }
        offset = offset.saturating_add(length);
    }
    found
}

/// Of several architectures the one that a card runs: the highest of its own generation that it reaches.
fn runs(capability: i32, architectures: &[i32]) -> Option<i32> {
    architectures.iter().copied().filter(|it| *it <= capability && it / 10 == capability / 10).max()
}

/// The architecture of a binary that this card runs; zero if it has none.
pub(crate) fn register(wrapper: *const c_void) -> i32 {
    runs(card().capability, &architectures(wrapper)).unwrap_or(0)
}

/// A kernel of a binary.
pub(crate) fn add(function: usize, architecture: i32) {
    if architecture != 0 {
        KERNELS.lock().unwrap_or_else(PoisonError::into_inner).insert(function, architecture);
    }
}

/// The architecture of a kernel's code.
pub(crate) fn architecture(function: usize) -> i32 {
    let kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    kernels.get(&function).copied().unwrap_or(card().capability)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A binary with machine code for some architectures, and PTX for the last.
    fn binary(list: &[u32]) -> Vec<u8> {
        let entry = |kind: u16, architecture: u32| {
            let mut bytes = vec![0; 64 + 16];
            bytes[0..2].copy_from_slice(&kind.to_le_bytes());
            bytes[4..8].copy_from_slice(&64_u32.to_le_bytes());
            bytes[8..16].copy_from_slice(&16_u64.to_le_bytes());
            bytes[28..32].copy_from_slice(&architecture.to_le_bytes());
            bytes
        };
        let mut body: Vec<u8> = list.iter().flat_map(|it| entry(MACHINE_CODE, *it)).collect();
        body.extend(entry(1, 120));
        let mut bytes = BINARY.to_le_bytes().to_vec();
        bytes.extend([1, 0, 16, 0]);
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    #[test]
    fn binaries_name_their_architectures() {
        let bytes = binary(&[75, 80, 86, 90]);
        let mut wrapper = WRAPPER.to_le_bytes().to_vec();
        wrapper.extend([1, 0, 0, 0]);
        wrapper.extend((bytes.as_ptr() as usize).to_le_bytes());
        assert_eq!(architectures(wrapper.as_ptr().cast()), [75, 80, 86, 90]);
        assert_eq!(architectures(std::ptr::null()), Vec::<i32>::new());
        assert_eq!(architectures([0_u8; 16].as_ptr().cast()), Vec::<i32>::new());
    }

    #[test]
    fn a_card_runs_the_nearest_of_its_generation() {
        let list = [75, 80, 86, 90, 100, 120];
        assert_eq!([89, 90, 75, 80, 103, 121].map(|card| runs(card, &list)), [86, 90, 75, 80, 100, 120].map(Some));
        assert_eq!(runs(70, &list), None);
    }
}
