//! The rest of the driver: contexts, virtual memory, entry points by name.

use std::ffi::{c_char, c_void};

use crate::device::current;
use crate::foreign::{INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, Status, get, handle, put, put_at, text};
use crate::ledger::{PAGE, ledger};

/// The one context.
pub(crate) const CONTEXT: usize = 0x100;

/// `CUmemAllocationProp`: kind, handle types, then location (its kind, its id).
const LOCATION_ID: usize = 12;

unsafe extern "C" {
    /// The dynamic linker's search by name.
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// A function of the driver by name: ours, or one that only counts. Newer versions of a function carry a suffix, which
/// the caller leaves out.
fn entry(name: &str) -> *mut c_void {
    let known = |name: &str| {
        let name = std::ffi::CString::new(name).unwrap_or_default();
        // SAFETY: the name ends with a zero; a null handle (RTLD_DEFAULT) searches the whole program.
        unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) }
    };
    ["", "_v2", "_v3"]
        .iter()
        .map(|suffix| known(&format!("{name}{suffix}")))
        .find(|address| !address.is_null())
        .unwrap_or_else(|| crate::unknown::entry(name))
}

fn find(name: *const c_char, out: *mut *mut c_void, found: *mut i32) {
    put(out, entry(text(name)));
    put(found, 0);
}

exports! {
    fn cudaGetDriverEntryPoint(name: *const c_char, out: *mut *mut c_void, _flags: u64, found: *mut i32) { find(name, out, found) }
    fn cudaGetDriverEntryPointByVersion(name: *const c_char, out: *mut *mut c_void, _version: u32, _flags: u64, found: *mut i32) {
        find(name, out, found)
    }
    fn cuGetProcAddress(name: *const c_char, out: *mut *mut c_void, _version: i32, _flags: u64) {
        find(name, out, std::ptr::null_mut())
    }
    fn cuGetProcAddress_v2(name: *const c_char, out: *mut *mut c_void, _version: i32, _flags: u64, found: *mut i32) {
        find(name, out, found)
    }

    fn cuMemCreate(out: *mut u64, bytes: usize, properties: *const c_void, _flags: u64) -> Status {
        let device = get(properties.cast::<u8>().wrapping_add(LOCATION_ID).cast::<i32>());
        let created = ledger().create((device.max(0) as usize).min(crate::ledger::DEVICES - 1), bytes as u64);
        put(out, created.unwrap_or(0));
        if created.is_some() { SUCCESS } else { OUT_OF_MEMORY }
    }
    fn cuMemRelease(memory: u64) { ledger().release(memory) }
    fn cuMemAddressReserve(out: *mut u64, bytes: usize, _alignment: usize, _wish: u64, _flags: u64) -> Status {
        let reserved = ledger().reserve(current(), bytes as u64);
        put(out, reserved.unwrap_or(0));
        if reserved.is_some() { SUCCESS } else { OUT_OF_MEMORY }
    }
    fn cuMemAddressFree(address: u64, _bytes: usize) -> Status {
        if ledger().free(address) { SUCCESS } else { INVALID_VALUE }
    }
    fn cuMemGetAllocationGranularity(out: *mut usize, _properties: usize, _option: i32) { put(out, PAGE as usize) }
    fn cuMemGetAllocationPropertiesFromHandle(out: *mut c_void, _memory: u64) {
        put_at(out, 0, [1_i32, 1, 1, current() as i32]);
    }
    fn cuMemExportToShareableHandle(out: *mut i32, _memory: u64, _kind: i32, _flags: u64) { put(out, 0) }
    fn cuMulticastGetGranularity(out: *mut usize, _properties: usize, _option: i32) { put(out, PAGE as usize) }

    fn cuCtxGetCurrent(out: *mut usize) { put(out, CONTEXT) }
    fn cuCtxGetApiVersion(_context: usize, out: *mut u32) { put(out, 3020) }
    fn cuDevicePrimaryCtxRetain(out: *mut usize, _device: i32) { put(out, CONTEXT) }
    fn cuDevicePrimaryCtxGetState(_device: i32, flags: *mut u32, active: *mut i32) {
        put(flags, 0);
        put(active, 1);
    }
    fn cuCtxCreate_v2(out: *mut usize) { put(out, CONTEXT) }
    fn cuCtxPopCurrent_v2(out: *mut usize) { put(out, CONTEXT) }
    fn cuCtxFromGreenCtx(out: *mut usize) { put(out, handle()) }
}

// Looked up by every torch when it starts; only programs that ask for these features call them.
exports! {
    fn cuDevResourceGenerateDesc() -> Status { NOT_SUPPORTED }
    fn cuDevSmResourceSplitByCount() -> Status { NOT_SUPPORTED }
    fn cuDeviceGetDevResource() -> Status { NOT_SUPPORTED }
    fn cuGreenCtxCreate() -> Status { NOT_SUPPORTED }
    fn cuMemImportFromShareableHandle() -> Status { NOT_SUPPORTED }
    fn cuMemRetainAllocationHandle() -> Status { NOT_SUPPORTED }
    fn cuMulticastCreate() -> Status { NOT_SUPPORTED }
    fn cuLogsRegisterCallback() -> Status { NOT_SUPPORTED }
    fn cuLogsUnregisterCallback() -> Status { NOT_SUPPORTED }
}

nothing! {
    cuMemMap cuMemUnmap cuMemSetAccess cuCtxSetCurrent cuCtxPushCurrent_v2 cuCtxDestroy_v2 cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxSetFlags_v2 cuGreenCtxDestroy cuMulticastAddDevice cuMulticastBindMem cuMulticastUnbind
}
