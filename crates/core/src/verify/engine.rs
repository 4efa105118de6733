//! Engines run for real: the buffers that their logs name, against ours (truth/engines/FORMAT.md).

use serde::Serialize;
use serde_json::{Value, json};

use super::kinds::{Kind, Score};
use super::ledger::Measure;
use super::{pattern, pool};
use crate::dtype::{builtin_formats, find_format};
use crate::plan::{ServePlan, ServingEngine};
use crate::serving::llama_cpp::{Build, Flash, LlamaCppPlan, ModelFile, buffers, experts};
use crate::source::gguf::{self, Header};
use crate::source::{StoredType, Tensor, catalogue};

/// Files of runs: one a line.
pub(super) const KIND: Kind = Kind {
    name: "engine",
    noun: "runs",
    looks: "runs of an engine, one JSON object a line, with `engine`, `args` and `buffers` (truth/engines/FORMAT.md)",
    levels: &["compute on cards, pool of a cache", "compute on the host"],
    joined: false,
    rows: |file| {
        let run = |row: &Value| row["engine"].is_string() && row["buffers"].is_array() && row["args"].is_object();
        (!file.documents.is_empty() && file.documents.iter().all(run)).then(|| file.documents.clone())
    },
    score: |_, row| {
        let id = row["id"].as_str().unwrap_or("(no id)");
        vec![match score(id, row) {
            Ok(scored) => {
                let sum = |host: bool| {
                    let own = |buffer: &&Compared| {
                        ["compute", "cache"].contains(&buffer.kind.as_str()) && (buffer.device == "CUDA_Host") == host
                    };
                    let all = scored.buffers.iter().filter(own);
                    let [predicted, measured] =
                        all.fold([0u64; 2], |[p, m], buffer| [p + buffer.predicted, m + buffer.measured]);
                    if measured == 0 {
                        return Measure::default();
                    }
                    Measure { predicted: Some(predicted), measured: Some(measured) }
                };
                let levels = [sum(false), sum(true), Measure::default()];
                let group = row["build"].as_str().or(row["version"].as_str()).unwrap_or_default().to_owned();
                Score { group, levels, ..Score::exact(id, scored.wrong(), &scored) }
            }
            Err(why) => Score::skipped(id, &why),
        }]
    },
};

/// A run beside our rules.
#[derive(Debug, Serialize)]
pub(super) struct Scored {
    pub(super) id: String,
    pub(super) model: String,
    pub(super) ok: bool,
    pub(super) buffers: Vec<Compared>,
}

#[derive(Debug, Serialize)]
pub(super) struct Compared {
    pub(super) kind: String,
    pub(super) device: String,
    pub(super) predicted: u64,
    pub(super) measured: u64,
}

impl Compared {
    /// llama.cpp's logs show hundredths of a MiB. Its weights and caches must agree as printed, its graphs within a twentieth;
    /// vLLM's weights and what a sequence takes within a hundredth (or 8 MiB: kernels of quantised matrices keep a little more),
    /// its pool within a fiftieth, which its profile run decides.
    fn agrees(&self) -> bool {
        let apart = self.predicted.abs_diff(self.measured);
        let within = |part: u64| apart.saturating_mul(part) <= self.measured;
        apart <= PRINTED
            || match self.kind.as_str() {
                "compute" => within(20),
                "weights" | "sequence" => within(100) || apart <= 8 << 20,
                "cache" => within(50),
                _ => self.kind == "activations",
            }
    }
}

/// Half of the last printed digit of a size in MiB, and what rounding it to bytes adds.
const PRINTED: u64 = (1 << 20) / 200 + 2;

impl Scored {
    pub(super) fn wrong(&self) -> Option<String> {
        let off = self.buffers.iter().find(|buffer| !buffer.agrees())?;
        let mib = |bytes: u64| bytes as f64 / f64::from(1u32 << 20);
        let Compared { kind, device, predicted, measured } = off;
        Some(format!("{kind} on {device}: {:.2} MiB, measured {:.2}", mib(*predicted), mib(*measured)))
    }
}

fn score(id: &str, row: &Value) -> Result<Scored, String> {
    match row["engine"].as_str() {
        Some("llama.cpp") => {}
        Some("vLLM") => return pool::score(id, row),
        other => return Err(format!("engine {} is not scored here", other.unwrap_or("(none)"))),
    }
    let header = header(row)?;
    if let Some(problem) = gguf::contradiction(&header) {
        return Err(problem);
    }
    let file = ModelFile::of(&[header])?;
    let (ours, _) = buffers(&plan(row)?, &file).map_err(|error| error.to_string())?;
    let mut ours: Vec<Option<_>> = ours.into_iter().map(Some).collect();
    let mut compared = Vec::new();
    for line in row["buffers"].as_array().into_iter().flatten() {
        let (kind, device) = (line[0].as_str().unwrap_or_default(), line[1].as_str().unwrap_or_default());
        let measured = (line[2].as_f64().unwrap_or(0.0) * f64::from(1u32 << 20)).round() as u64;
        let same = |own: &&mut Option<crate::serving::llama_cpp::LoggedBuffer>| {
            own.as_ref().is_some_and(|own| own.kind == kind && own.device == device)
        };
        let predicted = ours.iter_mut().find(same).and_then(Option::take).map_or(0, |own| own.bytes);
        compared.push(Compared { kind: kind.to_owned(), device: device.to_owned(), predicted, measured });
    }
    // A buffer of ours that the log does not have is as wrong as one we do not have; those that round to nothing are not.
    for extra in ours.into_iter().flatten().filter(|own| own.bytes > PRINTED) {
        let (kind, device) = (extra.kind.to_owned(), extra.device);
        compared.push(Compared { kind, device, predicted: extra.bytes, measured: 0 });
    }
    let model = row["header"]["name"].as_str().or_else(|| row["model"].as_str()).unwrap_or_default().to_owned();
    let mut scored = Scored { id: id.to_owned(), model, ok: false, buffers: compared };
    scored.ok = scored.wrong().is_none();
    Ok(scored)
}

/// The arguments of the program that made the rows (probe.cpp).
fn plan(row: &Value) -> Result<LlamaCppPlan, String> {
    let args = &row["args"];
    let number = |key: &str, default: u64| args[key].as_u64().unwrap_or(default);
    let on = |key: &str, default: bool| args[key].as_u64().map_or(default, |value| value > 0);
    let text = |key: &str| args[key].as_str().unwrap_or("f16").to_owned();
    let mut overrides: Vec<(String, String)> =
        (0..number("cpu_moe", 0)).map(|layer| (experts(Some(layer)), "CPU".to_owned())).collect();
    let given = args["ot"].as_str().unwrap_or_default();
    for one in given.split(',').filter(|text| !text.is_empty()) {
        let (pattern, buffer) = one.rsplit_once('=').ok_or_else(|| format!("ot {one}: no buffer"))?;
        overrides.push((pattern.to_owned(), buffer.to_owned()));
    }
    let split = args["ts"].as_str().map_or_else(
        || Ok(vec![1]),
        |text| text.split('/').map(|share| share.parse::<u64>().map_err(|error| error.to_string())).collect(),
    )?;
    let build = match row["number"].as_u64() {
        Some(number) => Build::Numbered(u32::try_from(number).unwrap_or(u32::MAX)),
        None => Build::Current,
    };
    Ok(LlamaCppPlan {
        build,
        context: number("ctx", 4096),
        parallel: number("seqs", 1),
        unified: on("unified", false),
        batch: number("batch", 2048),
        micro_batch: number("ubatch", 512),
        outputs: args["outputs"].as_u64(),
        flash_attention: match args["fa"].as_i64() {
            Some(0) => Flash::Off,
            Some(1) => Flash::On,
            _ => Flash::Auto,
        },
        key_type: text("ctk"),
        value_type: text("ctv"),
        gpu_layers: number("ngl", 99),
        tensor_split: split,
        full_windows: on("swa_full", false),
        offload_cache: on("kqv", true),
        offload_operations: on("op_offload", true),
        overrides,
        ..LlamaCppPlan::default()
    })
}

/// A run's family, and as much of its plan as says which features it used.
pub fn run_plan(row: &Value) -> Result<(String, ServePlan), String> {
    if row["engine"] == "vLLM" {
        let entry =
            catalogue::find(row["model"].as_str().unwrap_or_default()).ok_or("its model is not in the catalogue")?;
        return Ok((entry.config["model_type"].as_str().unwrap_or_default().to_owned(), pool::plan(row)?));
    }
    let args = &row["args"];
    let text = |key: &str| args[key].as_str().map(str::to_owned);
    let plan = ServePlan {
        engine: ServingEngine::LlamaCpp,
        version: row["number"].as_u64().map(|number| format!("b{number}")),
        n_gpu_layers: args["ngl"].as_u64(),
        cache_type_k: text("ctk"),
        cache_type_v: text("ctv"),
        tensor_split: args["ts"].as_str().map_or(Vec::new(), |split| vec![1; split.split('/').count()]),
        n_cpu_moe: args["cpu_moe"].as_u64(),
        override_tensor: text("ot"),
        no_kv_offload: args["kqv"].as_u64() == Some(0),
        ..ServePlan::default()
    };
    Ok((header(row)?.architecture().unwrap_or_default().to_owned(), plan))
}

/// The GGUF header that a row describes: by its own list of metadata and tensors, or by the sizes of gguf.py.
fn header(row: &Value) -> Result<Header, String> {
    let (metadata, tensors) = match row["tensors"].as_array() {
        Some(tensors) => (entries(&row["metadata"])?, listed(tensors)?),
        None => sized(&row["header"], row["type"].as_str().unwrap_or("f16"))?,
    };
    let mut offset = 0;
    let mut placed = Vec::new();
    for (name, ne, kind) in tensors {
        // ggml's own of a name come first: it interleaves MXFP4's scales.
        let own = find_format(builtin_formats(), &format!("ggml-{kind}"));
        let format = own.or_else(|| find_format(builtin_formats(), &kind));
        let format = format.ok_or_else(|| format!("{name}: {kind} is not a type"))?;
        let shape: Vec<u64> = ne.into_iter().rev().collect();
        let bytes = format.bytes(&shape).ok_or_else(|| format!("{name} is too large"))?;
        let stored = StoredType::Format(format.name.clone());
        placed.push(Tensor { name, stored, shape, offset, bytes });
        offset = (offset + bytes).next_multiple_of(32);
    }
    Ok(Header { version: 3, metadata, tensors: placed, data_start: 0, alignment: 32 })
}

/// Name, sizes, type.
type Row = (String, Vec<u64>, String);
type Listed = Vec<Row>;

fn entries(document: &Value) -> Result<Vec<(String, gguf::Value)>, String> {
    let entries = document.as_object().ok_or("metadata is not an object")?;
    entries.iter().map(|(key, value)| Ok((key.clone(), entry(key, value)?))).collect()
}

fn entry(key: &str, value: &Value) -> Result<gguf::Value, String> {
    Ok(match value {
        Value::String(text) => gguf::Value::Text(text.clone()),
        Value::Bool(flag) => gguf::Value::Bool(*flag),
        Value::Array(all) => gguf::Value::Array(all.iter().map(|one| entry(key, one)).collect::<Result<_, _>>()?),
        other => match (other.as_u64(), other.as_f64()) {
            (Some(number), _) => gguf::Value::Unsigned(number),
            (None, Some(number)) => gguf::Value::Float(number),
            _ => return Err(format!("metadata {key}: {other} is no value")),
        },
    })
}

/// `[name, sizes, type]`; names with braces stand for many, which lie layer by layer.
fn listed(tensors: &[Value]) -> Result<Listed, String> {
    let mut all: Vec<(Option<u64>, usize, Row)> = Vec::new();
    for (at, tensor) in tensors.iter().enumerate() {
        let name = tensor[0].as_str().ok_or("a tensor has no name")?;
        let ne: Vec<u64> = tensor[1].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
        let kind = tensor[2].as_str().unwrap_or("f32").to_owned();
        for name in pattern::expand(name)? {
            let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok());
            all.push((layer, at, (name, ne.clone(), kind.clone())));
        }
    }
    crate::order::sort_by_key(&mut all, |(layer, at, _)| (*layer, *at));
    Ok(all.into_iter().map(|(.., tensor)| tensor).collect())
}

/// What gguf.py writes for a model of these sizes.
fn sized(sizes: &Value, kind: &str) -> Result<(Vec<(String, gguf::Value)>, Listed), String> {
    let arch = sizes["arch"].as_str().ok_or("the row has no header")?;
    let size = |key: &str| sizes[key].as_u64().unwrap_or(0);
    let has = |key: &str| sizes[key] == true;
    let (hidden, layers, wide) = (size("d"), size("layers"), size("ff"));
    let (queries, keys) = (size("heads") * size("hd"), size("kv") * size("hd"));
    let mut metadata = json!({
        "block_count": layers, "context_length": size("ctx"), "embedding_length": hidden, "feed_forward_length": wide,
        "attention.head_count": size("heads"), "attention.head_count_kv": size("kv"),
        "attention.key_length": size("hd"), "attention.value_length": size("hd"), "rope.dimension_count": size("hd"),
        "vocab_size": size("vocab"),
    });
    if size("window") > 0 {
        metadata["attention.sliding_window"] = size("window").into();
    }
    if size("experts") > 0 {
        metadata["expert_count"] = size("experts").into();
        metadata["expert_used_count"] = size("used").into();
        metadata["expert_feed_forward_length"] = size("eff").into();
    }
    let mut entries: Vec<(String, gguf::Value)> =
        entries(&metadata)?.into_iter().map(|(key, value)| (format!("{arch}.{key}"), value)).collect();
    entries.push(("general.architecture".into(), gguf::Value::Text(arch.into())));
    let mut all: Listed = Vec::new();
    let mut push = |name: String, ne: &[u64], kind: &str| {
        // Rows that blocks do not divide are stored otherwise.
        let block = if kind.ends_with("_K") {
            256
        } else if kind.starts_with('q') {
            32
        } else {
            1
        };
        let fits = ne[0].is_multiple_of(block);
        let kind = if fits {
            kind
        } else if ne[0].is_multiple_of(32) {
            "q8_0"
        } else {
            "f16"
        };
        all.push((name, ne.to_vec(), kind.to_owned()));
    };
    push("token_embd.weight".into(), &[hidden, size("vocab")], kind);
    push("output_norm.weight".into(), &[hidden], "f32");
    if !has("tied") {
        push("output.weight".into(), &[hidden, size("vocab")], kind);
    }
    for layer in 0..layers {
        let name = |rest: &str| format!("blk.{layer}.{rest}");
        push(name("attn_norm.weight"), &[hidden], "f32");
        push(name("ffn_norm.weight"), &[hidden], "f32");
        if has("fused") {
            push(name("attn_qkv.weight"), &[hidden, queries + 2 * keys], kind);
        } else {
            for (part, out) in [("q", queries), ("k", keys), ("v", keys)] {
                push(name(&format!("attn_{part}.weight")), &[hidden, out], kind);
                if has("bias") {
                    push(name(&format!("attn_{part}.bias")), &[out], "f32");
                }
            }
        }
        push(name("attn_output.weight"), &[queries, hidden], kind);
        if has("qknorm") {
            push(name("attn_q_norm.weight"), &[size("hd")], "f32");
            push(name("attn_k_norm.weight"), &[size("hd")], "f32");
        }
        if has("postnorm") {
            push(name("post_attention_norm.weight"), &[hidden], "f32");
            push(name("post_ffw_norm.weight"), &[hidden], "f32");
        }
        if size("experts") > 0 {
            let (experts, narrow) = (size("experts"), size("eff"));
            push(name("ffn_gate_inp.weight"), &[hidden, experts], "f32");
            push(name("ffn_gate_exps.weight"), &[hidden, narrow, experts], kind);
            push(name("ffn_up_exps.weight"), &[hidden, narrow, experts], kind);
            push(name("ffn_down_exps.weight"), &[narrow, hidden, experts], kind);
        } else if has("fused") {
            push(name("ffn_up.weight"), &[hidden, 2 * wide], kind);
            push(name("ffn_down.weight"), &[wide, hidden], kind);
        } else {
            push(name("ffn_gate.weight"), &[hidden, wide], kind);
            push(name("ffn_up.weight"), &[hidden, wide], kind);
            push(name("ffn_down.weight"), &[wide, hidden], kind);
        }
    }
    Ok((entries, all))
}
