//! From what an engine is started with to what it sets aside.

use serde_json::{Value, json};

use super::llama_cpp::{Build, Flash, LlamaCppEstimate, LlamaCppPlan, Split, ollama};
use super::sglang::SglangPlan;
use super::tensorrt_llm::TensorRtLlmPlan;
use super::tgi::TgiPlan;
use super::vllm::{Draft, Speculation, VllmPlan, rules};
use super::{Budget, ServedModel, WeightFormat};
use crate::dtype::{DType, builtin_formats, find_format};
use crate::memory::device::Device;
use crate::model::Model;
use crate::plan::{Fault, ServePlan, ServingEngine};
use crate::source::quantization::Quantization;

/// What an engine said about a card.
#[derive(Debug, Clone, PartialEq)]
pub enum Served {
    /// A pool of blocks beside weights and scratch.
    Pool(Box<Budget>),
    /// Buffers, device by device.
    Buffers(Box<LlamaCppEstimate>),
}

/// Asks an engine about a model on the plan's card.
pub fn start(model: &Model, plan: &ServePlan) -> Result<Served, Vec<Fault>> {
    let one = |fault: Fault| vec![fault];
    let served = |format: &WeightFormat| {
        ServedModel::of(model, format).map_err(|error| one(Fault::new("model", error.to_string())))
    };
    let local = matches!(plan.engine, ServingEngine::LlamaCpp | ServingEngine::Ollama);
    let format = format(plan, model, local).map_err(one)?;
    let served = served(&format)?;
    if local {
        let defaults = match plan.engine {
            ServingEngine::Ollama => ollama(&served, plan.gpu.memory, plan.context, plan.parallel),
            _ => {
                let plain = LlamaCppPlan::default();
                let (context, parallel) =
                    (plan.context.unwrap_or(plain.context), plan.parallel.unwrap_or(plain.parallel));
                LlamaCppPlan { context, parallel, ..plain }
            }
        };
        let engine = llama_cpp(plan, defaults).map_err(one)?;
        let estimate = engine.estimate(&served).map_err(|error| one(Fault::new("cache_type_k", error.to_string())))?;
        return Ok(Served::Buffers(Box::new(estimate)));
    }
    let cache_dtype = cache_dtype(plan, &format).map_err(one)?;
    let (memory, process, context) = (plan.gpu.memory, plan.gpu.context(), plan.context);
    let ranks = plan.tensor_parallel_size.unwrap_or(1).max(1);
    let budget = match plan.engine {
        ServingEngine::Sglang => {
            let static_thousandths = plan.gpu_memory_utilization.map(thousandths);
            let default = SglangPlan::default();
            SglangPlan { memory, process, context, cache_dtype, tensor_parallel: ranks, static_thousandths, ..default }
                .budget(&served)
        }
        ServingEngine::Tgi => {
            TgiPlan { memory, process, max_total_tokens: context, cache_dtype, shards: ranks, ..TgiPlan::default() }
                .budget(&served)
        }
        ServingEngine::TensorrtLlm => {
            let default = TensorRtLlmPlan::default();
            TensorRtLlmPlan { memory, process, max_seq_len: context, cache_dtype, tensor_parallel: ranks, ..default }
                .budget(&served)
        }
        _ => {
            let engine = vllm(plan, cache_dtype);
            let draft = draft(plan, &served, &engine).map_err(one)?;
            let mut budget = engine.budget_with(&served, draft.as_ref());
            budget.notes.extend(without_effect(plan, &engine, &served));
            budget
        }
    };
    Ok(Served::Pool(Box::new(budget)))
}

fn thousandths(share: f64) -> u64 {
    (share * 1000.0).round() as u64
}

/// Weights as the config says, or as the plan does.
fn format(plan: &ServePlan, model: &Model, local: bool) -> Result<WeightFormat, Fault> {
    let bad = |problem: String| Fault::new("quantization", problem);
    let own = WeightFormat::of(model).map_err(|error| bad(error.to_string()))?;
    let Some(method) = &plan.quantization else { return Ok(own) };
    if local {
        let format = find_format(builtin_formats(), method).filter(|format| format.ggml_type.is_some());
        return format
            .cloned()
            .map(WeightFormat::Stored)
            .ok_or_else(|| Fault::value("quantization", method, "a ggml type").or("use one such as q4_k or q8_0"));
    }
    let WeightFormat::Plain(dtype) = own else {
        return Err(bad("{quantization}: the config is quantised already".into()).or_drop("quantization"));
    };
    let read = Quantization::from_config(&json!({"quantization_config": section(method)?}));
    let read = read.map_err(|error| bad(error.to_string()))?;
    Ok(read.map_or(WeightFormat::Plain(dtype), |read| WeightFormat::Checkpoint(Box::new(read), dtype)))
}

/// The usual settings of a method.
fn section(method: &str) -> Result<Value, Fault> {
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
            let fault = Fault::value("quantization", other, "awq, gptq, fp8, mxfp4, nf4 or int8");
            return Err(fault.or("put others into the config's quantization_config"));
        }
    })
}

/// The type of keys and values; 16 bits where nothing is said.
fn cache_dtype(plan: &ServePlan, format: &WeightFormat) -> Result<DType, Fault> {
    match plan.kv_cache_dtype.as_deref() {
        None | Some("auto") => Ok(match format {
            WeightFormat::Plain(DType::F32) => DType::F32,
            _ => DType::BF16,
        }),
        Some(text) if text.starts_with("fp8") => Ok(DType::F8E4M3),
        Some(text) => DType::parse(text).ok_or_else(|| Fault::value("kv_cache_dtype", text, "auto, bf16, fp16 or fp8")),
    }
}

fn vllm(plan: &ServePlan, cache_dtype: DType) -> VllmPlan {
    let default = VllmPlan::default();
    let version = plan.version.clone().unwrap_or(default.version.clone());
    let lora = [plan.max_loras.unwrap_or(1), plan.max_lora_rank.unwrap_or(16)];
    VllmPlan {
        utilization_thousandths: plan
            .gpu_memory_utilization
            .map_or(rules(&version).utilization_thousandths, thousandths),
        version,
        tensor_parallel: plan.tensor_parallel_size.unwrap_or(1),
        pipeline_parallel: plan.pipeline_parallel_size.unwrap_or(1),
        data_parallel: plan.data_parallel_size.unwrap_or(1),
        expert_parallel: plan.expert_parallel,
        max_model_len: plan.context,
        max_num_batched_tokens: plan.max_num_batched_tokens,
        max_num_seqs: plan.max_num_seqs,
        block_size: plan.block_size.unwrap_or(default.block_size),
        cache_dtype,
        enforce_eager: plan.enforce_eager,
        lora: plan.enable_lora.then_some(lora),
        prefix_caching: plan.enable_prefix_caching,
        speculative_tokens: plan.num_speculative_tokens.unwrap_or(0).min(1 << 16),
        memory: plan.gpu.memory,
        workspace: Device::of(&plan.gpu).blas_workspace(),
        multiprocessors: plan.gpu.threads().0,
        bare_context: plan.gpu.bare_context(),
        card: plan.gpu.name.clone(),
    }
}

/// What guessing ahead takes.
fn draft(plan: &ServePlan, served: &ServedModel, engine: &VllmPlan) -> Result<Option<Draft>, Fault> {
    let Some(text) = &plan.speculative_model else { return Ok(None) };
    let of = |speculation| Ok(Some(Draft::of(speculation, served, engine)));
    match (text.as_str(), text.parse::<u64>()) {
        (_, Ok(layers)) => return of(Speculation::Layers(layers)),
        ("mtp", _) => return of(Speculation::MultiToken),
        ("eagle", _) => return of(Speculation::Eagle),
        ("ngram", _) => return of(Speculation::NGram),
        _ => {}
    }
    let bad = |problem: String| Fault::new("speculative_model", format!("{{speculative_model}} {text}: {problem}"));
    let config = plan.speculative_config.clone().ok_or_else(|| bad("its config is not known".into()))?;
    let model = Model::new(config, None).map_err(|error| bad(error.to_string()))?;
    let format = WeightFormat::of(&model).map_err(|error| bad(error.to_string()))?;
    let draft = ServedModel::of(&model, &format).map_err(|error| bad(error.to_string()))?;
    of(Speculation::Model(&draft))
}

/// What was given to vLLM and changes no byte.
fn without_effect(plan: &ServePlan, engine: &VllmPlan, model: &ServedModel) -> Vec<String> {
    let experts = model.layers.iter().any(|layer| layer.experts > 0);
    let rules = rules(&engine.version);
    let states = model.layers.iter().any(|layer| model.states(layer) != (0, 0));
    let said = [
        (
            plan.num_speculative_tokens.is_some() && !states,
            "num_speculative_tokens: only states of constant size grow with it, which the model does not have",
        ),
        (
            plan.expert_parallel && engine.tensor_parallel.saturating_mul(engine.data_parallel) == 1,
            "expert_parallel: there is one card",
        ),
        (
            engine.data_parallel > 1 && !experts,
            "data_parallel_size: without experts every replica is the same; sizes are of one card",
        ),
        (
            plan.enforce_eager && !rules.graphs_in_budget,
            "enforce_eager: this version does not take CUDA graphs out of the cache's share",
        ),
        (
            plan.enable_prefix_caching && !(states && rules.states_kept),
            "enable_prefix_caching: kept prompts lie in the same blocks and take no memory of their own",
        ),
    ];
    said.into_iter().filter(|(given, _)| *given).map(|(_, text)| text.to_owned()).collect()
}

/// llama.cpp's plan over its defaults or Ollama's.
fn llama_cpp(plan: &ServePlan, default: LlamaCppPlan) -> Result<LlamaCppPlan, Fault> {
    let mut tensor_split = if plan.tensor_split.is_empty() { vec![1] } else { plan.tensor_split.clone() };
    let split = match plan.split_mode.as_deref() {
        None | Some("layer") => Split::Layer,
        // The first card holds all.
        Some("none") => {
            tensor_split = vec![1];
            Split::Layer
        }
        Some("row") => Split::Row,
        Some("tensor") => Split::Tensor,
        Some(other) => return Err(Fault::value("split_mode", other, "layer, row, tensor or none")),
    };
    let cpu_experts = match (plan.n_cpu_moe, plan.cpu_moe, plan.override_tensor.as_deref()) {
        (Some(layers), ..) => layers,
        (_, true, _) => u64::MAX,
        (.., Some(text)) => overridden(text)?,
        _ => 0,
    };
    let micro_batch = plan.ubatch_size.unwrap_or(default.micro_batch);
    Ok(LlamaCppPlan {
        build: build(plan.version.as_deref())?,
        // A graph is never larger than the logical batch (`n_ubatch = min(n_batch, n_ubatch)` of llama-context.cpp).
        micro_batch: plan.logical_batch.map_or(micro_batch, |batch| batch.min(micro_batch)),
        flash_attention: match plan.flash_attn.as_deref() {
            None => default.flash_attention,
            Some("off") => Flash::Off,
            Some("auto") => Flash::Auto,
            Some(_) => Flash::On,
        },
        key_type: plan.cache_type_k.clone().unwrap_or(default.key_type.clone()),
        value_type: plan.cache_type_v.clone().unwrap_or(default.value_type.clone()),
        gpu_layers: plan.n_gpu_layers.unwrap_or(default.gpu_layers),
        tensor_split,
        split,
        cpu_experts,
        full_windows: plan.swa_full,
        unified: plan.kv_unified,
        ..default
    })
}

/// llama.cpp's build: a number, or one of the two names.
fn build(version: Option<&str>) -> Result<Build, Fault> {
    match version {
        None | Some("current") => Ok(Build::Current),
        Some("early") => Ok(Build::Early),
        Some(other) => {
            other.trim_start_matches('b').parse::<u32>().map(Build::Numbered).map_err(|_| {
                Fault::value("version", other, "current, early (before March 2025) or a build such as b5781")
            })
        }
    }
}

/// Layers whose experts a pattern leaves on the host: all, or it is refused.
fn overridden(text: &str) -> Result<u64, Fault> {
    let (pattern, place) = text.rsplit_once('=').unwrap_or((text, ""));
    let words = ["exps", "ffn_exps", "ffn_(up|down|gate)_exps", "ffn_(gate|up|down)_exps", "ffn_(up|gate|down)_exps"];
    let plain = pattern.replace(['\\', '.', '*'], "").replace("__", "_");
    if place == "CPU" && words.contains(&plain.trim_matches('_')) {
        return Ok(u64::MAX);
    }
    Err(Fault::unsupported("override_tensor", format!("{{override_tensor}} {text}"))
        .or("take a pattern of all routed experts (exps=CPU), or {n_cpu_moe} for the first layers"))
}
