//! Devices: which there are, what they say of themselves, errors.

use std::cell::Cell;
use std::ffi::{c_char, c_void};

use crate::card::{Card, card};
use crate::foreign::{INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, Status, put, put_at, put_text};
use crate::ledger::DEVICES;

/// No such device (`cudaErrorInvalidDevice`).
const INVALID_DEVICE: Status = 101;

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    static LAST_ERROR: Cell<Status> = const { Cell::new(SUCCESS) };
}

/// The calling thread's device.
pub(crate) fn current() -> usize {
    CURRENT.get()
}

/// Keeps an error for `cudaGetLastError`.
pub(crate) fn remember(status: Status) -> Status {
    LAST_ERROR.set(status);
    status
}

/// How many devices the process sees: all, or those `CUDA_VISIBLE_DEVICES` leaves.
pub(crate) fn count() -> usize {
    let all = card().count.min(DEVICES);
    // The driver stops at the first number it does not know.
    let known = |name: &&str| {
        name.trim().parse().map_or(!name.trim().is_empty(), |index: i64| (0..all as i64).contains(&index))
    };
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => list.split(',').take_while(known).count().min(all),
        Err(_) => all,
    }
}

fn select(device: i32) -> Status {
    match usize::try_from(device) {
        Ok(device) if device < count() => {
            CURRENT.set(device);
            SUCCESS
        }
        _ => remember(INVALID_DEVICE),
    }
}

/// An attribute by its number, which runtime and driver share (`cudaDeviceAttr`).
fn attribute(number: i32, device: i32) -> i32 {
    let card = card();
    match number {
        1..=3 => 1024,    // threads of a block, its x and y
        4 => 64,          // its z
        5 => i32::MAX,    // grid x
        6 | 7 => 65535,   // grid y and z
        8 => 48 << 10,    // shared memory of a block
        9 => 64 << 10,    // constants
        10 => 32,         // warp
        11 => i32::MAX,   // pitch
        12 | 82 => 65536, // registers
        13 => 1_755_000,  // kHz
        14 => 512,        // texture alignment
        16 => card.multiprocessors,
        33 => device + 1, // PCI bus
        36 => 2_619_000,  // kHz of memory
        37 => 5120,       // bus width
        38 => card.l2_cache,
        39 => card.threads_per_multiprocessor,
        40 => 3, // copy engines
        75 => card.major(),
        76 => card.minor(),
        81 => card.shared_per_multiprocessor(),
        97 => card.shared_per_block(),
        102 => 1, // virtual memory management, the driver's number only
        106 => card.blocks_per_multiprocessor(),
        111 => 1024,                             // shared memory the system keeps
        120 => i32::from(card.capability >= 90), // clusters
        // Overlap, mapping, kernels side by side, addressing, priorities, managed memory, cooperation, pools.
        15 | 19 | 31 | 41 | 78 | 79 | 80 | 83 | 89 | 90 | 91 | 95 | 99 | 115 | 125 => 1,
        _ => 0,
    }
}

/// Fills `struct cudaDeviceProp`. Its fields moved with CUDA 13, which dropped clocks and a few flags.
fn properties(card: &Card, out: *mut c_void, device: i32) {
    let old = card.runtime < 13000;
    crate::foreign::host_mut(out, if old { 1032 } else { 1008 }).fill(0);
    put_text(out.cast(), 256, &card.name);
    put_at(out, 256, uuid(device));
    let number = |attribute_number| attribute(attribute_number, device);
    put_at(out, 288, card.memory);
    put_at(out, 296, 49152_u64);
    put_at(out, 304, [65536_i32, 32]);
    put_at(out, 312, i32::MAX as u64);
    put_at(out, 320, [1024_i32, 1024, 1024, 64, i32::MAX, 65535, 65535]);
    if old {
        put_at(out, 348, 1_755_000_i32);
    }
    put_at(out, 352, 65536_u64);
    put_at(out, 360, [card.major(), card.minor()]);
    put_at(out, 368, [512_u64, 32]);
    // CUDA 12: deviceOverlap, multiProcessorCount, timeout, integrated, canMapHostMemory. CUDA 13: without the first and third.
    if old {
        put_at(out, 384, [1_i32, card.multiprocessors, 0, 0, 1]);
    } else {
        put_at(out, 384, [card.multiprocessors, 0, 1]);
    }
    // From `concurrentKernels` on both versions list the same, at another place, but for the memory clock.
    let start = if old { 576 } else { 560 };
    put_at(out, start, [1_i32, 1, number(33)]);
    let engines = [number(40), 1];
    let caches = [number(37), card.l2_cache, 0, card.threads_per_multiprocessor, 1];
    if old {
        put_at(out, 600, engines);
        put_at(out, 608, number(36));
        put_at(out, 612, caches);
    } else {
        put_at(out, 584, engines);
        put_at(out, 592, caches);
    }
    let start = if old { 640 } else { 624 };
    put_at(out, start, card.shared_per_multiprocessor() as u64);
    put_at(out, start + 8, [65536_i32, 1]);
    // pageableMemoryAccess, concurrentManagedAccess, preemption, registered host pointers, cooperation.
    put_at(out, if old { 672 } else { 652 }, [0_i32, 1, 1, 1, 1]);
    let start = if old { 696 } else { 672 };
    put_at(out, start, card.shared_per_block() as u64);
    put_at(out, start + 16, card.blocks_per_multiprocessor());
    put_at(out, start + 24, 1024_u64);
    put_at(out, start + 48, 1_i32);
    put_at(out, start + 76, i32::from(card.capability >= 90));
}

/// A number of its own for each device.
pub(crate) fn uuid(device: i32) -> [u8; 16] {
    let mut uuid = *b"vramcast rehears";
    uuid[15] = device as u8;
    uuid
}

/// What CUDA says about an error, with its closing zero.
fn describe(status: Status) -> (&'static str, &'static str) {
    match status {
        SUCCESS => ("cudaSuccess\0", "no error\0"),
        INVALID_VALUE => ("cudaErrorInvalidValue\0", "invalid argument\0"),
        OUT_OF_MEMORY => ("cudaErrorMemoryAllocation\0", "out of memory\0"),
        INVALID_DEVICE => ("cudaErrorInvalidDevice\0", "invalid device ordinal\0"),
        801 => ("cudaErrorNotSupported\0", "operation not supported\0"),
        _ => ("cudaErrorUnknown\0", "unknown error\0"),
    }
}

exports! {
    fn cudaGetDeviceCount(out: *mut i32) { put(out, count() as i32) }
    fn cuDeviceGetCount(out: *mut i32) { put(out, count() as i32) }
    fn cudaGetDevice(out: *mut i32) { put(out, current() as i32) }
    fn cuCtxGetDevice(out: *mut i32) { put(out, current() as i32) }
    fn cudaSetDevice(device: i32) -> Status { select(device) }
    fn cudaInitDevice(device: i32) -> Status { select(device) }
    fn cuDeviceGet(out: *mut i32, device: i32) { put(out, device) }
    fn cudaGetDeviceProperties(out: *mut c_void, device: i32) { properties(card(), out, device) }
    fn cudaGetDeviceProperties_v2(out: *mut c_void, device: i32) { properties(card(), out, device) }
    fn cudaDeviceGetAttribute(out: *mut i32, number: i32, device: i32) { put(out, attribute(number, device)) }
    fn cuDeviceGetAttribute(out: *mut i32, number: i32, device: i32) { put(out, attribute(number, device)) }
    fn cuDeviceGetName(out: *mut c_char, room: i32, _device: i32) { put_text(out, room.max(0) as usize, &card().name) }
    fn cuDeviceTotalMem_v2(out: *mut usize, _device: i32) { put(out, card().memory as usize) }
    fn cuDeviceGetUuid(out: *mut [u8; 16], device: i32) { put(out, uuid(device)) }
    fn cuDeviceGetUuid_v2(out: *mut [u8; 16], device: i32) { put(out, uuid(device)) }
    fn cuDeviceComputeCapability(major: *mut i32, minor: *mut i32, _device: i32) {
        put(major, card().major());
        put(minor, card().minor());
    }
    fn cudaDeviceGetPCIBusId(out: *mut c_char, room: i32, device: i32) {
        put_text(out, room.max(0) as usize, &format!("0000:{:02X}:00.0", device + 1))
    }
    fn cudaDriverGetVersion(out: *mut i32) { put(out, card().driver) }
    fn cuDriverGetVersion(out: *mut i32) { put(out, card().driver) }
    fn cudaRuntimeGetVersion(out: *mut i32) { put(out, card().runtime) }
    // Cards of one machine reach each other.
    fn cudaDeviceCanAccessPeer(out: *mut i32, device: i32, peer: i32) { put(out, i32::from(device != peer)) }
    fn cuDeviceCanAccessPeer(out: *mut i32, device: i32, peer: i32) { put(out, i32::from(device != peer)) }
    fn cudaDeviceGetP2PAttribute(out: *mut i32, _attribute: i32, _device: i32, _peer: i32) { put(out, 1) }
    fn cudaDeviceGetLimit(out: *mut usize, _limit: i32) { put(out, 1024) }
    fn cudaGetLastError() -> Status { LAST_ERROR.replace(SUCCESS) }
    fn cudaPeekAtLastError() -> Status { LAST_ERROR.get() }
    fn cudaGetErrorName(status: Status) -> *const c_char { describe(status).0.as_ptr().cast() }
    fn cudaGetErrorString(status: Status) -> *const c_char { describe(status).1.as_ptr().cast() }
    fn cuGetErrorName(status: Status, out: *mut *const c_char) { put(out, describe(status).0.as_ptr().cast()) }
    fn cuGetErrorString(status: Status, out: *mut *const c_char) { put(out, describe(status).1.as_ptr().cast()) }
}

nothing! {
    cuInit cudaDeviceSynchronize cuCtxSynchronize cudaDeviceReset cudaDeviceSetLimit cudaDeviceSetCacheConfig cudaSetDeviceFlags
    cudaDeviceEnablePeerAccess cudaDeviceDisablePeerAccess cuCtxEnablePeerAccess cudaProfilerStart cudaProfilerStop
    cuProfilerStart cuProfilerStop
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets are those of the headers of CUDA 13.0 (`driver_types.h`).
    #[test]
    fn properties_stand_where_cuda_13_puts_them() {
        let mut bytes = [0xff_u8; 1008];
        properties(card(), bytes.as_mut_ptr().cast(), 0);
        let word = |offset: usize| i32::from_ne_bytes(bytes[offset..offset + 4].try_into().unwrap());
        let long = |offset: usize| u64::from_ne_bytes(bytes[offset..offset + 8].try_into().unwrap());
        assert!(bytes.starts_with(b"NVIDIA H200\0"));
        assert_eq!((long(288), word(360), word(364), word(384)), (card().memory, 9, 0, 132));
        assert_eq!((word(596), word(604), long(624), word(632)), (card().l2_cache, 2048, 233_472, 65536));
        assert_eq!((word(668), long(672), word(688), long(696), word(720), word(748)), (1, 232_448, 32, 1024, 1, 1));
    }

    /// The same for CUDA 12.4.
    #[test]
    fn properties_stand_where_cuda_12_puts_them() {
        let mut bytes = [0xff_u8; 1032];
        let old = Card { runtime: 12040, ..Card::default() };
        properties(&old, bytes.as_mut_ptr().cast(), 0);
        let word = |offset: usize| i32::from_ne_bytes(bytes[offset..offset + 4].try_into().unwrap());
        let long = |offset: usize| u64::from_ne_bytes(bytes[offset..offset + 8].try_into().unwrap());
        assert_eq!((long(288), word(360), word(388), word(400)), (old.memory, 9, 132, 1));
        assert_eq!((word(616), word(624), long(640), word(648)), (old.l2_cache, 2048, 233_472, 65536));
        assert_eq!((word(688), long(696), word(712), long(720), word(744), word(772)), (1, 232_448, 32, 1024, 1, 1));
    }
}
