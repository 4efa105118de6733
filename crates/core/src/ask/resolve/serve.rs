//! A serving engine settled.

use serde_json::{Value, json};

use super::{Draft, Settled, Surroundings};
use crate::ask::line::serving::STRETCHED;
use crate::ask::request::Request;
use crate::ask::{origin, tree};
use crate::model::Model;
use crate::plan::{Fault, ModelSizes, RunPlan, ServePlan, ServingEngine};
use crate::serving::vllm;

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
    check(model, &plan, &mut draft);
    serves(model, &mut plan, &mut draft, around.name);
    capable(&plan, &mut draft);
    draft.faults.clone().end()?;
    let origins = origin::trace(&plan, &request.stated, &draft.framework, &draft.derived, request.runner);
    Ok(Settled { plan: RunPlan::Serve(Box::new(plan)), notes: draft.notes, origins })
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
    let share = plan.gpu_memory_utilization.filter(|share| !(*share > 0.0 && *share <= 1.0));
    if let Some(share) = share {
        draft.faults.add(Fault::value("gpu_memory_utilization", share, "above 0 and at most 1"));
    }
    if let Some(gibibytes) = plan.cpu_offload_gb.filter(|size| !(*size >= 0.0 && *size <= 65_536.0)) {
        draft.faults.add(Fault::value("cpu_offload_gb", gibibytes, "from 0 to 65536"));
    }
    let sizes = ModelSizes::of(model.config(), 0);
    divided(draft, "tensor_parallel_size", plan.tensor_parallel_size, sizes.heads, "attention heads");
    // `ParallelConfig` of vllm/config/parallel.py.
    let cards = plan.tensor_parallel_size.unwrap_or(1).max(1);
    let shared = plan.decode_context_parallel_size.unwrap_or(1).max(1);
    draft.faults.when(!cards.is_multiple_of(shared), || {
        let what = format!("{shared} cards cannot share a sequence on {cards} tensor-parallel ones");
        Fault::new("decode_context_parallel_size", what).or_set("decode_context_parallel_size", 1)
    });
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
    if encodes || !caches || !served {
        let why = match (encodes, caches) {
            _ if model.only_counted().is_some() => "of which the parameters alone are known",
            (true, _) => "a decoder beside an encoder",
            (_, false) => "a model that generates no text",
            _ => "which no engine here serves",
        };
        let what = format!("{name} ({family}), {why}, on {engine}");
        return draft.faults.add(Fault::unsupported("engine", what).or_drop("engine"));
    }
    let longest = longest(model.config());
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

/// The longest sequence that a config allows, scaled positions counted (`_get_and_verify_max_len` of vLLM 0.11).
pub(super) fn longest(config: &Value) -> Option<u64> {
    let text = ["text_config", "llm_config"].iter().map(|key| &config[*key]).find(|inner| inner.is_object());
    let config = text.unwrap_or(config);
    let keys = ["max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"];
    let most = keys.iter().filter_map(|key| config[*key].as_u64()).min()?;
    let scaling = ["rope_scaling", "rope_parameters"].iter().map(|key| &config[*key]).find(|inner| inner.is_object());
    let Some(scaling) = scaling else { return Some(most) };
    let kind = ["rope_type", "type"].iter().find_map(|key| scaling[*key].as_str()).unwrap_or_default();
    let factor = scaling["factor"].as_f64().filter(|factor| *factor > 1.0);
    match (kind, factor) {
        ("default" | "su" | "longrope" | "llama3" | "mrope", _) | (_, None) => Some(most),
        ("yarn" | "deepseek_yarn", Some(factor)) => {
            let first = scaling["original_max_position_embeddings"].as_u64().unwrap_or(most);
            Some(most.max((first as f64 * factor) as u64))
        }
        (_, Some(factor)) => Some((most as f64 * factor) as u64),
    }
}

/// Refuses versions that nobody has read and types that a card cannot multiply.
fn capable(plan: &ServePlan, draft: &mut Draft<'_>) {
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
    let Some(capability) = plan.gpu.capability else {
        return draft.notes.push(format!("{} is no card of CUDA's: the rules are those of such cards", plan.gpu.name));
    };
    let method = plan.quantization.as_deref().map(str::to_ascii_lowercase).unwrap_or_default();
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
        Fault::new("quantization", what).or_set("quantization", "gptq").or_drop("quantization")
    });
}

fn divided(draft: &mut Draft<'_>, path: &str, ranks: Option<u64>, whole: Option<u64>, what: &str) {
    let (Some(ranks), Some(whole)) = (ranks.filter(|ranks| *ranks > 1), whole) else { return };
    if whole.is_multiple_of(ranks) {
        return;
    }
    let divides = |count: &u64| whole.is_multiple_of(*count);
    let near = [(1..=whole.min(ranks - 1)).rev().find(divides), (ranks..=whole).find(divides)];
    let fault = Fault::new(path, format!("{{{path}}} {ranks} does not divide {whole} {what}"));
    draft.faults.add(near.into_iter().flatten().fold(fault, |fault, count| fault.or_set(path, count)));
}
