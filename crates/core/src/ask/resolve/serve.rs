//! A serving engine settled.

use crate::source::gguf::architecture;
use serde_json::json;

use super::{Draft, Settled, Surroundings};
use crate::ask::line::serving::STRETCHED;
use crate::ask::request::Request;
use crate::ask::{origin, tree};
use crate::model::Model;
use crate::plan::{Fault, Gpus, ModelSizes, RunPlan, ServePlan, ServingEngine};
use crate::serving::{lengths, vllm};

pub(super) fn settle(model: &Model, request: &Request, around: &Surroundings<'_>) -> Result<Settled, Vec<Fault>> {
    let defaults = ServePlan::default();
    let mut draft = Draft::new(request, &defaults);
    let plain = draft.tree.clone();
    if request.framework.is_some() {
        draft.faults.add(Fault::no_effect("framework", "on a serving engine"));
    }
    tree::lay(&mut draft.tree, &request.stated);
    draft.tree["engine"] = json!(request.runner.name());
    draft.honoured(&plain, around);
    draft.card(around);
    let Some(mut plan) = draft.plan::<ServePlan>() else { return Err(draft.faults.end().err().unwrap_or_default()) };
    // llama.cpp's `-c 0` is the model's own length, as is saying nothing.
    if plan.engine == ServingEngine::LlamaCpp && plan.context == Some(0) {
        plan.context = None;
    }
    newer_driver(&mut plan, &mut draft);
    check(model, &plan, &mut draft);
    serves(model, &mut plan, &mut draft, around.name);
    capable(model.config(), &plan, &mut draft);
    draft.faults.clone().end()?;
    let origins = origin::trace(&plan, &request.stated, &draft.framework, &draft.derived, request.runner);
    Ok(Settled { plan: RunPlan::Serve(Box::new(plan)), notes: draft.notes, origins })
}

/// Builds of vLLM for CUDA 13 run on drivers that may offer less of a card.
fn newer_driver(plan: &mut ServePlan, draft: &mut Draft<'_>) {
    let version = plan.version.as_deref().unwrap_or(vllm::DEFAULT_VERSION);
    if plan.engine != ServingEngine::Vllm || !vllm::rules(version).cuda13 {
        return;
    }
    if let Some(memory) = Gpus::embedded().on_cuda13(&plan.gpu) {
        plan.gpu.memory = memory;
        draft.notes.push(format!("{}: {memory} bytes of it, as drivers of CUDA 13 offer", plan.gpu.name));
    }
}

/// Refuses what no engine would start with.
fn check(model: &Model, plan: &ServePlan, draft: &mut Draft<'_>) {
    const MOST: u64 = 1 << 24;
    for (path, value, most) in [
        ("context", plan.context, MOST),
        ("max_num_seqs", plan.max_num_seqs, MOST),
        ("max_num_batched_tokens", plan.max_num_batched_tokens, MOST),
        ("block_size", plan.block_size, 65_536),
        ("tensor_parallel_size", plan.tensor_parallel_size, 65_536),
        ("decode_context_parallel_size", plan.decode_context_parallel_size, 65_536),
        ("pipeline_parallel_size", plan.pipeline_parallel_size, 65_536),
        ("data_parallel_size", plan.data_parallel_size, 65_536),
        ("ubatch_size", plan.ubatch_size, MOST),
        ("logical_batch", plan.logical_batch, MOST),
        ("parallel", plan.parallel, MOST),
        ("max_loras", plan.max_loras, MOST),
        ("max_lora_rank", plan.max_lora_rank, MOST),
    ] {
        let wrong = value.is_some_and(|value| !(1..=most).contains(&value));
        draft.faults.when(wrong, || Fault::value(path, value.unwrap_or_default(), format!("from 1 to {most}")));
    }
    let (cards, replicas) = (plan.tensor_parallel_size.unwrap_or(1), plan.data_parallel_size.unwrap_or(1).max(1));
    draft.faults.when(plan.dp_attention && !cards.is_multiple_of(replicas), || {
        // `assert self.tp_size % self.dp_size == 0` of SGLang's server_args.py.
        let what = format!("{replicas} replicas of attention do not divide {cards} tensor-parallel cards");
        let near = (1..=cards.min(replicas)).rev().find(|count| cards.is_multiple_of(*count)).unwrap_or(1);
        Fault::new("data_parallel_size", what).or_set("data_parallel_size", near)
    });
    let share = plan.gpu_memory_utilization.filter(|share| !(*share > 0.0 && *share <= 1.0));
    if let Some(share) = share {
        draft.faults.add(Fault::value("gpu_memory_utilization", share, "above 0 and at most 1"));
    }
    if let Some(gibibytes) = plan.cpu_offload_gb.filter(|size| !(*size >= 0.0 && *size <= 65_536.0)) {
        draft.faults.add(Fault::value("cpu_offload_gb", gibibytes, "from 0 to 65536"));
    }
    let sizes = ModelSizes::of(model.config(), 0);
    // One latent for all heads has none of its own.
    let latent = model.config()["kv_lora_rank"].is_u64() || model.config()["text_config"]["kv_lora_rank"].is_u64();
    let kv_heads = sizes.kv_heads.or(sizes.heads).filter(|_| !latent);
    divided(draft, plan.tensor_parallel_size, sizes.heads, kv_heads);
    shared(draft, plan, sizes.heads, kv_heads);
    if let (Some(stages), Some(layers)) = (plan.pipeline_parallel_size, sizes.layers) {
        draft.faults.when(stages > layers, || {
            Fault::new("pipeline_parallel_size", format!("{stages} stages of {layers} layers"))
                .or_set("pipeline_parallel_size", layers)
        });
    }
    let experts = sizes.experts.is_some();
    for (path, given) in
        [("expert_parallel", plan.expert_parallel), ("cpu_moe", plan.cpu_moe), ("n_cpu_moe", plan.n_cpu_moe.is_some())]
    {
        draft.faults.when(given && !experts, || Fault::no_effect(path, "on a model without experts"));
    }
    for (path, given) in [("max_loras", plan.max_loras.is_some()), ("max_lora_rank", plan.max_lora_rank.is_some())] {
        draft.faults.when(given && !plan.enable_lora, || {
            Fault::no_effect(path, "without {enable_lora}").or_set("enable_lora", true)
        });
    }
    for (path, given) in [
        ("num_speculative_tokens", plan.num_speculative_tokens.is_some()),
        ("n_gpu_layers_draft", plan.n_gpu_layers_draft.is_some()),
    ] {
        draft
            .faults
            .when(given && plan.speculative_model.is_none(), || Fault::no_effect(path, "without {speculative_model}"));
    }
    draft.faults.when(plan.n_cpu_moe.is_some() && plan.cpu_moe, || {
        Fault::new("n_cpu_moe", "{n_cpu_moe} and {cpu_moe} say the same thing in two ways").or("give one of them")
    });
    let quantised = plan.cache_type_v.as_deref().is_some_and(|kind| !matches!(kind, "f16" | "bf16" | "f32"));
    draft.faults.when(quantised && plan.flash_attn.as_deref() == Some("off"), || {
        Fault::new("cache_type_v", "llama.cpp quantises values only with flash attention")
            .or_drop("cache_type_v")
            .or_drop("flash_attn")
    });
}

/// Refuses models that an engine cannot serve, and sequences that a model has no positions for.
fn serves(model: &Model, plan: &mut ServePlan, draft: &mut Draft<'_>, name: &str) {
    let (family, engine) = (model.family().name, draft.request.runner.title());
    let encodes = model.task().encodes();
    let caches = model.inventory().is_ok_and(|inventory| !inventory.caches.is_empty());
    let served = model.family().facts.served;
    // llama.cpp makes embeddings with encoders, too.
    let local = matches!(plan.engine, ServingEngine::LlamaCpp | ServingEngine::Ollama);
    let kind = model.config()["model_type"].as_str();
    let embeds = !caches && kind.is_some_and(architecture::embeds) && model.only_counted().is_none();
    let answered = embeds && local || !encodes && caches && served;
    if !answered {
        let why = match (encodes, caches) {
            _ if model.only_counted().is_some() => "of which the parameters alone are known",
            (true, _) => "a decoder beside an encoder",
            (_, false) => "a model that generates no text",
            _ => "which no engine here serves",
        };
        let fault = Fault::unsupported("engine", format!("{name} ({family}), {why}, on {engine}"));
        let elsewhere = "llama.cpp is answered for it: {engine} llama.cpp";
        return draft.faults.add(if embeds { fault.or(elsewhere) } else { fault.or_drop("engine") });
    }
    let longest = lengths::longest(model);
    let (Some(mut asked), Some(most)) = (plan.context, longest) else { return };
    if plan.engine == ServingEngine::LlamaCpp {
        // Its sequences share the context.
        asked /= plan.parallel.unwrap_or(1).max(1);
    }
    if asked <= most {
        return;
    }
    let what = format!("{name} was made for sequences of {most} tokens, not {asked}");
    match plan.engine {
        // `_get_and_verify_max_len` of vLLM and `ModelConfig` of SGLang stop here.
        _ if draft.notes.iter().any(|note| note.ends_with(STRETCHED)) => {}
        ServingEngine::Vllm | ServingEngine::Sglang => {
            draft.faults.add(Fault::new("context", what).or_set("context", most));
        }
        // `NewLlamaServer` of its llm/server.go.
        ServingEngine::Ollama => {
            plan.context = Some(most);
            draft.notes.push(format!("{what}: Ollama takes {most}"));
        }
        _ => draft.notes.push(format!("{what}: {engine} goes on, and what it says past them is not to be trusted")),
    }
}

/// Refuses versions that nobody has read and types that a card cannot multiply.
fn capable(config: &serde_json::Value, plan: &ServePlan, draft: &mut Draft<'_>) {
    if let (ServingEngine::Vllm, Some(version)) = (plan.engine, &plan.version)
        && let Err((expected, newest)) = vllm::readable(version)
    {
        draft.faults.add(Fault::value("version", version, expected).or_set("version", newest));
    }
    let blocks = [1, 8, 16, 32, 64, 128, 256];
    // `BlockSize` of vllm/config/cache.py.
    if let (ServingEngine::Vllm, Some(size)) = (plan.engine, plan.block_size.filter(|size| !blocks.contains(size))) {
        let near = blocks.into_iter().min_by_key(|known| known.abs_diff(size)).unwrap_or(16);
        draft.faults.add(Fault::value("block_size", size, "1, 8, 16, 32, 64, 128 or 256").or_set("block_size", near));
    }
    if let (Some(tokens), Some(sequences)) = (plan.max_num_batched_tokens, plan.max_num_seqs)
        && plan.engine == ServingEngine::Vllm
        && tokens < sequences
    {
        let what = format!("{tokens} tokens in a batch are fewer than its {sequences} sequences");
        let fault = Fault::new("max_num_batched_tokens", what).or_set("max_num_batched_tokens", sequences);
        draft.faults.add(fault.or_set("max_num_seqs", tokens));
    }
    draft.faults.when(!plan.tensor_split.is_empty() && plan.tensor_split.iter().all(|share| *share == 0), || {
        Fault::value("tensor_split", "0", "shares of which one is above 0").or_drop("tensor_split")
    });
    // `MaxLoRARanks` of vllm/config/lora.py.
    let ranks = [1, 8, 16, 32, 64, 128, 256, 320, 512];
    if let (ServingEngine::Vllm, Some(rank)) = (plan.engine, plan.max_lora_rank.filter(|rank| !ranks.contains(rank))) {
        let near = ranks.into_iter().find(|known| *known >= rank).unwrap_or(512);
        let known = "1, 8, 16, 32, 64, 128, 256, 320 or 512";
        draft.faults.add(Fault::value("max_lora_rank", rank, known).or_set("max_lora_rank", near));
    }
    // `kv_cache_types` of llama.cpp's common/arg.cpp.
    const CELLS: [&str; 9] = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"];
    for (path, kind) in [("cache_type_k", &plan.cache_type_k), ("cache_type_v", &plan.cache_type_v)] {
        if let Some(kind) = kind.as_deref().filter(|kind| !CELLS.contains(&kind.to_ascii_lowercase().as_str())) {
            draft.faults.add(
                Fault::value(path, kind, CELLS.join(", ")).or("say the nearest of these: types of forks are not known"),
            );
        }
    }
    let Some(capability) = plan.gpu.capability else {
        if plan.engine == ServingEngine::TensorrtLlm {
            let what = format!("TensorRT-LLM runs on NVIDIA's cards alone, and {} is none", plan.gpu.name);
            draft.faults.add(Fault::new("gpu", what).or("use vllm, sglang or llama.cpp there"));
            return;
        }
        return draft.notes.push(format!("{} is no card of CUDA's: the rules are those of such cards", plan.gpu.name));
    };
    let stored = config["quantization_config"]["quant_method"].as_str();
    let method = plan.quantization.as_deref().or(stored).map(str::to_ascii_lowercase).unwrap_or_default();
    // `_check_if_dtype_supports` of vLLM's platforms/cuda.py; SGLang's model_runner.py asks the same.
    let narrow = matches!(plan.dtype.as_deref(), Some("bf16" | "bfloat16"));
    let checks = matches!(plan.engine, ServingEngine::Vllm | ServingEngine::Sglang);
    draft.faults.when(narrow && checks && capability < 80, || {
        let what = format!("bfloat16 needs compute capability 80, and {} has {capability}", plan.gpu.name);
        Fault::new("dtype", what).or_set("dtype", "fp16")
    });
    // `get_min_capability` of vllm/model_executor/layers/quantization in v0.11.0; in v0.16.0 Marlin's fp8 runs on 75.
    let since = vllm::rules(plan.version.as_deref().unwrap_or(vllm::DEFAULT_VERSION)).since;
    let least = match method.as_str() {
        "fp8" | "w8a8" if since >= [0, 15, 0] => 75,
        "fp8" | "w8a8" | "mxfp4" => 80,
        "awq" => 75,
        "nf4" | "bitsandbytes" | "int8" => 70,
        _ => 0,
    };
    draft.faults.when(plan.engine == ServingEngine::Vllm && capability < least, || {
        let what = format!(
            "{{quantization}} {method} needs compute capability {least} in vLLM, and {} has {capability}",
            plan.gpu.name
        );
        match plan.quantization {
            Some(_) => Fault::new("quantization", what).or_set("quantization", "gptq").or_drop("quantization"),
            None => {
                Fault::new("quantization", what.replace("{quantization}", "the checkpoint's")).or("take a newer card")
            }
        }
    });
}

/// Heads are dealt to cards evenly; heads of keys and values too, or each goes to as many cards (`QKVParallelLinear` of
/// vllm/model_executor/layers/linear.py, and SGLang's).
fn divided(draft: &mut Draft<'_>, ranks: Option<u64>, heads: Option<u64>, kv_heads: Option<u64>) {
    const PATH: &str = "tensor_parallel_size";
    let (Some(ranks), Some(heads)) = (ranks.filter(|ranks| *ranks > 1), heads) else { return };
    let kv = kv_heads.unwrap_or(1).max(1);
    let shares = |count: u64| kv.is_multiple_of(count) || count.is_multiple_of(kv);
    let fits = |count: &u64| heads.is_multiple_of(*count) && shares(*count);
    if fits(&ranks) {
        return;
    }
    let what = match heads.is_multiple_of(ranks) {
        false => format!("{{{PATH}}} {ranks} does not divide {heads} attention heads"),
        true => format!("{{{PATH}}} {ranks} neither divides {kv} heads of keys and values nor is a multiple of them"),
    };
    let near = [(1..=heads.min(ranks - 1)).rev().find(fits), (ranks..=heads).find(fits)];
    draft.faults.add(near.into_iter().flatten().fold(Fault::new(PATH, what), |fault, n| fault.or_set(PATH, n)));
}

/// Cards that would hold the same heads may each hold a part of the tokens (`ParallelConfig` of vllm/config/parallel.py,
/// `verify_with_parallel_config` of config/model.py).
fn shared(draft: &mut Draft<'_>, plan: &ServePlan, heads: Option<u64>, kv_heads: Option<u64>) {
    const PATH: &str = "decode_context_parallel_size";
    let (cards, asked) = (plan.tensor_parallel_size.unwrap_or(1).max(1), plan.decode_context_parallel_size);
    let Some(asked) = asked.filter(|asked| *asked > 1) else { return };
    let kv = kv_heads.unwrap_or(1).max(1);
    let group = heads.filter(|_| kv_heads.is_some()).map(|heads| heads / kv);
    let can = |count: &u64| {
        cards.is_multiple_of(*count)
            && (*count == 1 || kv_heads.is_none() || *count <= cards / kv)
            && group.is_none_or(|group| group.is_multiple_of(*count))
    };
    if can(&asked) {
        return;
    }
    let what = match kv_heads {
        Some(kv) if asked > cards / kv.max(1) => {
            format!(
                "{asked} cards cannot share a sequence: {cards} cards hold {kv} heads of keys and values, each {} times",
                cards / kv.max(1)
            )
        }
        _ => format!("{asked} cards cannot share a sequence on {cards} tensor-parallel ones"),
    };
    let near = (1..asked).rev().find(can).unwrap_or(1);
    draft.faults.add(Fault::new(PATH, what).or_set(PATH, near));
}
