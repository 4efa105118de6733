//! Configs whose `model_type` no family reads: refused with what they look like, or, where somebody says so, read as the
//! usual decoder that their keys describe.

use serde_json::{Map, Value, json};

use super::Family;
use super::error::ModelError;
use super::families::decoders::llama;
use super::families::mixtures::{qwen2_moe, qwen3_moe};

/// What to take a model of an unknown type for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Assumption {
    /// A Llama-style decoder, with experts where the config counts some.
    Decoder,
}

impl Assumption {
    /// The one of a name.
    pub fn find(name: &str) -> Option<Self> {
        (name == "decoder").then_some(Self::Decoder)
    }
}

const PIPELINE: &str = "a part of a diffusers pipeline; docs/pictures.md names those that are modelled";

/// Marks by which files that are no model's config are known: all of these keys stand at the top.
const OTHERS: &[(&[&str], &str)] = &[
    (&["_diffusers_version"], PIPELINE),
    (&["_class_name"], PIPELINE),
    (&["block_out_channels"], "a U-Net or autoencoder of diffusers without its `_class_name`"),
    (&["peft_type"], "PEFT's adapter_config.json; give the base model, and this file as the adapter"),
    (&["weight_map"], "an index of safetensors files; give the folder"),
    (&["zero_optimization"], "a DeepSpeed configuration; give the model's config.json"),
    (&["train_micro_batch_size_per_gpu"], "a DeepSpeed configuration; give the model's config.json"),
    (&["per_device_train_batch_size"], "arguments of transformers' Trainer, which are a plan file; give the model too"),
    (&["totals", "plan"], "a report of vramcast, which is a plan file; give the model too"),
    (&["tokenizer_class"], "a tokenizer's config; give the config.json beside it"),
    (&["added_tokens"], "a tokenizer; give the config.json beside it"),
    (&["image_processor_type"], "an image processor's config; give the config.json beside it"),
    (&["feature_extractor_type"], "a feature extractor's config; give the config.json beside it"),
    (&["eos_token_id", "transformers_version"], "a generation_config.json; give the config.json beside it"),
    (
        &["pretrained_cfg"],
        "a model of timm that was not learned: `vramcast learn timm:NAME --out model.json` makes a MODEL of it",
    ),
    (&["dim", "n_layers", "n_heads"], "Meta's params.json; give the config.json of the converted model"),
    (&["name", "dependencies"], "npm's package.json"),
    (&["name", "version", "scripts"], "npm's package.json"),
    (&["compilerOptions"], "TypeScript's tsconfig.json"),
];

/// Why a config is refused: by its type, or by what it looks like.
pub(super) fn refusal(config: &Map<String, Value>) -> ModelError {
    let named = config.get("model_type").filter(|name| !name.is_null());
    if let Some(other) = named.filter(|name| name.as_str().is_none_or(|name| name.trim().is_empty())) {
        return ModelError::NoName { value: other.to_string().chars().take(80).collect() };
    }
    match named.and_then(Value::as_str) {
        Some(name) => ModelError::Unknown { model_type: name.chars().take(80).collect() },
        None => {
            let looks = OTHERS.iter().find(|(marks, _)| marks.iter().all(|mark| config.contains_key(*mark)));
            ModelError::NoModel { looks: looks.map(|(_, looks)| *looks) }
        }
    }
}

/// The families that stand in, under a name that says so.
static DECODER: Family = Family { name: "assumed decoder", ..llama::FAMILY };
static MIXTURE: Family = Family { name: "assumed mixture", ..qwen3_moe::FAMILY };
static SHARING_MIXTURE: Family = Family { name: "assumed mixture", ..qwen2_moe::FAMILY };

const HIDDEN: &[&str] = &["hidden_size", "n_embd", "d_model", "dim", "model_dim"];
const LAYERS: &[&str] = &["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const HEADS: &[&str] = &["num_attention_heads", "n_head", "n_heads", "num_heads"];
const KEY_HEADS: &[&str] = &["num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "num_query_groups"];
const WORDS: &[&str] = &["vocab_size", "padded_vocab_size"];
const WIDTH: &[&str] = &["intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "inner_dim"];
const EXPERTS: &[&str] = &[
    "num_local_experts",
    "n_routed_experts",
    "num_experts",
    "num_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
    "n_experts",
];
const CHOSEN: &[&str] = &[
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "num_selected_experts",
    "n_activated_experts",
    "experts_top_k",
];
const EXPERT_WIDTH: &[&str] =
    &["moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size"];
const SHARED: &[&str] = &["n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"];
const SHARED_WIDTH: &[&str] =
    &["shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"];
const DENSE_FIRST: &[&str] = &["first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "n_dense_layers"];
const EVERY: &[&str] =
    &["decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "moe_layer_interval", "moe_every_n_layers"];
/// Where models of several parts keep that of the text.
const TEXT_PARTS: [&str; 4] = ["text_config", "llm_config", "language_config", "language_model_config"];

/// The config of a usual decoder with these sizes, and what should be known about the guess.
pub(super) fn decoder(config: &Map<String, Value>) -> Result<(Value, &'static Family, Vec<String>), ModelError> {
    let mut notes = Vec::new();
    let mut whole = config.clone();
    if !HIDDEN.iter().any(|key| config.contains_key(*key))
        && let Some((part, text)) = TEXT_PARTS.iter().find_map(|key| Some((*key, config.get(*key)?.as_object()?)))
    {
        notes.push(format!("only its {part} is counted: what reads images or sound is not"));
        // The whole model's head and types stay where the part says nothing.
        whole.extend(text.clone());
        whole.shift_remove(part);
    }
    if whole.get("is_encoder_decoder") == Some(&json!(true)) {
        return Err(ModelError::Unsupported {
            what: "an encoder-decoder model of an unknown type".into(),
            hint: "it is no decoder, which is all that can be assumed".into(),
        });
    }
    let layers = needed(&whole, LAYERS)?;
    if layers > super::config::MAX_LAYERS {
        return Err(bad(LAYERS[0], &json!(layers), "a number of layers up to 4096"));
    }
    let (hidden, heads) = (needed(&whole, HIDDEN)?, needed(&whole, HEADS)?);
    let experts = size(&whole, EXPERTS)?.filter(|count| *count > 1);
    let expert_width = size(&whole, EXPERT_WIDTH)?;
    let width = match (size(&whole, WIDTH)?, expert_width) {
        (Some(width), _) => width,
        (None, Some(width)) if experts.is_some() => width,
        _ => needed(&whole, WIDTH)?,
    };
    let mut set = vec![
        ("hidden_size", json!(hidden)),
        ("num_hidden_layers", json!(layers)),
        ("num_attention_heads", json!(heads)),
        ("num_key_value_heads", json!(size(&whole, KEY_HEADS)?.unwrap_or(heads))),
        ("vocab_size", json!(needed(&whole, WORDS)?)),
        ("intermediate_size", json!(width)),
    ];
    let family = match experts {
        None => &DECODER,
        Some(count) => {
            let expert_width = expert_width.unwrap_or(width);
            let shared = match size(&whole, SHARED_WIDTH)? {
                Some(width) => width,
                None => size(&whole, SHARED)?.unwrap_or(0).saturating_mul(expert_width),
            };
            let dense = size(&whole, DENSE_FIRST)?.unwrap_or(0).min(layers);
            set.extend([
                ("num_experts", json!(count)),
                ("num_local_experts", json!(count)),
                ("num_experts_per_tok", json!(needed(&whole, CHOSEN)?)),
                ("moe_intermediate_size", json!(expert_width)),
                ("decoder_sparse_step", json!(size(&whole, EVERY)?.unwrap_or(1).max(1))),
            ]);
            if whole.get("mlp_only_layers").is_none_or(Value::is_null) {
                set.push(("mlp_only_layers", json!((0..dense).collect::<Vec<_>>())));
            }
            if shared > 0 {
                set.push(("shared_expert_intermediate_size", json!(shared)));
                set.push(("qkv_bias", json!(whole.get("attention_bias") == Some(&json!(true)))));
                &SHARING_MIXTURE
            } else {
                &MIXTURE
            }
        }
    };
    let name = config.get("model_type").and_then(Value::as_str).filter(|name| !name.is_empty()).unwrap_or("(none)");
    let with = experts.map_or_else(String::new, |count| format!(" with {count} experts"));
    notes.insert(
        0,
        format!("model_type {name} is not known: assumed to be a Llama-style decoder{with}; the result is a guess"),
    );
    if whole.get("kv_lora_rank").is_some_and(Value::is_number) {
        notes.push("kv_lora_rank: latent attention is counted as plain heads".into());
    }
    set.push(("model_type", json!(family.model_types[0])));
    whole.extend(set.into_iter().map(|(key, value)| (key.to_owned(), value)));
    Ok((Value::Object(whole), family, notes))
}

fn needed(config: &Map<String, Value>, keys: &[&str]) -> Result<u64, ModelError> {
    let first = keys.first().copied().unwrap_or_default();
    match size(config, keys)? {
        Some(0) => Err(bad(first, &json!(0), "a whole number above 0")),
        Some(size) => Ok(size),
        None => Err(ModelError::Missing { path: first.into(), family: "decoder".into() }),
    }
}

fn size(config: &Map<String, Value>, keys: &[&str]) -> Result<Option<u64>, ModelError> {
    for key in keys {
        let Some(value) = config.get(*key).filter(|value| !value.is_null()) else { continue };
        let whole = value.as_u64().filter(|size| *size <= 1 << 32);
        return whole.map(Some).ok_or_else(|| bad(key, value, "a whole number up to 4294967296"));
    }
    Ok(None)
}

fn bad(path: &str, value: &Value, expected: &str) -> ModelError {
    let shown = value.to_string().chars().take(80).collect();
    ModelError::BadValue { path: path.into(), value: shown, expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;

    fn assumed(config: Value) -> Result<Model, ModelError> {
        Model::assuming(config, None, Some(Assumption::Decoder))
    }

    /// The sizes of MiniMax-Text-01 under a type that nobody knows.
    fn mixture() -> Value {
        json!({"model_type": "minimax_x", "hidden_size": 6144, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9216, "num_local_experts": 32,
            "num_experts_per_tok": 2, "vocab_size": 200_064})
    }

    #[test]
    fn no_type_is_taken_for_another() {
        let said = |config: Value| Model::new(config, None).unwrap_err().to_string();
        assert!(said(json!({})).contains("no model_type"));
        assert!(said(json!({"name": "x", "version": "1", "dependencies": {}})).contains("package.json"));
        assert!(said(json!({"_class_name": "MochiTransformer3DModel"})).contains("diffusers"));
        assert!(said(mixture()).contains("minimax_x"));
    }

    #[test]
    fn an_assumed_mixture_counts_its_experts() {
        let total = |config: Value| assumed(config).unwrap().inventory().unwrap().total();
        assert!(total(mixture()) > 435_000_000_000, "{}", total(mixture()));
        let mut other = mixture();
        let object = other.as_object_mut().unwrap();
        object.shift_remove("num_local_experts");
        object.insert("n_routed_experts".into(), json!(32));
        assert_eq!(total(other.clone()), total(mixture()));
        other["n_shared_experts"] = json!(1);
        assert!(total(other) > total(mixture()));
        let model = assumed(mixture()).unwrap();
        assert!(model.notes()[0].contains("minimax_x") && model.notes()[0].contains("32 experts"));
    }

    #[test]
    fn what_a_decoder_needs_is_named() {
        let said = |config: Value| assumed(config).unwrap_err().to_string();
        assert!(said(json!({"model_type": "x"})).contains("num_hidden_layers"));
        assert!(said(json!({})).contains("num_hidden_layers"));
        let mut broken = mixture();
        broken["num_local_experts"] = json!([1, 2]);
        assert!(said(broken).contains("num_local_experts: [1,2]"));
        let mut seq2seq = mixture();
        seq2seq["is_encoder_decoder"] = json!(true);
        assert!(said(seq2seq).contains("encoder-decoder"));
        let nested = json!({"model_type": "x_vl", "text_config": mixture()});
        assert!(assumed(nested).unwrap().notes()[1].contains("text_config"));
        // What is known is not assumed.
        let known = assumed(json!({"model_type": "llama"})).unwrap();
        assert!(known.notes()[0].contains("nothing is assumed"));
    }
}
