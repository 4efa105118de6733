//! Memory calls of the runtime and of the driver.

use std::ffi::c_void;

use crate::card::card;
use crate::contents::contents;
use crate::device::current;
use crate::foreign::{
    INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, Status, copy_host, free_host_pages, host, host_mut,
    host_pages, put, put_at,
};
use crate::ledger::{device_of, ledger};

/// Allocates on the current device.
fn allocate(out: *mut u64, bytes: usize) -> Status {
    let address = ledger().allocate(current(), bytes as u64);
    put(out, address.unwrap_or(0));
    if address.is_some() { SUCCESS } else { crate::device::remember(OUT_OF_MEMORY) }
}

fn free(address: u64) -> Status {
    // Null is allowed, and so is memory that the library never saw, such as an imported handle.
    if address == 0 || device_of(address).is_none() || ledger().free(address) { SUCCESS } else { INVALID_VALUE }
}

/// Pinned and managed memory are ordinary pages of the host: programs read and write them.
fn allocate_host(out: *mut *mut c_void, bytes: usize) -> Status {
    let pointer = host_pages(bytes);
    put(out, pointer);
    if pointer.is_null() {
        return OUT_OF_MEMORY;
    }
    ledger().host.insert(pointer as usize, bytes);
    SUCCESS
}

fn free_host(pointer: *mut c_void) -> Status {
    let bytes = ledger().host.remove(&(pointer as usize));
    if let Some(bytes) = bytes {
        free_host_pages(pointer, bytes);
    }
    SUCCESS
}

/// Whether an address is one that [`allocate_host`] gave out.
fn is_ours(address: usize) -> bool {
    let ledger = ledger();
    ledger.host.range(..=address).next_back().is_some_and(|(start, bytes)| address < start + bytes)
}

/// Copies in whichever direction the addresses say.
pub(crate) fn copy(to: *mut c_void, from: *const c_void, bytes: usize) {
    match (device_of(to as u64).is_some(), device_of(from as u64).is_some()) {
        (false, false) => copy_host(to, from, bytes),
        (true, false) => contents().write(to as u64, host(from, bytes)),
        (true, true) => contents().copy(to as u64, from as u64, bytes as u64),
        (false, true) => match crate::contents::seen(from as u64, bytes) {
            Some(known) => host_mut(to, bytes).copy_from_slice(&known),
            None => {
                let host = host_mut(to, bytes);
                host.fill(0);
                // How many a kernel chose is read as one number, and whether a check passed as one byte.
                if let (1 | 4 | 8, Some(count)) = (bytes, crate::contents::counted()) {
                    host.copy_from_slice(&count.to_le_bytes()[..bytes]);
                }
            }
        },
    }
}

fn fill(to: *mut c_void, value: u8, bytes: usize) {
    if device_of(to as u64).is_none() {
        host_mut(to, bytes).fill(value);
    } else if bytes <= crate::contents::SMALL {
        contents().write(to as u64, &vec![value; bytes]);
    } else {
        contents().forget(to as u64, bytes as u64);
    }
}

fn copy_rows(to: *mut c_void, to_pitch: usize, from: *const c_void, from_pitch: usize, width: usize, rows: usize) {
    for row in 0..rows {
        let (to, from) =
            (to.cast::<u8>().wrapping_add(row * to_pitch), from.cast::<u8>().wrapping_add(row * from_pitch));
        copy(to.cast(), from.cast(), width);
    }
}

fn info(free: *mut usize, total: *mut usize) {
    put(free, ledger().free_bytes(current()) as usize);
    put(total, card().memory as usize);
}

exports! {
    fn cudaMalloc(out: *mut u64, bytes: usize) -> Status { allocate(out, bytes) }
    fn cudaMallocAsync(out: *mut u64, bytes: usize, _stream: usize) -> Status { allocate(out, bytes) }
    fn cudaMallocFromPoolAsync(out: *mut u64, bytes: usize, _pool: usize, _stream: usize) -> Status { allocate(out, bytes) }
    fn cudaMallocPitch(out: *mut u64, pitch: *mut usize, width: usize, height: usize) -> Status {
        // Rows begin at multiples of 512 bytes (textureAlignment).
        let row = width.next_multiple_of(512);
        put(pitch, row);
        allocate(out, row.saturating_mul(height))
    }
    fn cuMemAlloc_v2(out: *mut u64, bytes: usize) -> Status { allocate(out, bytes) }
    fn cuMemAllocAsync(out: *mut u64, bytes: usize, _stream: usize) -> Status { allocate(out, bytes) }
    fn cudaFree(address: u64) -> Status { free(address) }
    fn cudaFreeAsync(address: u64, _stream: usize) -> Status { free(address) }
    fn cuMemFree_v2(address: u64) -> Status { free(address) }
    fn cuMemFreeAsync(address: u64, _stream: usize) -> Status { free(address) }
    fn cudaMallocManaged(out: *mut *mut c_void, bytes: usize, _flags: u32) -> Status { allocate_host(out, bytes) }
    fn cuMemAllocManaged(out: *mut *mut c_void, bytes: usize, _flags: u32) -> Status { allocate_host(out, bytes) }
    fn cudaHostAlloc(out: *mut *mut c_void, bytes: usize, _flags: u32) -> Status { allocate_host(out, bytes) }
    fn cudaMallocHost(out: *mut *mut c_void, bytes: usize) -> Status { allocate_host(out, bytes) }
    fn cuMemHostAlloc(out: *mut *mut c_void, bytes: usize, _flags: u32) -> Status { allocate_host(out, bytes) }
    fn cudaFreeHost(pointer: *mut c_void) -> Status { free_host(pointer) }
    fn cuMemFreeHost(pointer: *mut c_void) -> Status { free_host(pointer) }
    fn cudaHostGetDevicePointer(out: *mut usize, pointer: usize, _flags: u32) { put(out, pointer) }
    fn cudaHostGetFlags(out: *mut u32, _pointer: usize) { put(out, 0) }
    fn cudaMemGetInfo(free: *mut usize, total: *mut usize) { info(free, total) }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) { info(free, total) }

    fn cudaMemcpy(to: *mut c_void, from: *const c_void, bytes: usize, _kind: i32) { copy(to, from, bytes) }
    fn cudaMemcpyAsync(to: *mut c_void, from: *const c_void, bytes: usize, _kind: i32, _stream: usize) { copy(to, from, bytes) }
    fn cudaMemcpyPeer(to: *mut c_void, _to_device: i32, from: *const c_void, _from_device: i32, bytes: usize) { copy(to, from, bytes) }
    fn cudaMemcpyPeerAsync(to: *mut c_void, _to_device: i32, from: *const c_void, _from_device: i32, bytes: usize, _stream: usize) {
        copy(to, from, bytes)
    }
    fn cudaMemcpy2D(to: *mut c_void, to_pitch: usize, from: *const c_void, from_pitch: usize, width: usize, rows: usize, _kind: i32) {
        copy_rows(to, to_pitch, from, from_pitch, width, rows)
    }
    fn cudaMemcpy2DAsync(to: *mut c_void, to_pitch: usize, from: *const c_void, from_pitch: usize, width: usize, rows: usize, _kind: i32, _stream: usize) {
        copy_rows(to, to_pitch, from, from_pitch, width, rows)
    }
    fn cuMemcpyHtoD_v2(to: *mut c_void, from: *const c_void, bytes: usize) { copy(to, from, bytes) }
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: *const c_void, bytes: usize) { copy(to, from, bytes) }
    fn cuMemcpyHtoDAsync_v2(to: *mut c_void, from: *const c_void, bytes: usize, _stream: usize) { copy(to, from, bytes) }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: *const c_void, bytes: usize, _stream: usize) { copy(to, from, bytes) }
    fn cuMemcpyDtoDAsync_v2(to: *mut c_void, from: *const c_void, bytes: usize, _stream: usize) { copy(to, from, bytes) }
    fn cuMemcpyAsync(to: *mut c_void, from: *const c_void, bytes: usize, _stream: usize) { copy(to, from, bytes) }
    fn cudaMemset(to: *mut c_void, value: i32, bytes: usize) { fill(to, value as u8, bytes) }
    fn cudaMemsetAsync(to: *mut c_void, value: i32, bytes: usize, _stream: usize) { fill(to, value as u8, bytes) }
    fn cuMemsetD8Async(to: *mut c_void, value: u8, bytes: usize, _stream: usize) { fill(to, value, bytes) }

    fn cudaPointerGetAttributes(out: *mut c_void, address: u64) {
        // struct cudaPointerAttributes: type, device, device pointer, host pointer.
        let device = device_of(address);
        let kind: i32 = match device {
            Some(_) => 2,
            None if is_ours(address as usize) => 1,
            None => 0,
        };
        put_at(out, 0, kind);
        put_at(out, 4, device.map_or(if kind == 1 { 0 } else { -2 }, |device| device as i32));
        put_at(out, 8, if kind == 0 { 0 } else { address });
        put_at(out, 16, if kind == 1 { address } else { 0 });
    }
    fn cuPointerGetAttribute(out: *mut c_void, attribute: i32, address: u64) -> Status {
        let Some(device) = device_of(address) else { return INVALID_VALUE };
        let (start, length) = ledger().range(address).unwrap_or((address, 0));
        match attribute {
            1 => put_at(out, 0, crate::driver::CONTEXT),
            2 => put_at(out, 0, 2_i32), // memory type: device
            3 | 4 => put_at(out, 0, address),
            6 | 8 => put_at(out, 0, 0_i32), // synchronous, managed: no
            7 => put_at(out, 0, start),     // a number of its own for each allocation
            9 => put_at(out, 0, device as i32),
            11 => put_at(out, 0, start),
            12 => put_at(out, 0, length),
            13 => put_at(out, 0, 1_i32),
            _ => put_at(out, 0, 0_i32),
        }
        SUCCESS
    }
    fn cuMemGetAddressRange_v2(start: *mut u64, length: *mut usize, address: u64) -> Status {
        let Some((begin, bytes)) = ledger().range(address) else { return INVALID_VALUE };
        put(start, begin);
        put(length, bytes as usize);
        SUCCESS
    }

    // One process cannot see the memory of another: there is none.
    fn cudaIpcGetMemHandle(_handle: *mut c_void, _address: u64) -> Status { NOT_SUPPORTED }
    fn cudaIpcOpenMemHandle(_out: *mut u64) -> Status { NOT_SUPPORTED }

    fn cudaMemPoolGetAttribute(_pool: usize, _attribute: i32, out: *mut u64) { put(out, 0) }
    fn cudaDeviceGetGraphMemAttribute(_device: i32, _attribute: i32, out: *mut u64) { put(out, 0) }

    // What the hook asks: memory taken from the driver, now and at most, and how often it was refused.
    fn vramcast_used(device: i32, used: *mut u64, peak: *mut u64, refused: *mut u64) {
        let ledger = ledger();
        let (now, most) = ledger.usage((device.max(0) as usize).min(crate::ledger::DEVICES - 1));
        put(used, now);
        put(peak, most);
        put(refused, ledger.refused());
    }
}

handles! { cudaDeviceGetDefaultMemPool cudaDeviceGetMemPool cudaMemPoolCreate cuMemPoolCreate }

nothing! {
    cudaHostRegister cudaHostUnregister cuMemHostRegister_v2 cuMemHostUnregister cudaIpcCloseMemHandle cudaMemPoolSetAccess
    cudaMemPoolSetAttribute cudaMemPoolTrimTo cudaMemPoolDestroy cudaMemPrefetchAsync cudaMemAdvise cudaMemcpyToSymbol
    cudaMemcpyToSymbolAsync cudaDeviceGraphMemTrim cuMemsetD16Async cuMemsetD32Async cudaMemset2DAsync cuMemPrefetchAsync
    cudaDeviceSetMemPool cudaMemPrefetchAsync_v2
}
