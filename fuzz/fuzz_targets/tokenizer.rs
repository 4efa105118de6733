//! Any bytes as a `tokenizer.json` that counts the tokens of texts and chats.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast::foreign;

const ROWS: &str = "{\"text\": \"a b, héllo 12 世界\"}\n{\"text\": \"\"}\n{\"prompt\": \"a \", \"completion\": \"b\"}\n\
                    {\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}";

fuzz_target!(|bytes: &[u8]| {
    if let Ok(counted) = foreign::samples(bytes, &serde_json::Value::Null, ROWS) {
        assert_eq!(counted.len(), 4);
    }
});
