//! Settings of transformers' `generate`.

use serde_json::{Value, json};

use crate::ask::runner::Scope;
use crate::ask::setting::{Kind, Setting, Spelling, Topic, setting};
use crate::ask::tree;

pub(super) const ROWS: &[Setting] = &[
    setting("new_tokens", "new-tokens", Kind::Whole, "Tokens to generate; 0: one forward pass")
        .from("our guess")
        .on(Topic::Generation, Scope::GENERATE)
        .example("--new-tokens 8"),
    setting(
        "stop_after",
        "stop-after",
        Kind::Whole,
        "Tokens after which every sequence has ended, when that is earlier",
    )
    .from("never")
    .on(Topic::Generation, Scope::GENERATE)
    .example("--stop-after 4 --new-tokens 900"),
    setting("beams", "beams", Kind::Whole, "Beams per prompt")
        .from("transformers 5.17's default")
        .on(Topic::Generation, Scope::GENERATE)
        .example("--beams 4"),
    setting("choice", "sample", Kind::Spelled(SAMPLE), "Sample instead of taking the likeliest token")
        .from("transformers 5.17's default")
        .on(Topic::Generation, Scope::GENERATE)
        .example("--sample --batch-size 64 --prompt 4"),
    setting(
        "forced_length",
        "min-new-tokens",
        Kind::Switch,
        "The length is forced (min_new_tokens forbids the end of the sequence)",
    )
    .on(Topic::Generation, Scope::GENERATE)
    .example("--min-new-tokens --batch-size 64 --prompt 4"),
    setting("weights", "dtype", super::FLOATS, "The type of the weights")
        .also(&["precision"])
        .value("TYPE")
        .from("as the config says, else bf16")
        .on(Topic::Precision, Scope::GENERATE)
        .example("--dtype fp32"),
    setting(
        "cache",
        "cache",
        Kind::Spelled(CACHE),
        "How keys and values are kept: growing, allocated once, on the host, in few bits, or not at all",
    )
    .from("transformers 5.17's default")
    .on(Topic::Generation, Scope::GENERATE)
    .example("--cache static"),
    setting(
        "cache",
        "no-kv-cache",
        Kind::Spelled(NO_CACHE),
        "Compute everything again for every token (use_cache=False)",
    )
    .from("transformers 5.17's default")
    .on(Topic::Generation, Scope::GENERATE)
    .example("--no-kv-cache"),
    setting(
        "cache.quantized.backend",
        "cache-backend",
        Kind::Choice(&[("quanto", "optimum-quanto"), ("hqq", "HQQ")]),
        "Who packs a quantised cache",
    )
    .value("WHO")
    .from("transformers 5.17's default")
    .on(Topic::Generation, Scope::GENERATE)
    .example("--cache-backend hqq --cache quantized"),
    setting("cache.quantized.bits", "cache-bits", Kind::Whole, "Bits of a quantised cache")
        .from("transformers 5.17's default")
        .on(Topic::Generation, Scope::GENERATE)
        .example("--cache-bits 2 --cache quantized"),
    setting(
        "cache.quantized.group_size",
        "cache-group-size",
        Kind::Whole,
        "Elements of a quantised cache that share a scale",
    )
    .from("transformers 5.17's default")
    .on(Topic::Generation, Scope::GENERATE)
    .example("--cache-group-size 32 --cache quantized"),
    setting(
        "cache.quantized.residual_length",
        "cache-residual",
        Kind::Whole,
        "New tokens that a quantised cache keeps in full width",
    )
    .from("transformers 5.17's default")
    .on(Topic::Generation, Scope::GENERATE)
    .example("--cache-residual 16 --cache quantized"),
    setting("assistant.model", "assistant-model", Kind::Text, "A small model that drafts tokens (assisted decoding)")
        .value("MODEL")
        .from("none")
        .on(Topic::DraftedTokens, Scope::GENERATE)
        .example("--assistant-model Qwen/Qwen2.5-0.5B"),
    setting(
        "assistant.tokens",
        "num-assistant-tokens",
        Kind::Whole,
        "Tokens that the assistant drafts before each check",
    )
    .from("transformers 5.17's default")
    .on(Topic::DraftedTokens, Scope::GENERATE)
    .example("--num-assistant-tokens 100 --assistant-model Qwen/Qwen2.5-0.5B"),
    setting(
        "assistant.schedule",
        "num-assistant-tokens-schedule",
        Kind::Choice(&[
            ("constant", "the same in every round"),
            ("heuristic", "two more after a draft that was accepted whole, else one less"),
        ]),
        "How that number changes",
    )
    .from("transformers 5.17's default")
    .on(Topic::DraftedTokens, Scope::GENERATE)
    .example("--num-assistant-tokens-schedule heuristic --assistant-model Qwen/Qwen2.5-0.5B"),
    setting(
        "prompt_lookup",
        "prompt-lookup-num-tokens",
        Kind::Whole,
        "Draft so many tokens by looking them up in the prompt",
    )
    .from("none")
    .on(Topic::DraftedTokens, Scope::GENERATE)
    .example("--prompt-lookup-num-tokens 10"),
    setting(
        "accepted",
        "accepted",
        Kind::Choice(&[("all", "every draft, whole"), ("none", "no drafted token")]),
        "How many drafted tokens are accepted, which depends on data",
    )
    .from("our guess: the fewest rounds")
    .on(Topic::DraftedTokens, Scope::GENERATE)
    .example("--accepted none --prompt-lookup-num-tokens 10"),
];

const SAMPLE: Spelling = Spelling {
    words: &["true"],
    bare: Some("true"),
    read: |_| Ok(json!({"choice": "sample"})),
    write: |plan| (plan.get("choice")? == "sample").then(|| "true".into()),
};

const CACHE: Spelling = Spelling {
    words: &["dynamic", "static", "offloaded", "quantized", "none"],
    bare: None,
    read: |text| match text {
        "dynamic" | "static" | "offloaded" | "none" => Ok(json!({"cache": text})),
        "quantized" => Ok(json!({"cache": {"quantized": {}}})),
        "offloaded-static" | "offloaded_static" => Err("simulated: use dynamic, static, offloaded or quantized".into()),
        _ => Err("dynamic, static, offloaded, quantized or none".into()),
    },
    write: |plan| match plan.get("cache")? {
        Value::String(text) => Some(text.clone()),
        cache => tree::get(cache, "quantized").map(|_| "quantized".into()),
    },
};

const NO_CACHE: Spelling =
    Spelling { words: &["true"], bare: Some("true"), read: |_| Ok(json!({"cache": "none"})), write: |_| None };
