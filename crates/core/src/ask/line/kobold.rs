//! koboldcpp's flags as llama.cpp's (`load_model` of koboldcpp.py and `gpttype_load_model` of gpttype_adapter.cpp, read as of
//! October 2024; later flags by their help as it is remembered).

use serde_json::{Map, Value, json};

use super::arguments::Parsed;

/// Positions that it adds to a context, to move what stands in it (`extra_context_handle_fragmentation`).
const SHIFTED: u64 = 80;
/// Positions where nothing is said, since 2025; 4096 before.
const USUAL: u64 = 8192;

/// Flags that llama.cpp has under other names, or another of its own.
const CALLED: &[(&str, &str)] = &[
    ("model_param", "model"),
    ("overridetensors", "override_tensor"),
    ("overridetensor", "override_tensor"),
    ("ot", "override_tensor"),
    ("draftmodel", "model_draft"),
    ("draftamount", "draft_max"),
    ("draftgpulayers", "n_gpu_layers_draft"),
    ("nommap", "no_mmap"),
    ("maingpu", "main_gpu"),
];

/// What changes no memory of a card; those that end in `*` stand for what begins so.
const IDLE: &[&str] = &[
    "port*",
    "host",
    "launch",
    "threads",
    "blasthreads",
    "batchthreads",
    "usemlock",
    "usemmap",
    "noavx2",
    "failsafe",
    "debugmode",
    "onready",
    "benchmark",
    "cli",
    "prompt*",
    "multiuser",
    "multiplayer",
    "websearch",
    "remotetunnel",
    "highpriority",
    "foreground",
    "preloadstory",
    "savedatafile",
    "quiet",
    "ssl",
    "nocertify",
    "password",
    "ignoremissing",
    "chatcompletionsadapter",
    "jinja*",
    "noblas",
    "forceversion",
    "smartcontext",
    "smartcache",
    "nofastforward",
    "unpack",
    "exportconfig",
    "exporttemplate",
    "nomodel",
    "showgui",
    "skiplauncher",
    "singleinstance",
    "horde*",
    "admin*",
    "genlimit",
    "gendefaults*",
    "defaultgenamt",
    "maxrequestsize",
    "nobostoken",
    "enableguidance",
    "version",
    "analyze",
    "istemplate",
    "ropeconfig",
    "overridenativecontext",
    "overridekv",
    "visionmaxres",
    "visionmintokens",
    "visionmaxtokens",
    "ratelimit",
    "testmemory",
    "proxy_port",
    "device",
    "downloaddir",
    "mcpfile",
    "baseconfig",
    "showmaxctxwarning",
    "pipelineparallel",
];

/// Further models and what belongs to them.
const BESIDE: &[&str] = &["sd", "whisper", "tts", "embeddings", "music", "lora"];

/// Turns koboldcpp's words into llama.cpp's; what to say beside them.
pub(super) fn told(parsed: &mut Parsed, open: &dyn Fn(&str) -> Result<Value, String>) -> Result<Vec<String>, String> {
    loosened(parsed);
    let mut given = std::mem::take(&mut parsed.object);
    if let Some(file) = given.shift_remove("config").as_ref().and_then(Value::as_str) {
        // Other arguments are then not read.
        let text = open(file).map_err(|problem| format!("--config {file}: {problem}"))?;
        given = text.as_object().cloned().ok_or_else(|| format!("--config {file}: no settings of koboldcpp"))?;
        // A saved file names everything, what is not in use with an empty value.
        given.retain(|_, value| !(value.is_null() || value == "" || value == false || *value == json!([])));
    }
    let mut notes = Vec::new();
    let mut object = Map::new();
    let number = |given: &Map<String, Value>, key: &str| given.get(key).and_then(Value::as_i64);
    let said = |given: &Map<String, Value>, key: &str| given.get(key).is_some_and(|value| *value != false);

    // A second plain word is the port.
    parsed.plain.truncate(1);
    let quantised = number(&given, "quantkv").unwrap_or(0);
    let shifts = !said(&given, "noshift") && quantised <= 0;
    let context = number(&given, "contextsize").and_then(|own| u64::try_from(own).ok()).unwrap_or(USUAL);
    object.insert("ctx_size".into(), (context + if shifts { SHIFTED } else { 0 }).into());
    object.insert("parallel".into(), 1.into());
    let batch = ["blasbatchsize", "batchsize"].iter().find_map(|key| number(&given, key)).filter(|size| *size > 0);
    for key in ["batch_size", "ubatch_size"] {
        object.insert(key.into(), batch.unwrap_or(512).into());
    }
    let flashes = said(&given, "flashattention") || quantised > 0;
    object.insert("flash_attn".into(), if flashes { "on" } else { "off" }.into());
    if let Some(kind) = match quantised {
        1 => Some("q8_0"),
        2 => Some("q4_0"),
        _ => None,
    } {
        object.insert("cache_type_k".into(), kind.into());
        object.insert("cache_type_v".into(), kind.into());
    }
    // Windows are cut where that is asked for.
    if !said(&given, "useswa") {
        object.insert("swa_full".into(), true.into());
    }
    match given.get("gpulayers") {
        Some(Value::Bool(true)) => drop(object.insert("n_gpu_layers".into(), 1.into())),
        Some(layers) if layers.as_i64().is_some_and(|layers| layers >= 0) => {
            object.insert("n_gpu_layers".into(), layers.clone());
        }
        _ => notes.push("gpulayers: how many koboldcpp takes by itself is a guess of its own: all are counted".into()),
    }
    match given.get("moecpu") {
        Some(Value::Bool(true)) => drop(object.insert("cpu_moe".into(), true.into())),
        Some(layers) if layers.as_i64().is_some_and(|layers| layers > 0) => {
            object.insert("n_cpu_moe".into(), layers.clone());
        }
        _ => {}
    }
    let words =
        ["usecublas", "usecuda", "usehipblas"].iter().find_map(|key| given.get(*key)).map(listed).unwrap_or_default();
    if said(&given, "lowvram") || words.iter().any(|word| word == "lowvram") {
        object.insert("no_kv_offload".into(), true.into());
    }
    if words.iter().any(|word| word == "rowsplit") {
        object.insert("split_mode".into(), "row".into());
        // llama.cpp of these days no longer has it (24216).
        object.insert("engine_version".into(), "b9889".into());
    }
    if said(&given, "usecpu") {
        object.insert("n_gpu_layers".into(), 0.into());
    }
    if let Some(other) = ["usevulkan", "useclblast"].into_iter().find(|key| given.contains_key(*key)) {
        notes.push(format!("not simulated: {other}: kernels of CUDA are taken"));
    }
    if let Some(shares) = given.get("tensor_split").or_else(|| given.get("tensorsplit")).map(listed) {
        object.insert("tensor_split".into(), shares.join(",").into());
    }
    let read = [
        "contextsize",
        "quantkv",
        "noshift",
        "blasbatchsize",
        "batchsize",
        "flashattention",
        "useswa",
        "gpulayers",
        "moecpu",
        "usecublas",
        "usecuda",
        "usehipblas",
        "lowvram",
        "usecpu",
        "usevulkan",
        "useclblast",
        "tensor_split",
        "tensorsplit",
    ];
    let (mut idle, mut beside) = (Vec::new(), Vec::new());
    for (key, value) in given {
        let is = |known: &&str| known.strip_suffix('*').map_or(*known == key, |start| key.starts_with(start));
        let own = CALLED.iter().find(|(own, _)| *own == key).map_or(key.as_str(), |(_, ours)| *ours);
        match key.as_str() {
            _ if read.contains(&key.as_str()) => {}
            _ if IDLE.iter().any(is) => idle.push(key),
            _ if BESIDE.iter().any(|start| key.starts_with(start)) => beside.push(key),
            _ => drop(object.insert(own.to_owned(), value)),
        }
    }
    if !idle.is_empty() {
        notes.push(format!("without effect on memory: {}", idle.join(", ")));
    }
    if !beside.is_empty() {
        notes.push(format!("not counted, models beside the one for text: {}", beside.join(", ")));
    }
    parsed.object = object;
    Ok(notes)
}

/// A model's file that a flag before it has swallowed, among its values.
fn loosened(parsed: &mut Parsed) {
    let file = |value: &Value| value.as_str().is_some_and(|word| word.ends_with(".gguf"));
    let owners = ["model", "model_param", "mmproj", "draftmodel", "lora"];
    for (key, value) in parsed.object.iter_mut().filter(|(key, _)| !owners.contains(&key.as_str())) {
        match value {
            Value::Array(values) => {
                let at = values.iter().position(file).unwrap_or(values.len());
                let loose = values.split_off(at);
                parsed.plain.extend(loose.iter().filter_map(Value::as_str).map(str::to_owned));
                let few = if values.len() < 2 && !key.contains("split") { values.pop() } else { None };
                few.into_iter().for_each(|one| *value = one);
            }
            one if file(one) => {
                parsed.plain.extend(one.as_str().map(str::to_owned));
                *one = Value::Bool(true);
            }
            _ => {}
        }
    }
}

/// One word or several.
fn listed(value: &Value) -> Vec<String> {
    let one = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    value.as_array().map_or_else(|| vec![one(value)], |values| values.iter().map(one).collect())
}
