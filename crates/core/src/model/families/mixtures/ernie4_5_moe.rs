//! ERNIE 4.5 MoE (21B-A3B, 300B-A47B): shared experts, a router in fp32 with a correction of its own.

use super::frame::{Context, Frame, RouterLogits};
use super::routing::{Routing, flatten, project_fp32};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, attention, gated_mlp, read};
use crate::model::facts::{AttentionKernels, ExpertNames, Facts};
use crate::model::op::{Activation, Mask, Reduction, Role, Rotary, RotaryTable, Unary};
use crate::model::tensor_plans::{ATTENTION, EXPERTS, GATED_MLP, SHARED_EXPERTS};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// ERNIE 4.5 MoE.
pub const FAMILY: Family = Family {
    name: "ERNIE 4.5 MoE",
    model_types: &["ernie4_5_moe"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        experts: Some(ExpertNames::USUAL),
        tensor_plan: &[ATTENTION, GATED_MLP, EXPERTS, SHARED_EXPERTS],
        registration: &[&["gate", "experts", "shared_experts"]],
        ..Facts::DEFAULT
    },
    build,
};

const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

struct Ernie {
    frame: Frame,
    attention: SelfAttention,
    width: u64,
    activation: Activation,
    bias: bool,
    experts: FusedExperts,
    shared_width: u64,
    interval: u64,
    first: u64,
    last: u64,
}

impl Ernie {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame { tied: c.flag("tie_word_embeddings", true)?, ..Frame::read(c, 103424, 2560, 28)? };
        let heads = read::positive(c, &["num_attention_heads"], 20)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], 4)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, frame.hidden, heads)?);
        let bias = c.flag("use_bias", false)?;
        attention.qkv_bias = bias;
        attention.out_bias = bias;
        attention.rotary = Some(Rotary::InterleavedPromoted);
        attention.rotary_pairs = true;
        let activation = read::activation(c, "hidden_act", "silu")?;
        let width = c.size_or(&["moe_intermediate_size"], 1536)?;
        let last = c.number("moe_layer_end_index", -1.0)?;
        Ok(Self {
            width: c.size_or(&["intermediate_size"], 12288)?,
            activation,
            bias,
            experts: FusedExperts::new(
                read::positive(c, &["moe_num_experts", "num_experts"], 64)?,
                read::positive(c, &["moe_k", "num_experts_per_tok"], 6)?,
                width,
                activation,
            ),
            shared_width: width.saturating_mul(c.size_or(&["moe_num_shared_experts"], 2)?),
            interval: read::positive(c, &["moe_layer_interval"], 1)?,
            first: c.size_or(&["moe_layer_start_index"], 1)?,
            last: if last < 0.0 { frame.layers } else { last as u64 },
            frame,
            attention,
        })
    }

    fn model(&self, g: &mut Graph, routers: &mut RouterLogits) -> Value {
        let context = |g: &mut Graph| {
            let mask = attention::mask(g, Mask::Causal);
            let table = RotaryTable { dim: self.attention.head_dim, axes: 1, doubled: true, fp32: true };
            Context { mask, rope: g.rotary_table("rotary_emb", g.inputs.seq, table) }
        };
        self.frame.model(g, None, context, |g, index, input, context| {
            let attend = |g: &mut Graph, x: &Value| self.attention.run(g, x, Some(&context.rope), &context.mask);
            self.frame.layer(g, input, attend, |g, x| {
                let sparse = (index + 1).is_multiple_of(self.interval) && index >= self.first && index <= self.last;
                if sparse {
                    self.experts(g, x, routers)
                } else {
                    gated_mlp(g, x, NAMES, self.width, self.activation, self.bias)
                }
            })
        })
    }

    fn experts(&self, g: &mut Graph, input: &Value, routers: &mut RouterLogits) -> Value {
        let flat = flatten(g, input);
        let shared = (self.shared_width > 0).then(|| {
            g.module("shared_experts", |g| gated_mlp(g, &flat, NAMES, self.shared_width, self.activation, self.bias))
        });
        let routing = g.module("gate", |g| self.route(g, &flat));
        routers.record(&routing.logits);
        let mut output = self.experts.run(g, "experts", &flat, &routing.indices, &routing.weights);
        if let Some(shared) = &shared {
            output = g.add(&output, shared);
        }
        output = g.reshape(&output, input.shape());
        g.type_as(&output, &flat)
    }

    fn route(&self, g: &mut Graph, x: &Value) -> Routing {
        let count = self.experts.count;
        let (logits, mut weights, indices) = g.without_autocast(|g| {
            let logits = project_fp32(g, x, count);
            let scores = g.softmax(&logits, 1, Some(DType::F32));
            let corrected = g.module("moe_statics", |g| {
                let correction = g.parameter("e_score_correction_bias", [1, count], Role::Other);
                let correction = g.read(correction, [1, count]);
                let correction = g.squeeze(&correction, 0);
                g.add(&scores, &correction)
            });
            let (_, indices) = g.top_k(&corrected, self.experts.top_k);
            drop(corrected);
            let mut weights = g.gather(&scores, 1, &indices);
            drop(scores);
            let sum = {
                let sum = g.reduce(Reduction::Sum, &weights, -1, true);
                g.unary(Unary::Clamp, &sum)
            };
            weights = g.div(&weights, &sum);
            (logits, weights, indices)
        });
        weights = g.type_as(&weights, x);
        Routing { logits, weights, indices }
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = Ernie::read(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, routers))
}
