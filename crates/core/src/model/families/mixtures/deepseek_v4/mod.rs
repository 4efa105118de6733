//! DeepSeek-V4 (Flash, Pro): several residual streams, one key head, long range through compressed keys.

mod compress;
mod streams;

use compress::{Compressor, rotary_buffers};

use super::frame::{Frame, RouterLogits};
use super::routing::{Routing, flatten, project};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{attention, read};
use crate::model::facts::{Facts, Liger, VllmFacts};
use crate::model::op::{
    Attention, Binary, CacheKind, CacheUpdate, EagerStyle, ExpertStyle, Input, Mask, Norm, Op, Reduction, Role,
    RotaryTable, Unary,
};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// DeepSeek-V4.
pub const FAMILY: Family = Family {
    name: "DeepSeek-V4",
    model_types: &["deepseek_v4"],
    facts: Facts {
        liger: Liger::NotSimulated,
        registration: &[&["gate", "experts", "shared_experts"]],
        vllm: VllmFacts { turns_in_single: true, ..VllmFacts::DEFAULT },
        ..Facts::DEFAULT
    },
    build,
};

/// How a layer reaches beyond its window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// Not at all.
    Window,
    /// Every few tokens compressed to one key, the best of which an indexer picks.
    Sparse,
    /// Very many tokens compressed to one key, all of which are seen.
    Heavy,
}

struct DeepSeekV4 {
    frame: Frame,
    heads: u64,
    head_dim: u64,
    turned: u64,
    query_rank: u64,
    window: u64,
    dropout: f64,
    output_groups: u64,
    output_rank: u64,
    reach: Vec<Reach>,
    hashed: Vec<bool>,
    sparse: Compressor,
    heavy: Compressor,
    streams: streams::Streams,
    experts: FusedExperts,
    mlp_bias: bool,
}

impl DeepSeekV4 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame::read(c, 129280, 4096, 43)?;
        let head_dim = read::positive(c, &["head_dim"], 512)?;
        let turned = c.size_or(&["qk_rope_head_dim"], read::rotary_dim(c, head_dim, 64.0 / 512.0)?)?;
        let rates = c.section("compress_rates");
        let rate = |legacy: &str, key: &str, default: u64| {
            if c.has(legacy) { read::positive(c, &[legacy], default) } else { read::positive(&rates, &[key], default) }
        };
        let sparse = rate("compress_rate_csa", "compressed_sparse_attention", 4)?;
        let heavy = rate("compress_rate_hca", "heavily_compressed_attention", 128)?;
        let hash_layers = c.size_or(&["num_hash_layers"], 3)?;
        let kinds = c.strings("mlp_layer_types")?;
        let hashed = |index: u64| match &kinds {
            Some(kinds) => kinds.get(index as usize) == Some(&"hash_moe"),
            None => index < hash_layers,
        };
        let mut experts = FusedExperts::new(
            read::positive(c, &["n_routed_experts", "num_local_experts", "num_experts"], 256)?,
            read::positive(c, &["num_experts_per_tok"], 6)?,
            c.size_or(&["moe_intermediate_size"], 2048)?,
            read::activation(c, "hidden_act", "silu")?,
        );
        experts.style = ExpertStyle::InterfaceClampedHalves;
        let output_groups = read::positive(c, &["o_groups"], 8)?;
        let heads = read::positive(c, &["num_attention_heads"], 64)?;
        if !heads.saturating_mul(head_dim).is_multiple_of(output_groups) {
            return Err(c.refuse("o_groups", "a divisor of the width of all heads"));
        }
        Ok(Self {
            heads,
            head_dim,
            turned,
            query_rank: c.size_or(&["q_lora_rank"], 1024)?,
            window: c.size_or(&["sliding_window"], 128)?,
            dropout: c.number("attention_dropout", 0.0)?,
            output_groups,
            output_rank: c.size_or(&["o_lora_rank"], 1024)?,
            reach: reach(c, frame.layers)?,
            hashed: (0..frame.layers).map(hashed).collect(),
            sparse: Compressor { rate: sparse, head_dim, turned, overlapping: true },
            heavy: Compressor { rate: heavy, head_dim, turned, overlapping: false },
            streams: streams::Streams::read(c)?,
            mlp_bias: c.flag("mlp_bias", false)?,
            experts,
            frame,
        })
    }

    fn model(&self, g: &mut Graph, indexer: &compress::Indexer, routers: &mut RouterLogits) -> Value {
        let (batch, seq, hidden) = (g.inputs.batch, g.inputs.seq, self.frame.hidden);
        let ids = g.input(Input::Tokens, [batch, seq]);
        let embeddings = g.embedding("embed_tokens", &ids, self.frame.vocab, hidden);
        let mask = attention::mask(g, Mask::SlidingEager(self.window));
        let mut states = {
            let each = g.unsqueeze(&embeddings, 2);
            let wide = g.expand(&each, [batch, seq, self.streams.count, hidden]);
            g.contiguous(&wide)
        };
        g.module("rotary_emb", |g| rotary_buffers(g, self.turned));
        let table = RotaryTable { dim: self.turned, axes: 1, doubled: false, fp32: false };
        let ropes = [g.rotary_table_bare(seq, table), g.rotary_table_bare(seq, table)];
        for index in 0..self.frame.layers {
            states = g.layer("layers", index, |g| {
                let reach = self.reach.get(index as usize).copied().unwrap_or(Reach::Window);
                let rope = &ropes[usize::from(reach != Reach::Window)];
                let attend = |g: &mut Graph, x: &Value| self.attend(g, x, reach, indexer, rope, &mask);
                let attended = self.streams.connect(g, "attn_hc", &states, |g, collapsed| {
                    let normed = g.norm("input_layernorm", collapsed, Norm::Rms, false);
                    g.module("self_attn", |g| attend(g, &normed))
                });
                let hashed = self.hashed.get(index as usize).copied().unwrap_or(false);
                self.streams.connect(g, "ffn_hc", &attended, |g, collapsed| {
                    let normed = g.norm("post_attention_layernorm", collapsed, Norm::Rms, false);
                    g.module("mlp", |g| self.mlp(g, &normed, hashed.then_some(&ids), routers))
                })
            });
        }
        let joined = self.streams.join(g, &states);
        g.norm("norm", &joined, Norm::Rms, false)
    }

    fn attend(
        &self,
        g: &mut Graph,
        hidden: &Value,
        reach: Reach,
        indexer: &compress::Indexer,
        (cosine, sine): &(Value, Value),
        mask: &Value,
    ) -> Value {
        let (batch, seq) = (hidden.size(0), hidden.size(1));
        let sinks = g.parameter("sinks", [self.heads], Role::Other);
        let latent = {
            let low = g.linear("q_a_proj", hidden, self.query_rank, false);
            g.norm("q_a_norm", &low, Norm::Rms, false)
        };
        let mut query = g.linear("q_b_proj", &latent, self.heads.saturating_mul(self.head_dim), false);
        query = attention::split_heads(g, query, self.heads, self.head_dim);
        query = streams::unweighted_norm(g, &query);
        query = compress::rotate(g, &query, cosine, sine);
        let mut key = {
            let projected = g.linear("kv_proj", hidden, self.head_dim, false);
            g.norm("kv_norm", &projected, Norm::Rms, false)
        };
        key = attention::split_heads(g, key, 1, self.head_dim);
        key = compress::rotate(g, &key, cosine, sine);
        key = self.cached(g, &key, reach);
        let mut mask = mask.clone();
        let compressor = match reach {
            Reach::Window => None,
            Reach::Sparse => Some((&self.sparse, Some(indexer))),
            Reach::Heavy => Some((&self.heavy, None)),
        };
        if let Some((compressor, indexer)) = compressor {
            let compressed = g.module("compressor", |g| compressor.run(g, hidden, &latent, indexer));
            let more = compressed.keys.as_ref();
            let parts: Vec<&Value> = std::iter::once(&key).chain(more).collect();
            key = g.cat(&parts, 2);
            mask = match (&compressed.keys, &compressed.bias) {
                (None, _) => mask,
                (Some(_), Some(bias)) => {
                    let bias = g.type_as(bias, &mask);
                    g.cat(&[&mask, &bias], -1)
                }
                (Some(_), None) => g.pad(&mask, mask.shape().with(-1, key.size(2))),
            };
        }
        let spec = Attention {
            groups: self.heads,
            causal: true,
            dropout_per_mille: (self.dropout.clamp(0.0, 1.0) * 1000.0).round() as u32,
            softcap: false,
            sinks: Some(sinks),
            eager: EagerStyle::Fp32Softmax,
            sdpa: false,
        };
        let mut attended = attention::attend(g, spec, &query, &key, &key, Some(&mask));
        attended = {
            let by_head = g.transpose(&attended, 1, 2);
            let back = g.unary(Unary::Neg, sine);
            let turned = compress::rotate(g, &by_head, cosine, &back);
            g.transpose(&turned, 1, 2)
        };
        let width = self.heads.saturating_mul(self.head_dim) / self.output_groups;
        let mut grouped = g.reshape(&attended, [batch, seq, self.output_groups, width]);
        grouped = g.module("o_a_proj", |g| self.grouped_linear(g, &grouped));
        g.linear("o_b_proj", &grouped, self.frame.hidden, false)
    }

    /// Keys are values too; layers with a compressor keep one tensor for both.
    fn cached(&self, g: &mut Graph, key: &Value, reach: Reach) -> Value {
        let update = CacheUpdate {
            kind: CacheKind::Sliding(self.window),
            heads: 1,
            key_dim: self.head_dim,
            value_dim: self.head_dim,
            true_heads: 1,
        };
        if reach == Reach::Window {
            return g.cache(update, key, key).0;
        }
        let grown = key.shape().with(2, key.size(2).saturating_add(g.inputs.past));
        g.run(Op::Cache(update), &[key], grown)
    }

    /// A linear per group of heads: `[batch, seq, groups, width] → [batch, seq, groups · rank]`.
    fn grouped_linear(&self, g: &mut Graph, x: &Value) -> Value {
        let (groups, rank, width) = (self.output_groups, self.output_rank, x.size(-1));
        let shape = [groups.saturating_mul(rank), width];
        let weight = g.parameter("weight", shape, Role::Linear);
        let weight = g.read(weight, shape);
        let weight = g.view(&weight, [groups, rank, width]);
        let weight = g.transpose(&weight, 1, 2);
        let rows = g.reshape(x, [x.size(0).saturating_mul(x.size(1)), groups, width]);
        let rows = g.transpose(&rows, 0, 1);
        let product = g.matmul(&rows, &weight);
        let product = g.transpose(&product, 0, 1);
        g.reshape(&product, [x.size(0), x.size(1), groups.saturating_mul(rank)])
    }

    fn mlp(&self, g: &mut Graph, input: &Value, ids: Option<&Value>, routers: &mut RouterLogits) -> Value {
        let flat = flatten(g, input);
        let routing = g.module("gate", |g| self.route(g, &flat, ids));
        if ids.is_none() {
            routers.record(&routing.logits);
        }
        let routed = {
            let output = self.experts.run(g, "experts", &flat, &routing.indices, &routing.weights);
            g.view(&output, input.shape())
        };
        let shared = g.module("shared_experts", |g| {
            let clamped = |g: &mut Graph, name: &str| {
                let wide = g.linear(name, input, self.experts.width, self.mlp_bias);
                g.unary(Unary::Clamp, &wide)
            };
            let gate = clamped(g, "gate_proj");
            let up = clamped(g, "up_proj");
            let product = g.glu(self.experts.activation, &gate, &up);
            g.linear("down_proj", &product, self.frame.hidden, self.mlp_bias)
        });
        g.add(&routed, &shared)
    }

    /// Experts by score, or by token id in the first layers (`ids`).
    fn route(&self, g: &mut Graph, x: &Value, ids: Option<&Value>) -> Routing {
        let (count, top_k) = (self.experts.count, self.experts.top_k);
        let logits = project(g, x, count);
        let scores = {
            let soft = g.unary(Unary::Softplus, &logits);
            g.unary(Unary::Sqrt, &soft)
        };
        let indices = match ids {
            Some(ids) => {
                g.buffer("tid2eid", [self.frame.vocab, top_k], DType::I64, true);
                let table = g.run(Op::Buffer(DType::I64), &[], [self.frame.vocab, top_k]);
                let ids = g.reshape(ids, [ids.size(0).saturating_mul(ids.size(1))]);
                g.index(&table, &ids)
            }
            None => {
                g.buffer("e_score_correction_bias", [count], DType::F32, true);
                let correction = g.run(Op::Buffer(DType::F32), &[], [count]);
                let choice = g.add(&scores, &correction);
                g.top_k(&choice, top_k).1
            }
        };
        let mut weights = g.gather(&scores, 1, &indices);
        weights = {
            let sum = g.reduce(Reduction::Sum, &weights, -1, true);
            let sum = g.scalar(Binary::Add, &sum);
            g.div(&weights, &sum)
        };
        weights = g.scale(&weights);
        Routing { logits, weights, indices }
    }
}

/// How each layer reaches back: stated, by the ratios of older configs, or the default pattern.
fn reach(c: &Config<'_>, layers: u64) -> Result<Vec<Reach>, ModelError> {
    if let Some(kinds) = c.strings("layer_types")? {
        let known = |kind: &&str| match *kind {
            "sliding_attention" => Ok(Reach::Window),
            "compressed_sparse_attention" => Ok(Reach::Sparse),
            "heavily_compressed_attention" => Ok(Reach::Heavy),
            _ => Err(c.refuse("layer_types", "kinds of attention DeepSeek-V4 has")),
        };
        return kinds.iter().map(known).collect();
    }
    if let Some(ratios) = c.sizes("compress_ratios")? {
        let known = |ratio: &u64| match ratio {
            0 => Ok(Reach::Window),
            4 => Ok(Reach::Sparse),
            128 => Ok(Reach::Heavy),
            _ => Err(c.refuse("compress_ratios", "0, 4 or 128 per layer")),
        };
        return ratios.iter().map(known).collect();
    }
    let sparse = |index: u64| index >= 2 && !index.is_multiple_of(2);
    Ok((0..layers).map(|index| if sparse(index) { Reach::Sparse } else { Reach::Heavy }).collect())
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = DeepSeekV4::read(c)?;
    let indexer = compress::Indexer::read(c, model.sparse.rate, model.turned)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, &indexer, routers))
}
