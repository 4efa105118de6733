//! Any name, size or count a user may type. Slow, because each is looked up in the whole catalogue.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::source::catalogue;
use vramcast_core::units::{Bytes, parse_count};

fuzz_target!(|text: &str| {
    if let Some(entry) = catalogue::find(text) {
        assert_eq!(catalogue::find(&entry.id), Some(entry));
    }
    for name in catalogue::suggest(text) {
        assert!(catalogue::find(name).is_some());
    }
    if let Ok(bytes) = text.parse::<Bytes>() {
        assert!(!bytes.to_string().is_empty());
    }
    let _ = parse_count(text);
});
