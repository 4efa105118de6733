//! Any text: an error, or an index whose files all stay below their folder.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::source::safetensors_index;

fuzz_target!(|data: &[u8]| {
    if let Ok(index) = safetensors_index::parse(data) {
        assert!(!index.weight_map.is_empty() && !index.files.is_empty());
        for file in &index.files {
            assert!(safetensors_index::is_safe(file));
            let mut parts = std::path::Path::new(file).components();
            assert!(parts.all(|part| matches!(part, std::path::Component::Normal(_))));
        }
        assert!(index.weight_map.values().all(|file| index.files.binary_search(file).is_ok()));
    }
});
