//! Kernels: registered, asked about, launched; none runs.

use std::cell::Cell;
use std::ffi::c_void;

use crate::binaries;
use crate::card::card;
use crate::foreign::{Status, get, host_mut, put, put_at};

/// `dim3`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Extent {
    x: u32,
    y: u32,
    z: u32,
}

#[derive(Clone, Copy, Default)]
struct Configuration {
    grid: Extent,
    block: Extent,
    shared: usize,
    stream: usize,
}

thread_local! {
    // The compiler's `<<<…>>>` pushes a configuration; the stub of the kernel takes it.
    static CONFIGURATION: Cell<Configuration> = Cell::default();
}

/// Blocks of a kernel that fit on a multiprocessor; threads decide, because registers are not known.
fn resident_blocks(threads: i32) -> i32 {
    (card().threads_per_multiprocessor / threads.max(1)).clamp(1, 8)
}

exports! {
    // The handle of a binary points to the architecture of it that runs.
    fn __cudaRegisterFatBinary(binary: *const c_void) -> *const i32 { Box::leak(Box::new(binaries::register(binary))) }
    fn __cudaRegisterFunction(binary: *const i32, function: usize) {
        if !binary.is_null() {
            binaries::add(function, get(binary))
        }
    }
    fn __cudaPushCallConfiguration(grid: Extent, block: Extent, shared: usize, stream: usize) {
        CONFIGURATION.set(Configuration { grid, block, shared, stream });
    }
    fn __cudaPopCallConfiguration(grid: *mut Extent, block: *mut Extent, shared: *mut usize, stream: *mut usize) {
        let last = CONFIGURATION.get();
        put(grid, last.grid);
        put(block, last.block);
        put(shared, last.shared);
        put(stream, last.stream);
    }
    fn __cudaInitModule(_module: usize) -> i8 { 1 }
    fn cudaFuncGetAttributes(out: *mut c_void, function: usize) {
        let architecture = binaries::architecture(function);
        // struct cudaFuncAttributes of CUDA 12 and 13: 144 bytes.
        host_mut(out, 144).fill(0);
        put_at(out, 24, [1024_i32, 32, architecture, architecture]);
        put_at(out, 44, card().shared_per_block());
    }
    fn cuFuncGetAttribute(out: *mut i32, attribute: i32, _function: usize) {
        put(out, match attribute {
            0 => 1024,                       // threads of a block
            4 => 32,                         // registers
            5 | 6 => card().capability,      // PTX and binary version
            8 => card().shared_per_block(),  // dynamic shared memory
            _ => 0,
        });
    }
    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(out: *mut i32, _function: usize, threads: i32, _shared: usize) {
        put(out, resident_blocks(threads))
    }
    fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out: *mut i32, _function: usize, threads: i32, _shared: usize, _flags: u32) {
        put(out, resident_blocks(threads))
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(out: *mut i32, _function: usize, threads: i32, _shared: usize) {
        put(out, resident_blocks(threads))
    }
    fn cudaOccupancyMaxActiveClusters(out: *mut i32, _function: usize, _configuration: usize) {
        put(out, card().multiprocessors / 2)
    }
    fn cudaGetSymbolAddress(out: *mut u64, _symbol: usize) -> Status {
        // A variable of a module: one page for all of them, on no account of torch.
        put(out, 0x0fff_ffe0_0000);
        0
    }
    fn cudaGetSymbolSize(out: *mut usize, _symbol: usize) { put(out, 8) }
    fn cudaLibraryGetKernelCount(out: *mut u32, _library: usize) { put(out, 0) }
    fn cuModuleGetGlobal_v2(address: *mut u64, bytes: *mut usize) {
        put(address, 0x0fff_ffe0_0000);
        put(bytes, 8);
    }
    fn nvrtcVersion(major: *mut i32, minor: *mut i32) {
        put(major, card().runtime / 1000);
        put(minor, card().runtime % 1000 / 10);
    }
    fn nvrtcGetPTXSize(_program: usize, out: *mut usize) { put(out, 1) }
    fn nvrtcGetCUBINSize(_program: usize, out: *mut usize) { put(out, 1) }
    fn nvrtcGetProgramLogSize(_program: usize, out: *mut usize) { put(out, 1) }
    fn nvrtcGetPTX(_program: usize, out: *mut u8) { put(out, 0) }
    fn nvrtcGetCUBIN(_program: usize, out: *mut u8) { put(out, 0) }
    fn nvrtcGetProgramLog(_program: usize, out: *mut u8) { put(out, 0) }
    fn nvrtcGetLoweredName(_program: usize, expression: usize, out: *mut usize) { put(out, expression) }
}

handles! {
    cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleGetFunction cuLibraryLoadData cuLibraryGetKernel
    cuLibraryGetModule cuKernelGetFunction __cudaGetKernel cudaLibraryLoadData cudaLibraryGetKernel cudaGetFuncBySymbol
    nvrtcCreateProgram
}

nothing! {
    __cudaRegisterFatBinaryEnd __cudaUnregisterFatBinary __cudaRegisterVar __cudaRegisterManagedVar
    __cudaLaunchKernel __cudaLaunchKernel_ptsz cudaLaunchKernel cudaLaunchKernelExC cudaLaunchCooperativeKernel cuLaunchKernel
    cuLaunchKernelEx cuLaunchCooperativeKernel cudaFuncSetAttribute cuFuncSetAttribute cuFuncSetCacheConfig cudaFuncSetCacheConfig
    cuModuleUnload cuLibraryUnload cuFuncLoad cuTensorMapEncodeTiled cuTensorMapEncodeIm2col nvrtcCompileProgram
    nvrtcDestroyProgram nvrtcAddNameExpression
}
