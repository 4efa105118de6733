//! Any bytes as a log: what broke a run.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::doctor;

fuzz_target!(|bytes: &[u8]| drop(doctor::diagnose(&doctor::text(bytes))));
