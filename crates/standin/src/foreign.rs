//! The border to C: everything unsafe is here.
//!
//! Every function of this module trusts its caller as the real library would: a pointer that a program hands to CUDA
//! is null or good for what the documentation of that call says. That is what each block below relies on.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What most calls return.
pub(crate) type Status = i32;
/// All went well, in every library of the family.
pub(crate) const SUCCESS: Status = 0;
/// The argument makes no sense (`cudaErrorInvalidValue`).
pub(crate) const INVALID_VALUE: Status = 1;
/// The card is full (`cudaErrorMemoryAllocation`).
pub(crate) const OUT_OF_MEMORY: Status = 2;
/// Not supported (`cudaErrorNotSupported`).
pub(crate) const NOT_SUPPORTED: Status = 801;

/// Exports functions under their C names. A body that ends without a value means success.
macro_rules! exports {
    ($( $(#[$attribute:meta])* fn $name:ident($($argument:ident : $type:ty),* $(,)?) $(-> $result:ty)? $body:block )*) => { $(
        $(#[$attribute])*
        // SAFETY: no other part of the program defines this name; replacing NVIDIA's is the purpose.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> exports!(@result $($result)?) { exports!(@body $body $($result)?) }
    )* };
    (@result) => { $crate::foreign::Status };
    (@result $result:ty) => { $result };
    (@body $body:block) => {{ $body; $crate::foreign::SUCCESS }};
    (@body $body:block $result:ty) => { $body };
}

/// Exports functions that take anything, do nothing and succeed.
macro_rules! nothing {
    ($($name:ident)*) => { exports! { $( fn $name() { } )* } };
}

/// Exports functions that make a handle and write it to where their first argument points.
macro_rules! handles {
    ($($name:ident)*) => { exports! { $( fn $name(out: *mut usize) { $crate::foreign::put(out, $crate::foreign::handle()) } )* } };
}

/// Exports questions for the size of a workspace. Only how many arguments stand before the answer differs.
macro_rules! sizes {
    (@one $out:ty, ($($argument:ident)*), $name:ident) => { exports! {
        #[allow(clippy::too_many_arguments)]
        fn $name($($argument: usize,)* out: *mut $out) {
            $crate::unknown::not_counted(stringify!($name));
            $crate::foreign::put(out, 0)
        }
    } };
    ($out:ty, $before:tt; $($name:ident)*) => { $( sizes!(@one $out, $before, $name); )* };
}

/// Writes an answer where the caller wants it; null means that it is not wanted.
pub(crate) fn put<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: the caller of the C function gave a place for this answer (see the module's documentation).
        unsafe { out.write_unaligned(value) }
    }
}

/// Writes at an offset of a structure of the caller.
pub(crate) fn put_at<T>(out: *mut c_void, offset: usize, value: T) {
    if !out.is_null() {
        put(out.cast::<u8>().wrapping_add(offset).cast::<T>(), value);
    }
}

/// Reads what the caller passes by pointer.
pub(crate) fn get<T: Copy + Default>(pointer: *const T) -> T {
    // SAFETY: not null, and readable by the contract of the C function.
    if pointer.is_null() { T::default() } else { unsafe { pointer.read_unaligned() } }
}

/// Text of the caller; the empty text where it passes none.
pub(crate) fn text<'a>(pointer: *const c_char) -> &'a str {
    if pointer.is_null() {
        return "";
    }
    // SAFETY: a text of the C interface ends with a zero and outlives the call.
    unsafe { CStr::from_ptr(pointer) }.to_str().unwrap_or("")
}

/// Writes text with its closing zero into a buffer of the caller, cut to its size.
pub(crate) fn put_text(out: *mut c_char, room: usize, value: &str) {
    if room == 0 {
        return;
    }
    for (index, byte) in value.bytes().take(room - 1).chain([0]).enumerate() {
        put(out.wrapping_add(index), byte as c_char);
    }
}

/// Host bytes as a slice, for the length of a call.
pub(crate) fn host<'a>(pointer: *const c_void, bytes: usize) -> &'a [u8] {
    if pointer.is_null() || bytes == 0 {
        return &[];
    }
    // SAFETY: the caller asks to copy these bytes, so they are readable.
    unsafe { std::slice::from_raw_parts(pointer.cast(), bytes) }
}

/// Host bytes that may be written, for the length of a call.
pub(crate) fn host_mut<'a>(pointer: *mut c_void, bytes: usize) -> &'a mut [u8] {
    if pointer.is_null() || bytes == 0 {
        return &mut [];
    }
    // SAFETY: the caller asks to copy to these bytes, so they are writable and nobody else's during the call.
    unsafe { std::slice::from_raw_parts_mut(pointer.cast(), bytes) }
}

/// Copies between places of the host that may overlap.
pub(crate) fn copy_host(to: *mut c_void, from: *const c_void, bytes: usize) {
    if !to.is_null() && !from.is_null() {
        // SAFETY: the caller asks for exactly this copy.
        unsafe { std::ptr::copy(from.cast::<u8>(), to.cast::<u8>(), bytes) }
    }
}

/// A callback of the caller, called at once because nothing is ever pending.
pub(crate) fn call_back(function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void) {
    if let Some(function) = function {
        // SAFETY: the caller passes function and data for this purpose.
        unsafe { function(data) }
    }
}

/// Pages of the host that cost nothing until they are touched.
pub(crate) fn host_pages(bytes: usize) -> *mut c_void {
    let Some(layout) = pages(bytes) else { return std::ptr::null_mut() };
    // SAFETY: the layout is not empty.
    unsafe { std::alloc::alloc(layout) }.cast()
}

/// Gives pages back.
pub(crate) fn free_host_pages(pointer: *mut c_void, bytes: usize) {
    if let Some(layout) = pages(bytes).filter(|_| !pointer.is_null()) {
        // SAFETY: pointer and size are those of `host_pages`; the ledger remembers both.
        unsafe { std::alloc::dealloc(pointer.cast(), layout) }
    }
}

fn pages(bytes: usize) -> Option<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(bytes.max(1).checked_next_multiple_of(4096)?, 4096).ok()
}

/// A name for something that has no contents: streams, events, descriptors. Small numbers are taken: null and 1 and 2 are
/// streams.
pub(crate) fn handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// Runs when the process ends well.
pub(crate) fn at_exit(function: extern "C" fn()) {
    unsafe extern "C" {
        safe fn atexit(function: extern "C" fn()) -> i32;
    }
    let _ = atexit(function);
}
