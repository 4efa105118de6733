//! Any prefix of any file: an error, a longer wish, or a header whose tensors fill its data exactly.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::source::{Progress, safetensors};

fuzz_target!(|data: &[u8]| {
    match safetensors::parse(data) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(Progress::Need { bytes }) => {
            assert!(bytes > data.len() as u64 && bytes <= 8 + safetensors::MAX_HEADER_BYTES);
        }
        Ok(Progress::Ready(header)) => {
            let mut end = 0;
            for tensor in &header.tensors {
                assert_eq!(tensor.offset, end);
                end += tensor.bytes;
                let _ = tensor.elements();
            }
            assert_eq!(end, header.data_bytes);
            assert!(header.data_start <= data.len() as u64);
        }
    }
});
