//! torchtitan's files: TOML up to 0.2, and functions of `config_registry.py` that return a `Trainer.Config` (torchtitan of
//! August 2026: config/configs.py, trainer.py, distributed/activation_checkpoint.py). TOML's defaults are those of 0.2's
//! config/job_config.py.

mod debug;
mod float8;
mod keys;

use serde_json::{Value, json};

use super::reader::{Reader, whole};
use super::table::Format;
use super::{Beside, Imported};
use crate::plan::Fault;
use crate::source::python::{CALL, called};

pub(super) const FORMAT: Format = Format {
    title: "torchtitan",
    version: "0.2 (TOML) and of 2026-08 (Python)",
    source: "torchtitan, config/configs.py, trainer.py and models/*/config_registry.py",
    keys: &[keys::KEYS],
};

/// Families and flavors, and the models they are.
const MODELS: &[(&str, &str, &str)] = &[
    ("llama2", "7B", "meta-llama/Llama-2-7b-hf"),
    ("llama2", "13B", "meta-llama/Llama-2-13b-hf"),
    ("llama2", "70B", "meta-llama/Llama-2-70b-hf"),
    ("llama3", "1B", "meta-llama/Llama-3.2-1B"),
    ("llama3", "3B", "meta-llama/Llama-3.2-3B"),
    ("llama3", "8B", "meta-llama/Llama-3.1-8B"),
    ("llama3", "70B", "meta-llama/Llama-3.1-70B"),
    ("llama3", "405B", "meta-llama/Llama-3.1-405B"),
    // Of the same shapes.
    ("llama3", "8B", "meta-llama/Meta-Llama-3-8B"),
    ("llama3", "70B", "meta-llama/Meta-Llama-3-70B"),
    ("llama4", "17bx16e", "meta-llama/Llama-4-Scout-17B-16E"),
    ("llama4", "17bx128e", "meta-llama/Llama-4-Maverick-17B-128E"),
    // 27 layers, kv_lora_rank 512 and no low rank of queries; 236B is V2 (models/deepseek_v3/__init__.py).
    ("deepseek_v3", "16B", "deepseek-ai/DeepSeek-V2-Lite"),
    ("deepseek_v3", "236B", "deepseek-ai/DeepSeek-V2"),
    ("deepseek_v3", "671B", "deepseek-ai/DeepSeek-V3"),
    ("gpt_oss", "20b", "openai/gpt-oss-20b"),
    ("gpt_oss", "120b", "openai/gpt-oss-120b"),
    ("qwen3", "", "Qwen/Qwen3-"),
    ("qwen3_5", "", "Qwen/Qwen3.5-"),
    ("kimi_k2_7", "moonlight-16B-A3B", "moonshotai/Moonlight-16B-A3B"),
    ("kimi_k2_7", "Kimi-VL-A3B", "moonshotai/Kimi-VL-A3B-Instruct"),
    ("kimi_k2_7", "Kimi-K2.5", "moonshotai/Kimi-K2.5"),
];

/// Family and flavor of a model, for those who write.
pub(crate) fn flavor(model: &str) -> Option<(&'static str, &'static str)> {
    MODELS.iter().find(|(_, flavor, id)| !flavor.is_empty() && *id == model).map(|(name, flavor, _)| (*name, *flavor))
}

/// Whether a file is torchtitan's: its TOML, or a `Trainer.Config` of its Python.
pub(super) fn is_marked(file: &super::Object) -> bool {
    let part = |name: &str, key: &str| file.get(name).is_some_and(|part| part.get(key).is_some());
    part("job", "dump_folder")
        || part("model", "flavor") && (file.contains_key("training") || file.contains_key("parallelism"))
        || file.contains_key("model_spec")
        || part("training", "local_batch_size")
        || part("training", "data_parallel_degree")
}

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    if ["async_loop", "generator", "rollouter"].iter().any(|key| value.get(key).is_some()) {
        let fault = Fault::unsupported("", "torchtitan's reinforcement learning, another task,");
        return Err(vec![
            fault.or(
                "ask for its roles: `vramcast train MODEL --engine fsdp2` and `vramcast infer MODEL --engine vllm`",
            ),
        ]);
    }
    let mut reader = Reader::new(&FORMAT, value, beside);
    let (model, family, config) = model(&mut reader, beside);
    reader.say("the model's code", "transformers' runs in the place of torchtitan's own");
    batch(&mut reader);
    spread(&mut reader, &family);
    types(&mut reader);
    checkpoints(&mut reader);
    optimizer(&mut reader);
    loss(&mut reader);
    compiled(&mut reader, &family, model.as_deref());
    float8::read(&mut reader);
    if let Some(norm) = reader.real("training.max_norm") {
        reader.set("clip", norm > 0.0);
    } else {
        reader.set("clip", true);
    }
    reader.finish(None, model).map(|read| Imported { config, ..read })
}

/// The model of a file, its family as torchtitan calls it, and the config of one that has no name elsewhere.
fn model(reader: &mut Reader<'_>, beside: &Beside<'_>) -> (Option<String>, String, Option<Value>) {
    let named = reader.text("hf_transformers.model").or_else(|| reader.text("hf_model")).map(str::to_owned);
    let spec = reader.get("model_spec").cloned().unwrap_or_default();
    let mut converters = spec["converters"].as_array().into_iter().flatten();
    let adapter = converters.find(|one| called(one).is_some_and(|name| name.contains("LoRA")));
    adapter.into_iter().for_each(|adapter| lora(reader, adapter));
    if let Some(how) = spec.get("attn_backend").and_then(Value::as_str) {
        reader.set("attention", if how.starts_with("flex") { "flex" } else { "sdpa" });
        if how == "varlen" {
            reader.say("model_spec.attn_backend", "rows of full length are simulated with SDPA");
        }
    }
    let flavor = reader.text("model.flavor").or_else(|| spec["0"].as_str()).or_else(|| spec["flavor"].as_str());
    let flavor = flavor.unwrap_or_default().to_owned();
    let assets = reader
        .text("model.hf_assets_path")
        .or_else(|| reader.text("hf_assets_path"))
        .or_else(|| reader.text("model.tokenizer_path"));
    // Its Python does not say the family: the folder of the file does, or a line's `--module`.
    let folder = beside.name.rsplit(['/', '\\']).nth(1).unwrap_or_default().to_owned();
    let family =
        reader.text("model.name").map(str::to_owned).or_else(|| beside.recipe.map(str::to_owned)).unwrap_or(folder);
    if family.starts_with("flux") {
        reader.refuse("model.name", "flux", "only models of text are trained here: another task");
    }
    if named.is_some() {
        return (named, family, None);
    }
    if let Some(config) = debug::config(&family, &flavor) {
        if flavor.contains("flex") {
            reader.set("attention", "flex");
        }
        return (None, family, Some(config));
    }
    let plain = |text: &str| text.to_lowercase();
    let of = |(name, size, id): &(&str, &str, &str)| -> Option<String> {
        if *name != family || flavor.starts_with("debug") {
            return None;
        }
        if size.is_empty() {
            Some(format!("{id}{flavor}"))
        } else {
            (plain(size) == plain(&flavor)).then(|| (*id).to_owned())
        }
    };
    let model = MODELS.iter().find_map(of).or_else(|| {
        let last = assets?.trim_end_matches('/').rsplit('/').next()?.to_owned();
        (!["tokenizer", "test_tokenizer", "tokenizer.model", "cl100k"].contains(&last.as_str())).then_some(last)
    });
    if model.is_none() {
        reader
            .notes
            .push(format!("{family} {flavor} is a model of torchtitan's own tests: --model says which one runs"));
    }
    (model, family, None)
}

/// Every layer by itself (`apply_compile`), where that is modelled: dense layers, and of tensor parallel Llama's.
fn compiled(reader: &mut Reader<'_>, family: &str, model: Option<&str>) {
    let on = ["compile.enable", "training.compile", "compile"].iter().any(|key| reader.is_on(key));
    let parts = reader.get("compile.components").and_then(Value::as_array).cloned();
    let has = |name: &str| parts.as_ref().is_none_or(|parts| parts.iter().any(|part| part == name));
    if !on {
        return;
    }
    let section = reader.has("compile");
    let split = !family.starts_with("llama") && reader.was_set("parallel.mesh.tp").is_some();
    // Qwen's mixtures say in their name how much of them is active.
    let mixed = model.is_some_and(|model| model.contains("-A"));
    let dense = ["llama2", "llama3", "qwen3"].contains(&family) && !mixed;
    let flex = reader.was_set("attention").is_some_and(|kind| kind == "flex");
    if split || !dense || flex || !has("model") || reader.was_set("adapter.method").is_some() {
        return reader.say("compile", "what runs is eager, which mostly keeps more for backward");
    }
    // `components` came with a section of its own, and are layers and loss where it does not say.
    reader.set("torch_compile", if section && has("loss") { "layers-and-loss" } else { "layers" });
}

/// `LoRAConverter.Config`: torchtitan's names of modules.
fn lora(reader: &mut Reader<'_>, config: &Value) {
    const NAMES: [(&str, &[&str]); 6] = [
        ("wq", &["q_proj"]),
        ("wkv", &["k_proj", "v_proj"]),
        ("wo", &["o_proj"]),
        ("w1", &["gate_proj"]),
        ("w2", &["down_proj"]),
        ("w3", &["up_proj"]),
    ];
    reader.set("adapter.method", "lora");
    reader.set("adapter.rank", config["rank"].clone());
    let named = |name: &str| NAMES.iter().find(|(known, _)| *known == name).map_or(vec![], |(_, names)| names.to_vec());
    let targets = config["target_modules"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let targets: Vec<&str> = targets.flat_map(named).collect();
    reader.set("adapter.targets", if targets.is_empty() { json!("all-linear") } else { json!(targets) });
}

fn batch(reader: &mut Reader<'_>) {
    let first = |keys: [&str; 2], reader: &mut Reader<'_>| keys.into_iter().find_map(|key| reader.number(key));
    // ParallelismConfig's and TrainingConfig's own.
    let length = first(["training.seq_len", "training.max_context_length"], reader).unwrap_or(2048).max(1);
    let tokens = reader.number("training.num_tokens_per_microbatch_per_dp_rank");
    let rows = first(["training.local_batch_size", "training.batch_size"], reader);
    let rows = rows.or(tokens.map(|tokens| (tokens / length).max(1))).unwrap_or(8);
    reader.set("batch.seq_len", length);
    reader.set("batch.batch_size", rows);
    reader.set("batch.mask", false);
    let all = reader.get("training.global_batch_size").or_else(|| reader.get("training.num_tokens_per_train_step"));
    let degree = |reader: &mut Reader<'_>, name: &str| {
        reader.get(&format!("parallelism.data_parallel_{name}_degree")).and_then(whole)
    };
    let data = degree(reader, "shard")
        .filter(|shard| *shard > 0)
        .map(|shard| shard * degree(reader, "replicate").unwrap_or(1));
    let tokens = reader.get("training.num_tokens_per_train_step").is_some();
    let each = rows.saturating_mul(if tokens { length } else { 1 });
    if let (Some(all), Some(data)) = (all.and_then(whole), data) {
        reader.set("gradient_accumulation", (all / each.saturating_mul(data).max(1)).max(1));
    } else if all.is_some_and(|all| all.as_i64().is_some_and(|all| all > 0)) {
        reader
            .notes
            .push("global_batch_size: micro-batches follow from the cards; --gradient-accumulation says them".into());
    }
}

/// The mesh, and FSDP's options.
fn spread(reader: &mut Reader<'_>, family: &str) {
    // Up to 2024 they stood under `training` and `experimental`.
    let degree = |reader: &mut Reader<'_>, name: &str| {
        let places = ["parallelism", "training", "experimental"].map(|part| format!("{part}.{name}"));
        places.iter().find_map(|key| reader.get(key).and_then(whole))
    };
    reader.set("parallel.engine.fsdp2", json!({"wrap": "ends"}));
    let tensor = degree(reader, "tensor_parallel_degree").unwrap_or(1);
    for (name, place) in [
        ("tensor_parallel_degree", "parallel.mesh.tp"),
        ("pipeline_parallel_degree", "parallel.mesh.pp"),
        ("context_parallel_degree", "parallel.mesh.cp"),
        ("data_parallel_replicate_degree", "parallel.mesh.dp_replicate"),
        ("data_parallel_shard_degree", "parallel.mesh.dp_shard"),
        ("data_parallel_degree", "parallel.mesh.dp_shard"),
    ] {
        let size = degree(reader, name);
        if let Some(size) = size.filter(|size| *size > 1) {
            reader.set(place, size);
        }
    }
    for key in ["parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree"] {
        if reader.get(key).and_then(whole).is_some_and(|size| size > 1) {
            reader.say(key, keys::EXPERTS);
        }
    }
    if tensor > 1 {
        // Its plan is known of Llama's layers; transformers' plan has no sequence parallel.
        if family.starts_with("llama3") || family.starts_with("llama2") {
            let whole = reader.is_on("parallelism.disable_loss_parallel");
            reader.set("parallel.engine.fsdp2.tensor", json!({"form": "torchtitan", "loss_parallel": !whole}));
        } else {
            reader.say(
                "parallelism.tensor_parallel_degree",
                "transformers' plan is simulated, without sequence parallel",
            );
        }
    }
    match reader.text("parallelism.fsdp_reshard_after_forward") {
        Some("always") => reader.set("parallel.engine.fsdp2.reshard_after_forward", true),
        Some("never") => reader.set("parallel.engine.fsdp2.reshard_after_forward", false),
        _ => {}
    }
    if reader.is_on("training.enable_cpu_offload") {
        reader.set("parallel.engine.fsdp2.offload", true);
    }
    pipeline(reader);
}

fn pipeline(reader: &mut Reader<'_>) {
    const AT: &str = "parallel.engine.fsdp2.pipeline";
    let schedule = reader.text("parallelism.pipeline_parallel_schedule").map(str::to_owned);
    if reader.was_set("parallel.mesh.pp").is_none() {
        return;
    }
    if let Some(name) = schedule {
        let known = match name.to_lowercase().as_str() {
            "1f1b" => "1f1b",
            "gpipe" => "gpipe",
            "interleaved1f1b" => "interleaved-1f1b",
            "loopedbfs" => "looped-bfs",
            "interleavedzerobubble" => "interleaved-zero-bubble",
            "zbvzerobubble" => "zbv-zero-bubble",
            _ => {
                reader.refuse("parallelism.pipeline_parallel_schedule", &name, "use 1F1B, GPipe or Interleaved1F1B");
                return;
            }
        };
        reader.set(&format!("{AT}.schedule"), known);
    }
    for (key, place) in [("first", "first_less"), ("last", "last_less")] {
        reader.number_to(&format!("parallelism.pipeline_parallel_{key}_stage_less_layers"), &format!("{AT}.{place}"));
    }
    if let Some(micro) = reader.number("parallelism.num_pp_microbatches").filter(|micro| *micro > 1) {
        reader.set("gradient_accumulation", micro);
    } else if reader.get("training.num_tokens_per_microbatch_per_dp_rank").is_none() {
        microbatches(reader);
    }
}

/// Up to 0.2 a pipeline cuts the local batch into pieces of `pipeline_parallel_microbatch_size` rows (1 where it is not said);
/// up to 2024 into as many as `pipeline_parallel_microbatches` says.
fn microbatches(reader: &mut Reader<'_>) {
    let key = "parallelism.pipeline_parallel_microbatch_size";
    let rows = reader.was_set("batch.batch_size").and_then(whole).unwrap_or(1).max(1);
    let pieces = reader.number("experimental.pipeline_parallel_microbatches").filter(|pieces| *pieces > 0);
    let size = match pieces {
        Some(pieces) => (rows / pieces).max(1),
        None => reader.number(key).unwrap_or(1).max(1),
    };
    if !rows.is_multiple_of(size) {
        reader.faults.add(Fault::new("", format!("{key}: {rows} rows are no multiple of {size}")));
    }
    reader.set("batch.batch_size", size);
    reader.set("gradient_accumulation", (rows / size).max(1));
}

/// Parameters are fp32 and computed with in bf16, unless it is said otherwise (TrainingConfig).
fn types(reader: &mut Reader<'_>) {
    let name = |text: Option<&str>, usual: &'static str| match text {
        None => usual,
        Some("bfloat16") => "bf16",
        Some("float16") => "fp16",
        _ => "fp32",
    };
    let weights = name(reader.text("training.dtype"), "fp32");
    let compute = name(reader.text("training.mixed_precision_param"), "bf16");
    let reduce = name(reader.text("training.mixed_precision_reduce"), "fp32");
    reader.set("weights", weights);
    reader.set("autocast", Value::Null);
    if (compute, reduce) != (weights, weights) {
        reader.set("parallel.engine.fsdp2.mixed_precision", json!({"parameters": compute, "reduce": reduce}));
    }
}

fn checkpoints(reader: &mut Reader<'_>) {
    let config =
        reader.get("activation_checkpoint").and_then(called).map(|name| name.split('.').next().unwrap_or_default());
    let option = reader.get("activation_checkpoint.selective_ac_option").cloned();
    let mode = match config {
        Some("FullAC") => "full",
        Some("SelectiveAC") => "selective",
        Some("NoAC") => "none",
        Some(other) => {
            reader.refuse("activation_checkpoint", other, "use FullAC or SelectiveAC");
            return;
        }
        None => reader.text("activation_checkpoint.mode").unwrap_or("selective"),
    };
    match mode {
        "none" => reader.set("checkpointing", "off"),
        "full" => reader.set("checkpointing", "full"),
        "selective" => {
            reader.set("checkpointing", "full");
            // Where nothing is said: every second product in Python, every second layer in TOML.
            match option.as_ref() {
                None if !reader.has("model_spec") => reader.set("checkpoints.every", 2),
                option => match option.and_then(whole) {
                    Some(every) => reader.set("checkpoints.every", every),
                    None => reader.set("checkpoints.selective", "alternate-matmuls"),
                },
            }
        }
        other => reader.refuse("activation_checkpoint.mode", other, "use none, selective or full"),
    }
}

fn optimizer(reader: &mut Reader<'_>) {
    let config = reader.get("optimizer").cloned().unwrap_or_default();
    let groups = config["param_groups"].as_array().into_iter().flatten();
    let mut names: Vec<&str> = groups.filter_map(|group| group["optimizer_name"].as_str()).collect();
    names.dedup();
    let by_call = match config.get(CALL).and_then(Value::as_str) {
        Some(call) if call.contains("muon") => "Muon",
        _ => names.first().copied().unwrap_or("AdamW"),
    };
    let name = config["name"].as_str().unwrap_or(by_call);
    match name {
        "AdamW" => reader.set("optimizer.kind", "adamw"),
        "Adam" => reader.set("optimizer.kind", "adam"),
        "Muon" | "DistMuon" => {
            reader.set("optimizer.kind", "adamw");
            reader.say("optimizer", "Muon on shards is simulated as AdamW, whose states are twice as large");
        }
        other => reader.refuse("optimizer", other, "use AdamW: others are not simulated on several cards"),
    }
    let how = config["implementation"].as_str().unwrap_or("fused");
    match how {
        "fused" | "foreach" => reader.set("optimizer.implementation", how),
        _ => reader.set("optimizer.implementation", "forloop"),
    }
    if reader.is_on("optimizer.early_step_in_backward") {
        reader
            .say("optimizer.early_step_in_backward", "the step is simulated after backward, which keeps all gradients");
    }
}

fn loss(reader: &mut Reader<'_>) {
    reader.set("loss.kind", "standard");
    match reader.get("loss").and_then(called).map(str::to_owned) {
        Some(name) if name.contains("Chunked") => {
            reader.say("loss", "on several cards the loss is simulated on whole logits, which are more");
        }
        Some(name) if name.contains("MTP") => {
            reader.say("loss", "heads for tokens further on are not simulated");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests;
