//! llama.cpp's own flags (common/arg.cpp at b21e4de) that are no settings here: what they change, other programs of its, and whole
//! lines that one flag stands for.

use serde_json::{Map, Value};

use super::arguments::{Parsed, typed};

/// Flags that change no memory of a card; those that end in `*` stand for what begins so.
const IDLE: &[&str] = &[
    "adaptive_*",
    "agent",
    "ag",
    "api_*",
    "attention",
    "backend_sampling",
    "binary_file",
    "bf",
    "cache_idle_slots",
    "cache_list",
    "cache_prompt",
    "cache_reuse",
    "cl",
    "check*",
    "completion_bash",
    "cms",
    "ctxcp",
    "context_file",
    "context_shift",
    "cors_*",
    "cpu_mask*",
    "cpu_range*",
    "cpu_strict*",
    "C",
    "Cb",
    "Cbd",
    "Cd",
    "Cr",
    "Crb",
    "Crbd",
    "Crd",
    "defrag_thold",
    "dt",
    "device_draft",
    "devd",
    "diffusion_*",
    "direct_io",
    "dio",
    "display_prompt",
    "docker_repo",
    "draft_min",
    "draft_n_min",
    "draft_p_min",
    "draft_p_split",
    "dry_*",
    "dynatemp_*",
    "embd_*",
    "escape",
    "fit_print",
    "fitp",
    "gan",
    "gaw",
    "grp_attn_*",
    "help",
    "h",
    "hf_file",
    "hff",
    "hft",
    "host_buffer",
    "ids",
    "in_*",
    "infill",
    "j",
    "jf",
    "json_schema*",
    "junk",
    "keep",
    "kv_offload",
    "kvo",
    "l",
    "lcd",
    "lcs",
    "list_devices",
    "load_mode",
    "lm",
    "logit_bias",
    "lookup_cache_*",
    "lora_init_without_apply",
    "lv",
    "mcp_*",
    "media_path",
    "mirostat*",
    "mli",
    "models_autoload",
    "multiline_input",
    "n_probs",
    "offline",
    "op_offload",
    "output*",
    "override_kv",
    "parse_special",
    "perf",
    "poll*",
    "pos",
    "prefill_assistant",
    "print_token_count",
    "prompt_cache*",
    "ptc",
    "rea",
    "repack",
    "repeat_last_n",
    "rerank",
    "reuse_port",
    "sampler*",
    "sampling_seq",
    "show_timings",
    "skip_chat_parsing",
    "slot_prompt_similarity",
    "sp",
    "spec_default",
    "spec_draft_backend_sampling",
    "spec_draft_cpu_mask*",
    "spec_draft_cpu_range*",
    "spec_draft_cpu_strict*",
    "spec_draft_device",
    "spec_draft_n_min",
    "spec_draft_p_*",
    "spec_draft_poll*",
    "spec_draft_prio*",
    "spec_draft_threads*",
    "spec_ngram_*",
    "special",
    "spm_infill",
    "sps",
    "sse_ping_interval",
    "stdin",
    "swa_checkpoints",
    "sysf",
    "system_prompt*",
    "tags",
    "tbd",
    "td",
    "temperature",
    "tgs",
    "tools*",
    "top_n_sigma",
    "top_nsigma",
    "tts_*",
    "typical*",
    "ui_*",
    "usage",
    "verbose_prompt",
    "verbosity",
    "version",
    "webui_*",
    "xtc_*",
    "mmproj_auto",
    "mg",
    "log*",
    "nocb",
    "ndio",
];

/// Flags that may change memory and are not simulated: what is in their place.
const SAID: &[(&str, &str)] = &[
    ("fit_target", "1 GiB is taken to be left free"),
    ("fitt", "1 GiB is taken to be left free"),
    ("fit_ctx", "a context that nobody asks for is at least 4096"),
    ("fitc", "a context that nobody asks for is at least 4096"),
    ("rope_scale", super::serving::STRETCHED),
    ("rope_freq_base", super::serving::STRETCHED),
    ("rope_freq_scale", super::serving::STRETCHED),
    ("yarn_orig_ctx", super::serving::STRETCHED),
    ("yarn_ext_factor", super::serving::STRETCHED),
    ("yarn_attn_factor", super::serving::STRETCHED),
    ("yarn_beta_slow", super::serving::STRETCHED),
    ("yarn_beta_fast", super::serving::STRETCHED),
    ("lora", "adapters are not counted"),
    ("lora_scaled", "adapters are not counted"),
    ("control_vector", "control vectors are not counted"),
    ("control_vector_scaled", "control vectors are not counted"),
    ("control_vector_layer_range", "control vectors are not counted"),
    ("cache_type_k_draft", "who guesses keeps keys and values in 16 bits"),
    ("cache_type_v_draft", "who guesses keeps keys and values in 16 bits"),
    ("spec_draft_type_k", "who guesses keeps keys and values in 16 bits"),
    ("spec_draft_type_v", "who guesses keeps keys and values in 16 bits"),
    ("ctkd", "who guesses keeps keys and values in 16 bits"),
    ("ctvd", "who guesses keeps keys and values in 16 bits"),
    ("override_tensor_draft", "all of who guesses lies where its layers do"),
    ("spec_draft_override_tensor", "all of who guesses lies where its layers do"),
    ("otd", "all of who guesses lies where its layers do"),
    ("cpu_moe_draft", "all of who guesses lies where its layers do"),
    ("spec_draft_cpu_moe", "all of who guesses lies where its layers do"),
    ("n_cpu_moe_draft", "all of who guesses lies where its layers do"),
    ("spec_draft_n_cpu_moe", "all of who guesses lies where its layers do"),
    ("spec_draft_ncmoe", "all of who guesses lies where its layers do"),
    ("ncmoed", "all of who guesses lies where its layers do"),
    ("cmoed", "all of who guesses lies where its layers do"),
    ("image_min_tokens", "the graph of the image encoder is not counted"),
    ("image_max_tokens", "the graph of the image encoder is not counted"),
    ("mtmd_batch_max_tokens", "the graph of the image encoder is not counted"),
    ("mmproj_url", "the image encoder's file is not fetched: it is not counted"),
    ("mmu", "the image encoder's file is not fetched: it is not counted"),
    ("mmproj_offload", "the image encoder's file is counted on the card where --mmproj names it"),
    ("mmproj_device", "the image encoder's file is counted on the first card where --mmproj names it"),
    ("mmdev", "the image encoder's file is counted on the first card where --mmproj names it"),
    ("image", "the graph of the image encoder is not counted"),
    ("audio", "the graph of the image encoder is not counted"),
    ("video", "the graph of the image encoder is not counted"),
    ("kv_unified", "slots share their cells where nothing says how many there are (-np)"),
    ("models_max", "one model is answered"),
];

/// Flags whose effect is too large to be passed over: what to do instead.
const REFUSED: &[(&str, &str)] = &[
    ("models_dir", "a router starts models as they are asked for: ask for one of them with llama-server -m MODEL"),
    ("models_preset", "a router starts models as they are asked for: ask for one with its section's keys as flags"),
    ("rpc", "cards of other machines are not simulated: say them as cards of this one with --tensor-split"),
    ("embd_gemma_default", "encoders are not answered on llama.cpp"),
    ("eagle3", "who guesses by a head of its own is not simulated on llama.cpp: leave it out for the model alone"),
    ("dflash", "who guesses by a head of its own is not simulated on llama.cpp: leave it out for the model alone"),
];

/// Whole lines that a flag stands for: repository, context, batches, slots, and who guesses.
const PRESETS: &[(&str, &str)] = &[
    ("gpt_oss_20b_default", "-hf ggml-org/gpt-oss-20b-GGUF -c 262144 -b 32768 -ub 2048 -np 2"),
    ("gpt_oss_120b_default", "-hf ggml-org/gpt-oss-120b-GGUF -c 262144 -b 32768 -ub 2048 -np 2"),
    ("fim_qwen_1.5b_default", "-hf ggml-org/Qwen2.5-Coder-1.5B-GGUF:Q8_0 -c 0 -b 1024 -ub 1024"),
    ("fim_qwen_3b_default", "-hf ggml-org/Qwen2.5-Coder-3B-GGUF:Q8_0 -c 0 -b 1024 -ub 1024"),
    ("fim_qwen_7b_default", "-hf ggml-org/Qwen2.5-Coder-7B-GGUF:Q8_0 -c 0 -b 1024 -ub 1024"),
    (
        "fim_qwen_7b_spec",
        "-hf ggml-org/Qwen2.5-Coder-7B-GGUF:Q8_0 -c 0 -b 1024 -ub 1024 -md qwen2.5-coder-0.5b-q8_0.gguf",
    ),
    (
        "fim_qwen_14b_spec",
        "-hf ggml-org/Qwen2.5-Coder-14B-GGUF:Q8_0 -c 0 -b 1024 -ub 1024 -md qwen2.5-coder-0.5b-q8_0.gguf",
    ),
    ("fim_qwen_30b_default", "-hf ggml-org/Qwen3-Coder-30B-A3B-Instruct-GGUF:Q8_0 -c 0 -b 1024 -ub 1024"),
    ("vision_gemma_4b_default", "-hf ggml-org/gemma-3-4b-it-qat-GGUF -c 0"),
    ("vision_gemma_12b_default", "-hf ggml-org/gemma-3-12b-it-qat-GGUF -c 0"),
];

/// Programs of its that load one model for one context, besides the server; `main` and `server` are the names of 2023 and 2024.
pub(super) fn is_program(name: &str, rest: &[String]) -> bool {
    let file = || rest.iter().any(|word| word.ends_with(".gguf"));
    match name {
        "llama-server" | "llama-cli" | "llama-bench" | "llama-run" | "llama-mtmd-cli" | "llama-completion"
        | "llama-simple-chat" | "llama-fit-params" | "llama-speculative" | "llama-embedding" | "llamafile" => true,
        "main" | "server" => file(),
        _ => name.ends_with(".llamafile") || name == "llama_cpp.server",
    }
}

/// How a flag of llama.cpp is taken that is no setting: nothing, what to say, or why it is refused.
pub(super) enum Taken {
    Idle,
    Said(&'static str),
    Refused(&'static str),
}

pub(super) fn taken(key: &str) -> Option<Taken> {
    let of = |list: &[(&str, &'static str)]| list.iter().find(|(own, _)| *own == key).map(|(_, words)| *words);
    let is = |known: &&str| known.strip_suffix('*').map_or(*known == key, |start| key.starts_with(start));
    let said = || of(SAID).map(Taken::Said);
    let idle = || IDLE.iter().any(is).then_some(Taken::Idle);
    of(REFUSED).map(Taken::Refused).or_else(said).or_else(idle)
}

/// What a line of llama.cpp means beyond its flags' own values.
pub(super) fn told(name: &str, parsed: &mut Parsed) -> Result<(), (&'static str, &'static str)> {
    if name == "llama_cpp.server" {
        python(&mut parsed.object);
    }
    for (flag, line) in PRESETS {
        if parsed.object.shift_remove(*flag).is_some() {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let words = super::serving::lettered(&words, crate::ask::runner::Runner::LlamaCpp);
            for (key, value) in super::arguments::parse(&words).object {
                parsed.object.entry(key).or_insert(value);
            }
        }
    }
    for key in ["mu", "model_url"] {
        if let Some(Value::String(url)) = parsed.object.shift_remove(key) {
            let file = url.split('?').next().and_then(|url| url.rsplit('/').next()).unwrap_or_default();
            parsed.object.entry("model").or_insert(file.into());
        }
    }
    for key in ["hf_repo_draft", "spec_draft_hf"] {
        if let Some(value) = parsed.object.shift_remove(key) {
            parsed.object.entry("model_draft").or_insert(value);
        }
    }
    let kinds = parsed.object.shift_remove("spec_type");
    for kind in kinds.as_ref().and_then(Value::as_str).into_iter().flat_map(|kinds| kinds.split(',')) {
        match kind {
            "draft-mtp" | "mtp" => drop(parsed.object.insert("model_draft".into(), "mtp".into())),
            // What stood in the prompt before is looked up on the host.
            _ if kind.starts_with("ngram") || ["none", "draft", "draft-simple"].contains(&kind) => {}
            _ => {
                let cure =
                    "who guesses by a head of its own is not simulated on llama.cpp: leave it out for the model alone";
                return Err(("spec-type but none, draft-simple, draft-mtp and ngram-…", cure));
            }
        }
    }
    Ok(())
}

/// Names and defaults of llama-cpp-python's server (`llama_cpp/server/settings.py`).
fn python(object: &mut Map<String, Value>) {
    for (theirs, ours) in
        [("n_ctx", "ctx_size"), ("n_batch", "batch_size"), ("n_ubatch", "ubatch_size"), ("draft_model", "model_draft")]
    {
        if let Some(value) = object.shift_remove(theirs) {
            object.insert(ours.into(), value);
        }
    }
    object.entry("ctx_size").or_insert(2048.into());
    object.entry("batch_size").or_insert(512.into());
    object.entry("ubatch_size").or_insert(512.into());
    object.entry("parallel").or_insert(1.into());
    let on = object.shift_remove("flash_attn").is_some_and(|value| value == true);
    object.insert("flash_attn".into(), if on { "on" } else { "off" }.into());
    // Layers are on the host unless said.
    object.entry("n_gpu_layers").or_insert(0.into());
    if object["n_gpu_layers"] == typed("-1") {
        object.insert("n_gpu_layers".into(), "all".into());
    }
    for (theirs, ours) in [("type_k", "cache_type_k"), ("type_v", "cache_type_v")] {
        // Numbers of `ggml_type`.
        let kind = match object.shift_remove(theirs).and_then(|value| value.as_u64()) {
            Some(0) => "f32",
            Some(1) => "f16",
            Some(2) => "q4_0",
            Some(8) => "q8_0",
            _ => continue,
        };
        object.insert(ours.into(), kind.into());
    }
    if object.shift_remove("offload_kqv").is_some_and(|value| value == false) {
        object.insert("no_kv_offload".into(), true.into());
    }
    if let Some(Value::Array(shares)) = object.get("tensor_split") {
        let shares: Vec<String> = shares.iter().map(ToString::to_string).collect();
        object.insert("tensor_split".into(), shares.join(",").into());
    }
    [
        "n_threads",
        "n_threads_batch",
        "use_mmap",
        "use_mlock",
        "interrupt_requests",
        "model_alias",
        "chat_format",
        "clip_model_path",
        "cache",
        "cache_type",
        "cache_size",
        "last_n_tokens_size",
        "main_gpu",
        "hf_model_repo_id",
        "vocab_only",
        "logits_all",
    ]
    .iter()
    .for_each(|key| drop(object.shift_remove(*key)));
}
