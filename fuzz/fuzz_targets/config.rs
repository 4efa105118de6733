//! Any `config.json`, read as leniently as the program reads it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::source::{adapter, json, quantization::Quantization};

fuzz_target!(|data: &[u8]| {
    let Ok(config) = json::parse(data) else {
        // What strict JSON allows, we read.
        assert!(serde_json::from_slice::<serde_json::Value>(data).is_err());
        return;
    };
    let _ = Quantization::from_config(&config);
    let _ = adapter::parse(&config);
});
