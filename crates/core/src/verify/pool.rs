//! vLLM run for real: what its worker loads, profiles and has left for the cache (truth/engines/FORMAT.md).

use serde_json::Value;

use super::engine::{Compared, Scored};
use crate::model::Model;
use crate::plan::{Gpus, ServePlan, ServingEngine};
use crate::serving::{Budget, Served, start};
use crate::source::catalogue;

/// A run beside our rules. What lies outside torch is no part of it: on a pretended card there is none.
pub(super) fn score(id: &str, row: &Value) -> Result<Scored, String> {
    let name = row["model"].as_str().ok_or("the row names no model")?;
    let entry = catalogue::find(name).ok_or_else(|| format!("{name} is not in the catalogue"))?;
    let mut config = entry.config;
    if let (Some(object), Some(changes)) = (config.as_object_mut(), row["config"].as_object()) {
        object.extend(changes.clone());
    }
    let model = Model::new(config, entry.auto_class.as_deref()).map_err(|error| error.to_string())?;
    let served = start(&model, &plan(row)?).map_err(|faults| format!("{:?}", faults.first()))?;
    let Served::Pool(budget) = served else { return Err("no pool".into()) };
    let part = |names: &[&str]| -> u64 {
        budget.parts.iter().filter(|part| names.contains(&part.name.as_str())).map(|part| part.bytes).sum()
    };
    let [weights, outside] = [part(&["weights", "LoRA slots", "draft model"]), part(&["outside torch"])];
    let activations = part(&["activations while profiling", "CUDA graphs"]);
    let cache = budget.cache.saturating_add(outside).saturating_sub(budget.missing);
    let mut compared = Vec::new();
    for line in row["buffers"].as_array().into_iter().flatten() {
        let kind = line[0].as_str().unwrap_or_default();
        let predicted = match kind {
            "weights" => weights,
            "activations" => activations,
            "cache" => cache,
            "sequence" => sequence(&budget),
            _ => return Err(format!("{kind} is not a part of vLLM's budget")),
        };
        let measured = line[2].as_u64().ok_or("a size is no number of bytes")?;
        compared.push(Compared { kind: kind.to_owned(), device: String::new(), predicted, measured });
    }
    let mut scored = Scored { id: id.to_owned(), model: name.to_owned(), ok: false, buffers: compared };
    scored.ok = scored.wrong().is_none();
    Ok(scored)
}

/// What one sequence of full length takes of the cache.
fn sequence(budget: &Budget) -> u64 {
    let whole = u128::from(budget.cache) * 1000 / u128::from(budget.concurrency_thousandths.max(1));
    u64::try_from(whole).unwrap_or(u64::MAX)
}

/// The settings of `vllm serve` that the row names.
pub(super) fn plan(row: &Value) -> Result<ServePlan, String> {
    let args = &row["args"];
    let number = |key: &str| args[key].as_u64();
    let on = |key: &str| args[key] == true;
    let card = row["gpu"].as_str().unwrap_or_default();
    let mut gpu = Gpus::embedded().called(card, None).ok_or_else(|| format!("{card} is not a known card"))?;
    // What the pretended card offered, where the table has learned better since.
    gpu.memory = row["memory"].as_u64().unwrap_or(gpu.memory);
    Ok(ServePlan {
        engine: ServingEngine::Vllm,
        version: row["version"].as_str().map(str::to_owned),
        gpu,
        context: number("max_model_len"),
        kv_cache_dtype: args["kv_cache_dtype"].as_str().map(str::to_owned),
        gpu_memory_utilization: args["gpu_memory_utilization"].as_f64(),
        tensor_parallel_size: number("tensor_parallel_size"),
        pipeline_parallel_size: number("pipeline_parallel_size"),
        data_parallel_size: number("data_parallel_size"),
        expert_parallel: on("enable_expert_parallel"),
        max_num_seqs: number("max_num_seqs"),
        max_num_batched_tokens: number("max_num_batched_tokens"),
        block_size: number("block_size"),
        enforce_eager: on("enforce_eager"),
        enable_lora: on("enable_lora"),
        max_loras: number("max_loras"),
        max_lora_rank: number("max_lora_rank"),
        enable_prefix_caching: args["enable_prefix_caching"].as_bool(),
        ..ServePlan::default()
    })
}
