//! Rows of `generate` in the ledger, as plans.

use serde_json::Value;

use super::ledger::{card, dtype};
use crate::dtype::DType;
use crate::plan::{
    Accepted, AllocatorOptions, Assistant, AttentionKind, Batch, CacheBackend, CacheImplementation, Choice, InferPlan,
    QuantizedCache, Schedule,
};

/// The plan of a row: greedy, its length forced by `min_new_tokens`, as truth/ledger/measure.py runs it.
pub(super) fn plan(row: &Value) -> Result<InferPlan, String> {
    let run = &row["run"];
    for (key, what) in [("lora", "adapters of generate"), ("peft", "adapters of generate"), ("dist", "several cards")] {
        if !run[key].is_null() {
            return Err(format!("{what} are not simulated yet"));
        }
    }
    let number = |key: &str| run[key].as_u64();
    let batch_size = number("batch").ok_or("run.batch is missing")?;
    let grid = run["grid"].as_array().map(|grid| [0, 1].map(|i| grid.get(i).and_then(Value::as_u64).unwrap_or(1)));
    let (allocator, _) =
        AllocatorOptions::parse(run["alloc_conf"].as_str().unwrap_or_default()).map_err(|e| e.to_string())?;
    let name = row["gpu"].as_str().unwrap_or_default();
    let cache = match run["cache"].as_str() {
        _ if run["use_cache"] == false => CacheImplementation::None,
        None | Some("dynamic") => CacheImplementation::Dynamic,
        Some("static") => CacheImplementation::Static,
        Some("offloaded") => CacheImplementation::Offloaded,
        Some("quantized") => CacheImplementation::Quantized(quantised(&run["cache_config"])),
        Some(other) => return Err(format!("cache implementation {other} is not simulated yet")),
    };
    let weights = dtype(&run["weights"]).unwrap_or(DType::BF16);
    Ok(InferPlan {
        batch: Batch {
            batch_size,
            seq_len: number("seq").unwrap_or(0),
            target_len: number("target_seq"),
            images: grid.map(|[height, width]| [batch_size, height, width]),
            audio_frames: (row["kind"] == "speech").then_some(3000),
            mask: run["mask"] == true,
            padded: false,
            real_tokens: None,
        },
        new_tokens: number("new_tokens").unwrap_or(0),
        // A pretend card holds no data, so every sequence looks finished after its first token, unless the loop was
        // made to go on.
        stop_after: (name.starts_with("replay") && run["all_tokens"] != true).then_some(1),
        cache,
        beams: number("beams").unwrap_or(1),
        choice: if run["sample"] == true { Choice::Sample } else { Choice::Greedy },
        forced_length: true,
        assistant: assistant(&run["assistant"], weights),
        prompt_lookup: number("prompt_lookup"),
        accepted: if run["accepted"] == "none" { Accepted::None } else { Accepted::All },
        weights,
        quantization: super::recorded::quantization(row)?,
        attention: if run["attn"] == "eager" { AttentionKind::Eager } else { AttentionKind::Sdpa },
        gpu: card(name),
        allocator: super::ledger::on_its_card(row, allocator),
    })
}

/// The assistant of a row, in the model's own type unless it says otherwise.
fn assistant(row: &Value, weights: DType) -> Option<Assistant> {
    let default = Assistant::default();
    row.is_object().then(|| Assistant {
        model: row["model"].as_str().unwrap_or_default().to_owned(),
        config: row["config"].clone(),
        weights: dtype(&row["weights"]).unwrap_or(weights),
        tokens: row["tokens"].as_u64().unwrap_or(default.tokens),
        schedule: if row["schedule"] == "heuristic" { Schedule::Heuristic } else { default.schedule },
    })
}

/// `cache_config` of a row, over transformers' defaults.
fn quantised(config: &Value) -> QuantizedCache {
    let default = QuantizedCache::default();
    QuantizedCache {
        backend: if config["backend"] == "hqq" { CacheBackend::Hqq } else { CacheBackend::Quanto },
        bits: config["nbits"].as_u64().unwrap_or(default.bits),
        group_size: config["q_group_size"].as_u64().unwrap_or(default.group_size),
        residual_length: config["residual_length"].as_u64().unwrap_or(default.residual_length),
    }
}
