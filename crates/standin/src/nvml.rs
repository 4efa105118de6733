//! NVML, as far as torch, monitors and launchers ask it.

use std::ffi::{c_char, c_void};

use crate::card::card;
use crate::foreign::{Status, put, put_at, put_text};
use crate::ledger::ledger;

/// `NVML_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: Status = 3;

/// A device is its index, one higher because null is no device.
fn index(device: usize) -> usize {
    device.saturating_sub(1).min(crate::ledger::DEVICES - 1)
}

/// Total, free, used; in version 2 the version and what the driver keeps come first.
fn memory(device: usize) -> [u64; 3] {
    let used = card().context + ledger().usage(index(device)).0;
    [card().memory, card().memory.saturating_sub(used), used]
}

exports! {
    // NVML shows every card, whatever CUDA_VISIBLE_DEVICES says.
    fn nvmlDeviceGetCount_v2(out: *mut u32) { put(out, card().count as u32) }
    fn nvmlDeviceGetHandleByIndex_v2(index: u32, out: *mut usize) { put(out, index as usize + 1) }
    fn nvmlDeviceGetHandleByPciBusId_v2(_bus: *const c_char, out: *mut usize) { put(out, 1) }
    fn nvmlDeviceGetHandleByUUID(_uuid: *const c_char, out: *mut usize) { put(out, 1) }
    fn nvmlDeviceGetIndex(device: usize, out: *mut u32) { put(out, index(device) as u32) }
    fn nvmlDeviceGetMemoryInfo(device: usize, out: *mut [u64; 3]) { put(out, memory(device)) }
    fn nvmlDeviceGetMemoryInfo_v2(device: usize, out: *mut c_void) {
        let [total, free, used] = memory(device);
        put_at(out, 8, [total, 0, free, used]);
    }
    fn nvmlDeviceGetName(_device: usize, out: *mut c_char, room: u32) { put_text(out, room as usize, &card().name) }
    fn nvmlDeviceGetUUID(device: usize, out: *mut c_char, room: u32) {
        put_text(out, room as usize, &format!("GPU-76726d63-6173-7420-7265-{:012x}", index(device)))
    }
    fn nvmlDeviceGetCudaComputeCapability(_device: usize, major: *mut i32, minor: *mut i32) {
        put(major, card().major());
        put(minor, card().minor());
    }
    fn nvmlSystemGetCudaDriverVersion_v2(out: *mut i32) { put(out, card().driver) }
    fn nvmlSystemGetDriverVersion(out: *mut c_char, room: u32) { put_text(out, room as usize, "580.00") }
    fn nvmlDeviceGetComputeRunningProcesses(_device: usize, many: *mut u32, _list: usize) { put(many, 0) }
    fn nvmlDeviceGetComputeRunningProcesses_v3(_device: usize, many: *mut u32, _list: usize) { put(many, 0) }
    fn nvmlDeviceGetP2PStatus(_device: usize, _peer: usize, _kind: i32, out: *mut i32) { put(out, 0) }
    fn nvmlDeviceGetUtilizationRates(_device: usize, out: *mut [u32; 2]) { put(out, [0, 0]) }
    fn nvmlDeviceGetPowerUsage(_device: usize, out: *mut u32) { put(out, 0) }
    fn nvmlDeviceGetTemperature(_device: usize, _sensor: i32, out: *mut u32) { put(out, 30) }
    fn nvmlErrorString(_status: Status) -> *const c_char { c"Success".as_ptr() }
    fn nvmlDeviceGetNvLinkRemoteDeviceType(_device: usize, _link: u32, _out: usize) -> Status { NOT_SUPPORTED }
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(_device: usize, _link: u32, _out: usize) -> Status { NOT_SUPPORTED }
    fn nvmlDeviceGetGpuFabricInfoV(_device: usize, _out: usize) -> Status { NOT_SUPPORTED }
}

nothing! { nvmlInit_v2 nvmlInit nvmlInitWithFlags nvmlShutdown }
