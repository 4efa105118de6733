//! Attention as encoders, and decoders beside them, write it: four projections, no rotation.

use crate::model::blocks::attention::grouped_cache;
use crate::model::blocks::attention::{attend, join_heads, split_heads};
use crate::model::graph::{Graph, Value};
use crate::model::op::{Attention, CacheKind, CacheUpdate, EagerStyle, Input, Mask, Op};

/// Self-attention over the whole sequence, or attention to what an encoder made of another.
#[derive(Debug, Clone)]
pub struct EncoderAttention {
    /// Heads, of queries and keys alike.
    pub heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Names of the projections of queries, keys, values and the output.
    pub names: [&'static str; 4],
    /// Which of them have a bias.
    pub bias: [bool; 4],
    /// Dropout on the probabilities.
    pub dropout: f64,
    /// How the eager code computes it.
    pub eager: EagerStyle,
    /// Whether a position sees only those before it (decoders, the text tower of CLIP).
    pub causal: bool,
    /// Whether the query is scaled before attention, and all three are made dense (Whisper).
    pub dense: bool,
}

/// What an encoder made, as a decoder's layers see it.
#[derive(Debug, Clone)]
pub struct Encoded {
    /// The states; gone once the caches of cross-attention hold their keys and values.
    pub states: Option<Value>,
    /// Samples.
    pub batch: u64,
    /// Positions.
    pub seq: u64,
}

impl Encoded {
    /// Runs the encoder; after the first token of a generation it is only declared, and without a cache its states are
    /// given.
    pub fn run(g: &mut Graph, encoder: impl FnOnce(&mut Graph) -> Value) -> Self {
        if g.inputs.past > 0 || g.inputs.encoded {
            let states = g.declare_only(encoder);
            let given = g.inputs.encoded.then(|| g.input(Input::Encoded, states.shape()));
            return Self { batch: states.size(0), seq: states.size(1), states: given };
        }
        // It runs once per sample; every beam then gets a copy.
        let (sequences, beams) = (g.inputs.batch, g.inputs.beams.max(1));
        g.inputs.batch = sequences / beams;
        let mut states = encoder(g);
        g.inputs.batch = sequences;
        if beams > 1 {
            states = g.repeat_interleave(&states, 0, beams);
        }
        Self { batch: states.size(0), seq: states.size(1), states: Some(states) }
    }
}

impl EncoderAttention {
    /// Every projection with a bias, softmax in the model's type (BERT's eager code).
    pub fn new(heads: u64, head_dim: u64, names: [&'static str; 4]) -> Self {
        Self {
            heads,
            head_dim,
            names,
            bias: [true; 4],
            dropout: 0.0,
            eager: EagerStyle::UncastSoftmax,
            causal: false,
            dense: false,
        }
    }

    /// With the output projection.
    pub fn run(&self, g: &mut Graph, hidden: &Value, mask: Option<&Value>) -> Value {
        // Queries, keys and values have names until the function returns.
        let query = self.project(g, hidden, 0);
        let key = self.project(g, hidden, 1);
        let value = self.project(g, hidden, 2);
        let attended = attend(g, self.spec(), &query, &key, &value, mask);
        let context = join_heads(g, attended);
        g.linear(self.names[3], &context, hidden.size(-1), self.bias[3])
    }

    /// Without it: `[batch, seq, heads · head_dim]`.
    pub fn context(&self, g: &mut Graph, hidden: &Value, mask: Option<&Value>) -> Value {
        let query = self.project(g, hidden, 0);
        let key = self.project(g, hidden, 1);
        let value = self.project(g, hidden, 2);
        let attended = attend(g, self.spec(), &query, &key, &value, mask);
        join_heads(g, attended)
    }

    /// Self-attention of a decoder, keys and values cached.
    pub fn run_cached(&self, g: &mut Graph, hidden: &Value, mask: Option<&Value>) -> Value {
        let query = self.project(g, hidden, 0);
        let (key, value) = self.cached_pair(g, hidden);
        let attended = attend(g, self.spec(), &query, &key, &value, mask);
        let context = join_heads(g, attended);
        g.linear(self.names[3], &context, hidden.size(-1), self.bias[3])
    }

    /// Attention to what the encoder made; its keys and values are cached once.
    pub fn run_cross(&self, g: &mut Graph, hidden: &Value, encoded: &Encoded, mask: Option<&Value>) -> Value {
        let query = self.project(g, hidden, 0);
        let (key, value) = self.cross_pair(g, hidden, encoded);
        let attended = attend(g, self.spec(), &query, &key, &value, mask);
        let context = join_heads(g, attended);
        g.linear(self.names[3], &context, hidden.size(-1), self.bias[3])
    }

    /// Keys and values of a decoder's own positions, through the cache.
    pub fn cached_pair(&self, g: &mut Graph, hidden: &Value) -> (Value, Value) {
        let (key, value) = (self.project(g, hidden, 1), self.project(g, hidden, 2));
        g.cache(grouped_cache(self.heads, self.head_dim, None), &key, &value)
    }

    /// Keys and values of the encoder's positions: projected at the first token, then out of the cache.
    pub fn cross_pair(&self, g: &mut Graph, hidden: &Value, encoded: &Encoded) -> (Value, Value) {
        let kind = CacheKind::Cross;
        let update = CacheUpdate { kind, ..grouped_cache(self.heads, self.head_dim, None) };
        let Some(states) = &encoded.states else {
            g.declare_only(|g| (self.project(g, hidden, 1), self.project(g, hidden, 2)));
            return g.cached(update, encoded.batch, encoded.seq);
        };
        let (key, value) = (self.project(g, states, 1), self.project(g, states, 2));
        g.cache(update, &key, &value)
    }

    /// One projection, split in heads: `[batch, heads, seq, head_dim]`.
    pub fn project(&self, g: &mut Graph, hidden: &Value, which: usize) -> Value {
        let mut x = g.linear(self.names[which], hidden, self.heads.saturating_mul(self.head_dim), self.bias[which]);
        if self.dense && which == 0 {
            x = g.scale(&x);
        }
        x = split_heads(g, x, self.heads, self.head_dim);
        if self.dense { g.contiguous(&x) } else { x }
    }

    /// The attention operation.
    pub fn spec(&self) -> Attention {
        Attention {
            groups: 1,
            causal: self.causal,
            dropout_per_mille: (self.dropout.clamp(0.0, 1.0) * 1000.0).round() as u32,
            softcap: false,
            sinks: None,
            eager: self.eager,
            sdpa: true,
        }
    }
}

/// A mask for `queries` positions over `keys` positions: `[batch, 1, queries, keys]`.
pub fn mask_over(g: &mut Graph, kind: Mask, batch: u64, queries: u64, keys: u64) -> Value {
    g.run(Op::Mask(kind), &[], [batch, 1, queries, keys])
}

/// A mask over all positions of `hidden`, in both directions.
pub fn full_mask(g: &mut Graph, hidden: &Value) -> Value {
    mask_over(g, Mask::Full, hidden.size(0), hidden.size(1), hidden.size(1))
}
