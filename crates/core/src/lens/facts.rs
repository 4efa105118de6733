//! The numbers of a model that published formulas ask for.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Silent, silent};
use crate::model::{Inventory, Model, ModuleKind};

/// Routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// How many.
    pub count: u64,
    /// The width of each.
    pub width: u64,
}

/// A model in the numbers of a formula.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// All parameters, tied ones once.
    pub parameters: u64,
    /// Layers.
    pub layers: u64,
    /// The hidden size.
    pub hidden: u64,
    /// Attention heads.
    pub heads: u64,
    /// Heads of keys and values.
    pub kv_heads: u64,
    /// The size of a head.
    pub head_dim: u64,
    /// The width of the MLP.
    pub intermediate: u64,
    /// Whether the MLP has a gate (three matrices).
    pub gated: bool,
    /// Whether norms have a bias.
    pub biased_norms: bool,
    /// The vocabulary.
    pub vocab: u64,
    /// Whether input and output embedding are one.
    pub tied: bool,
    /// Routed experts.
    pub experts: Option<Experts>,
    /// Most parameters that one module holds itself, children left out.
    pub largest_module: u64,
    /// Parameters without the head on top (`AutoModel`), and the largest layer or leaf of that model.
    pub headless: (u64, u64),
}

impl Facts {
    /// Reads them off a model; models without layers of a hidden size are refused.
    pub fn of(model: &Model) -> Result<Self, Silent> {
        let inventory = model.inventory().map_err(|error| Silent(error.to_string()))?;
        let config = model.config();
        let text = config.get("text_config").filter(|text| text.is_object()).unwrap_or(config);
        let read = |keys: &[&str]| keys.iter().find_map(|key| text.get(key).and_then(Value::as_u64));
        let Some(hidden) = read(&["hidden_size", "n_embd", "d_model", "dim"]) else {
            return silent("the config has no hidden_size that a formula could use");
        };
        let counted = inventory.modules.iter().filter(|module| module.kind == ModuleKind::Layer).count() as u64;
        let layers = read(&["num_hidden_layers", "n_layer", "n_layers", "num_layers"]).unwrap_or(counted);
        let heads = read(&["num_attention_heads", "n_head", "n_heads", "num_heads"]).unwrap_or((hidden / 128).max(1));
        let flag = |key: &str| text.get(key).or_else(|| config.get(key)).and_then(Value::as_bool);
        let named = |part: &str| inventory.parameters.iter().any(|parameter| parameter.name.contains(part));
        let experts = read(&["num_local_experts", "num_experts", "n_routed_experts"]).filter(|count| *count > 0);
        let intermediate = read(&["intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "hidden_dim"]);
        let intermediate = intermediate.unwrap_or(hidden.saturating_mul(4));
        let base = Model::new(config.clone(), Some("AutoModel")).and_then(|model| model.inventory());
        let base = base.as_ref().unwrap_or(&inventory);
        Ok(Self {
            parameters: inventory.total(),
            layers,
            hidden,
            heads,
            kv_heads: read(&["num_key_value_heads"]).unwrap_or(heads),
            head_dim: read(&["head_dim"]).unwrap_or(hidden / heads.max(1)),
            intermediate,
            gated: named("gate_proj") || named("gate_up_proj") || named(".w3."),
            biased_norms: named("norm.bias") || named("layernorm.bias") || named("ln_1.bias"),
            vocab: read(&["vocab_size"]).unwrap_or(0),
            tied: flag("tie_word_embeddings").unwrap_or(!inventory.aliases.is_empty()),
            experts: experts
                .map(|count| Experts { count, width: read(&["moe_intermediate_size"]).unwrap_or(intermediate) }),
            largest_module: largest_module(&inventory),
            headless: (base.total(), largest_layer_or_leaf(base)),
        })
    }

    /// A decoder of plain numbers: no experts, an MLP of 4 h, untied embeddings.
    pub fn of_sizes(parameters: u64, layers: u64, hidden: u64, heads: u64, vocab: u64) -> Self {
        let embedding = vocab.saturating_mul(hidden);
        let matrix = hidden.saturating_mul(hidden).saturating_mul(4);
        Self {
            parameters,
            layers,
            hidden,
            heads,
            kv_heads: heads,
            head_dim: hidden / heads.max(1),
            intermediate: hidden.saturating_mul(4),
            gated: false,
            biased_norms: true,
            vocab,
            tied: false,
            experts: None,
            largest_module: embedding.max(matrix),
            headless: (parameters.saturating_sub(embedding), embedding.max(matrix.saturating_mul(3))),
        }
    }
}

/// Parameters by the module that holds them itself.
fn by_module(inventory: &Inventory) -> BTreeMap<&str, u64> {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for parameter in &inventory.parameters {
        let module = parameter.name.rsplit_once('.').map_or("", |(module, _)| module);
        let count = counts.entry(module).or_default();
        *count = count.saturating_add(parameter.shape.elements());
    }
    counts
}

fn largest_module(inventory: &Inventory) -> u64 {
    by_module(inventory).into_values().max().unwrap_or(0)
}

/// What accelerate does not split: whole layers, and leaves outside them.
fn largest_layer_or_leaf(inventory: &Inventory) -> u64 {
    largest_module(inventory).max(inventory.largest_layer().map_or(0, |(_, count)| count))
}
