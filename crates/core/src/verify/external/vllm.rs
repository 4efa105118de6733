//! vLLM's start-up lines.

use serde_json::{Value, json};

use super::{compared, number};
use crate::dtype::DType;
use crate::memory::device::Device;
use crate::model::Model;
use crate::plan::{Gpu, Gpus, ServePlan};
use crate::serving::vllm::{Card, Draft, Speculation, VllmPlan, rules};
use crate::serving::{ServedModel, WeightFormat};
use crate::verify::kinds::Score;

pub(super) fn score(index: u64, row: &Value) -> Vec<Score> {
    let name = row["model"].as_str().unwrap_or_default();
    let label = format!("vllm_logs {index} {name}");
    let skip = |why: &str| vec![Score::skipped(&label, why)];
    if row["confidence"] == "low" {
        return skip("kept for context only by its source");
    }
    let Some(entry) = super::names::find(name) else { return skip("its config is not in the catalogue") };
    let mut config = entry.config;
    let quantization = row["quantization"].as_str().unwrap_or_default();
    let method = match quantization {
        "" => None,
        q if q.contains("fp8") || q.contains("w8a8") => Some(json!({"quant_method": "fbgemm_fp8"})),
        q if q.contains("awq") => Some(json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"})),
        q if q.contains("gptq") => Some(json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true})),
        _ => None,
    };
    // The config itself says how it is stored, where it is the upload of the log.
    let own = config["quantization_config"]["quant_method"].as_str().is_some_and(|own| quantization.contains(own));
    let weights_known = (quantization.is_empty() || method.is_some() || own) && !name.contains("4-bit");
    if let (Some(method), Some(object)) = (method, config.as_object_mut()) {
        object.insert("quantization_config".into(), method);
    }
    let Ok(model) = Model::new(config, entry.auto_class.as_deref()) else { return skip("its config is refused") };
    let Ok(format) = WeightFormat::of(&model) else { return skip("its quantisation is refused") };
    let Ok(served) = ServedModel::of(&model, &format) else { return skip("its config is refused") };
    let plan = plan(row);
    let mut scored = Vec::new();
    let mut compare = |quantity: &'static str, predicted: u64, measured: Option<u64>| {
        if let Some(measured) = measured {
            scored.push(compared(&label, quantity, predicted, measured));
        }
    };
    // What is loaded and set aside follows rules of a version; `0.1x` names none.
    let version_known = !row["vllm_version"].as_str().is_some_and(|version| version.starts_with("0.1x"));
    if weights_known && version_known && row["draft"].is_null() {
        let budget = plan.budget(&served);
        let held = ["weights", "LoRA slots"];
        let weights = budget.parts.iter().filter(|part| held.contains(&part.name.as_str())).map(|part| part.bytes);
        compare("weights", weights.sum(), number(&row["measured_bytes"]));
        let stated = !row["gpu_memory_utilization"].is_null() && !row["gpu_total_gib"].is_null();
        // Of several cards, the V0 engine logs one and does not say which.
        let one_pool = plan.tensor_parallel == 1 || rules(&plan.version).v1;
        if stated && one_pool && !served.multimodal {
            compare("cache pool", budget.cache, number(&row["measured_kv_bytes"]));
        }
    }
    // The pool is the log's own, so that this scores how tokens follow from bytes.
    if let Some(pool) = number(&row["measured_kv_bytes"]) {
        let speculation = if name.contains("EAGLE") { Speculation::Layers(1) } else { Speculation::NGram };
        let draft = Draft::of(speculation, &served, &plan);
        let held = plan.blocks(&served, Some(&draft), pool);
        // Whether prompts are kept decides how many states a sequence has.
        let states = served.layers.iter().any(|layer| served.states(layer) != (0, 0));
        let known = !states || !rules(&plan.version).states_kept || !row["prefix_caching"].is_null();
        // On several cards the smallest pool counts, and only one rank's line is in the log.
        if plan.tensor_parallel == 1 && known {
            compare("cache tokens", held.cache_tokens, number(&row["kv_cache_tokens"]));
        }
    }
    if scored.is_empty() { skip("nothing in it that our rules answer") } else { scored }
}

/// A log's family, and as much of its plan as says which features it used.
pub fn run_plan(row: &Value) -> Option<(String, ServePlan)> {
    let entry = super::names::find(row["model"].as_str()?)?;
    let plan = ServePlan {
        version: row["vllm_version"].as_str().map(str::to_owned),
        enforce_eager: row["enforce_eager"] == true,
        tensor_parallel_size: number(&row["tensor_parallel"]),
        kv_cache_dtype: row["kv_cache_dtype"].as_str().map(str::to_owned),
        enable_lora: row["enable_lora"] == true,
        speculative_model: row["draft"].as_str().map(str::to_owned),
        ..ServePlan::default()
    };
    Some((entry.config["model_type"].as_str()?.to_owned(), plan))
}

fn plan(row: &Value) -> VllmPlan {
    let one = |key: &str| number(&row[key]);
    let cache = row["kv_cache_dtype"].as_str().unwrap_or("auto");
    let gibibytes = row["gpu_total_gib"].as_f64().unwrap_or(80.0);
    let version = row["vllm_version"].as_str().unwrap_or_default();
    // Before 0.10 only the V0 engine printed what weights and activations take beside each other.
    let [minor, printed] = [rules(version).since < [0, 10, 0], !row["activation_peak_gib"].is_null()];
    let version = match version {
        old if minor && printed && !old.contains("V1") && !old.contains("V0") => format!("{old} V0"),
        old if old.starts_with("0.1x") => old.replacen("0.1x", "0.11", 1),
        other => other.to_owned(),
    };
    let card = row["gpu"].as_str().unwrap_or_default();
    let memory = (gibibytes * 1_073_741_824.0) as u64;
    let gpu = card_of(card, memory);
    let default = VllmPlan::default();
    VllmPlan {
        version,
        utilization_thousandths: (row["gpu_memory_utilization"].as_f64().unwrap_or(0.9) * 1000.0).round() as u64,
        tensor_parallel: one("tensor_parallel").unwrap_or(1),
        max_model_len: one("max_model_len"),
        max_num_batched_tokens: one("max_num_batched_tokens"),
        max_num_seqs: one("max_num_seqs"),
        block_size: one("block_size").unwrap_or(16),
        cache_dtype: if cache.starts_with("fp8") { DType::F8E4M3 } else { DType::BF16 },
        lora: (row["enable_lora"] == true).then(|| [1, one("max_lora_rank").unwrap_or(16)]),
        prefix_caching: row["prefix_caching"] == true,
        memory,
        // What a log does not name is no card of the rules'.
        card: Gpus::embedded().called(card, None).map_or_else(Card::default, |gpu| Card::from(&gpu)),
        multiprocessors: gpu.threads().0,
        bare_context: gpu.bare_context(),
        workspace: Device::of(&gpu).blas_workspace(),
        ..default
    }
}

/// The card of a log; where it says only how much memory there is, one of that size.
fn card_of(name: &str, memory: u64) -> Gpu {
    let cards = Gpus::embedded();
    let nvidia = || cards.all().filter(|card| card.capability.is_some());
    let nearest = || nvidia().min_by_key(|card| card.memory.abs_diff(memory)).unwrap_or_else(Gpu::h200);
    cards.called(name, None).unwrap_or_else(nearest)
}
