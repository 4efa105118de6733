//! Settings of transformers' `generate`.

use serde_json::{Value, json};

use crate::ask::runner::Scope;
use crate::ask::setting::{Kind, Setting, Spelling, Topic, setting};
use crate::ask::tree;

pub(super) const ROWS: &[Setting] = &[
    setting("new_tokens", "new-tokens", Kind::Whole, "Tokens to generate; 0: one forward pass")
        .also(&["max-new-tokens"])
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
        .also(&["num-beams"])
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
    setting("cache", "kv-cache", Kind::Spelled(KV_CACHE), "Another tool's word: whether keys and values are kept")
        .on(Topic::Generation, Scope::GENERATE),
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
    setting("device_map.how", "device-map", Kind::Spelled(DEVICE_MAP), "Where from_pretrained puts modules: auto, balanced, balanced_low_0, sequential, or a JSON object of names and devices")
        .value("MAP")
        .from("one card")
        .on(Topic::ManyCards, Scope::GENERATE)
        .example("--device-map sequential --gpus 2"),
    setting("device_map.cards", "gpus", Kind::Whole, "Cards that a device map puts modules on")
        .value("N")
        .from("one card")
        .on(Topic::ManyCards, Scope::GENERATE)
        .example("--gpus 2"),
    setting("device_map.max_memory", "max-memory", Kind::Spelled(MAX_MEMORY), "What each card, the host and the disk may hold of weights, such as 0=20GiB,1=20GiB,cpu=60GiB")
        .value("SIZES")
        .from("what they have")
        .on(Topic::ManyCards, Scope::GENERATE)
        .example("--max-memory 0=1GiB,cpu=64GiB"),
    setting(
        "diffusion.offload",
        "offload",
        Kind::Choice(&[
            ("none", "all parts on the card"),
            ("model", "enable_model_cpu_offload: the part that runs is on the card"),
            ("sequential", "enable_sequential_cpu_offload: the module that runs is on the card"),
        ]),
        "Where parts of a pipeline of diffusers wait",
    )
    .value("HOW")
    .from("diffusers 0.42's default")
    .on(Topic::Pictures, Scope::GENERATE)
    .example("--offload model"),
    setting(
        "diffusion.unguided",
        "no-guidance",
        Kind::Switch,
        "No second picture without the prompt (guidance_scale of 1)",
    )
    .from("diffusers 0.42's default")
    .on(Topic::Pictures, Scope::GENERATE)
    .example("--no-guidance"),
    setting("diffusion.vae_tiling", "vae-tiling", Kind::Switch, "Large pictures are decoded in tiles (vae.enable_tiling)")
        .from("diffusers 0.42's default")
        .on(Topic::Pictures, Scope::GENERATE)
        .example("--vae-tiling --images 1x768x768"),
    setting("diffusion.vae_slicing", "vae-slicing", Kind::Switch, "Pictures are decoded one by one (vae.enable_slicing)")
        .from("diffusers 0.42's default")
        .on(Topic::Pictures, Scope::GENERATE)
        .example("--vae-slicing --batch-size 2"),
    setting(
        "diffusion.attention_slicing",
        "attention-slicing",
        Kind::Switch,
        "A UNet attends half of its heads at a time (enable_attention_slicing)",
    )
    .from("diffusers 0.42's default")
    .on(Topic::Pictures, Scope::GENERATE)
    .example("--attention-slicing"),
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

const KV_CACHE: Spelling = Spelling {
    words: &["true", "false"],
    bare: Some("true"),
    read: |text| match text {
        "true" => Ok(json!({})),
        "false" => Ok(json!({"cache": "none"})),
        _ => Err("true or false".into()),
    },
    write: |_| None,
};

const DEVICE_MAP: Spelling = Spelling {
    words: &["auto", "balanced", "balanced_low_0", "sequential"],
    bare: None,
    read: |text| match text {
        "auto" | "balanced" | "balanced_low_0" | "sequential" => Ok(json!({"device_map": {"how": text}})),
        _ => {
            let wrong = || "auto, balanced, balanced_low_0, sequential or a JSON object such as {\"\": 0, \"lm_head\": \"cpu\"}";
            let value: Value = serde_json::from_str(text).map_err(|_| wrong().to_owned())?;
            let object = value.as_object().filter(|object| !object.is_empty()).ok_or_else(wrong)?;
            let device = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let modules: serde_json::Map<String, Value> =
                object.iter().map(|(name, value)| (name.clone(), device(value).into())).collect();
            Ok(json!({"device_map": {"how": "given", "modules": modules}}))
        }
    },
    write: |plan| {
        let map = plan.get("device_map")?;
        match map.get("how").and_then(Value::as_str) {
            Some("given") => Some(map.get("modules")?.to_string()),
            how => how.map(str::to_owned),
        }
    },
};

/// As accelerate reads sizes (`convert_file_size_to_int`).
const MAX_MEMORY: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| {
        let wrong = || "sizes of cards, cpu and disk, such as 0=20GiB,1=20GiB,cpu=60GiB".to_owned();
        let size = |text: &str| {
            let units = [
                ("GiB", 1u64 << 30),
                ("MiB", 1 << 20),
                ("KiB", 1 << 10),
                ("GB", 1_000_000_000),
                ("MB", 1_000_000),
                ("KB", 1000),
            ];
            let (number, unit) =
                units.iter().find_map(|(end, unit)| Some((text.strip_suffix(end)?, *unit))).unwrap_or((text, 1));
            let number: f64 = number.trim().parse().ok()?;
            (0.0..1e18).contains(&(number * unit as f64)).then_some((number * unit as f64) as u64)
        };
        let mut limits = serde_json::Map::new();
        for part in text.trim_matches(['{', '}']).split(',') {
            let (name, bytes) = part.split_once(['=', ':']).ok_or_else(wrong)?;
            let bare = |text: &str| text.trim().trim_matches(['"', '\'']).to_owned();
            limits.insert(bare(name), size(&bare(bytes)).ok_or_else(wrong)?.into());
        }
        let cards =
            limits.keys().filter_map(|name| name.parse::<u64>().ok()).max().map_or(1, |last| last.saturating_add(1));
        Ok(json!({"device_map": {"max_memory": limits, "cards": cards}}))
    },
    write: |plan| {
        let limits = plan.get("device_map")?.get("max_memory")?.as_object()?;
        Some(limits.iter().map(|(name, bytes)| format!("{name}={bytes}")).collect::<Vec<_>>().join(","))
    },
};
