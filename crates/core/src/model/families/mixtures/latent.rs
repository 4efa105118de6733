//! Multi-head latent attention (DeepSeek-V2, V3 and relatives): keys and values grow out of a small latent.

use crate::model::blocks::{attention, read};
use crate::model::op::{Attention, Binary, CacheKind, CacheUpdate, EagerStyle, Norm, Op, Rotary};
use crate::model::{Config, Graph, ModelError, Value};

/// Sizes of latent attention.
#[derive(Debug, Clone)]
pub(crate) struct Latent {
    /// Heads.
    pub(crate) heads: u64,
    /// Rank of the queries' own latent; `None`: projected at once.
    pub(crate) query_rank: Option<u64>,
    /// Rank of the latent.
    pub(crate) rank: u64,
    /// Dimensions of a head that are not rotated.
    pub(crate) plain: u64,
    /// Dimensions of a head that are rotated.
    pub(crate) turned: u64,
    /// Dimensions of a value.
    pub(crate) value: u64,
    /// Whether the projections to the latents and the output have a bias.
    pub(crate) bias: bool,
    /// Dropout on the probabilities.
    pub(crate) dropout: f64,
    /// How queries and keys are rotated.
    pub(crate) rotation: Rotation,
}

/// The rotations in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rotation {
    /// As complex numbers (V2).
    Complex,
    /// Even and odd dimensions taken apart, the halves joined (V3).
    EvenOdd,
    /// Llama's.
    Half,
}

/// Queries and the two parts of the latent, before rotation.
#[derive(Debug)]
pub(crate) struct Parts {
    /// `[batch, heads, seq, plain]`.
    pub(crate) query_plain: Value,
    /// `[batch, heads, seq, turned]`.
    pub(crate) query_turned: Value,
    /// `[batch, 1, seq, rank]`.
    pub(crate) latent: Value,
    /// `[batch, 1, seq, turned]`.
    pub(crate) key_turned: Value,
    /// Locals of the source that live as long.
    _alive: [Value; 2],
}

impl Latent {
    /// Reads the usual keys; V2's and V3's classes have the same sizes. `query_rank` is the class default.
    pub(crate) fn read(c: &Config<'_>, heads: u64, query_rank: u64, rotation: Rotation) -> Result<Self, ModelError> {
        let ranked = c.has("q_lora_rank") || !c.keys().any(|key| key == "q_lora_rank");
        Ok(Self {
            heads: read::positive(c, &["num_attention_heads"], heads)?,
            query_rank: if ranked { Some(c.size_or(&["q_lora_rank"], query_rank)?) } else { None },
            rank: c.size_or(&["kv_lora_rank"], 512)?,
            plain: c.size_or(&["qk_nope_head_dim"], 128)?,
            turned: c.size_or(&["qk_rope_head_dim"], 64)?,
            value: c.size_or(&["v_head_dim"], 128)?,
            bias: c.flag("attention_bias", false)?,
            dropout: c.number("attention_dropout", 0.0)?,
            rotation,
        })
    }

    /// Runs it inside the current module.
    pub(crate) fn run(&self, g: &mut Graph, hidden: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let query_latent = self.query_latent(g, hidden);
        let source = query_latent.as_ref().unwrap_or(hidden);
        let query = g.linear(self.query_name(), source, self.heads.saturating_mul(self.plain + self.turned), false);
        drop(query_latent);
        let mut parts = self.parts(g, hidden, query);
        self.rotate(g, &mut parts, rope);
        (parts.latent, parts.key_turned) = g.cache(self.cache(), &parts.latent, &parts.key_turned);
        let query = g.cat(&[&parts.query_plain, &parts.query_turned], -1);
        let (key, value) = self.expand(g, &parts.latent, &parts.key_turned);
        self.attend(g, &query, &key, &value, mask, hidden.size(-1))
    }

    /// The normed latent of the queries, where there is one.
    pub(crate) fn query_latent(&self, g: &mut Graph, hidden: &Value) -> Option<Value> {
        let low = g.linear("q_a_proj", hidden, self.query_rank?, self.bias);
        Some(g.norm("q_a_layernorm", &low, Norm::Rms, false))
    }

    /// The projection that makes the queries.
    pub(crate) fn query_name(&self) -> &'static str {
        if self.query_rank.is_some() { "q_b_proj" } else { "q_proj" }
    }

    /// Queries in heads and the compressed keys, both split in their plain and rotated dimensions.
    pub(crate) fn parts(&self, g: &mut Graph, hidden: &Value, query: Value) -> Parts {
        let (batch, seq) = (hidden.size(0), hidden.size(1));
        let query = attention::split_heads(g, query, self.heads, self.plain + self.turned);
        let (query_plain, query_turned) = g.split2(&query, -1, self.plain, self.turned);
        let compressed = g.linear("kv_a_proj_with_mqa", hidden, self.rank + self.turned, self.bias);
        let (latent, key_turned) = g.split2(&compressed, -1, self.rank, self.turned);
        let latent = g.norm("kv_a_layernorm", &latent, Norm::Rms, false);
        let latent = g.view(&latent, [batch, 1, seq, self.rank]);
        let key_turned = g.view(&key_turned, [batch, 1, seq, self.turned]);
        Parts { query_plain, query_turned, latent, key_turned, _alive: [query, compressed] }
    }

    /// Rotates the rotated parts.
    pub(crate) fn rotate(&self, g: &mut Graph, parts: &mut Parts, rope: &(Value, Value)) {
        let (query, key) = (&parts.query_turned, &parts.key_turned);
        let style = match self.rotation {
            Rotation::Complex => Rotary::Complex,
            Rotation::Half => Rotary::Half,
            Rotation::EvenOdd => {
                (parts.query_turned, parts.key_turned) = rotate_even_odd(g, query, key, rope, 1);
                return;
            }
        };
        (parts.query_turned, parts.key_turned) = attention::rotate_whole(g, style, query, key, &rope.0, &rope.1);
    }

    /// Keys and values of all heads from the latent.
    pub(crate) fn expand(&self, g: &mut Graph, latent: &Value, key_turned: &Value) -> (Value, Value) {
        let (batch, keys, width) = (latent.size(0), latent.size(2), self.plain + self.value);
        let wide = g.linear("kv_b_proj", latent, self.heads.saturating_mul(width), false);
        let wide = g.view(&wide, [batch, keys, self.heads, width]);
        let wide = g.transpose(&wide, 1, 2);
        let (key_plain, value) = g.split2(&wide, -1, self.plain, self.value);
        let key_turned = g.expand(key_turned, [batch, self.heads, keys, self.turned]);
        let shape = key_plain.shape().with(-1, self.plain + self.turned);
        (g.run(Op::CopySlices(3), &[&key_plain, &key_turned], shape), value)
    }

    /// Attention over full heads and the output projection.
    pub(crate) fn attend(
        &self,
        g: &mut Graph,
        query: &Value,
        key: &Value,
        value: &Value,
        mask: &Value,
        hidden: u64,
    ) -> Value {
        let spec = Attention {
            groups: 1,
            causal: true,
            dropout_per_mille: (self.dropout.clamp(0.0, 1.0) * 1000.0).round() as u32,
            softcap: false,
            sinks: None,
            eager: EagerStyle::Fp32Softmax,
            sdpa: true,
        };
        let attended = attention::attend(g, spec, query, key, value, Some(mask));
        let joined = attention::join_heads(g, attended);
        g.linear("o_proj", &joined, hidden, self.bias)
    }

    /// What a layer caches.
    pub(crate) fn cache(&self) -> CacheUpdate {
        let expanded = self.heads.saturating_mul(self.plain + self.turned + self.value);
        CacheUpdate {
            kind: CacheKind::Latent { expanded },
            heads: 1,
            key_dim: self.rank,
            value_dim: self.turned,
            true_heads: 1,
        }
    }
}

/// V3's rotation of queries, then keys; the heads' dimension of the tables is inserted at `heads_dim`.
pub(crate) fn rotate_even_odd(
    g: &mut Graph,
    query: &Value,
    key: &Value,
    (cosine, sine): &(Value, Value),
    heads_dim: i64,
) -> (Value, Value) {
    let half = query.size(-1) / 2;
    let table = |g: &mut Graph, table: &Value| {
        let table = g.slice(table, -1, 0, half);
        g.unsqueeze(&table, heads_dim)
    };
    let (cosine, sine) = (table(g, cosine), table(g, sine));
    let parts = |g: &mut Graph, x: &Value| (g.slice_step(x, -1, 0, half, 2), g.slice_step(x, -1, 1, half, 2));
    let (query_even, query_odd) = parts(g, query);
    let (key_even, key_odd) = parts(g, key);
    let query = turn(g, &query_even, &query_odd, &cosine, &sine);
    let key = turn(g, &key_even, &key_odd, &cosine, &sine);
    (query, key)
}

/// `cat(first · cos − second · sin, second · cos + first · sin)`.
pub(crate) fn turn(g: &mut Graph, first: &Value, second: &Value, cosine: &Value, sine: &Value) -> Value {
    let half = |g: &mut Graph, a: &Value, b: &Value, kind: Binary| {
        let a = g.mul(a, cosine);
        let b = g.mul(b, sine);
        g.binary(kind, &a, &b)
    };
    let left = half(g, first, second, Binary::Sub);
    let right = half(g, second, first, Binary::Add);
    g.cat(&[&left, &right], -1)
}
