//! Any bytes as a shared library.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast::foreign;

fuzz_target!(|data: &[u8]| {
    let _ = foreign::library(data);
});
