//! Compressed keys: windows of tokens folded into one key each, and the indexer that picks among them.

use crate::dtype::DType;
use crate::model::blocks::{attention, read};
use crate::model::op::{CacheKind, CacheUpdate, Norm, Op, Reduction, Role, RotaryTable, Unary};
use crate::model::{Config, Graph, ModelError, Value};

/// Folds windows of `rate` tokens into one key.
#[derive(Debug, Clone, Copy)]
pub(super) struct Compressor {
    /// Tokens per key.
    pub(super) rate: u64,
    /// Width of a key.
    pub(super) head_dim: u64,
    /// Rotated dimensions.
    pub(super) turned: u64,
    /// Whether a window also sees the one before (projections twice as wide).
    pub(super) overlapping: bool,
}

/// What a compressor returns; nothing while no window is full.
#[derive(Debug)]
pub(super) struct Compressed {
    /// `[batch, 1, keys, head_dim]`.
    pub(super) keys: Option<Value>,
    /// What is added to the scores, `[batch, 1, seq, keys]`.
    pub(super) bias: Option<Value>,
}

impl Compressor {
    /// Runs it inside the current module.
    pub(super) fn run(&self, g: &mut Graph, hidden: &Value, latent: &Value, indexer: Option<&Indexer>) -> Compressed {
        let (batch, seq) = (hidden.size(0), hidden.size(1));
        let compressed = self.fold(g, hidden);
        let keys = compressed.as_ref().map(|keys| g.unsqueeze(keys, 1));
        let chosen = indexer.map(|indexer| g.module("indexer", |g| indexer.run(g, hidden, latent)));
        let Some(count) = keys.as_ref().map(|keys| keys.size(2)) else {
            return Compressed { keys: None, bias: None };
        };
        let bias = match chosen {
            Some(chosen) => chosen.map(|chosen| {
                let safe = {
                    let valid = g.compare(&chosen);
                    let other = g.fill(DType::I64, chosen.shape());
                    g.run(Op::Where, &[&valid, &chosen, &other], chosen.shape())
                };
                let full = constant(g, [batch, 1, seq, count + 1]);
                let index = g.unsqueeze(&safe, 1);
                let full = g.run(Op::Scatter { dim: 3, in_place: true }, &[&full, &index], full.shape());
                g.slice(&full, -1, 0, count)
            }),
            None if seq == 1 => None,
            None => {
                let zeros = constant(g, [batch, 1, seq, count]);
                let future = g.fill(DType::Bool, [1, 1, seq, count]);
                Some(g.masked_fill(&zeros, &future))
            }
        };
        Compressed { keys, bias }
    }

    /// `[batch, keys, head_dim]`, those of the cache included.
    fn fold(&self, g: &mut Graph, hidden: &Value) -> Option<Value> {
        let (batch, seq, past) = (hidden.size(0), hidden.size(1), g.inputs.past);
        let width = if self.overlapping { 2 * self.head_dim } else { self.head_dim };
        let position_bias = g.parameter("position_bias", [self.rate, width], Role::Other);
        g.parameter("kv_norm.weight", [self.head_dim], Role::Norm);
        g.module("rotary_emb", |g| rotary_buffers(g, self.turned));
        let mut keys = g.linear("kv_proj", hidden, width, false);
        let mut gates = g.linear("gate_proj", hidden, width, false);
        // Tokens of a window that was not full stand in a buffer before the new ones.
        let buffered = past % self.rate;
        if buffered > 0 {
            let shape = [batch, seq.saturating_add(buffered), width];
            keys = g.pad(&keys, shape);
            gates = g.pad(&gates, shape);
        }
        let windows = keys.size(1) / self.rate;
        let mut folded = None;
        if windows > 0 {
            let shape = [batch, windows, self.rate, width];
            keys = g.slice(&keys, 1, 0, windows * self.rate);
            gates = g.slice(&gates, 1, 0, windows * self.rate);
            keys = g.view(&keys, shape);
            gates = {
                let split = g.view(&gates, shape);
                let bias = g.read(position_bias, [self.rate, width]);
                g.add(&split, &bias)
            };
            if self.overlapping {
                keys = self.overlap(g, &keys);
                gates = self.overlap(g, &gates);
            }
            let normed = {
                let sum = {
                    let soft = g.softmax(&gates, 2, Some(DType::F32));
                    let soft = g.type_as(&soft, &keys);
                    let weighed = g.mul(&keys, &soft);
                    drop(soft);
                    g.reduce(Reduction::Sum, &weighed, 2, false)
                };
                g.norm("kv_norm", &sum, Norm::Rms, false)
            };
            let table = RotaryTable { dim: self.turned, axes: 1, doubled: false, fp32: false };
            let (cosine, sine) = g.rotary_table_bare(windows, table);
            let one_head = g.unsqueeze(&normed, 1);
            let turned = rotate(g, &one_head, &cosine, &sine);
            folded = Some(g.squeeze(&turned, 1));
        }
        let total = if g.inputs.cache { seq.saturating_add(past) / self.rate } else { windows };
        match folded {
            Some(folded) if g.inputs.cache => {
                let update = CacheUpdate {
                    kind: CacheKind::Folded { every: self.rate },
                    heads: 1,
                    key_dim: self.head_dim,
                    value_dim: 0,
                    true_heads: 1,
                };
                Some(g.run(Op::Cache(update), &[&folded], [batch, total, self.head_dim]))
            }
            Some(folded) => Some(folded),
            // Nothing new: what the cache holds.
            None if total > 0 => Some(g.run(Op::Buffer(DType::BF16), &[], [batch, total, self.head_dim])),
            None => None,
        }
    }

    /// Each window beside the first half of the one before: `[batch, windows, 2 · rate, head_dim]`.
    fn overlap(&self, g: &mut Graph, x: &Value) -> Value {
        let before = g.slice(x, -1, 0, self.head_dim);
        let own = g.slice(x, -1, self.head_dim, self.head_dim);
        let shape = own.shape().with(2, 2 * self.rate);
        g.run(Op::CopySlices(2), &[&before, &own], shape)
    }
}

/// Picks the compressed keys a query sees.
#[derive(Debug)]
pub(super) struct Indexer {
    compressor: Compressor,
    heads: u64,
    top_k: u64,
}

impl Indexer {
    pub(super) fn read(c: &Config<'_>, rate: u64, turned: u64) -> Result<Self, ModelError> {
        let head_dim = read::positive(c, &["index_head_dim"], 128)?;
        Ok(Self {
            compressor: Compressor { rate, head_dim, turned, overlapping: true },
            heads: read::positive(c, &["index_n_heads"], 64)?,
            top_k: c.size_or(&["index_topk"], 512)?,
        })
    }

    /// Indices `[batch, seq, top_k]`. No gradient comes back through a choice, so that nothing outlives the call.
    fn run(&self, g: &mut Graph, hidden: &Value, latent: &Value) -> Option<Value> {
        g.without_grad(|g| {
            let head_dim = self.compressor.head_dim;
            let keys = self.compressor.fold(g, hidden);
            let table = RotaryTable { dim: self.compressor.turned, axes: 1, doubled: false, fp32: false };
            let (cosine, sine) = g.rotary_table_bare(hidden.size(1), table);
            let mut query = g.linear("q_b_proj", latent, self.heads.saturating_mul(head_dim), false);
            query = attention::split_heads(g, query, self.heads, head_dim);
            query = rotate(g, &query, &cosine, &sine);
            query = g.transpose(&query, 1, 2);
            let mut scores = g.module("scorer", |g| self.score(g, hidden, &query, keys.as_ref()))?;
            let future = g.fill(DType::Bool, [1, hidden.size(1), scores.size(-1)]);
            scores = g.masked_fill(&scores, &future);
            let (_, indices) = g.top_k(&scores, self.top_k.min(scores.size(-1)));
            let invalid = g.compare(&indices);
            let none = g.fill(DType::I64, indices.shape());
            Some(g.run(Op::Where, &[&invalid, &none, &indices], indices.shape()))
        })
    }

    fn score(&self, g: &mut Graph, hidden: &Value, query: &Value, keys: Option<&Value>) -> Option<Value> {
        let Some(keys) = keys else {
            g.linear("weights_proj", hidden, self.heads, false);
            return None;
        };
        let mut scores = {
            let query = g.float(query);
            let turned = g.transpose(keys, -1, -2);
            let turned = g.float(&turned);
            let turned = g.unsqueeze(&turned, 1);
            g.matmul(&query, &turned)
        };
        scores = g.unary(Unary::Relu, &scores);
        scores = g.scale(&scores);
        let weights = {
            let narrow = g.linear("weights_proj", hidden, self.heads, false);
            let wide = g.float(&narrow);
            let scaled = g.scale(&wide);
            g.unsqueeze(&scaled, -1)
        };
        let weighed = g.mul(&scores, &weights);
        Some(g.reduce(Reduction::Sum, &weighed, 2, false))
    }
}

/// The last dimensions of every head rotated in fp32, the first passed by: `x` is `[batch, heads, seq, dim]`.
pub(super) fn rotate(g: &mut Graph, x: &Value, cosine: &Value, sine: &Value) -> Value {
    let doubled = |g: &mut Graph, table: &Value| {
        let table = g.repeat_interleave(table, -1, 2);
        g.unsqueeze(&table, 1)
    };
    let (cosine, sine) = (doubled(g, cosine), doubled(g, sine));
    let turned = cosine.size(-1).min(x.size(-1));
    let plain = x.size(-1) - turned;
    let passed = g.slice(x, -1, 0, plain);
    let rotated = g.slice(x, -1, plain, turned);
    let sum = {
        let first = {
            let wide = g.float(&rotated);
            g.mul(&wide, &cosine)
        };
        let second = {
            let swapped = {
                let even = g.slice_step(&rotated, -1, 0, turned / 2, 2);
                let odd = g.slice_step(&rotated, -1, 1, turned / 2, 2);
                let negative = g.unary(Unary::Neg, &odd);
                let stacked = g.stack(&[&negative, &even], -1);
                g.view(&stacked, rotated.shape())
            };
            let wide = g.float(&swapped);
            drop(swapped);
            g.mul(&wide, &sine)
        };
        g.add(&first, &second)
    };
    let narrow = g.type_as(&sum, x);
    drop(sum);
    g.cat(&[&passed, &narrow], -1)
}

/// The frequencies every rotary module keeps, for plain and compressed layers.
pub(super) fn rotary_buffers(g: &mut Graph, turned: u64) {
    for kind in ["main", "compress"] {
        for name in ["inv_freq", "original_inv_freq"] {
            g.buffer(&format!("{kind}_{name}"), [turned / 2], DType::F32, false);
        }
    }
}

/// A constant tensor in the model's type.
fn constant(g: &mut Graph, shape: [u64; 4]) -> Value {
    let wide = g.fill(DType::F32, shape);
    g.to_model_type(&wide)
}
