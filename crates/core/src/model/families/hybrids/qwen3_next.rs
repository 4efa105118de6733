//! Qwen3-Next, and the text models of Qwen3.5: gated delta layers with a gated attention layer every fourth.

use super::gated_delta::GatedDelta;
use super::state;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, attention, gated_mlp, read};
use crate::model::facts::{ExpertNames, Facts, Liger};
use crate::model::families::decoders::decoder::{self, Decoder, Vocabulary};
use crate::model::families::mixtures::routing::{Routing, softmax_top_k};
use crate::model::op::{Activation, Mask, Norm, Rotary, RotaryTable, Unary};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP, TensorRules, TensorStyle};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Qwen3-Next.
pub const FAMILY: Family = Family {
    name: "Qwen3-Next",
    model_types: &["qwen3_next"],
    facts: Facts {
        tasks: Some(&[Task::CausalLm, Task::Base, Task::SequenceClassification]),
        liger: Liger::NotSimulated,
        experts: Some(ExpertNames::USUAL),
        ..Facts::DEFAULT
    },
    build: |c, task, g| {
        let generation = match c.model_type() {
            "qwen3_5_text" => Generation::ThreeFive,
            "qwen3_5_moe_text" => Generation::ThreeFiveSparse,
            _ => Generation::Next,
        };
        decoder::build(c, task, g, &Qwen3Next::read(c, generation)?)
    },
};

/// Qwen3.5's text model on its own.
pub const QWEN3_5: Family = Family {
    name: "Qwen3.5 (text)",
    model_types: &["qwen3_5_text"],
    facts: Facts { tensor_plan: &[ATTENTION, GATED_MLP, GATED_DELTA], ..Facts::DEFAULT },
    ..FAMILY
};

/// The same with experts.
pub const QWEN3_5_MOE: Family =
    Family { name: "Qwen3.5 MoE (text)", model_types: &["qwen3_5_moe_text"], facts: Facts::DEFAULT, ..FAMILY };

/// How transformers splits a mixer: every projection is gathered again, so what is between them is whole.
const GATED_DELTA: TensorRules = &[
    ("linear_attn.in_proj_qkv", TensorStyle::ColumnGathered),
    ("linear_attn.in_proj_z", TensorStyle::ColumnGathered),
    ("linear_attn.in_proj_b", TensorStyle::ColumnGathered),
    ("linear_attn.in_proj_a", TensorStyle::ColumnGathered),
    ("linear_attn.out_proj", TensorStyle::ColumnGathered),
];

/// Which of the models with this layer it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Generation {
    /// Qwen3-Next.
    Next,
    /// Qwen3.5.
    ThreeFive,
    /// Qwen3.5 with experts.
    ThreeFiveSparse,
}

/// The text model.
#[derive(Debug, Clone)]
pub(crate) struct Qwen3Next {
    generation: Generation,
    vocabulary: Vocabulary,
    layers: Vec<Layer>,
    width: u64,
    activation: Activation,
    sparse: Sparse,
    attention: SelfAttention,
    delta: GatedDelta,
}

#[derive(Debug, Clone, Copy)]
struct Layer {
    attends: bool,
    sparse: bool,
}

#[derive(Debug, Clone)]
struct Sparse {
    experts: FusedExperts,
    shared_width: u64,
    normalised: bool,
}

impl Qwen3Next {
    /// Reads the text model's config.
    pub(crate) fn read(c: &Config<'_>, generation: Generation) -> Result<Self, ModelError> {
        let next = generation == Generation::Next;
        let sparse = generation != Generation::ThreeFive;
        let (layers, kv_heads, experts, top_k) = match generation {
            Generation::Next => (48, 2, 512, 10),
            Generation::ThreeFive => (32, 4, 0, 0),
            Generation::ThreeFiveSparse => (40, 2, 256, 8),
        };
        let vocabulary =
            Vocabulary::read(c, if next { 151_936 } else { 248_320 }, if sparse { 2048 } else { 4096 }, false)?;
        let heads = read::positive(c, &["num_attention_heads"], 16)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], kv_heads)?;
        let head_dim = read::positive(c, &["head_dim"], 256)?;
        state::product(c, "num_attention_heads", &[2, heads, head_dim])?;
        let mut attention = SelfAttention::new(heads, kv_heads, head_dim);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.rotary_dim = read::rotary_dim(c, head_dim, 0.25)?;
        let activation = read::activation(c, "hidden_act", "silu")?;
        let layers = c.layers(&["num_hidden_layers"], layers)?;
        let interval = read::positive(c, &["full_attention_interval"], 4)?;
        let attends = state::attention_layers(c, &["layer_types"], layers, |index| (index + 1) % interval == 0)?;
        let experts = if sparse { c.size_or(&["num_experts", "num_local_experts"], experts)? } else { 0 };
        // Qwen3.5 has experts in every layer or in none.
        let step = if next { read::positive(c, &["decoder_sparse_step"], 1)? } else { 1 };
        let dense = if next { c.sizes("mlp_only_layers")?.unwrap_or_default() } else { Vec::new() };
        let has_experts = |index: u64| experts > 0 && !dense.contains(&index) && (index + 1).is_multiple_of(step);
        Ok(Self {
            generation,
            vocabulary,
            layers: (0..).zip(attends).map(|(index, attends)| Layer { attends, sparse: has_experts(index) }).collect(),
            width: c.size_or(&["intermediate_size"], if next { 5632 } else { 12288 })?,
            activation,
            sparse: Sparse {
                experts: FusedExperts::new(
                    experts,
                    c.size_or(&["num_experts_per_tok"], top_k)?,
                    c.size_or(&["moe_intermediate_size"], 512)?,
                    activation,
                ),
                shared_width: c.size_or(&["shared_expert_intermediate_size"], 512)?,
                normalised: !next || c.flag("norm_topk_prob", true)?,
            },
            attention,
            delta: GatedDelta::read(c, next)?,
        })
    }

    fn layer(&self, g: &mut Graph, layer: Layer, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let mut hidden = g.norm("input_layernorm", input, Norm::RmsGemma, false);
        hidden = if layer.attends {
            g.module("self_attn", |g| self.attend(g, &hidden, rope, mask))
        } else {
            g.module("linear_attn", |g| self.delta.run(g, &hidden))
        };
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::RmsGemma, false);
        hidden =
            g.module("mlp", |g| if layer.sparse { self.sparse(g, &hidden) } else { self.mlp(g, &hidden, self.width) });
        g.add(&residual, &hidden)
    }

    fn mlp(&self, g: &mut Graph, hidden: &Value, width: u64) -> Value {
        gated_mlp(g, hidden, ["gate_proj", "up_proj", "down_proj"], width, self.activation, false)
    }

    /// Attention whose query projection also makes a gate for its output.
    fn attend(&self, g: &mut Graph, input: &Value, (cosine, sine): &(Value, Value), mask: &Value) -> Value {
        let SelfAttention { heads, kv_heads, head_dim, qkv_bias, rotary_dim, .. } = self.attention;
        let (batch, seq) = (input.size(0), input.size(1));
        let (mut query, mut gate) = {
            let joined = g.linear("q_proj", input, 2 * heads * head_dim, qkv_bias);
            let joined = g.view(&joined, [batch, seq, heads, 2 * head_dim]);
            g.split2(&joined, -1, head_dim, head_dim)
        };
        gate = g.reshape(&gate, [batch, seq, heads * head_dim]);
        query = g.norm("q_norm", &query, Norm::RmsGemma, false);
        query = g.transpose(&query, 1, 2);
        let mut key = g.linear("k_proj", input, kv_heads.saturating_mul(head_dim), qkv_bias);
        key = g.split_last(&key, kv_heads, head_dim);
        key = g.norm("k_norm", &key, Norm::RmsGemma, false);
        key = g.transpose(&key, 1, 2);
        let mut value = self.attention.project(g, input, 2, kv_heads);
        (query, key) = attention::rotate(g, Rotary::Half, rotary_dim, query, key, cosine, sine);
        (key, value) = g.cache(self.attention.cache(), &key, &value);
        let mut attended = attention::attend(g, self.attention.spec(None), &query, &key, &value, Some(mask));
        attended = attention::join_heads(g, attended);
        attended = {
            let gate = g.unary(Unary::Sigmoid, &gate);
            g.mul(&attended, &gate)
        };
        g.linear("o_proj", &attended, input.size(-1), self.attention.out_bias)
    }

    /// Routed experts beside a shared one with a gate of its own.
    fn sparse(&self, g: &mut Graph, input: &Value) -> Value {
        let Sparse { experts, shared_width, normalised } = &self.sparse;
        let hidden = g.view(input, [input.size(0).saturating_mul(input.size(1)), input.size(2)]);
        let mut shared = g.module("shared_expert", |g| self.mlp(g, &hidden, *shared_width));
        let Routing { logits: _, weights, indices } =
            g.module("gate", |g| softmax_top_k(g, &hidden, experts.count, experts.top_k, *normalised));
        let mut output = experts.run(g, "experts", &hidden, &indices, &weights);
        shared = {
            let gate = g.linear("shared_expert_gate", &hidden, 1, false);
            let gate = g.unary(Unary::Sigmoid, &gate);
            g.mul(&gate, &shared)
        };
        output = g.add(&output, &shared);
        g.reshape(&output, input.shape())
    }

    fn rotary(&self, g: &mut Graph, like: &Value) -> (Value, Value) {
        let dim = self.attention.rotary_dim;
        if self.generation == Generation::Next {
            let table = RotaryTable { dim, axes: 1, doubled: true, fp32: false };
            return g.rotary_table("rotary_emb", g.inputs.seq, table);
        }
        // Positions have three axes, whose frequencies are interleaved by overwriting those of the first.
        let (batch, seq, half) = (g.inputs.batch, g.inputs.seq, dim / 2);
        g.module("rotary_emb", |g| {
            g.buffer("original_inv_freq", [half], DType::F32, false);
            let frequencies = g.held("inv_freq", [half], DType::F32);
            g.without_grad(|g| {
                let angles = g.without_autocast(|g| {
                    let positions = g.fill(DType::I64, [1, 1, 1, seq]);
                    let positions = g.expand(&positions, [3, batch, 1, seq]);
                    let positions = g.float(&positions);
                    let frequencies = g.view(&frequencies, [1, 1, half, 1]);
                    let frequencies = g.expand(&frequencies, [3, batch, half, 1]);
                    let angles = g.matmul(&frequencies, &positions);
                    g.transpose(&angles, 2, 3)
                });
                let axes = |g: &mut Graph, kind| {
                    let wave = g.unary(kind, &angles);
                    g.scale(&wave)
                };
                let (mut cosine, mut sine) = (axes(g, Unary::Cos), axes(g, Unary::Sin));
                let first = |g: &mut Graph, x: &Value| {
                    let x = g.select(x, 0, 0);
                    g.cat(&[&x, &x], -1)
                };
                sine = first(g, &sine);
                cosine = first(g, &cosine);
                (g.type_as(&cosine, like), g.type_as(&sine, like))
            })
        })
    }
}

impl Decoder for Qwen3Next {
    fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.rotary(g, &embeddings);
        let mut hidden = embeddings.clone();
        for (index, layer) in (0..).zip(&self.layers) {
            hidden = g.layer("layers", index, |g| self.layer(g, *layer, &hidden, &rope, &mask));
        }
        g.norm("norm", &hidden, Norm::RmsGemma, false)
    }
}
