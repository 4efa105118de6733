//! What Megatron needs to know of a model, read off the family's own description: the parameters of its program.

use crate::model::op::{Parameter, Role};
use crate::model::{Config, Model, ModuleKind, Program};
use crate::plan::PlanError;
use crate::plan::parallel::megatron::Fp8;

/// A decoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Architecture {
    /// Width of the residual stream.
    pub hidden: u64,
    /// Rows of the vocabulary, without padding.
    pub vocabulary: u64,
    /// Whether the head is the embedding's table.
    pub tied: bool,
    /// Layers, in order.
    pub layers: Vec<Layer>,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Its module in the program.
    pub module: u32,
    /// Whether its products are in fp8.
    pub fp8: bool,
    /// Attention.
    pub attention: Attention,
    /// The feed-forward.
    pub feed_forward: FeedForward,
}

/// Attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Queries in groups.
    Grouped(Grouped),
    /// Latent attention.
    Latent(Latent),
}

/// Attention with grouped queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grouped {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Whether queries and keys are normed.
    pub qk_norm: bool,
    /// Whether the projection has a bias.
    pub bias: bool,
}

/// Multi-head latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Heads.
    pub heads: u64,
    /// Width of the queries' latent, where there is one.
    pub query_rank: Option<u64>,
    /// Width of the keys' and values' latent.
    pub key_rank: u64,
    /// Part of a key that is not rotated.
    pub plain_dim: u64,
    /// Part that is.
    pub rotary_dim: u64,
    /// Width of a value.
    pub value_dim: u64,
}

impl Latent {
    /// Width of a query.
    pub fn query_dim(&self) -> u64 {
        self.plain_dim + self.rotary_dim
    }
}

/// A feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForward {
    /// One gated MLP.
    Dense {
        /// Its width.
        width: u64,
    },
    /// Routed experts.
    Mixture(Mixture),
}

/// Routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mixture {
    /// How many.
    pub experts: u64,
    /// How many run for a token.
    pub top_k: u64,
    /// Width of one.
    pub width: u64,
    /// Width of the shared experts together, 0 without.
    pub shared: u64,
    /// Whether the shared experts' output is gated.
    pub shared_gate: bool,
}

impl Architecture {
    /// Reads a model; models with layers that Megatron has no spec for are refused by the parameter that says so.
    pub fn of(model: &Model, program: &Program) -> Result<Self, PlanError> {
        let heads = Config::new(model.config())?.size(&["num_attention_heads", "n_head", "num_heads"])?;
        let stack: Vec<(u32, &str)> = program
            .modules
            .iter()
            .enumerate()
            .filter(|(_, module)| module.kind == ModuleKind::Layer)
            .map(|(index, module)| (index as u32, module.path.as_str()))
            .collect();
        let mut layers = Vec::new();
        for (module, path) in &stack {
            let inside = |parameter: &&Parameter| within(&parameter.name, path).is_some();
            let own: Vec<(&str, &Parameter)> = program
                .parameters
                .iter()
                .filter(inside)
                .filter_map(|parameter| Some((within(&parameter.name, path)?, parameter)))
                .collect();
            layers.push(layer(*module, heads, &Named { path, own })?);
        }
        let outside = |parameter: &&Parameter| stack.iter().all(|(_, path)| within(&parameter.name, path).is_none());
        let rest: Vec<&Parameter> = program.parameters.iter().filter(outside).collect();
        let embedding = rest.iter().find(|p| p.role == Role::Embedding);
        let Some(embedding) = embedding.filter(|_| !layers.is_empty()) else {
            return Err(unsupported("a model without an embedding and a stack of layers"));
        };
        let head = rest.iter().find(|p| p.role == Role::Linear && p.shape.size(0) == embedding.shape.size(0));
        if let Some(other) = rest
            .iter()
            .find(|p| p.role != Role::Norm && p.name != embedding.name && head.is_none_or(|h| h.name != p.name))
        {
            return Err(unsupported(&other.name));
        }
        Ok(Self { hidden: embedding.shape.size(1), vocabulary: embedding.shape.size(0), tied: head.is_none(), layers })
    }
}

impl Architecture {
    /// Marks the layers whose products are in fp8.
    pub fn with_fp8(mut self, fp8: Option<Fp8>) -> Self {
        let count = self.layers.len() as u64;
        for (layer, index) in self.layers.iter_mut().zip(0..) {
            layer.fp8 = fp8.is_some_and(|fp8| fp8.covers(index, count));
        }
        self
    }
}

/// The rest of a name under a path.
fn within<'a>(name: &'a str, path: &str) -> Option<&'a str> {
    name.strip_prefix(path)?.strip_prefix('.')
}

fn unsupported(what: &str) -> PlanError {
    crate::plan::Fault::unsupported("parallel.engine", format!("Megatron with {what}"))
        .or("decoders with RMS norms, grouped-query or latent attention, gated MLPs and routed experts are simulated")
        .into()
}

/// The parameters of a layer, by the rest of their names.
struct Named<'a> {
    path: &'a str,
    own: Vec<(&'a str, &'a Parameter)>,
}

impl Named<'_> {
    /// The first parameter whose name ends so.
    fn find(&self, ends: &[&str]) -> Option<&Parameter> {
        ends.iter().find_map(|end| self.own.iter().find(|(name, _)| name.ends_with(end)).map(|(_, p)| *p))
    }

    fn rows(&self, ends: &[&str]) -> Option<u64> {
        self.find(ends).map(|parameter| parameter.shape.size(0))
    }

    fn need(&self, end: &str) -> Result<u64, PlanError> {
        self.rows(&[end]).ok_or_else(|| unsupported(&format!("{} without {end}", self.path)))
    }

    /// Refuses parameters that none of these endings names.
    fn only(&self, known: &[&str]) -> Result<(), PlanError> {
        match self.own.iter().find(|(name, _)| !known.iter().any(|end| name.ends_with(end))) {
            Some((_, parameter)) => Err(unsupported(&parameter.name)),
            None => Ok(()),
        }
    }
}

/// Every parameter that a layer of Megatron's GPT has a place for.
const KNOWN: [&str; 29] = [
    "layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "q_proj.bias",
    "k_proj.bias",
    "v_proj.bias",
    "o_proj.weight",
    "qkv_proj.weight",
    "q_a_proj.weight",
    "q_a_layernorm.weight",
    "q_b_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "kv_a_layernorm.weight",
    "kv_b_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "mlp.gate_up_proj.weight",
    "experts.gate_up_proj",
    "experts.down_proj",
    "mlp.gate.weight",
    "gate.e_score_correction_bias",
    "experts.gate_proj.weight",
    "experts.up_proj.weight",
    "experts.down_proj.weight",
    "expert_gate.weight",
];

fn layer(module: u32, heads: u64, named: &Named<'_>) -> Result<Layer, PlanError> {
    let shared = ["shared_expert.gate_proj.weight", "shared_expert.up_proj.weight", "shared_expert.down_proj.weight"];
    let known: Vec<&str> = KNOWN.iter().copied().chain(shared).collect();
    named.only(&known)?;
    if named.own.iter().any(|(name, p)| p.role == Role::Bias && name.contains("norm")) {
        return Err(unsupported("LayerNorm"));
    }
    Ok(Layer { module, fp8: false, attention: attention(heads.max(1), named)?, feed_forward: feed_forward(named)? })
}

fn attention(heads: u64, named: &Named<'_>) -> Result<Attention, PlanError> {
    let output = named.find(&["o_proj.weight"]).map(|p| p.shape.size(1)).unwrap_or(0);
    if let Some(combined) = named.rows(&["kv_a_proj_with_mqa.weight"]) {
        let key_rank = named.need("kv_a_layernorm.weight")?;
        let rotary_dim = combined.saturating_sub(key_rank);
        let query_rank = named.rows(&["q_a_proj.weight"]);
        let query = named.need(if query_rank.is_some() { "q_b_proj.weight" } else { "q_proj.weight" })? / heads;
        return Ok(Attention::Latent(Latent {
            heads,
            query_rank,
            key_rank,
            plain_dim: query.saturating_sub(rotary_dim),
            rotary_dim,
            value_dim: output / heads,
        }));
    }
    let head_dim = output / heads;
    let keys = match named.rows(&["qkv_proj.weight"]) {
        Some(all) => all.saturating_sub(output) / 2,
        None => named.need("k_proj.weight")?,
    };
    if named.rows(&["q_proj.weight"]).is_some_and(|rows| rows != output) {
        return Err(unsupported(&format!("{}: queries of another width than the output", named.path)));
    }
    Ok(Attention::Grouped(Grouped {
        heads,
        kv_heads: keys.checked_div(head_dim).unwrap_or(0).max(1),
        head_dim,
        qk_norm: named.find(&["q_norm.weight"]).is_some(),
        bias: named.find(&["q_proj.bias"]).is_some(),
    }))
}

fn feed_forward(named: &Named<'_>) -> Result<FeedForward, PlanError> {
    let experts = named.own.iter().find_map(|(_, p)| match p.role {
        Role::Experts { count, top_k } => Some((count, top_k)),
        _ => None,
    });
    let Some((count, top_k)) = experts else {
        let width = named.find(&["mlp.down_proj.weight"]).map(|p| p.shape.size(1));
        let width = width.ok_or_else(|| unsupported(&format!("{} without mlp.down_proj", named.path)))?;
        return Ok(FeedForward::Dense { width });
    };
    // [experts, 2 x width, hidden] or transposed: the down projection holds width x hidden either way.
    let down = named.find(&["experts.down_proj"]);
    let hidden = named.find(&["layernorm.weight"]).map_or(1, |p| p.shape.size(0)).max(1);
    let per_expert = down.map_or(0, |p| p.shape.elements() / count.max(1));
    let shared = named
        .own
        .iter()
        .find(|(name, _)| name.contains("shared_expert") && name.ends_with("down_proj.weight"))
        .map_or(0, |(_, p)| p.shape.size(1));
    Ok(FeedForward::Mixture(Mixture {
        experts: count,
        top_k,
        width: per_expert / hidden,
        shared,
        shared_gate: named.find(&["shared_expert_gate.weight"]).is_some(),
    }))
}
