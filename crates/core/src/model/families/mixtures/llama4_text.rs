//! Llama 4's text model (Scout, Maverick): chunked layers with rotary, full layers without, every expert run on every token.

use super::frame::Frame;
use super::routing::flatten;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, attention, gated_mlp, read};
use crate::model::facts::{Facts, Liger};
use crate::model::op::{
    Activation, Attention, Binary, EagerStyle, ExpertStyle, Mask, Norm, Op, Reduction, Rotary, RotaryTable, Unary,
};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Llama 4's text model alone.
pub const FAMILY: Family = Family {
    name: "Llama 4 text",
    model_types: &["llama4_text"],
    facts: Facts { liger: Liger::NotSimulated, ..Facts::DEFAULT },
    build,
};

const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Llama 4's text model.
#[derive(Debug)]
pub(crate) struct Llama4Text {
    /// The decoder around it.
    pub(crate) frame: Frame,
    attention: SelfAttention,
    chunk: u64,
    rotated: Vec<bool>,
    chunked: Vec<bool>,
    sparse: Vec<bool>,
    qk_norm: bool,
    tuned: bool,
    dense_width: u64,
    activation: Activation,
    experts: FusedExperts,
}

impl Llama4Text {
    /// Reads `text_config`.
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame { router_loss: false, ..Frame::read(c, 202048, 5120, 48)? };
        let heads = read::positive(c, &["num_attention_heads"], 40)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], 8)?;
        let mut attention = SelfAttention::new(heads, kv_heads, c.size_or(&["head_dim"], 128)?);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        let interval = read::positive(c, &["no_rope_layer_interval"], 4)?;
        let listed = c.sizes("no_rope_layers")?.filter(|list| !list.is_empty());
        let rotated: Vec<bool> = (0..frame.layers)
            .map(|index| match &listed {
                Some(list) => list.get(index as usize).is_some_and(|&rotated| rotated != 0),
                None => !(index + 1).is_multiple_of(interval),
            })
            .collect();
        let kinds = c.strings("layer_types")?;
        let chunked = match &kinds {
            Some(kinds) => kinds.iter().map(|&kind| kind == "chunked_attention").collect(),
            None => rotated.clone(),
        };
        let step = read::positive(c, &["interleave_moe_layer_step"], 1)?;
        let moe_layers = c.sizes("moe_layers")?;
        let sparse = |index: u64| match &moe_layers {
            Some(list) => list.contains(&index),
            None => (index + 1).is_multiple_of(step),
        };
        let activation = read::activation(c, "hidden_act", "silu")?;
        let mut experts = FusedExperts::new(
            read::positive(c, &["num_local_experts"], 16)?,
            read::positive(c, &["num_experts_per_tok"], 1)?,
            c.size_or(&["intermediate_size"], 8192)?,
            activation,
        );
        experts.transposed = true;
        experts.style = ExpertStyle::Dense;
        Ok(Self {
            chunk: c.size_or(&["attention_chunk_size"], 8192)?,
            sparse: (0..frame.layers).map(sparse).collect(),
            rotated,
            chunked,
            qk_norm: c.flag("use_qk_norm", true)?,
            tuned: c.flag("attn_temperature_tuning", true)?,
            dense_width: c.size_or(&["intermediate_size_mlp"], 16384)?,
            activation,
            experts,
            frame,
            attention,
        })
    }

    /// The model; `embeddings` are given by a model that put image features among them.
    pub(crate) fn model(&self, g: &mut Graph, embeddings: Option<Value>) -> Value {
        let context = |g: &mut Graph| {
            let masks = [Mask::Causal, Mask::Chunked(self.chunk)].map(|kind| attention::mask(g, kind));
            // One complex tensor: as many bytes as cosine and sine in fp32.
            let table = RotaryTable { dim: self.attention.head_dim, axes: 1, doubled: false, fp32: true };
            (masks, g.rotary_table("rotary_emb", g.inputs.seq, table))
        };
        let at = |list: &[bool], index: u64| list.get(index as usize).copied().unwrap_or(false);
        self.frame.model(g, embeddings, context, |g, index, input, (masks, rope)| {
            let chunked = at(&self.chunked, index);
            let rope = at(&self.rotated, index).then_some(rope);
            let mut hidden = g.norm("input_layernorm", input, Norm::Rms, false);
            let attended =
                g.module("self_attn", |g| self.attend(g, &hidden, rope, &masks[usize::from(chunked)], chunked));
            hidden = g.add(input, &attended);
            let residual = hidden.clone();
            hidden = g.norm("post_attention_layernorm", &hidden, Norm::Rms, false);
            hidden = g.module("feed_forward", |g| {
                if at(&self.sparse, index) {
                    self.experts(g, &hidden)
                } else {
                    gated_mlp(g, &hidden, NAMES, self.dense_width, self.activation, false)
                }
            });
            hidden = g.view(&hidden, residual.shape());
            g.add(&residual, &hidden)
        })
    }

    fn attend(
        &self,
        g: &mut Graph,
        hidden: &Value,
        rope: Option<&(Value, Value)>,
        mask: &Value,
        chunked: bool,
    ) -> Value {
        let own = &self.attention;
        let linear = |g: &mut Graph, name: &str, heads: u64| {
            let x = g.linear(name, hidden, heads.saturating_mul(own.head_dim), own.qkv_bias);
            g.split_last(&x, heads, own.head_dim)
        };
        let mut query = linear(g, "q_proj", own.heads);
        let mut key = linear(g, "k_proj", own.kv_heads);
        let mut value = linear(g, "v_proj", own.kv_heads);
        value = g.transpose(&value, 1, 2);
        if let Some((cosine, sine)) = rope {
            (query, key) = attention::rotate_whole(g, Rotary::Complex, &query, &key, cosine, sine);
            if self.qk_norm {
                query = g.norm("qk_norm", &query, Norm::RmsBare, false);
                key = g.norm("qk_norm", &key, Norm::RmsBare, false);
            }
        } else if self.tuned {
            query = tune(g, &query);
        }
        query = g.transpose(&query, 1, 2);
        key = g.transpose(&key, 1, 2);
        let window = chunked.then_some(self.chunk);
        (key, value) = g.cache(attention::grouped_cache(own.kv_heads, own.head_dim, window), &key, &value);
        let spec = Attention { eager: EagerStyle::PlainSoftmax, ..own.spec(None) };
        let attended = attention::attend(g, spec, &query, &key, &value, Some(mask));
        own.output(g, attended, hidden.size(-1))
    }

    fn experts(&self, g: &mut Graph, input: &Value) -> Value {
        let flat = flatten(g, input);
        let count = self.experts.count;
        let logits = g.linear("router", &flat, count, false);
        let scores = {
            let (best, indices) = g.top_k(&logits, self.experts.top_k);
            let lowest = g.without_grad(|g| g.unary(Unary::Clone, &logits));
            let kept = g.run(Op::Scatter { dim: 1, in_place: true }, &[&lowest, &indices, &best], lowest.shape());
            let soft = {
                let wide = g.float(&kept);
                g.unary(Unary::Sigmoid, &wide)
            };
            g.type_as(&soft, &kept)
        };
        let rows = [count.saturating_mul(flat.size(0)), flat.size(1)];
        let mut routed = g.run(Op::Repeat, &[&flat], rows);
        routed = {
            let turned = g.transpose(&scores, 0, 1);
            let column = g.reshape(&turned, [rows[0], 1]);
            g.mul(&routed, &column)
        };
        let from_experts = self.experts.run_dense(g, "experts", &routed);
        let output =
            g.module("shared_expert", |g| gated_mlp(g, &flat, NAMES, self.experts.width, self.activation, false));
        let sum = {
            let split = g.reshape(&from_experts, [count, flat.size(0), flat.size(1)]);
            g.reduce(Reduction::Sum, &split, 0, false)
        };
        g.in_place(Binary::Add, &output, &sum)
    }
}

/// Queries of layers without rotary grow with the logarithm of their position.
fn tune(g: &mut Graph, query: &Value) -> Value {
    let seq = query.size(1);
    let scales = g.fill(DType::F32, [1, seq, 1, 1]);
    let scales = g.expand(&scales, [query.size(0), seq, 1, 1]);
    let scaled = g.mul(query, &scales);
    g.type_as(&scaled, query)
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = Llama4Text::read(c)?;
    model.frame.build(c, g, task, |g, _| model.model(g, None))
}
