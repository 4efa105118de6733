//! Attention as encoders write it: four projections, no rotation, no cache.

use crate::model::blocks::attention::{attend, join_heads, split_heads};
use crate::model::graph::{Graph, Value};
use crate::model::op::{Attention, EagerStyle, Mask, Op};

/// Self-attention over the whole sequence.
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
    /// Whether a position sees only those before it (the text towers of CLIP).
    pub causal: bool,
}

impl EncoderAttention {
    /// Every projection with a bias, softmax in the model's type (BERT's eager code).
    pub fn new(heads: u64, head_dim: u64, names: [&'static str; 4]) -> Self {
        Self { heads, head_dim, names, bias: [true; 4], dropout: 0.0, eager: EagerStyle::PlainSoftmax, causal: false }
    }

    /// With the output projection.
    pub fn run(&self, g: &mut Graph, hidden: &Value, mask: Option<&Value>) -> Value {
        let context = self.context(g, hidden, mask);
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

    /// One projection, split in heads: `[batch, heads, seq, head_dim]`.
    pub fn project(&self, g: &mut Graph, hidden: &Value, which: usize) -> Value {
        let x = g.linear(self.names[which], hidden, self.heads.saturating_mul(self.head_dim), self.bias[which]);
        split_heads(g, x, self.heads, self.head_dim)
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
