//! Self-attention as most decoders write it.

use crate::model::graph::{Graph, Value};
use crate::model::op::{Attention, CacheKind, CacheUpdate, EagerStyle, Mask, Norm, Op, ParameterId, Rotary};
use crate::model::shape::Shape;

/// When the rotated dimensions of a head are cut from the rest and joined with it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RotaryCut {
    /// When there is a rest.
    WhenPartial,
    /// Also where that rest is empty.
    Always,
    /// The same, and the rotated parts keep their names until both are joined.
    Named,
}

/// Queries, keys and values by three linears, rotated, cached, attended, projected.
#[derive(Debug, Clone)]
pub struct SelfAttention {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Whether queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// Names of the four projections.
    pub names: [&'static str; 4],
    /// Norms on queries and keys.
    pub qk_norm: QkNorm,
    /// How queries and keys are rotated; `None`: not at all.
    pub rotary: Option<Rotary>,
    /// Rotated dimensions; fewer than the head's width means the rest passes by.
    pub rotary_dim: u64,
    /// When heads are cut and joined again.
    pub rotary_cut: RotaryCut,
    /// Whether each layer makes a table for neighbouring pairs out of the one for halves (GLM, ERNIE).
    pub rotary_pairs: bool,
    /// Only the last so many positions are seen and cached.
    pub window: Option<u64>,
    /// Scores are squashed by tanh.
    pub softcap: bool,
    /// Dropout on the probabilities.
    pub dropout: f64,
    /// Whether positions see only those before them.
    pub causal: bool,
}

/// Norms on queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Over each head, once heads stand before positions (Gemma 3): names of both.
    Head(Norm, [&'static str; 2]),
    /// Over each head, while positions still stand before heads (Qwen3): names of both.
    HeadLast(Norm, [&'static str; 2]),
    /// Over the whole projection, before the split (OLMo 2): names of both.
    Whole(Norm, [&'static str; 2]),
}

impl SelfAttention {
    /// Llama's: four projections without bias, every dimension rotated.
    pub fn new(heads: u64, kv_heads: u64, head_dim: u64) -> Self {
        Self {
            heads,
            kv_heads,
            head_dim,
            qkv_bias: false,
            out_bias: false,
            names: ["q_proj", "k_proj", "v_proj", "o_proj"],
            qk_norm: QkNorm::None,
            rotary: Some(Rotary::Half),
            rotary_dim: head_dim,
            rotary_cut: RotaryCut::WhenPartial,
            rotary_pairs: false,
            window: None,
            softcap: false,
            dropout: 0.0,
            causal: true,
        }
    }

    /// The same attention in a layer with this window.
    pub fn windowed(&self, window: Option<u64>) -> Self {
        Self { window, ..self.clone() }
    }

    /// Runs it inside the current module: `hidden` is `[batch, seq, hidden]`, so is the result.
    pub fn run(&self, g: &mut Graph, hidden: &Value, rope: Option<&(Value, Value)>, mask: &Value) -> Value {
        let mut query = self.project(g, hidden, 0, self.heads);
        let mut key = self.project(g, hidden, 1, self.kv_heads);
        let mut value = self.project(g, hidden, 2, self.kv_heads);
        if let QkNorm::Head(kind, names) = self.qk_norm {
            query = g.norm(names[0], &query, kind, false);
            key = g.norm(names[1], &key, kind, false);
        }
        if let (Some(style), Some(rope)) = (self.rotary, rope) {
            let paired = self.rotary_pairs.then(|| paired_table(g, rope));
            let (cosine, sine) = paired.as_ref().unwrap_or(rope);
            (query, key) = match self.rotary_cut {
                RotaryCut::Named => {
                    let (query, key, _) = rotate_part(g, style, self.rotary_dim, &query, &key, cosine, sine);
                    (query, key)
                }
                RotaryCut::Always => rotate_renamed(g, style, self.rotary_dim, &query, &key, cosine, sine),
                RotaryCut::WhenPartial => rotate(g, style, self.rotary_dim, query, key, cosine, sine),
            };
        }
        (key, value) = g.cache(self.cache(), &key, &value);
        let attended = attend(g, self.spec(None), &query, &key, &value, Some(mask));
        self.output(g, attended, hidden.size(-1))
    }

    /// One projection, split in heads: `[batch, heads, seq, head_dim]`.
    pub fn project(&self, g: &mut Graph, hidden: &Value, which: usize, heads: u64) -> Value {
        let mut x = g.linear(self.names[which], hidden, heads.saturating_mul(self.head_dim), self.qkv_bias);
        if let (QkNorm::Whole(kind, names), 0 | 1) = (self.qk_norm, which) {
            x = g.norm(names[which], &x, kind, false);
        }
        if let (QkNorm::HeadLast(kind, names), 0 | 1) = (self.qk_norm, which) {
            x = g.split_last(&x, heads, self.head_dim);
            x = g.norm(names[which], &x, kind, false);
            return g.transpose(&x, 1, 2);
        }
        split_heads(g, x, heads, self.head_dim)
    }

    /// The output projection of `[batch, seq, heads, head_dim]`.
    pub fn output(&self, g: &mut Graph, attended: Value, hidden: u64) -> Value {
        let joined = join_heads(g, attended);
        g.linear(self.names[3], &joined, hidden, self.out_bias)
    }

    /// What the layer caches.
    pub fn cache(&self) -> CacheUpdate {
        grouped_cache(self.kv_heads, self.head_dim, self.window)
    }

    /// The attention operation.
    pub fn spec(&self, sinks: Option<ParameterId>) -> Attention {
        Attention {
            groups: self.heads / self.kv_heads.max(1),
            causal: self.causal,
            dropout_per_mille: (self.dropout.clamp(0.0, 1.0) * 1000.0).round() as u32,
            softcap: self.softcap,
            sinks,
            eager: EagerStyle::Fp32Softmax,
            sdpa: true,
        }
    }
}

/// Keys and values per head, growing or windowed.
pub fn grouped_cache(heads: u64, head_dim: u64, window: Option<u64>) -> CacheUpdate {
    let kind = window.map_or(CacheKind::Full, CacheKind::Sliding);
    CacheUpdate { kind, heads, key_dim: head_dim, value_dim: head_dim, true_heads: heads }
}

/// `[batch, seq, heads · dim] → [batch, heads, seq, dim]`, as views.
pub fn split_heads(g: &mut Graph, x: Value, heads: u64, dim: u64) -> Value {
    let x = g.split_last(&x, heads, dim);
    g.transpose(&x, 1, 2)
}

/// `[batch, seq, heads, dim] → [batch, seq, heads · dim]`, dense.
pub fn join_heads(g: &mut Graph, attended: Value) -> Value {
    let width = attended.size(2).saturating_mul(attended.size(3));
    let joined = g.reshape(&attended, [attended.size(0), attended.size(1), width]);
    g.contiguous(&joined)
}

/// Softmax attention: q `[batch, heads, seq, dim]`, result `[batch, seq, heads, value dim]`.
pub fn attend(
    g: &mut Graph,
    spec: Attention,
    query: &Value,
    key: &Value,
    value: &Value,
    mask: Option<&Value>,
) -> Value {
    let shape = Shape::from([query.size(0), query.size(2), query.size(1), value.size(-1)]);
    let mut inputs = vec![query, key, value];
    inputs.extend(mask);
    g.run(Op::Attention(spec), &inputs, shape)
}

/// Queries and keys rotated; where only part of a head is, the rest passes by and both are joined again.
pub fn rotate(
    g: &mut Graph,
    style: Rotary,
    rotary_dim: u64,
    query: Value,
    key: Value,
    cosine: &Value,
    sine: &Value,
) -> (Value, Value) {
    if rotary_dim >= query.size(-1) {
        return rotate_whole(g, style, &query, &key, cosine, sine);
    }
    rotate_renamed(g, style, rotary_dim, &query, &key, cosine, sine)
}

/// [`rotate_part`] where the joined tensor takes the name of its rotated part, which goes at once.
fn rotate_renamed(
    g: &mut Graph,
    style: Rotary,
    rotary_dim: u64,
    query: &Value,
    key: &Value,
    cosine: &Value,
    sine: &Value,
) -> (Value, Value) {
    let [query_turned, query_passed] = cut(g, query, rotary_dim);
    let [key_turned, key_passed] = cut(g, key, rotary_dim);
    let (mut query, mut key) = rotate_whole(g, style, &query_turned, &key_turned, cosine, sine);
    drop((query_turned, key_turned));
    query = g.cat(&[&query, &query_passed], -1);
    key = g.cat(&[&key, &key_passed], -1);
    (query, key)
}

/// Queries rotated and joined before keys are: `cat([q * cos + rotate_half(q) * sin, rest])` in one expression.
pub fn rotate_joined(
    g: &mut Graph,
    style: Rotary,
    rotary_dim: u64,
    query: &Value,
    key: &Value,
    (cosine, sine): &(Value, Value),
) -> (Value, Value) {
    let [query_turned, query_passed] = cut(g, query, rotary_dim);
    let [key_turned, key_passed] = cut(g, key, rotary_dim);
    let inputs = [&query_turned, &key_turned, cosine, sine, &query_passed, &key_passed];
    two(g.run_many(Op::Rotary(style), &inputs, &[query.shape(), key.shape()]))
}

/// The dimensions of a head that turn, and the rest.
fn cut(g: &mut Graph, x: &Value, rotary_dim: u64) -> [Value; 2] {
    let rest = x.size(-1).saturating_sub(rotary_dim);
    [g.slice(x, -1, 0, rotary_dim), g.slice(x, -1, rotary_dim, rest)]
}

/// The first dimensions of each head rotated and joined with the rest, also where that rest is empty: a copy.
///
/// The third output are the parts, for code that keeps names for them.
pub fn rotate_part(
    g: &mut Graph,
    style: Rotary,
    rotary_dim: u64,
    query: &Value,
    key: &Value,
    cosine: &Value,
    sine: &Value,
) -> (Value, Value, [Value; 4]) {
    let [mut query_turned, query_passed] = cut(g, query, rotary_dim);
    let [mut key_turned, key_passed] = cut(g, key, rotary_dim);
    (query_turned, key_turned) = rotate_whole(g, style, &query_turned, &key_turned, cosine, sine);
    let query = g.cat(&[&query_turned, &query_passed], -1);
    let key = g.cat(&[&key_turned, &key_passed], -1);
    (query, key, [query_turned, query_passed, key_turned, key_passed])
}

/// Queries and keys rotated in every dimension.
pub fn rotate_whole(
    g: &mut Graph,
    style: Rotary,
    query: &Value,
    key: &Value,
    cosine: &Value,
    sine: &Value,
) -> (Value, Value) {
    two(g.run_many(Op::Rotary(style), &[query, key, cosine, sine], &[query.shape(), key.shape()]))
}

fn two(mut both: Vec<Value>) -> (Value, Value) {
    let key = both.pop();
    match (both.pop(), key) {
        (Some(query), Some(key)) => (query, key),
        _ => unreachable!("run_many returns one value per shape"),
    }
}

/// The mask a model builds for all its layers of one kind: `[batch, 1, seq, past + seq]`.
pub fn mask(g: &mut Graph, kind: Mask) -> Value {
    let (batch, seq) = (g.inputs.batch, g.inputs.seq);
    let window = match kind {
        Mask::Sliding(window) | Mask::SlidingEager(window) | Mask::Chunked(window) | Mask::Images(Some(window)) => {
            Some(window)
        }
        _ => None,
    };
    let keys = g.inputs.keys(window, seq);
    g.run(Op::Mask(kind), &[], [batch, 1, seq, keys])
}

/// The masks of a model whose layers see everything or a window.
#[derive(Debug, Clone)]
pub struct Masks {
    full: Value,
    sliding: Value,
}

impl Masks {
    /// Builds the masks that these layers need, one window each; `full` builds the full one in any case.
    pub fn new(g: &mut Graph, windows: &[Option<u64>], full: bool) -> Self {
        Self::of_kinds(g, windows, full, Mask::Causal, Mask::Sliding)
    }

    /// The same for layers that see in both directions.
    pub fn bidirectional(g: &mut Graph, windows: &[Option<u64>], full: bool) -> Self {
        Self::of_kinds(g, windows, full, Mask::Full, Mask::FullSliding)
    }

    /// The same where the tokens of an image see each other.
    pub fn with_images(g: &mut Graph, windows: &[Option<u64>]) -> Self {
        Self::of_kinds(g, windows, true, Mask::Images(None), |window| Mask::Images(Some(window)))
    }

    fn of_kinds(g: &mut Graph, windows: &[Option<u64>], full: bool, all: Mask, some: fn(u64) -> Mask) -> Self {
        let window = windows.iter().copied().flatten().next();
        // For a static cache `generate` makes the masks itself, of the kinds that the layers have.
        let full = (full && g.inputs.static_cache.is_none()) || window.is_none() || windows.contains(&None);
        let full = full.then(|| mask(g, all));
        let sliding = window.map(|window| mask(g, some(window)));
        match (full, sliding) {
            (Some(full), Some(sliding)) => Self { full, sliding },
            (Some(only), None) | (None, Some(only)) => Self { full: only.clone(), sliding: only },
            (None, None) => {
                let full = mask(g, all);
                Self { sliding: full.clone(), full }
            }
        }
    }

    /// The mask of a layer with this window.
    pub fn of(&self, window: Option<u64>) -> &Value {
        if window.is_some() { &self.sliding } else { &self.full }
    }
}

/// A rotary table for neighbouring pairs out of one for halves: its first half, each column twice (a copy per layer).
pub fn paired_table(g: &mut Graph, rope: &(Value, Value)) -> (Value, Value) {
    let mut paired = |table: &Value| {
        let half = g.slice(table, -1, 0, table.size(-1) / 2);
        g.repeat_interleave(&half, -1, 2)
    };
    (paired(&rope.0), paired(&rope.1))
}
