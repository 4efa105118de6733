//! DeepSeek-V3.2 and GLM-5: V3 with sparse attention, where an indexer picks the keys that are seen.

use super::deepseek_v3::Mlp;
use super::frame::{Context, Frame, RouterLogits, rope};
use super::latent::{Latent, Rotation, rotate_even_odd};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::{attention, read};
use crate::model::facts::{ExpertNames, Facts};
use crate::model::op::{Binary, CacheKind, CacheUpdate, Mask, Norm, Op, Rotary, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// DeepSeek-V3.2.
pub const FAMILY: Family = Family {
    name: "DeepSeek-V3.2",
    model_types: &["deepseek_v32"],
    facts: Facts { experts: Some(ExpertNames::USUAL), ..Facts::DEFAULT },
    build,
};
/// GLM-5.
pub const GLM: Family = Family {
    name: "GLM-5",
    model_types: &["glm_moe_dsa"],
    facts: Facts { experts: Some(ExpertNames::USUAL), ..Facts::DEFAULT },
    build,
};

struct Sparse {
    frame: Frame,
    attention: Latent,
    mlp: Mlp,
    indexer: Indexer,
    /// Whether a layer's choice of keys lives on for the next.
    hands_on: bool,
    /// Layers that have an indexer; the others take the keys of the layer before.
    indexed: Vec<bool>,
}

struct Indexer {
    heads: u64,
    head_dim: u64,
    turned: u64,
    top_k: u64,
    even_odd: bool,
}

impl Sparse {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let glm = c.model_type() == "glm_moe_dsa";
        let sizes = if glm { [154880, 6144, 78] } else { [129280, 7168, 61] };
        let frame = Frame { router_loss: false, ..Frame::read(c, sizes[0], sizes[1], sizes[2])? };
        let (heads, rank) = if glm { (64, 2048) } else { (128, 1536) };
        let mut attention = Latent::read(c, heads, rank, Rotation::EvenOdd)?;
        if glm {
            attention.plain = c.size_or(&["qk_nope_head_dim"], 192)?;
            attention.value = c.size_or(&["v_head_dim"], 256)?;
        }
        if attention.query_rank.is_none() {
            return Err(c.refuse("q_lora_rank", "a rank: the indexer reads the queries' latent"));
        }
        let indexer = Indexer {
            heads: read::positive(c, &["index_n_heads"], if glm { 32 } else { 64 })?,
            head_dim: c.size_or(&["index_head_dim"], 128)?,
            turned: attention.turned,
            top_k: c.size_or(&["index_topk"], 2048)?,
            even_odd: glm,
        };
        let (width, router) = if glm { (12288, [256, 1, 1]) } else { (18432, [256, 8, 4]) };
        Ok(Self {
            mlp: Mlp::read(c, frame.layers, width, router)?,
            indexed: indexed_layers(c, frame.layers)?,
            hands_on: glm,
            frame,
            attention,
            indexer,
        })
    }

    fn model(&self, g: &mut Graph, routers: &mut RouterLogits) -> Value {
        let context = |g: &mut Graph| Context {
            mask: attention::mask(g, Mask::CausalKept),
            rope: rope(g, self.attention.turned),
        };
        let mut chosen: Option<Value> = None;
        self.frame.model(g, None, context, |g, index, input, context| {
            let indexed = self.indexed.get(index as usize).copied().unwrap_or(true) || chosen.is_none();
            let attend = |g: &mut Graph, x: &Value| {
                let (output, indices) = self.attend(g, x, context, if indexed { None } else { chosen.take() });
                // Only GLM hands the choice on from layer to layer.
                chosen = Some(indices).filter(|_| self.hands_on);
                output
            };
            self.frame.layer(g, input, attend, |g, x| self.mlp.run(g, index, x, routers))
        })
    }

    fn attend(&self, g: &mut Graph, hidden: &Value, context: &Context, chosen: Option<Value>) -> (Value, Value) {
        let own = &self.attention;
        let latent = own.query_latent(g, hidden).unwrap_or_else(|| hidden.clone());
        let query = g.linear("q_b_proj", &latent, own.heads.saturating_mul(own.plain + own.turned), false);
        let mut parts = own.parts(g, hidden, query);
        own.rotate(g, &mut parts, &context.rope);
        let query = g.cat(&[&parts.query_plain, &parts.query_turned], -1);
        let (mut key, mut value) = own.expand(g, &parts.latent, &parts.key_turned);
        // 5.17 caches whole heads here, unlike V3; later versions the latent.
        (key, value) = g.cache(own.cache(), &key, &value);
        let chosen = chosen.unwrap_or_else(|| {
            let mask = g.slice(&context.mask, 1, 0, 1);
            let mask = g.squeeze(&mask, 1);
            g.module("indexer", |g| g.without_grad(|g| self.indexer.run(g, hidden, &latent, &context.rope, &mask)))
        });
        let hidden_keys = {
            let all = g.fill(DType::Bool, [hidden.size(0), hidden.size(1), key.size(2)]);
            let wide = g.to(&chosen, DType::I64);
            let kept = g.run(Op::Scatter { dim: 2, in_place: false }, &[&all, &wide], all.shape());
            g.unsqueeze(&kept, 1)
        };
        let mask = {
            let seen = g.unary(Unary::Not, &hidden_keys);
            g.binary(Binary::Mul, &context.mask, &seen)
        };
        let attended = own.attend(g, &query, &key, &value, &mask, hidden.size(-1));
        drop((hidden_keys, mask));
        (attended, chosen)
    }
}

impl Indexer {
    /// The keys each query sees, `[batch, seq, top_k]`.
    fn run(&self, g: &mut Graph, hidden: &Value, latent: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let (batch, seq) = (hidden.size(0), hidden.size(1));
        let plain = self.head_dim.saturating_sub(self.turned);
        let mut query = g.linear("wq_b", latent, self.heads.saturating_mul(self.head_dim), false);
        query = g.view(&query, [batch, seq, self.heads, self.head_dim]);
        let (mut query_turned, query_plain) = g.split2(&query, -1, self.turned, plain);
        let mut key = {
            let projected = g.linear("wk", hidden, self.head_dim, false);
            let normed = g.norm("k_norm", &projected, Norm::Layer, true);
            g.unsqueeze(&normed, 2)
        };
        let (mut key_turned, key_plain) = g.split2(&key, -1, self.turned, plain);
        (query_turned, key_turned) = if self.even_odd {
            rotate_even_odd(g, &query_turned, &key_turned, rope, 2)
        } else {
            attention::rotate_whole(g, Rotary::Half, &query_turned, &key_turned, &rope.0, &rope.1)
        };
        query = g.cat(&[&query_turned, &query_plain], -1);
        key = g.cat(&[&key_turned, &key_plain], -1);
        key = g.squeeze(&key, 2);
        let update =
            CacheUpdate { kind: CacheKind::Index, heads: 1, key_dim: self.head_dim, value_dim: 0, true_heads: 1 };
        key = g.run(Op::Cache(update), &[&key], [batch, g.inputs.keys(None, seq), self.head_dim]);
        let mut scores = {
            let product = {
                let wide_query = g.float(&query);
                let turned = g.transpose(&key, -1, -2);
                let turned = g.float(&turned);
                let turned = g.unsqueeze(&turned, 1);
                g.matmul(&wide_query, &turned)
            };
            g.scale(&product)
        };
        scores = g.unary(Unary::Relu, &scores);
        let weights = {
            let wide = {
                let narrow = g.linear("weights_proj", hidden, self.heads, false);
                g.float(&narrow)
            };
            g.scale(&wide)
        };
        let mut index_scores = {
            let rows = g.unsqueeze(&weights, 2);
            let product = g.matmul(&rows, &scores);
            g.squeeze(&product, 2)
        };
        index_scores = {
            let unseen = g.unary(Unary::Not, mask);
            g.masked_fill(&index_scores, &unseen)
        };
        let (_, indices) = g.top_k(&index_scores, self.top_k.min(key.size(1)));
        g.to(&indices, DType::I32)
    }
}

/// GLM's schedule of layers with an indexer; every layer without one.
fn indexed_layers(c: &Config<'_>, layers: u64) -> Result<Vec<bool>, ModelError> {
    if let Some(kinds) = c.strings("indexer_types")? {
        return Ok(kinds.iter().map(|&kind| kind == "full").collect());
    }
    if let Some(kinds) = c.get("index_topk_pattern") {
        return Ok(match kinds.as_str() {
            Some(pattern) => pattern.chars().map(|letter| letter == 'F').collect(),
            None => c.strings("index_topk_pattern")?.unwrap_or_default().iter().map(|&kind| kind == "full").collect(),
        });
    }
    let every = c.size_or(&["index_topk_freq"], 1)?.max(1);
    let offset = c.size_or(&["index_skip_topk_offset"], 2)?;
    Ok((0..layers).map(|index| (index + 1).saturating_sub(offset).is_multiple_of(every)).collect())
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = Sparse::read(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, routers))
}
