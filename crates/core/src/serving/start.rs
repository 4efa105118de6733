//! From what an engine is started with to what it sets aside.

use serde_json::{Value, json};

use super::llama_cpp::LlamaCppEstimate;
use super::model::ServedLayer;
use super::sglang::SglangPlan;
use super::tensorrt_llm::TensorRtLlmPlan;
use super::tgi::TgiPlan;
use super::vllm::{DEFAULT_VERSION, Draft, Speculation, VllmPlan, rules};
use super::{Budget, ServedModel, WeightFormat};
use crate::dtype::DType;
use crate::memory::device::Device;
use crate::model::Model;
use crate::model::facts::VideoTokens;
use crate::plan::{Fault, ServePlan, ServingEngine};
use crate::source::catalogue;
use crate::source::quantization::{Quantization, Scheme};
use crate::source::uploads;

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
    if local {
        return super::local::start(model, plan).map(|estimate| Served::Buffers(Box::new(estimate))).map_err(one);
    }
    let format = format(plan, model).map_err(one)?;
    let mut served = served(&format)?;
    in_file(plan, model, &mut served).map_err(one)?;
    if let WeightFormat::Checkpoint(stored, _) | WeightFormat::Text(stored, _) = &format {
        served.guesses_whole = stored.leaves("mtp.layers.0.mlp.down_proj");
    }
    let cache_dtype = cache_dtype(plan, &format).map_err(one)?;
    let (memory, process, context) = (plan.gpu.memory, plan.gpu.context(), plan.context);
    let ranks = plan.tensor_parallel_size.unwrap_or(1).max(1);
    let budget = match plan.engine {
        ServingEngine::Sglang => {
            let static_thousandths = plan.gpu_memory_utilization.map(thousandths);
            let default = SglangPlan::default();
            SglangPlan {
                memory,
                process,
                context,
                cache_dtype,
                tensor_parallel: ranks,
                static_thousandths,
                replicas: plan.data_parallel_size.unwrap_or(1),
                dp_attention: plan.dp_attention,
                page_size: plan.block_size.unwrap_or(default.page_size),
                captures: !plan.enforce_eager,
                chunked_prefill: plan.max_num_batched_tokens,
                graph_batch: plan.max_cudagraph_capture_size,
            }
            .budget(&served)
        }
        ServingEngine::Tgi => {
            let default = TgiPlan::default();
            TgiPlan {
                memory,
                process,
                max_total_tokens: context,
                max_batch_prefill_tokens: plan.max_num_batched_tokens.unwrap_or(default.max_batch_prefill_tokens),
                fraction_thousandths: plan.gpu_memory_utilization.map_or(default.fraction_thousandths, thousandths),
                cache_dtype,
                shards: ranks,
            }
            .budget(&served)
        }
        ServingEngine::TensorrtLlm => {
            let default = TensorRtLlmPlan::default();
            TensorRtLlmPlan {
                memory,
                process,
                max_seq_len: context,
                cache_dtype,
                tensor_parallel: ranks,
                max_num_tokens: plan.max_num_batched_tokens.unwrap_or(default.max_num_tokens),
                max_batch_size: plan.max_num_seqs.unwrap_or(default.max_batch_size),
                free_thousandths: plan.gpu_memory_utilization.map_or(default.free_thousandths, thousandths),
            }
            .budget(&served)
        }
        _ => {
            let engine = vllm(plan, cache_dtype, &served);
            let idle = let_in(plan, model, &mut served, rules(&engine.version).since);
            let states = plan.mamba_ssm_cache_dtype.as_deref().and_then(DType::parse);
            served.state_dtype = states.or(served.state_dtype);
            let draft = draft(plan, &served, &engine).map_err(one)?;
            let mut budget = engine.budget_with(&served, draft.as_ref());
            budget.notes.extend(without_effect(plan, &engine, &served));
            budget.notes.extend(idle);
            budget
        }
    };
    Ok(Served::Pool(Box::new(budget)))
}

/// What prompts may hold decides which encoders vLLM loads and what goes through them while it profiles.
fn let_in(plan: &ServePlan, model: &Model, served: &mut ServedModel, since: [u32; 3]) -> Option<String> {
    let limited = plan.language_model_only || plan.no_videos || plan.no_audio || plan.skip_mm_profiling;
    if !served.multimodal {
        let said = limited || plan.images_per_prompt.is_some() || plan.max_pixels.is_some();
        return said.then(|| "what a prompt may hold beside text changes nothing: the model has no encoders".into());
    }
    let says = |keys: &[&str]| keys.iter().any(|key| model.config().get(key).is_some_and(|value| !value.is_null()));
    let encoder = served.image_encoder.filter(|encoder| encoder.video.is_some());
    let videos = !plan.no_videos && (encoder.is_some() || says(&["video_token_id", "video_token_index"]));
    let unseen = plan.language_model_only || plan.images_per_prompt == Some(0) && !videos;
    let unheard = plan.language_model_only || plan.no_audio || !says(&["audio_config"]);
    // Towers are left out since 0.15 (`_mark_tower_model` of models/interfaces.py).
    if (unseen || plan.no_audio) && since >= [0, 15, 0] {
        served.leave_out_towers(unseen, unheard);
    }
    // Without any the model is taken for one of text since 0.10.2 (`supports_multimodal_inputs` of multimodal/registry.py).
    if plan.skip_mm_profiling || unseen && since >= [0, 11, 0] {
        served.image_encoder = None;
    }
    let encoder = served.image_encoder.as_mut()?;
    if plan.no_videos {
        encoder.video = encoder.video.map(|_| VideoTokens::None);
    }
    encoder.per_prompt = plan.images_per_prompt.unwrap_or(u64::MAX);
    encoder.bound(plan.max_pixels.unwrap_or(u64::MAX));
    if let (Some(0), Some(VideoTokens::Fixed(tokens))) = (plan.images_per_prompt, encoder.video) {
        (encoder.tokens, encoder.patches) = (tokens, tokens.saturating_mul(encoder.merged));
    }
    None
}

fn thousandths(share: f64) -> u64 {
    (share * 1000.0).round() as u64
}

/// Weights as the config says, or as the plan does.
fn format(plan: &ServePlan, model: &Model) -> Result<WeightFormat, Fault> {
    let bad = |problem: String| Fault::new("quantization", problem);
    let own = WeightFormat::of(model).map_err(|error| bad(error.to_string()))?;
    let own = match (plan.dtype.as_deref(), own) {
        // Without a word of it engines compute in 16 bits, whatever the checkpoint holds.
        (Some("fp32"), WeightFormat::Plain(_)) => WeightFormat::Plain(DType::F32),
        // `_resolve_auto_dtype` of vllm/config/model.py ("Downcasting"); SGLang does the same.
        (_, WeightFormat::Plain(DType::F32)) => WeightFormat::Plain(DType::BF16),
        (_, own) => own,
    };
    let Some(method) = &plan.quantization else { return Ok(own) };
    if !model.files().is_empty() {
        let said = format!("{{quantization}} {method}: the file is quantised as it is");
        let same = method.eq_ignore_ascii_case("gguf");
        return if same { Ok(own) } else { Err(bad(said).or_drop("quantization")) };
    }
    let WeightFormat::Plain(dtype) = own else {
        // Engines take the method of the config again, or the name of the kernel that runs it (`_verify_quantization`).
        let stored = model.config()["quantization_config"]["quant_method"].as_str().unwrap_or_default().to_owned();
        let said = format!("{{quantization}} {method}: the config says {stored}");
        let same = plain_method(method) == plain_method(&stored);
        return if same { Ok(own) } else { Err(bad(said).or_drop("quantization")) };
    };
    let read = Quantization::from_config(&json!({"quantization_config": section(method)?}));
    let read = read.map_err(|error| bad(error.to_string()))?;
    // Kernels of 4 bits need a checkpoint; others are quantised while they are loaded, and with them towers of vLLM's own.
    let loaded = ["fp8", "w8a8", "int8", "nf4", "bitsandbytes"].contains(&method.to_ascii_lowercase().as_str());
    let stored =
        if loaded && !model.family().facts.vllm.plain_towers { WeightFormat::Checkpoint } else { WeightFormat::Text };
    Ok(read.map_or(WeightFormat::Plain(dtype), |read| stored(Box::new(read), dtype)))
}

/// vLLM and SGLang keep the matrices of a GGUF file as they lie in it (layers/quantization/gguf.py), the others read none.
fn in_file(plan: &ServePlan, model: &Model, served: &mut ServedModel) -> Result<(), Fault> {
    if model.files().is_empty() {
        return Ok(());
    }
    if !matches!(plan.engine, ServingEngine::Vllm | ServingEngine::Sglang) {
        let name = if plan.engine == ServingEngine::Tgi { "TGI" } else { "TensorRT-LLM" };
        let fault = Fault::unsupported("engine", format!("a GGUF file by {name}"));
        return Err(fault.or("llama.cpp, Ollama, vLLM and SGLang read one"));
    }
    let bytes = super::llama_cpp::lengths(model, served).map_err(|problem| Fault::new("model", problem))?;
    served.recount(|tensor| {
        if let Some(found) = bytes.get(&tensor.name).filter(|_| tensor.shape.len() > 1) {
            tensor.quantised |= *found < tensor.bytes();
            tensor.parts = vec![*found];
        }
    });
    Ok(())
}

/// A method without the name of a kernel that runs it: `awq_marlin` is AWQ.
fn plain_method(method: &str) -> String {
    let lower = method.to_ascii_lowercase().replace('_', "-");
    let ends = ["-marlin", "-fp4", "-mixed", "-24"];
    let plain = ends.iter().find_map(|end| lower.strip_suffix(end)).unwrap_or(&lower);
    plain.strip_prefix("gpt-oss-").unwrap_or(plain).to_owned()
}

/// The usual settings of a method.
fn section(method: &str) -> Result<Value, Fault> {
    Ok(match method.to_ascii_lowercase().trim_end_matches("_marlin") {
        "awq" => json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}),
        "gptq" | "int4" | "w4a16" => json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true}),
        "fp8" | "w8a8" => json!({"quant_method": "fbgemm_fp8"}),
        "nf4" | "bitsandbytes" => {
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"})
        }
        "int8" => json!({"quant_method": "bitsandbytes", "load_in_8bit": true}),
        "mxfp4" => json!({"quant_method": "mxfp4"}),
        "nvfp4" | "modelopt_fp4" => {
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": uploads::left_by_modelopt()})
        }
        other => {
            let fault = Fault::value("quantization", other, "awq, gptq, fp8, mxfp4, nvfp4, nf4 or int8");
            return Err(fault.or("put others into the config's quantization_config"));
        }
    })
}

/// The type of keys and values; 16 bits where nothing is said.
fn cache_dtype(plan: &ServePlan, format: &WeightFormat) -> Result<DType, Fault> {
    match plan.kv_cache_dtype.as_deref() {
        None | Some("auto") => Ok(match format {
            WeightFormat::Plain(DType::F32) => DType::F32,
            WeightFormat::Checkpoint(stored, _) => asked_by_checkpoint(plan, stored).unwrap_or(DType::BF16),
            _ => DType::BF16,
        }),
        Some(text) if text.starts_with("fp8") => Ok(DType::F8E4M3),
        Some(text) => DType::parse(text).ok_or_else(|| {
            let fault = Fault::value("kv_cache_dtype", text, "auto, bf16, fp16 or fp8");
            fault.or("say fp8, the narrowest that is answered")
        }),
    }
}

/// The type that a checkpoint asks keys and values to be in, where vLLM listens: to ModelOpt's since 0.14
/// (`resolve_kv_cache_dtype_string` of utils/torch_utils.py), to compressed-tensors' since 0.15 (`kv_cache_scheme` in
/// attention/layer.py).
fn asked_by_checkpoint(plan: &ServePlan, stored: &Quantization) -> Option<DType> {
    let version = plan.version.as_deref().unwrap_or(DEFAULT_VERSION);
    let since = if stored.scheme() == Scheme::Compressed { [0, 15, 0] } else { [0, 14, 0] };
    let listens = plan.engine == ServingEngine::Vllm && rules(version).since >= since;
    stored.kv_cache.filter(|_| listens)
}

fn vllm(plan: &ServePlan, cache_dtype: DType, model: &ServedModel) -> VllmPlan {
    let default = VllmPlan::default();
    let version = plan.version.clone().unwrap_or(default.version.clone());
    // Models of states alone do not keep them (`is_prefix_caching_supported` of config/model.py).
    let attends = |layer: &ServedLayer| !layer.caches.is_empty() && model.states(layer) == (0, 0);
    let hybrid = model.layers.iter().any(attends);
    let states_kept = hybrid && rules(&version).states_kept_unasked;
    let lora = [plan.max_loras.unwrap_or(1), plan.max_lora_rank.unwrap_or(16)];
    VllmPlan {
        utilization_thousandths: plan
            .gpu_memory_utilization
            .map_or(rules(&version).utilization_thousandths, thousandths),
        version,
        tensor_parallel: plan.tensor_parallel_size.unwrap_or(1),
        context_parallel: plan.decode_context_parallel_size.unwrap_or(1),
        pipeline_parallel: plan.pipeline_parallel_size.unwrap_or(1),
        data_parallel: plan.data_parallel_size.unwrap_or(1),
        expert_parallel: plan.expert_parallel,
        max_model_len: plan.context,
        max_num_batched_tokens: plan.max_num_batched_tokens,
        max_num_seqs: plan.max_num_seqs,
        block_size: plan.block_size.unwrap_or(default.block_size),
        cache_dtype,
        enforce_eager: plan.enforce_eager,
        largest_graph: plan.max_cudagraph_capture_size,
        compiled_before: plan.compile_cache,
        flashinfer: plan.flashinfer_sampler,
        lora: plan.enable_lora.then_some(lora),
        prefix_caching: plan.enable_prefix_caching.unwrap_or(states_kept),
        speculative_tokens: plan.num_speculative_tokens.unwrap_or(0).min(1 << 16),
        cache_bytes: plan.kv_cache_memory_bytes,
        offloaded: plan.cpu_offload_gb.map_or(0, |gibibytes| (gibibytes.max(0.0) * f64::from(1u32 << 30)) as u64),
        memory: plan.gpu.memory,
        workspace: Device::of(&plan.gpu).blas_workspace(),
        multiprocessors: plan.gpu.threads().0,
        bare_context: plan.gpu.bare_context(),
        card: (&plan.gpu).into(),
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
        ("eagle3", _) => return of(Speculation::Eagle3),
        ("ngram", _) => return of(Speculation::NGram),
        _ => {}
    }
    let bad = |problem: String| Fault::new("speculative_model", format!("{{speculative_model}} {text}: {problem}"));
    let model = second_model(plan, text)?;
    let format = WeightFormat::of(&model).map_err(|error| bad(error.to_string()))?;
    let draft = ServedModel::of(&model, &format).map_err(|error| bad(error.to_string()))?;
    of(Speculation::Model(&draft))
}

/// The model that guesses ahead, by its config or its name.
pub(super) fn second_model(plan: &ServePlan, name: &str) -> Result<Model, Fault> {
    let bad = |problem: String| Fault::new("speculative_model", format!("{{speculative_model}} {name}: {problem}"));
    let config = plan.speculative_config.clone().or_else(|| Some(catalogue::find(name)?.config));
    let config = config.ok_or_else(|| bad("its config is not known".into()))?;
    Model::new(config, None).map_err(|error| bad(error.to_string()))
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
            plan.mamba_ssm_cache_dtype.is_some() && !states,
            "mamba_ssm_cache_dtype: only recurrent states are in it, which the model does not have",
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
            plan.enable_prefix_caching.is_some() && !(states && rules.states_kept),
            "enable_prefix_caching: kept prompts lie in the same blocks and take no memory of their own",
        ),
    ];
    said.into_iter().filter(|(given, _)| *given).map(|(_, text)| text.to_owned()).collect()
}
