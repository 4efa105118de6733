//! llama.cpp's buffer lines, and a table of what it held on cards.

use serde_json::Value;

use super::{compared, mebibytes, number};
use crate::model::Model;
use crate::model::op::{CacheKind, CacheUpdate};
use crate::serving::llama_cpp::{Build, Flash, LlamaCppPlan, Split};
use crate::serving::{ServedLayer, ServedModel, WeightFormat};
use crate::verify::kinds::Score;

const MIB: u64 = 1 << 20;

/// A row of llamacpp_logs.json: the model is what the log prints of it.
pub(super) fn score_log(index: u64, row: &Value) -> Vec<Score> {
    let file = row["file"].as_str().or_else(|| row["command"].as_str()).unwrap_or_default();
    let label = format!("llamacpp_logs {index} {}", file.chars().take(48).collect::<String>());
    let skip = |why: &str| vec![Score::skipped(&label, why)];
    let Some(model) = printed_model(&row["arch"], printed_build(row)) else {
        return skip("its architecture is not printed whole");
    };
    let placed = row["offloaded_layers"].as_str().and_then(|text| text.split('/').nth(1)?.parse::<usize>().ok());
    if placed.is_some_and(|total| total != model.layers.len() + 1) {
        return skip("its lines are of two different models");
    }
    let Some(plan) = printed_plan(row) else { return skip("its cache types are not printed") };
    let Ok(estimate) = plan.estimate(&model) else { return skip("its cache type is not one of ggml's") };
    let mut scored = Vec::new();
    let devices = row["gpu_buffers_mib"].as_object();
    let on_devices: Option<u64> = devices.map(|all| all.values().filter_map(|d| mebibytes(&d["kv"])).sum());
    let on_host: u64 =
        row["host_buffers_mib"]["kv"].as_object().into_iter().flat_map(|all| all.values()).filter_map(mebibytes).sum();
    let total = on_devices.unwrap_or(0) + on_host;
    let ours = estimate.devices.iter().map(|device| device.cache).sum::<u64>() + estimate.host.cache;
    if total > 0 {
        // Logs round every buffer to a hundredth of a MiB, and CUDA pads quantised ones.
        let rounded = |bytes: u64| (bytes + MIB / 2) / MIB;
        scored.push(compared(&label, "cache", rounded(ours), rounded(total)));
    }
    if let Some((predicted, measured)) = printed_compute(row, &plan, &estimate) {
        scored.push(compared(&label, "compute", predicted, measured));
    }
    if scored.is_empty() { skip("no buffer in it that our rules answer") } else { scored }
}

/// The compute buffer where the log says all that decides it: one device or none, nothing placed by hand.
fn printed_compute(
    row: &Value,
    plan: &LlamaCppPlan,
    estimate: &crate::serving::llama_cpp::LlamaCppEstimate,
) -> Option<(u64, u64)> {
    let command = row["command"].as_str().unwrap_or_default();
    let by_hand = ["-ot ", "--override-tensor", "exps=CPU"].iter().any(|part| command.contains(part));
    let embedding = row["arch"]["arch"] == "bert";
    if by_hand || embedding || matches!(plan.build, Build::Ik { mla: 1.. }) {
        return None;
    }
    let devices: Vec<&Value> = row["gpu_buffers_mib"].as_object()?.values().collect();
    match devices.as_slice() {
        [] => Some((estimate.host.compute, mebibytes(&row["host_buffers_mib"]["compute"]["CPU"])?)),
        [only] if mebibytes(&only["model"])? > 0 => {
            Some((estimate.devices.last()?.compute, mebibytes(&only["compute"])?))
        }
        _ => None,
    }
}

fn printed_plan(row: &Value) -> Option<LlamaCppPlan> {
    let context = &row["context"];
    let lines: Vec<&str> = row["kv_lines"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let typed = |name: &str| {
        let line = lines.iter().find(|line| line.contains(name))?;
        let rest = &line[line.find(name)? + name.len()..];
        Some(rest.split(')').next()?.trim().to_owned())
    };
    let windows = lines.iter().any(|line| line.contains("non-SWA"));
    let keys = typed("c^KV (").or_else(|| typed("K (")).or_else(|| windows.then(|| "f16".to_owned()))?;
    let values = typed("kv^T (").or_else(|| typed("V (")).unwrap_or_else(|| "f16".to_owned());
    let ik = row["engine"].as_str().is_some_and(|engine| engine.starts_with("ik"));
    let mla = number(&context["mla_attn"]).and_then(|mode| u8::try_from(mode).ok()).unwrap_or(0);
    // A mode that is printed as 0 with a latent cache was chosen by the program.
    let mla = if mla == 0 && lines.iter().any(|line| line.contains("c^KV")) { 3 } else { mla };
    let layers = number(&row["arch"]["n_layer"])?;
    let offloaded = row["offloaded_layers"].as_str().and_then(|text| text.split('/').next()?.parse().ok());
    let on_device = row["gpu_buffers_mib"].as_object().is_some_and(|all| !all.is_empty());
    Some(LlamaCppPlan {
        build: match (ik, windows, printed_build(row)) {
            (true, ..) => Build::Ik { mla },
            (.., Some(number)) => Build::Numbered(number),
            (_, true, _) => Build::Current,
            _ => Build::Early,
        },
        context: number(&row["n_ctx"])?,
        parallel: number(&context["n_seq_max"]).unwrap_or(1),
        unified: context["kv_unified"] == "true",
        micro_batch: number(&context["n_ubatch"]).unwrap_or(512),
        flash_attention: if context["flash_attn"] == "0" { Flash::Off } else { Flash::Auto },
        key_type: keys,
        value_type: values,
        gpu_layers: offloaded.unwrap_or(if on_device { layers + 1 } else { 0 }),
        ..LlamaCppPlan::default()
    })
}

/// The number of a build such as `5781 (ba3ef86c5)`.
fn printed_build(row: &Value) -> Option<u32> {
    row["build"].as_str()?.trim_start_matches('b').split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Layers of one round, of which all but one slide, and whether that one comes first (`set_swa_pattern` of llama.cpp's
/// models/).
fn windows_of(family: &str) -> Option<(u64, bool)> {
    Some(match family {
        "gpt-oss" | "gemma2" => (2, false),
        "gemma3" => (6, false),
        "gemma3n" => (5, false),
        "cohere2" | "exaone4" | "exaone-moe" | "llama4" | "olmo2" | "afmoe" => (4, false),
        "smallthinker" | "laguna" => (4, true),
        _ => return None,
    })
}

/// The model as far as `print_info` tells.
fn printed_model(arch: &Value, build: Option<u32>) -> Option<ServedModel> {
    let one = |key: &str| number(&arch[key]);
    let layers = one("n_layer")?;
    let key_dim = one("n_embd_head_k")?;
    let value_dim = one("n_embd_head_v").unwrap_or(key_dim);
    let heads = one("n_head").unwrap_or(0);
    let kv_heads = one("n_head_kv")?;
    let window = one("n_swa").filter(|window| *window > 0);
    let cache = |index: u64| match (one("kv_lora_rank"), arch["arch"].as_str()) {
        // For a few months of 2025 the latent was kept as one key head of 576 and one value head of 512.
        (Some(rank), Some("deepseek2")) if kv_heads > 1 => CacheUpdate {
            kind: CacheKind::Latent { expanded: heads * (key_dim + value_dim) },
            heads: 1,
            key_dim: rank,
            value_dim: key_dim - value_dim,
            true_heads: 1,
        },
        (Some(_), Some("deepseek2")) if build.is_some_and(|number| number >= 7832) => {
            CacheUpdate { kind: CacheKind::Full, heads: 1, key_dim, value_dim: 0, true_heads: 1 }
        }
        (_, family) => {
            let slides = family.and_then(windows_of).is_some_and(|(round, first)| match first {
                true => !index.is_multiple_of(round),
                false => index % round != round - 1,
            });
            let kind = window.filter(|_| slides).map_or(CacheKind::Full, CacheKind::Sliding);
            CacheUpdate { kind, heads: kv_heads, key_dim, value_dim, true_heads: kv_heads }
        }
    };
    let layer = |index| ServedLayer { split: MIB, caches: vec![cache(index)], ..ServedLayer::default() };
    Some(ServedModel {
        layers: (0..layers).map(layer).collect(),
        head: MIB,
        gated: true,
        hidden: one("n_embd").unwrap_or(0),
        vocabulary: one("n_vocab").unwrap_or(0),
        heads,
        head_dim: key_dim,
        // Experts of a token run side by side; `n_ff` is that of dense layers.
        width: if one("n_expert").unwrap_or(0) > 0 { 0 } else { one("n_ff").unwrap_or(0) },
        ..ServedModel::default()
    })
}

/// A cell of llamacpp_ananke.json: whole MiB.
pub(super) fn score_cell(index: u64, row: &Value) -> Vec<Score> {
    let name = row["model"].as_str().unwrap_or_default();
    let label = format!("llamacpp_ananke {index} {name} ctx {}", row["n_ctx"]);
    let skip = |why: &str| vec![Score::skipped(&label, why)];
    let Some(entry) = super::names::find(name) else { return skip("its config is not in the catalogue") };
    if !row["draft"].is_null() {
        return skip("a draft model shares its buffers");
    }
    let Ok(model) = Model::new(entry.config, entry.auto_class.as_deref()) else { return skip("its config is refused") };
    let format = WeightFormat::Plain(crate::dtype::DType::BF16);
    let Ok(served) = ServedModel::of(&model, &format) else { return skip("its config is refused") };
    let parts: Vec<&Value> = row["breakdown_mib"].as_array().into_iter().flatten().collect();
    let per_layer = served.tensors.iter().any(|tensor| tensor.name.contains("per_layer"));
    let shared = row["note"].as_str().is_some_and(|note| note.contains("ONE GPU share"));
    let kind = row["kv_type"].as_str().unwrap_or("f16").to_owned();
    let parallel = number(&row["parallel"])
        .or_else(|| row["parallel"].as_str()?.trim_start_matches("auto(").trim_end_matches(')').parse().ok())
        .unwrap_or(1);
    let plan = LlamaCppPlan {
        context: number(&row["n_ctx"]).unwrap_or(0),
        parallel,
        // llama-server shares cells when it chooses the number of sequences itself.
        unified: row["kv_unified"] == true || row["parallel"].is_string(),
        micro_batch: number(&row["n_ubatch"]).unwrap_or(512),
        flash_attention: if row["flash_attn"] == "off" { Flash::Off } else { Flash::Auto },
        key_type: kind.clone(),
        value_type: kind,
        // A row of devices that split every layer shows one of them.
        tensor_split: vec![1; if shared { 2 } else { parts.len().max(1) }],
        split: if row["split_mode"] == "tensor" { Split::Tensor } else { Split::Layer },
        cpu_experts: number(&row["n_cpu_moe"]).unwrap_or(0),
        ..LlamaCppPlan::default()
    };
    let Ok(estimate) = plan.estimate(&served) else { return skip("its cache type is not one of ggml's") };
    let mut scored = Vec::new();
    let mut add = |quantity, predicted: u64, measured: u64| {
        scored.push(compared(&label, quantity, predicted, measured));
    };
    if let Some(whole) = number(&row["kv_mib"]) {
        add("cache", estimate.devices.iter().map(|d| d.cache).sum::<u64>() / MIB, whole);
    }
    for (device, part) in estimate.devices.iter().zip(&parts) {
        if let Some(cache) = number(&part["kv"]) {
            add("cache", device.cache / MIB, cache);
        }
        // Copies of the host's experts are as large as their types, which differ from layer to layer; inputs that every
        // layer of Gemma's small models gets are not in our graph.
        let whole = plan.cpu_experts == 0 && !per_layer;
        if let (Some(compute), true) = (number(&part["compute"]), whole) {
            add("compute", device.compute / MIB, compute);
        }
    }
    if scored.is_empty() { skip("no buffer in it that our rules answer") } else { scored }
}
