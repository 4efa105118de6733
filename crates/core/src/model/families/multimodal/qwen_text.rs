//! The language models of Qwen2-VL, 2.5-VL and 3-VL: Qwen decoders whose positions have three axes.

use crate::dtype::DType;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, attention, gated_mlp};
use crate::model::op::{Activation, Binary, LinearLayout, Mask, Norm, Op, Reduction, Role, Unary};
use crate::model::{Graph, Value};

/// A Qwen decoder with multimodal rotary positions.
#[derive(Debug, Clone)]
pub(super) struct QwenText {
    pub vocab: u64,
    pub hidden: u64,
    pub layers: u64,
    pub width: u64,
    pub activation: Activation,
    pub attention: SelfAttention,
    pub sections: Sections,
    /// Layers from this index on see a window only.
    pub window: Option<(u64, u64)>,
    pub experts: Option<SparseLayers>,
}

/// How the three axes of positions share the frequencies.
#[derive(Debug, Clone)]
pub(super) enum Sections {
    /// One after the other, of these lengths.
    Joined(Vec<u64>),
    /// Every third frequency, written over the first axis.
    Interleaved,
}

/// Which layers have experts, and which they are.
#[derive(Debug, Clone)]
pub(super) struct SparseLayers {
    pub experts: FusedExperts,
    pub step: u64,
    pub dense: Vec<u64>,
}

/// Image features that are added to the hidden states of the first layers.
pub(super) struct Deepstack {
    /// Where image tokens stand, `[batch, seq]`.
    pub mask: Value,
    /// One per layer, `[image tokens, hidden]`.
    pub features: Vec<Value>,
}

impl QwenText {
    /// `embed_tokens`, which the surrounding model calls itself.
    pub(super) fn embed(&self, g: &mut Graph, ids: &Value) -> Value {
        g.embedding("language_model.embed_tokens", ids, self.vocab, self.hidden)
    }

    /// The decoder on embedded tokens; `positions` is `[3, batch, seq]`.
    pub(super) fn model(
        &self,
        g: &mut Graph,
        embeddings: &Value,
        positions: &Value,
        deepstack: Option<&Deepstack>,
    ) -> Value {
        let mask = attention::mask(g, Mask::Causal);
        let windowed = self.window.map(|(_, window)| attention::mask(g, Mask::Sliding(window)));
        let rope = self.rotary(g, embeddings, positions);
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            let (mask, window) = match (&windowed, self.window) {
                (Some(windowed), Some((first, window))) if index >= first => (windowed, Some(window)),
                _ => (&mask, None),
            };
            hidden = g.layer("layers", index, |g| self.layer(g, index, &hidden, &rope, mask, window));
            if let Some((stack, features)) = deepstack.and_then(|d| Some((d, d.features.get(index as usize)?))) {
                hidden = add_features(g, &hidden, &stack.mask, features);
            }
        }
        g.norm("norm", &hidden, Norm::Rms, false)
    }

    fn layer(
        &self,
        g: &mut Graph,
        index: u64,
        input: &Value,
        rope: &(Value, Value),
        mask: &Value,
        window: Option<u64>,
    ) -> Value {
        let mut hidden = g.norm("input_layernorm", input, Norm::Rms, false);
        let attention = SelfAttention { window, ..self.attention.clone() };
        hidden = g.module("self_attn", |g| attention.run(g, &hidden, Some(rope), mask));
        let residual = g.add(input, &hidden);
        hidden = g.norm("post_attention_layernorm", &residual, Norm::Rms, false);
        hidden = g.module("mlp", |g| match &self.experts {
            Some(sparse) if sparse.applies(index) => sparse.run(g, &hidden),
            _ => gated_mlp(g, &hidden, ["gate_proj", "up_proj", "down_proj"], self.width, self.activation, false),
        });
        g.add(&residual, &hidden)
    }

    /// Cosine and sine, `[batch, seq, head_dim]`, recomposed from three axes.
    fn rotary(&self, g: &mut Graph, like: &Value, positions: &Value) -> (Value, Value) {
        let half = self.attention.head_dim / 2;
        let (batch, seq) = (positions.size(1), positions.size(2));
        g.module("rotary_emb", |g| {
            for buffer in ["inv_freq", "original_inv_freq"] {
                g.buffer(buffer, [half], DType::F32, false);
            }
            g.without_grad(|g| {
                let frequencies = g.run(Op::Buffer(DType::F32), &[], [1, 1, half, 1]);
                let frequencies = g.expand(&frequencies, [3, batch, half, 1]);
                let positions = g.view(positions, [3, batch, 1, seq]);
                let positions = g.float(&positions);
                let (angles, mut cosine, mut sine) = g.without_autocast(|g| {
                    let angles = g.matmul(&frequencies, &positions);
                    let angles = g.transpose(&angles, 2, 3);
                    let mut cosine = g.unary(Unary::Cos, &angles);
                    cosine = g.scale(&cosine);
                    let mut sine = g.unary(Unary::Sin, &angles);
                    sine = g.scale(&sine);
                    (angles, cosine, sine)
                });
                sine = self.recompose(g, &sine);
                cosine = self.recompose(g, &cosine);
                let both = (g.type_as(&cosine, like), g.type_as(&sine, like));
                drop(angles);
                both
            })
        })
    }

    fn recompose(&self, g: &mut Graph, x: &Value) -> Value {
        let axis = |g: &mut Graph, part: &Value, axis: u64| {
            let part = g.slice(part, 0, axis, 1);
            g.squeeze(&part, 0)
        };
        let joined = match &self.sections {
            Sections::Interleaved => axis(g, x, 0),
            Sections::Joined(lengths) => {
                let parts = g.split(x, -1, lengths);
                let picked: Vec<_> = parts.iter().enumerate().map(|(i, part)| axis(g, part, i as u64 % 3)).collect();
                g.cat(&picked.iter().collect::<Vec<_>>(), -1)
            }
        };
        g.cat(&[&joined, &joined], -1)
    }
}

impl SparseLayers {
    fn applies(&self, index: u64) -> bool {
        !self.dense.contains(&index) && self.experts.count > 0 && (index + 1).is_multiple_of(self.step)
    }

    fn run(&self, g: &mut Graph, hidden: &Value) -> Value {
        let flat = g.view(hidden, [hidden.size(0).saturating_mul(hidden.size(1)), hidden.size(2)]);
        let (indices, weights) = g.module("gate", |g| {
            let weight = g.parameter("weight", [self.experts.count, hidden.size(2)], Role::Linear);
            let op = Op::Linear { weight, bias: None, layout: LinearLayout::OutIn };
            let logits = g.run(op, &[&flat], [flat.size(0), self.experts.count]);
            let probabilities = g.softmax(&logits, -1, Some(DType::F32));
            let (mut top, indices) = g.top_k(&probabilities, self.experts.top_k);
            let total = g.reduce(Reduction::Sum, &top, -1, true);
            top = g.in_place(Binary::Div, &top, &total);
            (indices, g.type_as(&top, &logits))
        });
        let mixed = self.experts.run(g, "experts", &flat, &indices, &weights);
        g.reshape(&mixed, hidden.shape())
    }
}

/// `_deepstack_process`: a copy of the hidden states with features added at the image tokens.
fn add_features(g: &mut Graph, hidden: &Value, mask: &Value, features: &Value) -> Value {
    let features = g.type_as(features, hidden);
    let copy = g.unary(Unary::Clone, hidden);
    let rows = features.size(0);
    let picked = g.run(Op::Index, &[&copy, mask], [rows, hidden.size(-1)]);
    let sum = g.add(&picked, &features);
    g.run(Op::Scatter { dim: 0, in_place: true }, &[&copy, mask, &sum], hidden.shape())
}
