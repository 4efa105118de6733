//! Qwen1.5-MoE and Qwen2-MoE: routed experts beside a gated shared expert.

use super::frame::{Frame, RouterLogits, rope};
use super::routing::{flatten, softmax_top_k};
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, attention, gated_mlp, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Mask, Unary};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Qwen2-MoE.
pub const FAMILY: Family = Family {
    name: "Qwen2-MoE",
    model_types: &["qwen2_moe"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        tensor_plan: &[ATTENTION, GATED_MLP],
        leaf_blocks: true,
        ..Facts::DEFAULT
    },
    build,
};

const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

struct Qwen2Moe {
    frame: Frame,
    attention: SelfAttention,
    window: u64,
    sliding: Vec<bool>,
    sparse: SparseLayers,
    width: u64,
    shared_width: u64,
    activation: Activation,
    experts: FusedExperts,
    normalised: bool,
}

/// Which layers of a Qwen mixture have experts.
#[derive(Debug)]
pub(crate) struct SparseLayers {
    step: u64,
    dense: Vec<u64>,
    any: bool,
}

impl SparseLayers {
    /// Reads `decoder_sparse_step` and `mlp_only_layers`; without experts every layer is dense.
    pub(crate) fn read(c: &Config<'_>, experts: u64) -> Result<Self, ModelError> {
        let step = read::positive(c, &["decoder_sparse_step"], 1)?;
        Ok(Self { step, dense: c.sizes("mlp_only_layers")?.unwrap_or_default(), any: experts > 0 })
    }

    /// Whether this layer has experts.
    pub(crate) fn contains(&self, index: u64) -> bool {
        self.any && !self.dense.contains(&index) && (index + 1).is_multiple_of(self.step)
    }
}

impl Qwen2Moe {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame::read(c, 151936, 2048, 24)?;
        let heads = read::positive(c, &["num_attention_heads"], 16)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], 16)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, frame.hidden, heads)?);
        attention.qkv_bias = c.flag("qkv_bias", true)?;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        let use_window = c.flag("use_sliding_window", false)?;
        let window_layers = c.size_or(&["max_window_layers"], 28)?;
        let kinds = c.strings("layer_types")?;
        let sliding = |index: u64| match &kinds {
            Some(kinds) => kinds.get(index as usize) == Some(&"sliding_attention"),
            None => use_window && index.is_multiple_of(2) && index < window_layers,
        };
        let activation = read::activation(c, "hidden_act", "silu")?;
        let count = c.size_or(&["num_experts", "num_local_experts"], 60)?;
        let top_k = c.size_or(&["num_experts_per_tok"], 4)?;
        Ok(Self {
            window: if use_window { c.size_or(&["sliding_window"], 4096)? } else { 0 },
            sliding: (0..frame.layers).map(sliding).collect(),
            sparse: SparseLayers::read(c, count)?,
            width: c.size_or(&["intermediate_size"], 5632)?,
            shared_width: c.size_or(&["shared_expert_intermediate_size"], 5632)?,
            activation,
            experts: FusedExperts::new(count, top_k, c.size_or(&["moe_intermediate_size"], 1408)?, activation),
            normalised: c.flag("norm_topk_prob", false)?,
            frame,
            attention,
        })
    }

    fn model(&self, g: &mut Graph, routers: &mut RouterLogits) -> Value {
        let windowed = SelfAttention { window: Some(self.window), ..self.attention.clone() };
        // Both masks are built, whether or not a layer slides.
        let context = |g: &mut Graph| {
            let masks = [Mask::Causal, Mask::Sliding(self.window)].map(|kind| attention::mask(g, kind));
            (masks, rope(g, self.attention.head_dim))
        };
        self.frame.model(g, None, context, |g, index, input, (masks, rope)| {
            let sliding = self.sliding.get(index as usize).copied().unwrap_or(false);
            let (own, mask) = if sliding { (&windowed, &masks[1]) } else { (&self.attention, &masks[0]) };
            let attend = |g: &mut Graph, x: &Value| own.run(g, x, Some(rope), mask);
            self.frame.layer(g, input, attend, |g, x| {
                if self.sparse.contains(index) {
                    self.experts(g, x, routers)
                } else {
                    gated_mlp(g, x, NAMES, self.width, self.activation, false)
                }
            })
        })
    }

    fn experts(&self, g: &mut Graph, input: &Value, routers: &mut RouterLogits) -> Value {
        let flat = flatten(g, input);
        let mut shared =
            g.module("shared_expert", |g| gated_mlp(g, &flat, NAMES, self.shared_width, self.activation, false));
        let (count, top_k) = (self.experts.count, self.experts.top_k);
        let routing = g.module("gate", |g| softmax_top_k(g, &flat, count, top_k, self.normalised));
        routers.record(&routing.logits);
        let mut output = self.experts.run(g, "experts", &flat, &routing.indices, &routing.weights);
        shared = {
            let gate = g.linear("shared_expert_gate", &flat, 1, false);
            let gate = {
                let logits = gate;
                g.unary(Unary::Sigmoid, &logits)
            };
            g.mul(&gate, &shared)
        };
        output = g.add(&output, &shared);
        g.reshape(&output, input.shape())
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = Qwen2Moe::read(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, routers))
}
