//! Any `config.json`, read as leniently as the program reads it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::source::{adapter, catalogue, json, quantization::Quantization};

fuzz_target!(|data: &[u8]| {
    // Names are short; looking up long texts would only slow the rest down.
    if let (true, Ok(text)) = (data.len() < 24, std::str::from_utf8(data)) {
        let _ = catalogue::find(text);
        let _ = catalogue::suggest(text);
        let _ = text.parse::<vramcast_core::units::Bytes>();
        let _ = vramcast_core::units::parse_count(text);
    }
    let Ok(config) = json::parse(data) else {
        // What strict JSON allows, we read.
        assert!(serde_json::from_slice::<serde_json::Value>(data).is_err());
        return;
    };
    let _ = Quantization::from_config(&config);
    let _ = adapter::parse(&config);
});
