//! Any prefix of any file: an error, a longer wish, or a header whose tensors do not overlap.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::source::{Progress, gguf};

fuzz_target!(|data: &[u8]| {
    for file_bytes in [None, Some(data.len() as u64), Some(u64::MAX)] {
        match gguf::parse(data, file_bytes) {
            Err(error) => assert!(!error.to_string().is_empty()),
            Ok(Progress::Need { bytes }) => {
                assert!(bytes > data.len() as u64 && bytes <= gguf::MAX_HEADER_BYTES);
            }
            Ok(Progress::Ready(header)) => {
                let mut end = 0;
                for tensor in &header.tensors {
                    assert!(tensor.offset >= end);
                    end = tensor.offset + tensor.bytes;
                    let _ = tensor.elements();
                }
                let _ = (header.architecture(), header.number("block_count"), header.split_count());
                assert!(header.tensor_bytes().is_some_and(|bytes| bytes <= end));
                // A longer prefix changes nothing.
                let mut longer = data.to_vec();
                longer.extend([0; 64]);
                assert_eq!(gguf::parse(&longer, file_bytes), Ok(Progress::Ready(header)));
            }
        }
    }
});
