//! Loads the library as a program would and calls it through its C interface.
//!
//! One test, because the library keeps one ledger for the process.

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::transmute;
use std::path::PathBuf;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const NOW: c_int = 2;
const GLOBAL: c_int = 0x100;

struct Library(*mut c_void);

impl Library {
    /// The library, built here: cargo builds none for tests that cannot link to it.
    fn open() -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("standin");
        let mut build = std::process::Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")]);
        assert!(build.arg("--target-dir").arg(&folder).status().unwrap().success());
        let path = CString::new(folder.join("debug/libvramcast_standin.so").to_str().unwrap()).unwrap();
        // SAFETY: the path ends with a zero, and the library runs nothing when it is loaded.
        let library = unsafe { dlopen(path.as_ptr(), NOW | GLOBAL) };
        assert!(!library.is_null());
        Self(library)
    }

    fn address(&self, name: &str) -> *mut c_void {
        let symbol = CString::new(name).unwrap();
        // SAFETY: the handle is open and the name ends with a zero.
        let address = unsafe { dlsym(self.0, symbol.as_ptr()) };
        assert!(!address.is_null(), "{name} is missing");
        address
    }
}

/// Calls a function of the library: its name, the types of its arguments, the arguments.
macro_rules! call {
    ($library:expr, $name:literal, ($($type:ty),*), $($argument:expr),*) => {{
        // SAFETY: the types are those of the C declaration, and every pointer is to a local of this test.
        let function: extern "C" fn($($type),*) -> i32 = unsafe { transmute($library.address($name)) };
        function($($argument),*)
    }};
}

/// The workspace of a convolution of 8 pictures of 20 channels and 32 × 32 pixels to 40 channels, in fp16, as torch asks for
/// it: by graph, heuristic and plan.
fn workspace_of_a_convolution(library: &Library) -> i64 {
    let create = || {
        let mut out = 0_u64;
        call!(library, "cudnnBackendCreateDescriptor", (i32, *mut u64), 0, &mut out);
        out
    };
    type Set = (u64, i32, i32, Vec<u64>);
    let set = |(descriptor, attribute, kind, values): Set| {
        let values = values.as_ptr();
        let count = if attribute == 902 || attribute == 903 { 4 } else { 1 };
        call!(
            library,
            "cudnnBackendSetAttribute",
            (u64, i32, i32, i64, *const u64),
            descriptor,
            attribute,
            kind,
            count,
            values
        );
    };
    const DATA_TYPE: i32 = 1;
    const INT64: i32 = 3;
    const DESCRIPTOR: i32 = 15;
    const HALF: u64 = 2;
    let tensor = |sizes: [u64; 4]| {
        let tensor = create();
        let strides = vec![sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1];
        [(901, DATA_TYPE, vec![HALF]), (902, INT64, sizes.to_vec()), (903, INT64, strides)]
            .into_iter()
            .for_each(|(attribute, kind, values)| set((tensor, attribute, kind, values)));
        tensor
    };
    let (input, kernel, output) = (tensor([8, 20, 32, 32]), tensor([40, 20, 3, 3]), tensor([8, 40, 32, 32]));
    let [operation, graph, heuristic, configuration, plan] = [(); 5].map(|()| create());
    for (descriptor, attribute, named) in [
        (operation, 703, kernel),
        (operation, 704, input),
        (operation, 705, output),
        (graph, 801, operation),
        (heuristic, 201, graph),
    ] {
        set((descriptor, attribute, DESCRIPTOR, vec![named]));
    }
    let (mut count, mut workspace, mut result) = (0_i64, -1_i64, configuration);
    macro_rules! ask {
        ($descriptor:expr, $attribute:literal, $kind:expr, $out:expr) => {
            call!(
                library,
                "cudnnBackendGetAttribute",
                (u64, i32, i32, i64, *mut i64, *mut c_void),
                $descriptor,
                $attribute,
                $kind,
                1,
                &mut count,
                (&raw mut $out).cast()
            )
        };
    }
    ask!(heuristic, 202, DESCRIPTOR, result);
    assert_eq!((count, result), (1, configuration));
    set((plan, 401, DESCRIPTOR, vec![configuration]));
    ask!(plan, 402, INT64, workspace);
    workspace
}

#[test]
fn a_program_can_use_it() {
    // SAFETY: nothing else in this process reads the environment yet.
    unsafe {
        std::env::set_var("VRAMCAST_CARD", "name=Tesla T4;capability=75;memory=15828320256;count=2;context=1000000")
    };
    let library = Library::open();

    let (mut count, mut major, mut free, mut total) = (0, 0, 0_usize, 0_usize);
    assert_eq!(call!(library, "cudaGetDeviceCount", (*mut i32), &mut count), 0);
    assert_eq!(call!(library, "cudaDeviceGetAttribute", (*mut i32, i32, i32), &mut major, 75, 0), 0);
    assert_eq!((count, major), (2, 7));
    assert_eq!(call!(library, "cudaSetDevice", (i32), 5), 101, "there is no sixth card");
    assert_eq!(call!(library, "cudaSetDevice", (i32), 1), 0);

    // Memory is counted, and runs out as on the card.
    let (mut first, mut second) = (0_u64, 0_u64);
    assert_eq!(call!(library, "cudaMalloc", (*mut u64, usize), &mut first, 3 << 20), 0);
    call!(library, "cudaMemGetInfo", (*mut usize, *mut usize), &mut free, &mut total);
    assert_eq!((total, total - free), (15_828_320_256, 1_000_000 + (4 << 20)));
    assert_eq!(call!(library, "cudaMalloc", (*mut u64, usize), &mut second, 16 << 30), 2, "out of memory");
    assert_eq!(call!(library, "cudaGetLastError", (),), 2);
    assert_eq!(call!(library, "cudaGetLastError", (),), 0);

    // Small writes of the host read back; what a kernel would have written is zero.
    let (wrote, mut read) = ([7_i64, 8, 9], [1_i64; 2]);
    let from = wrote.as_ptr().cast::<c_void>();
    call!(library, "cudaMemcpyAsync", (u64, *const c_void, usize, i32, usize), first, from, 24, 1, 0);
    call!(library, "cudaMemcpy", (*mut c_void, u64, usize, i32), read.as_mut_ptr().cast(), first + 8, 16, 2);
    assert_eq!(read, [8, 9]);
    call!(library, "cudaMemcpy", (*mut c_void, u64, usize, i32), read.as_mut_ptr().cast(), first + (1 << 20), 16, 2);
    assert_eq!(read, [0, 0]);

    // A pointer knows its device.
    let mut attributes = [-1_i32; 22];
    call!(library, "cudaPointerGetAttributes", (*mut i32, u64), attributes.as_mut_ptr(), first);
    assert_eq!((attributes[0], attributes[1]), (2, 1));
    assert_eq!(call!(library, "cudaFree", (u64), first), 0);
    assert_eq!(call!(library, "cudaFree", (u64), first), 1, "freed twice");

    // Virtual memory: addresses are free, pages are not. The driver's functions are found by name.
    let (mut create, mut pages, mut range) = (0_usize, 0_u64, 0_u64);
    let name = c"cuMemCreate".as_ptr();
    call!(
        library,
        "cudaGetDriverEntryPointByVersion",
        (*const c_char, *mut usize, u32, u64, *mut i32),
        name,
        &mut create,
        12000,
        0,
        &mut count
    );
    assert_eq!(create, library.address("cuMemCreate") as usize);
    let properties = [1_i32, 0, 1, 1];
    let properties = properties.as_ptr();
    assert_eq!(
        call!(library, "cuMemAddressReserve", (*mut u64, usize, usize, u64, u64), &mut range, 64 << 30, 0, 0, 0),
        0
    );
    assert_eq!(
        call!(library, "cuMemCreate", (*mut u64, usize, *const i32, u64), &mut pages, 20 << 20, properties, 0),
        0
    );
    assert_eq!(
        call!(library, "cuMemCreate", (*mut u64, usize, *const i32, u64), &mut second, 15 << 30, properties, 0),
        2
    );
    assert_eq!(call!(library, "cuMemRelease", (u64), pages), 0);

    // A world of four in one process: everyone holds the same, so a sum is four times as much.
    #[repr(C)]
    struct Identity([u64; 16]);
    let (mut world, mut rank) = (0_usize, 0);
    assert_eq!(
        call!(library, "ncclCommInitRank", (*mut usize, i32, Identity, i32), &mut world, 4, Identity([1; 16]), 3),
        0
    );
    call!(library, "ncclCommUserRank", (usize, *mut i32), world, &mut rank);
    assert_eq!(rank, 3);
    call!(library, "cudaMalloc", (*mut u64, usize), &mut first, 1000);
    call!(library, "cudaMemcpyAsync", (u64, *const c_void, usize, i32, usize), first, from, 24, 1, 0);
    const INT64: i32 = 4;
    const SUM: i32 = 0;
    call!(
        library,
        "ncclAllReduce",
        (u64, u64, usize, i32, i32, usize, usize),
        first,
        first + 512,
        2,
        INT64,
        SUM,
        world,
        0
    );
    call!(library, "cudaMemcpy", (*mut c_void, u64, usize, i32), read.as_mut_ptr().cast(), first + 512, 16, 2);
    assert_eq!(read, [28, 32]);

    // Copies with channels filled up to 24 and 40.
    let copies = 2 * (8 * 24 * 32 * 32 + 40 * 24 * 9 + 8 * 40 * 32 * 32) + 512;
    assert_eq!(workspace_of_a_convolution(&library), copies);

    // Sizes that the stand-in does not know are none; torch takes what it finds there otherwise.
    let (mut work, mut buffer) = (-1, usize::MAX);
    call!(
        library,
        "cusolverDnSgesvdaStridedBatched_bufferSize",
        (usize, i32, i32, i32, i32, usize, i32, i64, usize, i64, usize, i32, i64, usize, i32, i64, *mut i32, i32),
        0,
        0,
        8,
        8,
        8,
        0,
        8,
        64,
        0,
        8,
        0,
        8,
        64,
        0,
        8,
        64,
        &mut work,
        1
    );
    call!(
        library,
        "cusparseSpMM_bufferSize",
        (usize, i32, i32, usize, usize, usize, usize, usize, i32, i32, *mut usize),
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        &mut buffer
    );
    assert_eq!((work, buffer), (0, 0));

    // A call that nobody wrote succeeds.
    assert_eq!(call!(library, "vramcast_unknown", (*const c_char), c"cuOdd".as_ptr()), 0);
}
