//! Qwen3-MoE (30B-A3B, 235B-A22B, Coder): norms on heads, no shared expert.

use super::frame::{Context, Frame, RouterLogits};
use super::qwen2_moe::SparseLayers;
use super::routing::{flatten, softmax_top_k};
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{QkNorm, SelfAttention, gated_mlp, read};
use crate::model::facts::{AdaptedTables, AttentionKernels, ExpertNames, Facts, Liger, VllmFacts};
use crate::model::op::{Activation, Norm};
use crate::model::tensor_plans::{ATTENTION, EXPERTS, GATED_MLP};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Qwen3-MoE.
pub const FAMILY: Family = Family {
    name: "Qwen3-MoE",
    model_types: &["qwen3_moe"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::NotSimulated,
        experts: Some(ExpertNames::USUAL),
        tensor_plan: &[ATTENTION, GATED_MLP, EXPERTS],
        leaf_blocks: true,
        registration: &[&["experts", "gate"]],
        vllm: VllmFacts { tables: AdaptedTables::Qwen3, ..VllmFacts::DEFAULT },
        ..Facts::DEFAULT
    },
    build,
};

/// Qwen3's mixture.
#[derive(Debug)]
pub(crate) struct Qwen3Moe {
    /// The decoder around it.
    pub(crate) frame: Frame,
    /// Its attention.
    pub(crate) attention: SelfAttention,
    sparse: SparseLayers,
    width: u64,
    activation: Activation,
    experts: FusedExperts,
    normalised: bool,
}

impl Qwen3Moe {
    /// Reads the text config.
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame::read(c, 151936, 2048, 24)?;
        let heads = read::positive(c, &["num_attention_heads"], 32)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], 4)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, frame.hidden, heads)?);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.qk_norm = QkNorm::HeadLast(Norm::Rms, ["q_norm", "k_norm"]);
        if c.flag("use_sliding_window", false)? {
            attention.window = Some(c.size_or(&["sliding_window"], 4096)?).filter(|&window| window > 0);
        }
        let activation = read::activation(c, "hidden_act", "silu")?;
        let count = c.size_or(&["num_experts", "num_local_experts"], 128)?;
        let top_k = c.size_or(&["num_experts_per_tok"], 8)?;
        Ok(Self {
            sparse: SparseLayers::read(c, count)?,
            width: c.size_or(&["intermediate_size"], 6144)?,
            activation,
            experts: FusedExperts::new(count, top_k, c.size_or(&["moe_intermediate_size"], 768)?, activation),
            normalised: c.flag("norm_topk_prob", false)?,
            frame,
            attention,
        })
    }

    fn model(&self, g: &mut Graph, routers: &mut RouterLogits) -> Value {
        let context = |g: &mut Graph| Context::causal(g, self.attention.window, self.attention.head_dim);
        self.frame.model(g, None, context, |g, index, input, context| {
            self.layer(g, index, input, &context.rope, &context.mask, routers)
        })
    }

    /// One layer.
    pub(crate) fn layer(
        &self,
        g: &mut Graph,
        index: u64,
        input: &Value,
        rope: &(Value, Value),
        mask: &Value,
        routers: &mut RouterLogits,
    ) -> Value {
        let attend = |g: &mut Graph, x: &Value| self.attention.run(g, x, Some(rope), mask);
        self.frame.layer(g, input, attend, |g, x| {
            if !self.sparse.contains(index) {
                return gated_mlp(g, x, ["gate_proj", "up_proj", "down_proj"], self.width, self.activation, false);
            }
            let flat = flatten(g, x);
            let (count, top_k) = (self.experts.count, self.experts.top_k);
            let routing = g.module("gate", |g| softmax_top_k(g, &flat, count, top_k, self.normalised));
            routers.record(&routing.logits);
            let output = self.experts.run(g, "experts", &flat, &routing.indices, &routing.weights);
            g.reshape(&output, x.shape())
        })
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = Qwen3Moe::read(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, routers))
}
