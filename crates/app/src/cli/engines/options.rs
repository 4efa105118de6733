//! The flags of serving engines, under the names their users know; one that an engine does not have is refused.

use clap::Args;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use vramcast_core::dtype::{DType, builtin_formats, find_format};
use vramcast_core::model::Model;
use vramcast_core::plan::Gpu;
use vramcast_core::serving::llama_cpp::{Build, LlamaCppPlan, Split};
use vramcast_core::serving::vllm::{VllmPlan, rules};
use vramcast_core::serving::{ServedModel, WeightFormat};
use vramcast_core::source::quantization::Quantization;

use super::EngineName;
use crate::cli::Failure;

/// What an engine is started with.
#[derive(Debug, Clone, Default, Args, Deserialize, JsonSchema)]
#[command(next_help_heading = "Serving engines")]
#[serde(default, deny_unknown_fields)]
pub(crate) struct EngineArguments {
    /// The version whose rules hold (vLLM: 0.6 to 0.28, "0.8.5 V0" for the older engine; llama.cpp: a build such as b5781,
    /// current or early).
    #[arg(long, value_name = "VERSION")]
    pub engine_version: Option<String>,
    /// Longest sequence the engine shall hold [default: the engine's].
    #[arg(long, value_name = "N", visible_aliases = ["max-model-len", "ctx-size", "num-ctx", "max-total-tokens", "context-length"])]
    pub context: Option<u64>,
    /// How weights are quantised when the config does not say: awq, gptq, fp8, nf4; a ggml type for llama.cpp; nf4, fp4 or
    /// int8 for transformers.
    #[arg(long, value_name = "METHOD")]
    pub quantization: Option<String>,
    /// The type of keys and values: auto, bf16, fp8 and the like.
    #[arg(long, value_name = "TYPE")]
    pub kv_cache_dtype: Option<String>,
    /// Cards over which every layer is split.
    #[arg(long, value_name = "N", visible_aliases = ["tp", "tp-size", "num-shard"])]
    pub tensor_parallel_size: Option<u64>,
    /// Stages of layers (vLLM).
    #[arg(long, value_name = "N", visible_alias = "pp")]
    pub pipeline_parallel_size: Option<u64>,
    /// Replicas that share experts (vLLM).
    #[arg(long, value_name = "N", visible_alias = "dp")]
    pub data_parallel_size: Option<u64>,
    /// Whole experts on each card instead of parts of all (vLLM).
    #[arg(long, visible_alias = "enable-expert-parallel")]
    pub expert_parallel: bool,
    /// Share of the card that vLLM may use, or SGLang's static share.
    #[arg(long, value_name = "SHARE", visible_alias = "mem-fraction-static")]
    pub gpu_memory_utilization: Option<f64>,
    /// Sequences in a batch (vLLM).
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<u64>,
    /// Tokens in a batch (vLLM).
    #[arg(long, value_name = "N")]
    pub max_num_batched_tokens: Option<u64>,
    /// Tokens of a cache block (vLLM).
    #[arg(long, value_name = "N")]
    pub block_size: Option<u64>,
    /// No CUDA graphs (vLLM).
    #[arg(long)]
    pub enforce_eager: bool,
    /// Keep finished prompts in the cache; takes no memory of its own (vLLM).
    #[arg(long)]
    pub enable_prefix_caching: bool,
    /// Room for adapters (vLLM).
    #[arg(long)]
    pub enable_lora: bool,
    /// Adapters at once (vLLM).
    #[arg(long, value_name = "N", requires = "enable_lora")]
    pub max_loras: Option<u64>,
    /// Largest rank of an adapter (vLLM).
    #[arg(long, value_name = "N", requires = "enable_lora")]
    pub max_lora_rank: Option<u64>,
    /// Who guesses tokens ahead: a model, mtp, eagle, ngram, or the number of layers of a head counted elsewhere (vLLM).
    #[arg(long, value_name = "MODEL")]
    pub speculative_model: Option<String>,
    /// Tokens guessed ahead (vLLM).
    #[arg(long, value_name = "N", requires = "speculative_model")]
    pub num_speculative_tokens: Option<u64>,
    /// Layers on the card, the output counted as one (llama.cpp -ngl).
    #[arg(long, value_name = "N", visible_alias = "gpu-layers")]
    pub n_gpu_layers: Option<u64>,
    /// Tokens computed at once (llama.cpp -ub).
    #[arg(long, value_name = "N")]
    pub ubatch_size: Option<u64>,
    /// Flash attention: on or off (llama.cpp -fa).
    #[arg(long, value_name = "on|off", num_args = 0..=1, default_missing_value = "on")]
    pub flash_attn: Option<String>,
    /// The ggml type of keys (llama.cpp -ctk).
    #[arg(long, value_name = "TYPE")]
    pub cache_type_k: Option<String>,
    /// The ggml type of values (llama.cpp -ctv).
    #[arg(long, value_name = "TYPE")]
    pub cache_type_v: Option<String>,
    /// Shares of several cards, such as 3,1 (llama.cpp -ts).
    #[arg(long, value_name = "SHARES", value_delimiter = ',')]
    pub tensor_split: Vec<u64>,
    /// Layers whose experts stay on the host (llama.cpp).
    #[arg(long, value_name = "N")]
    pub n_cpu_moe: Option<u64>,
    /// The experts of all layers stay on the host (llama.cpp).
    #[arg(long)]
    pub cpu_moe: bool,
    /// Tensors that stay on the host: a pattern of all routed experts, such as exps=CPU (llama.cpp -ot).
    #[arg(long, value_name = "PATTERN=CPU")]
    pub override_tensor: Option<String>,
    /// Sliding layers get as many cells as the others (llama.cpp).
    #[arg(long)]
    pub swa_full: bool,
    /// Sequences share one run of cells (llama.cpp).
    #[arg(long)]
    pub kv_unified: bool,
    /// How several cards share a model: layer, row, tensor or none (llama.cpp -sm).
    #[arg(long, value_name = "HOW")]
    pub split_mode: Option<String>,
    /// Tokens of a logical batch (llama.cpp -b, which the command line reads as --batch-size).
    #[arg(skip)]
    pub logical_batch: Option<u64>,
    /// Sequences at once (llama.cpp -np, Ollama).
    #[arg(long, value_name = "N", visible_alias = "num-parallel")]
    pub parallel: Option<u64>,
}

use EngineName::{Hf, LlamaCpp, Ollama, Sglang, TensorrtLlm, Tgi, Vllm};

impl EngineArguments {
    /// Refuses what the chosen engine does not have.
    pub(crate) fn check(&self, engine: EngineName) -> Result<(), Failure> {
        let pooled = [Vllm, Sglang, Tgi, TensorrtLlm];
        let local = [LlamaCpp, Ollama];
        let any = [Vllm, Sglang, Tgi, TensorrtLlm, LlamaCpp, Ollama];
        let every = [Hf, Vllm, Sglang, Tgi, TensorrtLlm, LlamaCpp, Ollama];
        let given: [(&str, bool, &[EngineName]); 31] = [
            ("--engine-version", self.engine_version.is_some(), &[Vllm, LlamaCpp]),
            ("--context", self.context.is_some(), &any),
            ("--quantization", self.quantization.is_some(), &every),
            ("--kv-cache-dtype", self.kv_cache_dtype.is_some(), &pooled),
            ("--tensor-parallel-size", self.tensor_parallel_size.is_some(), &pooled),
            ("--pipeline-parallel-size", self.pipeline_parallel_size.is_some(), &[Vllm]),
            ("--data-parallel-size", self.data_parallel_size.is_some(), &[Vllm]),
            ("--expert-parallel", self.expert_parallel, &[Vllm]),
            ("--gpu-memory-utilization", self.gpu_memory_utilization.is_some(), &[Vllm, Sglang]),
            ("--max-num-seqs", self.max_num_seqs.is_some(), &[Vllm]),
            ("--max-num-batched-tokens", self.max_num_batched_tokens.is_some(), &[Vllm]),
            ("--block-size", self.block_size.is_some(), &[Vllm]),
            ("--enforce-eager", self.enforce_eager, &[Vllm]),
            ("--enable-prefix-caching", self.enable_prefix_caching, &[Vllm]),
            ("--enable-lora", self.enable_lora, &[Vllm]),
            ("--max-loras", self.max_loras.is_some(), &[Vllm]),
            ("--max-lora-rank", self.max_lora_rank.is_some(), &[Vllm]),
            ("--speculative-model", self.speculative_model.is_some(), &[Vllm]),
            ("--num-speculative-tokens", self.num_speculative_tokens.is_some(), &[Vllm]),
            ("--n-gpu-layers", self.n_gpu_layers.is_some(), &local),
            ("--ubatch-size", self.ubatch_size.is_some(), &local),
            ("--flash-attn", self.flash_attn.is_some(), &local),
            ("--cache-type-k", self.cache_type_k.is_some(), &local),
            ("--cache-type-v", self.cache_type_v.is_some(), &local),
            ("--tensor-split", !self.tensor_split.is_empty(), &[LlamaCpp]),
            ("--split-mode", self.split_mode.is_some(), &[LlamaCpp]),
            ("--n-cpu-moe", self.n_cpu_moe.is_some(), &[LlamaCpp]),
            ("--cpu-moe", self.cpu_moe, &[LlamaCpp]),
            ("--override-tensor", self.override_tensor.is_some(), &[LlamaCpp]),
            ("--swa-full / --kv-unified", self.swa_full || self.kv_unified, &[LlamaCpp]),
            ("--parallel", self.parallel.is_some(), &local),
        ];
        let wrong =
            given.iter().find(|(_, given, engines)| *given && engine != EngineName::All && !engines.contains(&engine));
        wrong.map_or(Ok(()), |(flag, ..)| {
            Err(Failure::bad_input(format!("{flag} is not an option of {}", engine.title()))
                .hint("see `vramcast infer --help` for which engine has which"))
        })
    }

    /// Weights as the config says, or as `--quantization` does.
    pub(super) fn format(&self, engine: EngineName, model: &Model) -> Result<WeightFormat, Failure> {
        let own = WeightFormat::of(model).map_err(|e| Failure::bad_input(e.to_string()))?;
        let Some(method) = &self.quantization else { return Ok(own) };
        if matches!(engine, LlamaCpp | Ollama) {
            let format = find_format(builtin_formats(), method).filter(|format| format.ggml_type.is_some());
            return format.cloned().map(WeightFormat::Stored).ok_or_else(|| {
                Failure::bad_input(format!("--quantization: {method} is not a ggml type")).hint("such as q4_k or q8_0")
            });
        }
        let WeightFormat::Plain(dtype) = own else {
            return Err(Failure::bad_input("--quantization: the config is quantised already"));
        };
        let section = section(method)?;
        let read = Quantization::from_config(&json!({"quantization_config": section}));
        let read = read.map_err(|e| Failure::bad_input(e.to_string()))?;
        Ok(read.map_or(WeightFormat::Plain(dtype), |read| WeightFormat::Checkpoint(Box::new(read), dtype)))
    }

    /// The type of keys and values; 16 bits where nothing is said.
    pub(super) fn cache_dtype(&self, format: &WeightFormat) -> Result<DType, Failure> {
        match self.kv_cache_dtype.as_deref() {
            None | Some("auto") => Ok(match format {
                WeightFormat::Plain(DType::F32) => DType::F32,
                _ => DType::BF16,
            }),
            Some(text) if text.starts_with("fp8") => Ok(DType::F8E4M3),
            Some(text) => DType::parse(text)
                .ok_or_else(|| Failure::bad_input(format!("--kv-cache-dtype: {text} is not auto, bf16, fp16 or fp8"))),
        }
    }

    /// vLLM's plan.
    pub(super) fn vllm(&self, gpu: &Gpu, cache_dtype: DType) -> Result<VllmPlan, Failure> {
        let default = VllmPlan::default();
        let lora = [self.max_loras.unwrap_or(1), self.max_lora_rank.unwrap_or(16)];
        let version = self.engine_version.clone().unwrap_or(default.version.clone());
        Ok(VllmPlan {
            utilization_thousandths: thousandths(self.gpu_memory_utilization)?
                .unwrap_or(rules(&version).utilization_thousandths),
            version,
            tensor_parallel: positive("--tensor-parallel-size", self.tensor_parallel_size)?,
            pipeline_parallel: positive("--pipeline-parallel-size", self.pipeline_parallel_size)?,
            data_parallel: positive("--data-parallel-size", self.data_parallel_size)?,
            expert_parallel: self.expert_parallel,
            max_model_len: self.context,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_num_seqs: self.max_num_seqs,
            block_size: positive("--block-size", self.block_size.or(Some(default.block_size)))?,
            cache_dtype,
            enforce_eager: self.enforce_eager,
            lora: self.enable_lora.then_some(lora),
            prefix_caching: self.enable_prefix_caching,
            speculative_tokens: self.num_speculative_tokens.unwrap_or(0).min(1 << 16),
            memory: gpu.memory,
            workspace: vramcast_core::memory::device::Device::of(gpu).blas_workspace(),
            multiprocessors: gpu.threads().0,
            bare_context: gpu.bare_context(),
            card: gpu.name.clone(),
        })
    }

    /// What was given to vLLM and changes no byte, said; refused where the model has nothing it could act on.
    pub(super) fn without_effect_on_vllm(&self, plan: &VllmPlan, model: &ServedModel) -> Result<Vec<String>, Failure> {
        let experts = model.layers.iter().any(|layer| layer.experts > 0);
        if self.expert_parallel && !experts {
            return Err(Failure::bad_input("--expert-parallel: the model has no experts").hint("leave it out"));
        }
        let rules = rules(&plan.version);
        let graphs = rules.graphs_in_budget;
        let states = model.layers.iter().any(|layer| model.states(layer) != (0, 0));
        let said = [
            (
                self.num_speculative_tokens.is_some() && !states,
                "--num-speculative-tokens: only states of constant size grow with it, which the model does not have",
            ),
            (
                self.expert_parallel && plan.tensor_parallel.saturating_mul(plan.data_parallel) == 1,
                "--expert-parallel: there is one card",
            ),
            (
                plan.data_parallel > 1 && !experts,
                "--data-parallel-size: without experts every replica is the same; sizes are of one card",
            ),
            (
                self.enforce_eager && !graphs,
                "--enforce-eager: this version does not take CUDA graphs out of the cache's share",
            ),
            (
                self.enable_prefix_caching && !(states && rules.states_kept),
                "--enable-prefix-caching: kept prompts lie in the same blocks and take no memory of their own",
            ),
        ];
        Ok(said.into_iter().filter(|(given, _)| *given).map(|(_, text)| text.to_owned()).collect())
    }

    /// llama.cpp's plan over its defaults or Ollama's.
    pub(super) fn llama_cpp(&self, default: LlamaCppPlan) -> Result<LlamaCppPlan, Failure> {
        let flash_attention = match self.flash_attn.as_deref() {
            None => default.flash_attention,
            Some("on" | "1" | "auto") => true,
            Some("off" | "0") => false,
            Some(other) => return Err(Failure::bad_input(format!("--flash-attn: {other} is not on or off"))),
        };
        let build = build(self.engine_version.as_deref())?;
        let mut tensor_split = if self.tensor_split.is_empty() { vec![1] } else { self.tensor_split.clone() };
        let split = match self.split_mode.as_deref() {
            None | Some("layer") => Split::Layer,
            // The first card holds all.
            Some("none") => {
                tensor_split = vec![1];
                Split::Layer
            }
            Some("row") => Split::Row,
            Some("tensor") => Split::Tensor,
            Some(other) => {
                return Err(Failure::bad_input(format!("--split-mode: {other} is not layer, row, tensor or none")));
            }
        };
        let cpu_experts = match (self.n_cpu_moe, self.cpu_moe, self.override_tensor.as_deref()) {
            (Some(layers), false, None) => layers,
            (None, true, None) => u64::MAX,
            (None, false, Some(text)) => overridden(text)?,
            (None, false, None) => 0,
            _ => return Err(Failure::bad_input("--n-cpu-moe, --cpu-moe and --override-tensor: give one of them")),
        };
        let micro_batch = self.ubatch_size.unwrap_or(default.micro_batch);
        Ok(LlamaCppPlan {
            build,
            // A graph is never larger than the logical batch (`n_ubatch = min(n_batch, n_ubatch)` of llama-context.cpp).
            micro_batch: self.logical_batch.map_or(micro_batch, |batch| batch.min(micro_batch)),
            flash_attention,
            key_type: self.cache_type_k.clone().unwrap_or(default.key_type.clone()),
            value_type: self.cache_type_v.clone().unwrap_or(default.value_type.clone()),
            gpu_layers: self.n_gpu_layers.unwrap_or(default.gpu_layers),
            tensor_split,
            split,
            cpu_experts,
            full_windows: self.swa_full,
            unified: self.kv_unified,
            ..default
        })
    }

    /// A share of the card in thousandths.
    pub(super) fn static_share(&self) -> Result<Option<u64>, Failure> {
        thousandths(self.gpu_memory_utilization)
    }
}

/// llama.cpp's build: a number, or one of the two names.
fn build(version: Option<&str>) -> Result<Build, Failure> {
    match version {
        None | Some("current") => Ok(Build::Current),
        Some("early") => Ok(Build::Early),
        Some(other) => match other.trim_start_matches('b').parse::<u32>() {
            Ok(number) => Ok(Build::Numbered(number)),
            Err(_) => Err(Failure::bad_input(format!("--engine-version: {other} is not current, early or a build"))
                .hint("a build of llama.cpp such as b5781; early: before March 2025")),
        },
    }
}

/// Layers whose experts a pattern of `--override-tensor` leaves on the host: all, or it is refused.
fn overridden(text: &str) -> Result<u64, Failure> {
    let (pattern, place) = text.rsplit_once('=').unwrap_or((text, ""));
    let words = ["exps", "ffn_exps", "ffn_(up|down|gate)_exps", "ffn_(gate|up|down)_exps", "ffn_(up|gate|down)_exps"];
    let plain = pattern.replace(['\\', '.', '*'], "").replace("__", "_");
    if place == "CPU" && words.contains(&plain.trim_matches('_')) {
        return Ok(u64::MAX);
    }
    Err(Failure::bad_input(format!("--override-tensor: {text} is not modelled"))
        .hint("a pattern of all routed experts (exps=CPU), or --n-cpu-moe N for the first N layers"))
}

fn positive(flag: &str, value: Option<u64>) -> Result<u64, Failure> {
    match value.unwrap_or(1) {
        count @ 1..=65_536 => Ok(count),
        other => Err(Failure::bad_input(format!("{flag}: {other} is not from 1 to 65536"))),
    }
}

fn thousandths(share: Option<f64>) -> Result<Option<u64>, Failure> {
    match share {
        None => Ok(None),
        Some(share) if share > 0.0 && share <= 1.0 => Ok(Some((share * 1000.0).round() as u64)),
        Some(other) => Err(Failure::bad_input(format!("--gpu-memory-utilization: {other} is not between 0 and 1"))),
    }
}

/// The usual settings of a method.
fn section(method: &str) -> Result<Value, Failure> {
    Ok(match method.to_ascii_lowercase().as_str() {
        "awq" => json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}),
        "gptq" | "int4" | "w4a16" => json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true}),
        "fp8" | "w8a8" => json!({"quant_method": "fbgemm_fp8"}),
        "nf4" | "bitsandbytes" => {
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"})
        }
        "int8" => json!({"quant_method": "bitsandbytes", "load_in_8bit": true}),
        "mxfp4" => json!({"quant_method": "mxfp4"}),
        other => {
            return Err(Failure::bad_input(format!("--quantization: {other} is not known"))
                .hint("awq, gptq, fp8, mxfp4, nf4 or int8; others are read from a config's quantization_config"));
        }
    })
}

/// llama.cpp's flags of several letters, which are no long options, under their long names.
const LETTERS: &[(&str, &str)] = &[
    ("-ngl", "--n-gpu-layers"),
    ("-ub", "--ubatch-size"),
    ("-fa", "--flash-attn"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-ts", "--tensor-split"),
    ("-sm", "--split-mode"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-cmoe", "--cpu-moe"),
    ("-ot", "--override-tensor"),
    ("-np", "--parallel"),
    ("-c", "--ctx-size"),
];

/// Puts llama.cpp's short flags in words, for `infer` alone.
pub(in crate::cli) fn known_by_letters(arguments: Vec<std::ffi::OsString>) -> Vec<std::ffi::OsString> {
    if !arguments.iter().take(3).any(|argument| argument == "infer") {
        return arguments;
    }
    let long = |argument: std::ffi::OsString| {
        let known = LETTERS.iter().find(|(short, _)| argument == *short);
        known.map_or(argument, |(_, long)| (*long).into())
    };
    arguments.into_iter().map(long).collect()
}
