//! Lines of serving engines: places of a plan that are flags of theirs.

use serde_json::{Value, json};

use super::{Draft, Object, at};
use crate::serving::llama_cpp::Mixture;

/// Flags of vLLM (engine/arg_utils.py) and where a plan has them.
const VLLM: [(&str, &str); 24] = [
    ("max-model-len", "context"),
    ("gpu-memory-utilization", "gpu_memory_utilization"),
    ("tensor-parallel-size", "tensor_parallel_size"),
    ("pipeline-parallel-size", "pipeline_parallel_size"),
    ("data-parallel-size", "data_parallel_size"),
    ("max-num-seqs", "max_num_seqs"),
    ("max-num-batched-tokens", "max_num_batched_tokens"),
    ("block-size", "block_size"),
    ("dtype", "dtype"),
    ("kv-cache-dtype", "kv_cache_dtype"),
    ("kv-cache-memory-bytes", "kv_cache_memory_bytes"),
    ("decode-context-parallel-size", "decode_context_parallel_size"),
    ("quantization", "quantization"),
    ("enforce-eager", "enforce_eager"),
    ("max-cudagraph-capture-size", "max_cudagraph_capture_size"),
    ("mamba-ssm-cache-dtype", "mamba_ssm_cache_dtype"),
    ("enable-expert-parallel", "expert_parallel"),
    ("enable-lora", "enable_lora"),
    ("max-loras", "max_loras"),
    ("max-lora-rank", "max_lora_rank"),
    ("cpu-offload-gb", "cpu_offload_gb"),
    ("language-model-only", "language_model_only"),
    ("skip-mm-profiling", "skip_mm_profiling"),
    ("enable-prefix-caching", "enable_prefix_caching"),
];

/// Flags of llama.cpp (common/arg.cpp).
const LLAMA_CPP: [(&str, &str); 16] = [
    ("--ctx-size", "context"),
    ("--n-gpu-layers", "n_gpu_layers"),
    ("--batch-size", "logical_batch"),
    ("--ubatch-size", "ubatch_size"),
    ("--cache-type-k", "cache_type_k"),
    ("--cache-type-v", "cache_type_v"),
    ("--flash-attn", "flash_attn"),
    ("--parallel", "parallel"),
    ("--split-mode", "split_mode"),
    ("--tensor-split", "tensor_split"),
    ("--n-cpu-moe", "n_cpu_moe"),
    ("--override-tensor", "override_tensor"),
    ("--model-draft", "speculative_model"),
    ("--draft-max", "num_speculative_tokens"),
    ("--n-gpu-layers-draft", "n_gpu_layers_draft"),
    ("--mmproj", "mmproj"),
];

/// Those that take no value.
const LLAMA_CPP_SWITCHES: [(&str, &str); 6] = [
    ("--cpu-moe", "cpu_moe"),
    ("--swa-full", "swa_full"),
    ("--kv-unified", "kv_unified"),
    ("--no-kv-offload", "no_kv_offload"),
    ("--no-op-offload", "no_op_offload"),
    ("--no-mmap", "no_mmap"),
];

/// Types as vLLM spells them (`ModelDType` of vllm/config/model.py).
const TYPES: [(&str, &str); 3] = [("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32")];

pub(super) fn draft(tool: &str, model: &str, plan: &Value) -> Draft {
    let said = |path: &str| at(plan, path).filter(|value| **value != false && **value != json!([]));
    if tool == "vllm" {
        let mut file = Object::new();
        file.insert("model".into(), json!(model));
        let typed = ["dtype", "mamba-ssm-cache-dtype"];
        for (flag, path) in VLLM {
            if let Some(value) = said(path) {
                let spelled = TYPES.iter().find(|(ours, _)| typed.contains(&flag) && value == ours);
                file.insert(flag.into(), spelled.map_or_else(|| value.clone(), |(_, theirs)| json!(theirs)));
            }
        }
        let mut limits = Object::new();
        limits.extend(said("images_per_prompt").map(|images| ("image".to_owned(), images.clone())));
        for (kind, path) in [("video", "no_videos"), ("audio", "no_audio")] {
            limits.extend(said(path).map(|_| (kind.to_owned(), json!(0))));
        }
        if !limits.is_empty() {
            file.insert("limit-mm-per-prompt".into(), Value::Object(limits));
        }
        if let Some(pixels) = said("max_pixels") {
            file.insert("mm-processor-kwargs".into(), json!({"max_pixels": pixels}));
        }
        let line = ["vllm", "serve", "--config", "vllm.yaml"].map(str::to_owned).to_vec();
        return Draft { files: vec![("vllm.yaml".into(), Value::Object(file))], line, own: None };
    }
    // It runs GGUF files, which say by their names how they are quantised.
    let mixture = at(plan, "quantization").and_then(Value::as_str).and_then(Mixture::find);
    let file = mixture.filter(|_| !model.ends_with(".gguf")).map(|mixture| {
        let name = model.rsplit('/').next().unwrap_or(model);
        format!("{}-{}.gguf", name.trim_end_matches("-GGUF"), mixture.name)
    });
    let mut line = ["llama-server", "--model", file.as_deref().unwrap_or(model)].map(str::to_owned).to_vec();
    for (flag, path) in LLAMA_CPP {
        if let Some(value) = said(path) {
            let text = match value {
                Value::Bool(_) => "on".to_owned(),
                Value::String(text) => text.clone(),
                Value::Array(list) => list.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
                other => other.to_string(),
            };
            line.extend([flag.to_owned(), text]);
        }
    }
    line.extend(LLAMA_CPP_SWITCHES.iter().filter(|(_, path)| said(path).is_some()).map(|(flag, _)| (*flag).to_owned()));
    Draft { files: Vec::new(), line, own: None }
}
