//! cuBLAS and cuBLASLt: handles and the few answers that torch reads.

use std::ffi::{c_char, c_void};

use crate::card::card;
use crate::foreign::{host_mut, put};

exports! {
    fn cublasGetMathMode(_handle: usize, out: *mut i32) { put(out, 0) }
    fn cublasGetPointerMode_v2(_handle: usize, out: *mut i32) { put(out, 0) }
    fn cublasGetAtomicsMode(_handle: usize, out: *mut i32) { put(out, 0) }
    fn cublasGetStream_v2(_handle: usize, out: *mut usize) { put(out, 0) }
    fn cublasGetVersion_v2(_handle: usize, out: *mut i32) { put(out, card().runtime * 10) }
    fn cublasGetProperty(_kind: i32, out: *mut i32) { put(out, card().runtime / 1000) }
    fn cublasGetStatusString(_status: i32) -> *const c_char { c"CUBLAS_STATUS_SUCCESS".as_ptr() }
    fn cublasGetStatusName(_status: i32) -> *const c_char { c"CUBLAS_STATUS_SUCCESS".as_ptr() }
    fn cublasLtGetVersion() -> usize { card().runtime as usize * 10 }
    fn cublasLtGetCudartVersion() -> usize { card().runtime as usize }
    // One algorithm, which needs no workspace: cublasLtMatmulHeuristicResult_t is 96 bytes of zeros then.
    #[allow(clippy::too_many_arguments)]
    fn cublasLtMatmulAlgoGetHeuristic(_handle: usize, _product: usize, _a: usize, _b: usize, _c: usize, _d: usize, _wish: usize,
                                      _wanted: i32, results: *mut c_void, found: *mut i32) {
        host_mut(results, 96).fill(0);
        put(found, 1);
    }
    fn cublasLtMatmulDescGetAttribute(_product: usize, _attribute: i32, _out: usize, _room: usize, written: *mut usize) {
        put(written, 0)
    }
}

handles! {
    cublasCreate_v2 cublasLtCreate cublasLtMatmulDescCreate cublasLtMatrixLayoutCreate cublasLtMatmulPreferenceCreate
    cublasLtMatrixTransformDescCreate
}
