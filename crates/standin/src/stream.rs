//! Streams and events: everything is done the moment it is asked for.

use std::ffi::c_void;
use std::sync::OnceLock;
use std::time::Instant;

use crate::foreign::{Status, call_back, get, handle, put};

/// Microseconds since the library was first asked, so that timings are times.
fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_micros() as u64
}

/// Milliseconds that pass at least between two events.
const SHORTEST: f32 = 1.0;

/// Events carry the moment they were last recorded.
fn elapsed(out: *mut f32, start: *const u64, end: *const u64) {
    let real = get(end).saturating_sub(get(start)) as f32 / 1000.0;
    // Benchmarks repeat until enough time has passed by these clocks: where kernels take none they would not end.
    put(out, if start == end { 0.0 } else { real.max(SHORTEST) });
}

fn create(out: *mut *mut u64) {
    put(out, Box::into_raw(Box::new(now())));
}

fn record(event: *mut u64, stream: usize) {
    put(event, now());
    crate::graph::recorded(event as usize, stream);
}

type Callback = Option<unsafe extern "C" fn(*mut c_void)>;

exports! {
    fn cudaEventCreate(out: *mut *mut u64) { create(out) }
    fn cudaEventCreateWithFlags(out: *mut *mut u64, _flags: u32) { create(out) }
    fn cuEventCreate(out: *mut *mut u64, _flags: u32) { create(out) }
    fn cudaEventRecord(event: *mut u64, stream: usize) { record(event, stream) }
    fn cudaEventRecordWithFlags(event: *mut u64, stream: usize, _flags: u32) { record(event, stream) }
    fn cuEventRecord(event: *mut u64, stream: usize) { record(event, stream) }
    fn cudaEventElapsedTime(out: *mut f32, start: *const u64, end: *const u64) { elapsed(out, start, end) }
    fn cudaEventElapsedTime_v2(out: *mut f32, start: *const u64, end: *const u64) { elapsed(out, start, end) }
    fn cuEventElapsedTime_v2(out: *mut f32, start: *const u64, end: *const u64) { elapsed(out, start, end) }
    fn cudaStreamWaitEvent(stream: usize, event: usize, _flags: u32) { crate::graph::waits(stream, event) }
    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: u32) { crate::graph::waits(stream, event) }
    fn cudaDeviceGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        put(least, 0);
        put(greatest, -5);
    }
    fn cudaStreamGetPriority(_stream: usize, out: *mut i32) { put(out, 0) }
    fn cudaStreamGetFlags(_stream: usize, out: *mut u32) { put(out, 1) }
    fn cudaStreamGetDevice(_stream: usize, out: *mut i32) { put(out, crate::device::current() as i32) }
    fn cudaStreamGetId(stream: usize, out: *mut u64) { put(out, stream as u64) }
    fn cuStreamGetCtx(_stream: usize, out: *mut usize) { put(out, crate::driver::CONTEXT) }
    fn cudaStreamAddCallback(stream: usize, function: Option<unsafe extern "C" fn(usize, Status, *mut c_void)>, data: *mut c_void, _flags: u32) {
        if let Some(function) = function {
            // SAFETY: the caller passes function and data for this purpose.
            unsafe { function(stream, 0, data) }
        }
    }
    fn cudaLaunchHostFunc(_stream: usize, function: Callback, data: *mut c_void) { call_back(function, data) }
    fn cuLaunchHostFunc(_stream: usize, function: Callback, data: *mut c_void) { call_back(function, data) }
    fn cuGreenCtxStreamCreate(out: *mut usize) { put(out, handle()) }
}

handles! { cudaStreamCreate cudaStreamCreateWithFlags cudaStreamCreateWithPriority cuStreamCreate cuStreamCreateWithPriority }

nothing! {
    cudaEventDestroy cuEventDestroy_v2 cudaEventQuery cuEventQuery cudaEventSynchronize cuEventSynchronize cudaStreamDestroy
    cuStreamDestroy_v2 cudaStreamQuery cuStreamQuery cudaStreamSynchronize cuStreamSynchronize cudaStreamAttachMemAsync
    cudaStreamSetAttribute cuStreamWriteValue32 cuStreamWriteValue32_v2 cuStreamWaitValue32_v2 cuStreamBatchMemOp_v2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_time_passes_between_two_events() {
        let (start, end, mut out) = (7_u64, 9_u64, 0.0_f32);
        elapsed(&mut out, &start, &end);
        assert!(out >= 1.0, "{out}");
        elapsed(&mut out, &start, &start);
        assert!(out.abs() < f32::EPSILON, "{out}");
        elapsed(&mut out, &start, &5_000_007);
        assert!((out - 5000.0).abs() < 1.0, "{out}");
    }
}
