//! Files of real runs with bytes changed, cut, doubled and moved: every one is an error or an answer, never a panic, and
//! what an answer says adds up. `fuzz/fuzz_targets/recording.rs` looks for more, guided by coverage.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use vramcast_core::recording::{Recording, pickle::Pickle, profiler, snapshot};

const FILES: [&[u8]; 6] = [
    include_bytes!("../../app/tests/recording/train.pickle"),
    include_bytes!("../../app/tests/recording/trace.json"),
    include_bytes!("../../app/tests/recording/timeline.json"),
    include_bytes!("../../../fuzz/seeds/recording/snapshot"),
    include_bytes!("../../../fuzz/seeds/recording/protocol-2"),
    include_bytes!("../../../fuzz/seeds/recording/code"),
];

#[derive(Debug, Clone)]
enum Change {
    Byte(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Remove(prop::sample::Index, usize),
    Repeat(prop::sample::Index, usize),
}

fn change() -> impl Strategy<Value = Change> {
    let place = any::<prop::sample::Index>;
    // Bytes that are instructions of pickles and signs of JSON, more often than others.
    let byte =
        prop_oneof![any::<u8>(), prop::sample::select(b"(]}uae.NKMJGX\x8c\x8a\x94\x85\x86\x87qrhj{\"[,:0-9".to_vec())];
    prop_oneof![
        8 => (place(), byte).prop_map(|(place, byte)| Change::Byte(place, byte)),
        1 => place().prop_map(Change::Cut),
        1 => (place(), 1..64_usize).prop_map(|(place, count)| Change::Remove(place, count)),
        1 => (place(), 1..64_usize).prop_map(|(place, count)| Change::Repeat(place, count)),
    ]
}

fn changed(file: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut bytes = file.to_vec();
    for change in changes {
        if bytes.is_empty() {
            break;
        }
        let end = |start: usize, count: usize, length: usize| (start + count).min(length);
        match change {
            Change::Byte(place, byte) => {
                let place = place.index(bytes.len());
                bytes[place] = *byte;
            }
            Change::Cut(place) => bytes.truncate(place.index(bytes.len())),
            Change::Remove(place, count) => {
                let start = place.index(bytes.len());
                bytes.drain(start..end(start, *count, bytes.len()));
            }
            Change::Repeat(place, count) => {
                let start = place.index(bytes.len());
                let again = bytes[start..end(start, *count, bytes.len())].to_vec();
                bytes.splice(start..start, again);
            }
        }
    }
    bytes
}

fn adds_up(recording: &Recording) {
    let parts: u64 = recording.parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
    assert!(recording.parts.is_empty() || parts == recording.peak_allocated, "{parts} of {}", recording.peak_allocated);
}

#[test]
fn the_files_as_they_are_are_read() {
    for file in FILES.iter().take(5) {
        let read = snapshot::read(file).ok().or_else(|| profiler::read(file).ok());
        adds_up(&read.expect("a file of a real run"));
    }
    assert!(snapshot::read(FILES[5]).unwrap_err().to_string().contains("would run code"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, rng_seed: RngSeed::Fixed(9), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_changed_file_is_an_error_or_an_answer(
        which in 0..FILES.len(),
        changes in prop::collection::vec(change(), 1..12),
    ) {
        let bytes = changed(FILES[which], &changes);
        if let Ok(pickle) = Pickle::parse(&bytes) {
            let root = pickle.root();
            let _ = (pickle.list(root), pickle.key(root, "segments"), pickle.count(root), pickle.text(root));
        }
        if let Ok(recording) = snapshot::read(&bytes) {
            prop_assert!(recording.peak_allocated > 0);
            adds_up(&recording);
        }
        if let Ok(recording) = profiler::read(&bytes) {
            adds_up(&recording);
        }
    }
}
