//! Any text as a chat template, and as rows of data beside one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::json;
use vramcast::foreign;

/// Whatever stands between spaces is a token.
const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}}"#;
const CHATS: &str = r#"{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": " a "}, {"role": "assistant", "content": null}]}
{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "a a"}]}
{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "a"}]}"#;

fuzz_target!(|text: &str| {
    let config = json!({"chat_template": text, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
    let _ = foreign::samples(TOKENIZER.as_bytes(), &config, CHATS);
    let _ = foreign::samples(TOKENIZER.as_bytes(), &json!({}), text);
});
