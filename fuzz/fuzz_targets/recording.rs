//! Any bytes as a pickle, a snapshot, a trace or a timeline: an error, or parts that are the whole peak.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::recording::{pickle::Pickle, profiler, snapshot};

fuzz_target!(|data: &[u8]| {
    if let Ok(pickle) = Pickle::parse(data) {
        let _ = (pickle.list(pickle.root()), pickle.key(pickle.root(), "segments"), pickle.count(pickle.root()));
    }
    if let Ok(recording) = snapshot::read(data) {
        assert!(recording.peak_allocated > 0);
        let parts: u64 = recording.parts.iter().map(|part| part.bytes).sum();
        assert!(recording.parts.is_empty() || parts == recording.peak_allocated);
    }
    let _ = profiler::read(data);
});
