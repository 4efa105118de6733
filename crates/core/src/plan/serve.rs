//! What a serving engine is started with, under the names its users know.

use serde::{Deserialize, Serialize};

use super::Gpu;
use crate::model::Assumption;

/// A serving engine on a card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ServePlan {
    /// Who serves.
    pub engine: ServingEngine,
    /// The version whose rules hold; the newest that the rules know when absent.
    pub version: Option<String>,
    /// Longest sequence the engine shall hold; the engine's own when absent.
    pub context: Option<u64>,
    /// How weights are quantised when the config does not say.
    pub quantization: Option<String>,
    /// The type of weights that are not quantised; 16 bits when absent (vLLM, SGLang).
    pub dtype: Option<String>,
    /// The type of keys and values; that of the weights when absent.
    pub kv_cache_dtype: Option<String>,
    /// Cards over which every layer is split.
    pub tensor_parallel_size: Option<u64>,
    /// Cards of the tensor-parallel ones that share the cache of a sequence (vLLM).
    pub decode_context_parallel_size: Option<u64>,
    /// Stages of layers (vLLM).
    pub pipeline_parallel_size: Option<u64>,
    /// Replicas that share experts (vLLM, and SGLang where attention alone is replicated).
    pub data_parallel_size: Option<u64>,
    /// Attention in replicas on the tensor-parallel cards, the rest split over all of them (SGLang).
    pub dp_attention: bool,
    /// Whole experts on each card instead of parts of all (vLLM).
    pub expert_parallel: bool,
    /// Share of the card that vLLM may use, SGLang's static share, or TensorRT-LLM's share of what is free.
    pub gpu_memory_utilization: Option<f64>,
    /// Sequences in a batch (vLLM).
    pub max_num_seqs: Option<u64>,
    /// Tokens in a batch (vLLM).
    pub max_num_batched_tokens: Option<u64>,
    /// Bytes of the cache; no profile run decides then.
    pub kv_cache_memory_bytes: Option<u64>,
    /// Gibibytes of the weights that stay on the host.
    pub cpu_offload_gb: Option<f64>,
    /// Tokens of a cache block (vLLM).
    pub block_size: Option<u64>,
    /// No CUDA graphs (vLLM).
    pub enforce_eager: bool,
    /// The largest batch that CUDA graphs are captured for (vLLM, SGLang).
    pub max_cudagraph_capture_size: Option<u64>,
    /// What an earlier start has compiled is found again (vLLM).
    pub compile_cache: bool,
    /// FlashInfer samples (vLLM).
    pub flashinfer_sampler: bool,
    /// Encoders of images and sound are not loaded (vLLM).
    pub language_model_only: bool,
    /// `--limit-mm-per-prompt '{"video": 0}'`: no videos in the profile run.
    pub no_videos: bool,
    /// `--limit-mm-per-prompt '{"image": 2}'`: images of a prompt (vLLM); as many as fit when absent.
    pub images_per_prompt: Option<u64>,
    /// Pixels of a picture at most (vLLM); as many as the model takes when absent.
    pub max_pixels: Option<u64>,
    /// `--limit-mm-per-prompt '{"audio": 0}'`: no sound.
    pub no_audio: bool,
    /// Nothing goes through encoders in the profile run (vLLM).
    pub skip_mm_profiling: bool,
    /// Whether finished prompts are kept in the cache; none: as the version does unasked (vLLM).
    pub enable_prefix_caching: Option<bool>,
    /// The type of recurrent states; as the config says when absent (vLLM).
    pub mamba_ssm_cache_dtype: Option<String>,
    /// Room for adapters (vLLM).
    pub enable_lora: bool,
    /// Adapters at once (vLLM).
    pub max_loras: Option<u64>,
    /// Largest rank of an adapter (vLLM).
    pub max_lora_rank: Option<u64>,
    /// Who guesses tokens ahead (vLLM, llama.cpp).
    pub speculative_model: Option<String>,
    /// The config of a model that does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculative_config: Option<serde_json::Value>,
    /// Tokens guessed ahead (vLLM, llama.cpp).
    pub num_speculative_tokens: Option<u64>,
    /// Layers of the model that guesses on the card (llama.cpp).
    pub n_gpu_layers_draft: Option<u64>,
    /// The file of an image encoder (llama.cpp).
    pub mmproj: Option<String>,
    /// Its size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mmproj_bytes: Option<u64>,
    /// Layers on the card, the output counted as one (llama.cpp).
    pub n_gpu_layers: Option<u64>,
    /// Tokens computed at once (llama.cpp).
    pub ubatch_size: Option<u64>,
    /// Tokens of a logical batch (llama.cpp).
    pub logical_batch: Option<u64>,
    /// Flash attention: on or off (llama.cpp).
    pub flash_attn: Option<String>,
    /// The ggml type of keys (llama.cpp).
    pub cache_type_k: Option<String>,
    /// The ggml type of values (llama.cpp).
    pub cache_type_v: Option<String>,
    /// Shares of several cards (llama.cpp); one card when empty.
    pub tensor_split: Vec<u64>,
    /// How several cards share a model (llama.cpp).
    pub split_mode: Option<String>,
    /// Layers whose experts stay on the host (llama.cpp).
    pub n_cpu_moe: Option<u64>,
    /// The experts of all layers stay on the host (llama.cpp).
    pub cpu_moe: bool,
    /// Tensors that stay on the host (llama.cpp).
    pub override_tensor: Option<String>,
    /// Sliding layers get as many cells as the others (llama.cpp).
    pub swa_full: bool,
    /// Sequences share one run of cells (llama.cpp).
    pub kv_unified: bool,
    /// Keys and values stay on the host (llama.cpp).
    pub no_kv_offload: bool,
    /// Operations on the host's weights stay there (llama.cpp).
    pub no_op_offload: bool,
    /// Weights on the host are read into a buffer, not mapped (llama.cpp).
    pub no_mmap: bool,
    /// Sequences at once (llama.cpp, Ollama).
    pub parallel: Option<u64>,
    /// What the model is taken for where its type is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assume: Option<Assumption>,
    /// The card.
    pub gpu: Gpu,
}

/// Who serves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ServingEngine {
    /// vLLM.
    #[default]
    Vllm,
    /// SGLang.
    Sglang,
    /// Text Generation Inference.
    Tgi,
    /// TensorRT-LLM.
    TensorrtLlm,
    /// llama.cpp.
    #[serde(rename = "llama.cpp", alias = "llama-cpp")]
    LlamaCpp,
    /// Ollama.
    Ollama,
}

impl ServingEngine {
    /// Its name, as plans and flags spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Tgi => "tgi",
            Self::TensorrtLlm => "tensorrt-llm",
            Self::LlamaCpp => "llama.cpp",
            Self::Ollama => "ollama",
        }
    }
}

impl Default for ServePlan {
    fn default() -> Self {
        Self {
            engine: ServingEngine::Vllm,
            version: None,
            context: None,
            quantization: None,
            dtype: None,
            kv_cache_dtype: None,
            tensor_parallel_size: None,
            decode_context_parallel_size: None,
            pipeline_parallel_size: None,
            data_parallel_size: None,
            dp_attention: false,
            expert_parallel: false,
            gpu_memory_utilization: None,
            max_num_seqs: None,
            max_num_batched_tokens: None,
            kv_cache_memory_bytes: None,
            cpu_offload_gb: None,
            block_size: None,
            enforce_eager: false,
            max_cudagraph_capture_size: None,
            compile_cache: false,
            flashinfer_sampler: false,
            language_model_only: false,
            no_videos: false,
            images_per_prompt: None,
            max_pixels: None,
            no_audio: false,
            skip_mm_profiling: false,
            enable_prefix_caching: None,
            mamba_ssm_cache_dtype: None,
            enable_lora: false,
            max_loras: None,
            max_lora_rank: None,
            speculative_model: None,
            speculative_config: None,
            num_speculative_tokens: None,
            n_gpu_layers_draft: None,
            mmproj: None,
            mmproj_bytes: None,
            n_gpu_layers: None,
            ubatch_size: None,
            logical_batch: None,
            flash_attn: None,
            cache_type_k: None,
            cache_type_v: None,
            tensor_split: Vec::new(),
            split_mode: None,
            n_cpu_moe: None,
            cpu_moe: false,
            override_tensor: None,
            swa_full: false,
            kv_unified: false,
            no_kv_offload: false,
            no_op_offload: false,
            no_mmap: false,
            parallel: None,
            assume: None,
            gpu: Gpu::h200(),
        }
    }
}
