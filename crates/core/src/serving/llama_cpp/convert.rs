//! What convert_hf_to_gguf.py and llama-quantize would write for a model of transformers: names, shapes, types, metadata.

use std::collections::BTreeMap;

use super::ahead;
use super::file::ModelFile;
use super::hybrids;
use super::publishers::Library;
use super::quantize::{Made, Mixture, Quantizer};
use crate::model::op::CacheKind;
use crate::model::{Config, Model};
use crate::serving::ServedModel;
use crate::serving::tensors::is_tower;
use crate::source::gguf::architecture;
use crate::source::gguf::{Header, Value};
use crate::source::{StoredType, Tensor};

/// Modules of a decoder layer and their names in GGUF (gguf-py/gguf/tensor_mapping.py).
const MODULES: &[(&str, &str)] = &[
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.dense", "attn_output"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.query_key_value", "attn_qkv"),
    ("self_attention.query_key_value", "attn_qkv"),
    ("attention.query_key_value", "attn_qkv"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("self_attention.dense", "attn_output"),
    ("attention.dense", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.query_layernorm", "attn_q_norm"),
    ("self_attn.key_layernorm", "attn_k_norm"),
    ("self_attn.sinks", "attn_sinks"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("input_layernorm", "attn_norm"),
    ("ln_1", "attn_norm"),
    ("ln_attn", "attn_norm_2"),
    ("ln_mlp", "attn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("ln_2", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("feed_forward.gate_proj", "ffn_gate"),
    ("feed_forward.up_proj", "ffn_up"),
    ("feed_forward.down_proj", "ffn_down"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.gate.wg", "ffn_gate_inp"),
    ("feed_forward.router", "ffn_gate_inp"),
    ("block_sparse_moe.router.layer", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b"),
    ("mlp.e_score_correction_bias", "exp_probs_b"),
];

/// Modules that hold what every token passes beside its experts.
const SHARED: [&str; 4] =
    ["mlp.shared_experts.", "mlp.shared_expert.", "feed_forward.shared_expert.", "mlp.shared_mlp."];

/// Modules of routed experts.
const EXPERTS: [(&str, &str); 8] = [
    ("mlp.experts.gate_up_proj", "both"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("feed_forward.experts.gate_up_proj", "both"),
    ("feed_forward.experts.down_proj", "ffn_down_exps"),
    ("block_sparse_moe.experts.gate_up_proj", "both"),
    ("block_sparse_moe.experts.down_proj", "ffn_down_exps"),
    ("block_sparse_moe.input_linear", "both"),
    ("block_sparse_moe.output_linear", "ffn_down_exps"),
];

/// How a file is made, where that is not as llama.cpp's converter does it now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Style {
    /// Of Ollama's library.
    pub library: bool,
    /// Latents are stored as whole heads: files from before April 2025.
    pub whole_heads: bool,
    /// With a layer that guesses ahead: files since May 2026 whose names say so.
    pub ahead: bool,
    /// In the converter's order, the output last: files before November 2024.
    pub output_last: bool,
    /// A tensor for every expert: files before April 2024.
    pub parts_experts: bool,
}

/// The file that would hold a model under a mixture.
pub fn convert(model: &Model, served: &ServedModel, mixture: &'static Mixture) -> Result<ModelFile, String> {
    convert_in(Style::default(), model, served, mixture)
}

/// The same in another style.
pub fn convert_in(
    style: Style,
    model: &Model,
    served: &ServedModel,
    mixture: &'static Mixture,
) -> Result<ModelFile, String> {
    let config = Config::new(model.config()).map_err(|error| error.to_string())?;
    let text = config.get("text_config").filter(|text| text["model_type"].is_string()).unwrap_or(model.config());
    let kind = text["model_type"].as_str().unwrap_or_default();
    let known = architecture::of_type(kind).or_else(|| architecture::of_type(config.model_type()));
    let name =
        known.ok_or_else(|| format!("llama.cpp has no architecture for models of type {kind} that is known here"))?;
    let mut tensors = Vec::new();
    for tensor in &served.tensors {
        named(tensor, served, name, text, style, &mut tensors);
    }
    rotary(text, served, &mut tensors);
    stacked(&mut tensors);
    // Layers of Gemma 4 are scaled as a whole; of transformers' model that is a buffer.
    if name == "gemma4" {
        tensors.extend((0..served.layers.len()).map(|at| (format!("blk.{at}.layer_output_scale.weight"), vec![1])));
    }
    let mut metadata = metadata(text, served, name, style, &tensors);
    if style.ahead && ahead::append(&mut tensors, &mut metadata, name) {
        metadata.push((format!("{name}.nextn_predict_layers"), Value::Unsigned(1)));
    }
    // llama-quantize writes layer after layer, by name.
    let place = |name: &str| {
        if style.output_last && name.starts_with("output") {
            i64::MAX - i64::from(name.contains("_norm"))
        } else {
            layer(name)
        }
    };
    crate::order::sort_by(&mut tensors, |(a, _), (b, _)| (place(a), a.as_str()).cmp(&(place(b), b.as_str())));
    let header = typed(tensors, metadata, name, served, style, mixture)?;
    ModelFile::of(&[header])
}

/// Bytes of a model's weights in the file that it was read from, by their names in transformers.
pub fn lengths(model: &Model, served: &ServedModel) -> Result<BTreeMap<String, u64>, String> {
    let first = model.files().first().and_then(Header::architecture).unwrap_or_default();
    let config = Config::new(model.config()).map_err(|error| error.to_string())?;
    let text = config.get("text_config").filter(|text| text["model_type"].is_string()).unwrap_or(model.config());
    let tensors = model.files().iter().flat_map(|part| &part.tensors);
    let stored = crate::order::map(tensors.map(|tensor| (tensor.name.as_str(), tensor.bytes)));
    let mut found = BTreeMap::new();
    for tensor in &served.tensors {
        let mut names = Vec::new();
        named(tensor, served, first, text, Style::default(), &mut names);
        let bytes: Option<u64> = names.iter().map(|(name, _)| stored.get(name.as_str()).copied()).sum();
        if let Some(bytes) = bytes.filter(|bytes| *bytes > 0) {
            found.insert(tensor.name.clone(), bytes);
        }
    }
    Ok(found)
}

type Named = Vec<(String, Vec<u64>)>;

fn layer(name: &str) -> i64 {
    name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok()).unwrap_or(-1)
}

/// A weight's names in GGUF: one, two for fused experts and split latents, or none.
fn named(
    tensor: &crate::serving::tensors::ServedTensor,
    served: &ServedModel,
    architecture: &str,
    config: &serde_json::Value,
    style: Style,
    all: &mut Named,
) {
    let shape = tensor.shape.clone();
    // Layers are told by what they cache, and encoders cache nothing.
    let encodes = || tensor.name.split_once("encoder.layer.")?.1.split('.').next()?.parse().ok();
    let Some(index) = tensor.layer.map_or_else(encodes, |index| Some(index as u64)) else {
        return outside(tensor, served, config, all);
    };
    let mark = format!(".{index}.");
    let Some((_, inner)) = tensor.name.split_once(&mark) else { return };
    let (module, leaf) = match inner.rsplit_once('.') {
        Some((module, leaf @ ("weight" | "bias"))) => (module, leaf),
        _ => (inner, "weight"),
    };
    let mut push = |name: String, shape: Vec<u64>| all.push((format!("blk.{index}.{name}"), shape));
    if hybrids::named(inner, &shape, config, served, &mut push) {
        return;
    }
    if let Some((_, to)) = EXPERTS.iter().find(|(from, _)| module == *from || inner == *from) {
        return experts(to, &shape, leaf, served.hidden, &mut push);
    }
    if let Some((_, to)) = EXPERTS.iter().find(|(from, _)| inner == format!("{from}_bias")) {
        return experts(to, &shape, "bias", served.hidden, &mut push);
    }
    if let Some(part) = SHARED.iter().find_map(|prefix| module.strip_prefix(prefix)) {
        let part = part.trim_end_matches("_proj");
        return push(format!("ffn_{part}_shexp.{leaf}"), shape);
    }
    if module == "post_attention_layernorm" {
        let after = served.post_norms || architecture::renames_norm(architecture);
        return push(format!("{}.{leaf}", if after { "post_attention_norm" } else { "ffn_norm" }), shape);
    }
    if module == "self_attn.kv_b_proj" && shape.len() == 2 && !style.whole_heads {
        let size = |key: &str| config[key].as_u64().unwrap_or(0);
        let (rank, own, value) = (shape[1], size("qk_nope_head_dim"), size("v_head_dim"));
        let heads = shape[0].checked_div(own + value).unwrap_or(0);
        push("attn_k_b.weight".into(), vec![heads, rank, own]);
        return push("attn_v_b.weight".into(), vec![heads, value, rank]);
    }
    let found = MODULES.iter().find(|(from, _)| *from == module).map(|(_, to)| *to);
    let leaf = if found == Some("exp_probs_b") { "bias" } else { leaf };
    let mut shape = shape;
    // GPT-2 keeps its matrices the other way round.
    if module.starts_with("attn.c_") || module.starts_with("mlp.c_") {
        shape.reverse();
    }
    push(format!("{}.{leaf}", found.unwrap_or(module)), shape);
}

fn experts(to: &str, shape: &[u64], leaf: &str, hidden: u64, push: &mut impl FnMut(String, Vec<u64>)) {
    let count = shape.first().copied().unwrap_or(0);
    let (a, b) = (shape.get(1).copied().unwrap_or(1), shape.get(2).copied().unwrap_or(1));
    if leaf == "bias" {
        match to {
            "both" => {
                ["gate", "up"].into_iter().for_each(|half| push(format!("ffn_{half}_exps.bias"), vec![count, a / 2]))
            }
            other => push(format!("{other}.bias"), vec![count, a]),
        }
        return;
    }
    // Some keep inputs first (gpt-oss), others outputs.
    match to {
        "both" => {
            let wide = if b == hidden { a } else { b };
            ["gate", "up"]
                .into_iter()
                .for_each(|half| push(format!("ffn_{half}_exps.weight"), vec![count, wide / 2, hidden]));
        }
        other => {
            let narrow = if a == hidden { b } else { a };
            push(format!("{other}.weight"), vec![count, hidden, narrow]);
        }
    }
}

/// Tables, last norms and positions.
fn outside(
    tensor: &crate::serving::tensors::ServedTensor,
    served: &ServedModel,
    config: &serde_json::Value,
    all: &mut Named,
) {
    let name = tensor.name.as_str();
    // Encoders are a file of their own (mmproj).
    if is_tower(name) || name.contains("mtp.") {
        return;
    }
    let leaf = if name.ends_with(".bias") { "bias" } else { "weight" };
    // Gemma 3n's streams: one matrix each.
    let streams = [("altup_projections.", "altup_proj"), ("altup_unembed_projections.", "altup_unembd_proj")];
    if let Some((_, to)) = streams.iter().find(|(from, _)| name.contains(from)) {
        return all.push((format!("{to}.weight"), tensor.shape.clone()));
    }
    let module = tensor.module();
    let to = match module {
        _ if served.is_head(tensor) => "output",
        "embed_tokens" | "wte" | "word_embeddings" | "embed_in" | "embeddings" if leaf == "weight" => "token_embd",
        "wpe" | "embed_positions" | "position_embeddings" => "position_embd",
        "word_embeddings_layernorm" | "embedding_norm" => "token_embd_norm",
        // BERT.
        "LayerNorm" if name.contains("embeddings.") => "token_embd_norm",
        "token_type_embeddings" => "token_types",
        // Gemma's E models.
        "embed_tokens_per_layer" => "per_layer_token_embd",
        "per_layer_model_projection" => "per_layer_model_proj",
        "per_layer_projection_norm" => "per_layer_proj_norm",
        "norm" | "ln_f" | "final_layernorm" | "final_layer_norm" | "norm_f" => "output_norm",
        _ => return,
    };
    let mut shape = tensor.shape.clone();
    // RoBERTa counts positions from behind its padding, which the converter cuts off.
    if to == "position_embd" && config["model_type"].as_str().is_some_and(|kind| kind.contains("roberta")) {
        let before = config["pad_token_id"].as_u64().map_or(0, |pad| pad + 1);
        shape.iter_mut().take(1).for_each(|rows| *rows = rows.saturating_sub(before));
    }
    all.push((format!("{to}.{leaf}"), shape));
}

/// Factors of stretched rotary embeddings, which the converter writes as tensors.
fn rotary(config: &serde_json::Value, served: &ServedModel, all: &mut Named) {
    let scaling = ["rope_scaling", "rope_parameters"].iter().map(|key| &config[*key]).find(|value| value.is_object());
    let Some(scaling) = scaling else { return };
    let kind = scaling["rope_type"].as_str().or_else(|| scaling["type"].as_str()).unwrap_or_default();
    let half = served.rotary.max(served.head_dim.min(served.rotary)) / 2;
    let half = if half == 0 { served.head_dim / 2 } else { half };
    match kind {
        "llama3" => all.push(("rope_freqs.weight".into(), vec![half])),
        "longrope" | "su" => {
            all.push(("rope_factors_long.weight".into(), vec![half]));
            all.push(("rope_factors_short.weight".into(), vec![half]));
        }
        _ => {}
    }
}

/// Matrices of Gemma 3n's streams are one tensor.
fn stacked(all: &mut Named) {
    for name in ["altup_proj.weight", "altup_unembd_proj.weight"] {
        let first = all.iter().position(|(own, _)| own == name);
        let count = all.iter().filter(|(own, _)| own == name).count() as u64;
        let Some(shape) = first.and_then(|at| all.get(at)).map(|(_, shape)| shape.clone()) else { continue };
        all.retain(|(own, _)| own != name);
        all.push((name.to_owned(), std::iter::once(count).chain(shape).collect()));
    }
}

fn metadata(
    config: &serde_json::Value,
    served: &ServedModel,
    name: &str,
    style: Style,
    tensors: &Named,
) -> Vec<(String, Value)> {
    let mut all = vec![("general.architecture".to_owned(), Value::Text(name.to_owned()))];
    let mut put = |key: &str, value: Value| all.push((format!("{name}.{key}"), value));
    let size = |keys: &[&str]| keys.iter().find_map(|key| config[*key].as_u64()).unwrap_or(0);
    let real = |key: &str| config[key].as_f64().filter(|value| *value != 0.0);
    let highest = tensors.iter().map(|(name, _)| layer(name)).max().unwrap_or(-1);
    let layers = u64::try_from(highest + 1).unwrap_or(0).max(served.layers.len() as u64);
    put("block_count", Value::Unsigned(layers));
    put("context_length", Value::Unsigned(if served.positions > 0 { served.positions } else { served.longest }));
    put("embedding_length", Value::Unsigned(served.hidden));
    put("feed_forward_length", Value::Unsigned(served.width));
    put("vocab_size", Value::Unsigned(served.vocabulary));
    put("attention.head_count", Value::Unsigned(served.heads));
    let first = served.layers.iter().flat_map(|layer| &layer.caches).find(hybrids::grows);
    let numbers = |of: &dyn Fn(&crate::model::op::CacheUpdate) -> u64| {
        let own = served.layers.iter().map(|layer| layer.caches.iter().find(hybrids::grows).map_or(0, of));
        Value::Array(own.map(Value::Unsigned).collect())
    };
    match first.map(|cache| cache.kind) {
        Some(CacheKind::Latent { .. }) if style.whole_heads => {
            let turned = size(&["qk_rope_head_dim"]);
            put("attention.head_count_kv", Value::Unsigned(served.heads));
            put("attention.kv_lora_rank", Value::Unsigned(size(&["kv_lora_rank"])));
            put("attention.key_length", Value::Unsigned(turned + size(&["qk_nope_head_dim"])));
            put("attention.value_length", Value::Unsigned(size(&["v_head_dim"])));
            put("rope.dimension_count", Value::Unsigned(turned));
        }
        Some(CacheKind::Latent { .. }) => {
            let (rank, turned) = (size(&["kv_lora_rank"]), size(&["qk_rope_head_dim"]));
            put("attention.head_count_kv", Value::Unsigned(1));
            put("attention.kv_lora_rank", Value::Unsigned(rank));
            put("attention.key_length", Value::Unsigned(rank + turned));
            put("attention.value_length", Value::Unsigned(rank));
            put("attention.key_length_mla", Value::Unsigned(turned + size(&["qk_nope_head_dim"])));
            put("attention.value_length_mla", Value::Unsigned(size(&["v_head_dim"])));
            put("rope.dimension_count", Value::Unsigned(turned));
        }
        Some(_) => {
            let kv_heads = numbers(&|cache| cache.true_heads);
            // Layers that read others' caches have heads all the same.
            let alike = size(&["num_kv_shared_layers"]) > 0;
            put("attention.head_count_kv", if alike { Value::Unsigned(served.kv_heads) } else { kv_heads });
            let widest = |of: &dyn Fn(&crate::model::op::CacheUpdate) -> u64, sliding: bool| {
                let caches = served.layers.iter().flat_map(|layer| &layer.caches).filter(hybrids::grows);
                let own = caches.filter(|cache| matches!(cache.kind, CacheKind::Sliding(_)) == sliding);
                own.map(of).max()
            };
            let whole = widest(&|cache| cache.key_dim, false).or_else(|| widest(&|cache| cache.key_dim, true));
            let values = widest(&|cache| cache.value_dim, false).or_else(|| widest(&|cache| cache.value_dim, true));
            put("attention.key_length", Value::Unsigned(whole.unwrap_or(served.head_dim)));
            put("attention.value_length", Value::Unsigned(values.unwrap_or(served.head_dim)));
            if let Some(window) = widest(&|cache| cache.key_dim, true) {
                put("attention.key_length_swa", Value::Unsigned(window));
            }
            if let Some(window) = widest(&|cache| cache.value_dim, true) {
                put("attention.value_length_swa", Value::Unsigned(window));
            }
            put(
                "rope.dimension_count",
                Value::Unsigned(if served.rotary > 0 { served.rotary } else { served.head_dim }),
            );
        }
        None => put("attention.head_count_kv", Value::Unsigned(served.kv_heads)),
    }
    let window = |cache: &crate::model::op::CacheUpdate| match cache.kind {
        CacheKind::Sliding(window) => window,
        _ => 0,
    };
    let widest = served.layers.iter().flat_map(|layer| &layer.caches).map(window).max().unwrap_or(0);
    if widest > 0 {
        put("attention.sliding_window", Value::Unsigned(widest));
        let kinds = config["layer_types"].as_array().filter(|_| size(&["num_kv_shared_layers"]) > 0);
        let said = kinds
            .map(|kinds| Value::Array(kinds.iter().map(|kind| Value::Bool(kind == "sliding_attention")).collect()));
        put("attention.sliding_window_pattern", said.unwrap_or_else(|| numbers(&|cache| u64::from(window(cache) > 0))));
    }
    let count = tensors.iter().find(|(name, _)| name.ends_with("ffn_down_exps.weight")).map(|(_, shape)| shape[0]);
    if let Some(count) = count {
        put("expert_count", Value::Unsigned(count));
        put("expert_used_count", Value::Unsigned(served.chosen_experts.max(1)));
        put("expert_group_count", Value::Unsigned(size(&["n_group"])));
        put("expert_group_used_count", Value::Unsigned(size(&["topk_group"])));
        let sigmoid =
            config["scoring_func"] == "sigmoid" || tensors.iter().any(|(name, _)| name.contains("exp_probs_b"));
        put("expert_gating_func", Value::Unsigned(if sigmoid { 2 } else { 0 }));
        put("expert_weights_norm", Value::Bool(config["norm_topk_prob"] == true));
        put("expert_weights_scale", Value::Float(real("routed_scaling_factor").unwrap_or(0.0)));
    }
    for (key, from) in [
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("logit_scale", "logit_scale"),
        ("logit_scale", "logits_scaling"),
        ("residual_scale", "residual_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("attention.clamp_kqv", "clip_qkv"),
    ] {
        if let Some(value) = real(from) {
            put(key, Value::Float(value));
        }
    }
    if let shared @ 1.. = size(&["num_kv_shared_layers"]) {
        put("attention.shared_kv_layers", Value::Unsigned(shared));
    }
    if name == "bert" {
        put("attention.causal", Value::Bool(false));
    }
    hybrids::metadata(config, served, &mut put);
    if let Some(original) = config["original_max_position_embeddings"].as_u64() {
        put("rope.scaling.original_context_length", Value::Unsigned(original));
    }
    all
}

fn typed(
    tensors: Named,
    metadata: Vec<(String, Value)>,
    name: &str,
    served: &ServedModel,
    style: Style,
    mixture: &'static Mixture,
) -> Result<Header, String> {
    let ends = |end: &str| tensors.iter().filter(|(name, _)| name.ends_with(end)).count();
    let first = served.layers.iter().flat_map(|layer| &layer.caches).find(hybrids::grows);
    let kv_heads = match first.map(|cache| cache.kind) {
        Some(CacheKind::Latent { .. }) => 1,
        _ => served.kv_heads,
    };
    let layers = served.layers.len() + usize::from(ends("nextn.eh_proj.weight") > 0);
    let made = Made {
        layers,
        hidden: served.hidden,
        experts: tensors.iter().find(|(name, _)| name.ends_with("ffn_down_exps.weight")).map_or(0, |(_, s)| s[0]),
        shared: served.heads.checked_div(kv_heads).unwrap_or(1),
        falcon: name == "falcon",
        large: layers == 80 && matches!(name, "llama" | "qwen2" | "deci" | "olmo") && served.heads != kv_heads,
        tied: !tensors.iter().any(|(name, _)| name == "output.weight"),
        values: ends("attn_v.weight") + ends("attn_qkv.weight") + ends("attn_kv_b.weight"),
        mxfp4: name == "gpt-oss",
        delta: Library::of(name) == Some(Library::Delta),
        late: style.ahead,
        parts: style.parts_experts,
        // Newer files of the library are llama-quantize's.
        library: if style.library && !style.ahead { Library::of(name) } else { None },
    };
    let mut quantizer = Quantizer::new(mixture, made);
    let mut offset = 0u64;
    let mut placed = Vec::new();
    for (name, shape) in tensors {
        let unknown = || format!("{name}: {} has no type for it", mixture.name);
        let format = quantizer.format(&name, &shape).ok_or_else(unknown)?;
        let bytes = format.bytes(&shape).ok_or_else(unknown)?;
        placed.push(Tensor { name, stored: StoredType::Format(format.name.clone()), shape, offset, bytes });
        offset = offset.saturating_add(bytes).next_multiple_of(32);
    }
    Ok(Header { version: 3, metadata, tensors: placed, data_start: 0, alignment: 32 })
}
