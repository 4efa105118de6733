//! Any `config.json`, read as leniently as the program reads it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::model::Model;
use vramcast_core::source::{adapter, json, quantization::Quantization};

fuzz_target!(|data: &[u8]| {
    let Ok(config) = json::parse(data) else {
        // What strict JSON allows, we read.
        assert!(serde_json::from_slice::<serde_json::Value>(data).is_err());
        return;
    };
    let _ = Quantization::from_config(&config);
    let _ = adapter::parse(&config);
    // Any family on any config: an inventory or an error, never a panic.
    if let Ok(model) = Model::new(config, None) {
        let _ = model.inventory().map(|inventory| (inventory.total(), inventory.active(), inventory.cache_bytes_per_token(2)));
    }
});
