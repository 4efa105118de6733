//! Variables that engines read beside their flags, before a line or given to its container. A flag stands over its variable.

use serde_json::{Map, Value};

use super::arguments;
use crate::ask::runner::Runner;
use crate::ask::table;

/// How the names of an engine's variables begin.
const STARTS: [(&str, Runner); 6] = [
    ("LLAMA_ARG_", Runner::LlamaCpp),
    ("GGML_", Runner::LlamaCpp),
    ("OLLAMA_", Runner::Ollama),
    ("VLLM_", Runner::Vllm),
    ("SGLANG_", Runner::Sglang),
    ("SGL_", Runner::Sglang),
];

/// Those that are not called as their flags are (`set_env` of llama.cpp's common/arg.cpp, `AsMap` of Ollama's
/// envconfig/config.go).
const CALLED: [(&str, &[&str]); 14] = [
    ("VLLM_USE_FLASHINFER_SAMPLER", &["flashinfer_sampler"]),
    ("LLAMA_ARG_BATCH", &["batch_size"]),
    ("LLAMA_ARG_UBATCH", &["ubatch_size"]),
    ("LLAMA_ARG_N_PARALLEL", &["parallel"]),
    ("LLAMA_ARG_HF_REPO", &["model"]),
    ("LLAMA_ARG_NO_KV_OFFLOAD", &["no_kv_offload"]),
    ("LLAMA_ARG_SPEC_DRAFT_MODEL", &["model_draft"]),
    ("LLAMA_ARG_SPEC_DRAFT_HF_REPO", &["model_draft"]),
    ("LLAMA_ARG_MODEL_DRAFT", &["model_draft"]),
    ("LLAMA_ARG_SPEC_DRAFT_N_MAX", &["draft_max"]),
    ("OLLAMA_CONTEXT_LENGTH", &["ctx_size"]),
    ("OLLAMA_NUM_PARALLEL", &["parallel"]),
    ("OLLAMA_KV_CACHE_TYPE", &["cache_type_k", "cache_type_v"]),
    ("OLLAMA_FLASH_ATTENTION", &["flash_attn"]),
];

/// What changes no memory of a card, by what stands behind the engine's own start.
const HARMLESS: [&str; 41] = [
    "NO_USAGE_STATS",
    "USAGE_SOURCE",
    "LOGGING",
    "IMAGE_FETCH_TIMEOUT",
    "VIDEO_FETCH_TIMEOUT",
    "AUDIO_FETCH_TIMEOUT",
    "TARGET_DEVICE",
    "MAIN_CUDA_VERSION",
    "ASSETS",
    "PLUGINS",
    "SKIP_P2P_CHECK",
    "EXECUTE_MODEL_TIMEOUT",
    "RAY_",
    "NCCL_SO_PATH",
    "WATCHDOG",
    "SET_CPU_AFFINITY",
    "SLEEP_WHEN_IDLE",
    "HOST",
    "PORT",
    "API_",
    "MODELS",
    "DEBUG",
    "ORIGINS",
    "KEEP_ALIVE",
    "MAX_QUEUE",
    "MAX_LOADED",
    "LOAD_TIMEOUT",
    "NO",
    "LOG",
    "CACHE_ROOT",
    "CONFIG_ROOT",
    "USE_MODELSCOPE",
    "WORKER_MULTIPROC",
    "DO_NOT_TRACK",
    "ALLOW",
    "RPC_",
    "ENGINE_",
    "HTTP_",
    "TORCH_PROFILER",
    "TEST_",
    "SERVER_DEV",
];

/// How the note on variables begins that decide nothing.
pub(super) const IDLE: &str = "variables without effect on memory: ";

/// The engine whose variable this is.
pub(super) fn engine(name: &str) -> Option<Runner> {
    STARTS.iter().find(|(start, _)| name.starts_with(start)).map(|(_, runner)| *runner)
}

/// An engine's variables as the flags they stand for; what none stands for is said.
pub(super) fn flags(
    runner: Runner,
    variables: &[(String, String)],
    given: &Map<String, Value>,
    harmless: impl Fn(&str) -> bool,
) -> (Map<String, Value>, Vec<String>) {
    let (mut object, mut notes, mut idle) = (Map::new(), Vec::new(), Vec::new());
    let row = |key: &str| table::called(key, runner).filter(|row| row.scope.has(runner)).map(|row| row.path);
    for (name, value) in variables.iter().filter(|(name, _)| engine(name) == Some(runner)) {
        let behind = STARTS.iter().find_map(|(start, _)| name.strip_prefix(start)).unwrap_or(name);
        let own = behind.to_ascii_lowercase();
        let called = CALLED.iter().find(|(known, _)| known == name);
        let keys = called.map_or_else(|| vec![own.as_str()], |(_, keys)| keys.to_vec());
        if !keys.iter().all(|key| *key == "model" || row(key).is_some()) {
            match name.as_str() {
                // What runs since 0.11 whatever it says.
                "VLLM_USE_V1" if value == "0" => notes.push(
                    "not simulated: VLLM_USE_V1=0: the older engine is named in the version: --engine-version \"0.8.5 V0\"".into(),
                ),
                "VLLM_USE_V1" => idle.push(name.as_str()),
                _ if HARMLESS.iter().any(|start| behind.starts_with(start)) || harmless(&own) => idle.push(name),
                _ => notes.push(format!("not simulated: {name}={value}: what is usual is taken")),
            }
            continue;
        }
        for key in keys {
            let stands = |other: &String| other == key || row(key).is_some() && row(other.as_str()) == row(key);
            if given.keys().any(|other| stands(&other.replace('-', "_"))) {
                continue;
            }
            let switch = table::called(key, runner).is_some_and(|row| row.is_switch());
            match (switch, value.to_ascii_lowercase().as_str()) {
                (true, "0" | "false" | "off" | "") => idle.push(name),
                (true, _) => drop(object.insert(key.to_owned(), Value::Bool(true))),
                // `-fa` takes words.
                (false, "1" | "true") if key == "flash_attn" => drop(object.insert(key.to_owned(), "on".into())),
                (false, "0" | "false") if key == "flash_attn" => drop(object.insert(key.to_owned(), "off".into())),
                _ => drop(object.insert(key.to_owned(), arguments::typed(value))),
            }
        }
    }
    if !idle.is_empty() {
        notes.push(format!("{IDLE}{}", idle.join(", ")));
    }
    (object, notes)
}
