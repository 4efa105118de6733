//! Handles of cuSPARSE, cuSOLVER, cuFFT and cuRAND, and what they say about workspaces: none is needed.

use crate::foreign::put;

handles! {
    cusparseCreate cusparseCreateMatDescr cusparseCreateBsrsm2Info cusparseCreateBsrsv2Info cusparseCreateCoo cusparseCreateCsr
    cusparseCreateBsr cusparseCreateDnMat cusparseCreateDnVec cusparseSpGEMM_createDescr cusparseSpSV_createDescr
    cusparseSpSM_createDescr cusolverDnCreate cusolverDnCreateGesvdjInfo cusolverDnCreateParams cusolverDnCreateSyevjInfo
    cusolverSpCreate curandCreateGenerator cusparseLtInit cusparseLtMatmulDescriptorInit
}

exports! {
    fn cufftCreate(out: *mut i32) { put(out, 1) }
    fn cufftGetVersion(out: *mut i32) { put(out, 12000) }
    #[allow(clippy::too_many_arguments)]
    fn cufftXtMakePlanMany(_plan: i32, _rank: i32, _n: usize, _in_embed: usize, _in_stride: i64, _in_dist: i64, _in_type: i32, _out_embed: usize,
                           _out_stride: i64, _out_dist: i64, _out_type: i32, _batch: i64, workspace: *mut usize, _type: i32) {
        put(workspace, 0)
    }
    fn cusparseGetVersion(_handle: usize, out: *mut i32) { put(out, 12000) }
}

sizes! { i32, (_a _b _c _d _e);
    cusolverDnSpotrf_bufferSize cusolverDnDpotrf_bufferSize cusolverDnCpotrf_bufferSize cusolverDnZpotrf_bufferSize
    cusolverDnSgetrf_bufferSize cusolverDnDgetrf_bufferSize cusolverDnCgetrf_bufferSize cusolverDnZgetrf_bufferSize
    cusolverDnSgeqrf_bufferSize cusolverDnDgeqrf_bufferSize cusolverDnCgeqrf_bufferSize cusolverDnZgeqrf_bufferSize
}
sizes! { i32, (_a _b _c);
    cusolverDnSgesvd_bufferSize cusolverDnDgesvd_bufferSize cusolverDnCgesvd_bufferSize cusolverDnZgesvd_bufferSize
}
sizes! { i32, (_a _b _c _d);
    cusolverDnSsytrf_bufferSize cusolverDnDsytrf_bufferSize cusolverDnCsytrf_bufferSize cusolverDnZsytrf_bufferSize
}
sizes! { i32, (_a _b _c _d _e _f _g);
    cusolverDnSorgqr_bufferSize cusolverDnDorgqr_bufferSize cusolverDnCungqr_bufferSize cusolverDnZungqr_bufferSize
    cusolverDnSsyevd_bufferSize cusolverDnDsyevd_bufferSize cusolverDnCheevd_bufferSize cusolverDnZheevd_bufferSize
    cusolverDnSsyevj_bufferSize cusolverDnDsyevj_bufferSize cusolverDnCheevj_bufferSize cusolverDnZheevj_bufferSize
    cusolverDnSsyevjBatched_bufferSize cusolverDnDsyevjBatched_bufferSize cusolverDnCheevjBatched_bufferSize
    cusolverDnZheevjBatched_bufferSize
}
sizes! { i32, (_a _b _c _d _e _f _g _h _i _j _k);
    cusolverDnSormqr_bufferSize cusolverDnDormqr_bufferSize cusolverDnCunmqr_bufferSize cusolverDnZunmqr_bufferSize
    cusolverDnSgesvdjBatched_bufferSize cusolverDnDgesvdjBatched_bufferSize cusolverDnCgesvdjBatched_bufferSize
    cusolverDnZgesvdjBatched_bufferSize
    cusparseSbsrsv2_bufferSize cusparseDbsrsv2_bufferSize cusparseCbsrsv2_bufferSize cusparseZbsrsv2_bufferSize
}
sizes! { i32, (_a _b _c _d _e _f _g _h _i _j _k _l);
    cusolverDnSgesvdj_bufferSize cusolverDnDgesvdj_bufferSize cusolverDnCgesvdj_bufferSize cusolverDnZgesvdj_bufferSize
}
sizes! { i32, (_a _b _c _d _e _f _g _h _i _j _k _l _m);
    cusparseSbsrsm2_bufferSize cusparseDbsrsm2_bufferSize cusparseCbsrsm2_bufferSize cusparseZbsrsm2_bufferSize
}
sizes! { i32, (_a _b _c _d _e _f _g _h _i _j _k _l _m _n _o _p);
    cusolverDnSgesvdaStridedBatched_bufferSize cusolverDnDgesvdaStridedBatched_bufferSize
    cusolverDnCgesvdaStridedBatched_bufferSize cusolverDnZgesvdaStridedBatched_bufferSize
}
sizes! { usize, (_a _b); cusparseLtMatmulGetWorkspace }
sizes! { usize, (_a _b _c _d _e _f); cusparseXcoosort_bufferSizeExt cusparseXcsrsort_bufferSizeExt }
sizes! { usize, (_a _b _c _d _e _f _g _h _i); cusparseSpMV_bufferSize cusparseSpSV_bufferSize }
sizes! { usize, (_a _b _c _d _e _f _g _h _i _j); cusparseSpMM_bufferSize cusparseSDDMM_bufferSize cusparseSpSM_bufferSize }
sizes! { usize, (_a _b _c _d _e _f _g _h _i _j _k); cusparseSpGEMM_workEstimation cusparseSpGEMM_compute }
sizes! { usize, (_a _b _c _d _e _f _g _h _i _j _k _l _m _n _o _p _q _r _s);
    cusparseScsrgeam2_bufferSizeExt cusparseDcsrgeam2_bufferSizeExt cusparseCcsrgeam2_bufferSizeExt
    cusparseZcsrgeam2_bufferSizeExt
}

/// The same of the newer interface: one size on the device, one on the host.
macro_rules! two_sizes {
    ($($argument:ident)*; $name:ident) => { exports! {
        #[allow(clippy::too_many_arguments)]
        fn $name($($argument: usize,)* device: *mut usize, host: *mut usize) {
            crate::unknown::not_counted(stringify!($name));
            put(device, 0);
            put(host, 0);
        }
    } };
}

two_sizes! { _a _b _c _d _e _f _g _h; cusolverDnXpotrf_bufferSize }
two_sizes! { _a _b _c _d _e _f _g _h _i _j; cusolverDnXgeqrf_bufferSize }
two_sizes! { _a _b _c _d _e _f _g _h _i _j _k; cusolverDnXsyevd_bufferSize }
two_sizes! { _a _b _c _d _e _f _g _h _i _j _k; cusolverDnXsyevBatched_bufferSize }
two_sizes! { _a _b _c _d _e _f _g _h _i _j _k; cusolverDnXsytrs_bufferSize }
two_sizes! { _a _b _c _d _e _f _g _h _i _j _k _l _m _n _o _p _q; cusolverDnXgeev_bufferSize }
