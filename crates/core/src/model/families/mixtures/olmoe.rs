//! OLMoE: norms over whole queries and keys, many small experts.

use super::frame::{Context, Frame, RouterLogits};
use super::routing::{flatten, softmax_top_k};
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{QkNorm, SelfAttention, attention, read};
use crate::model::facts::{AttentionKernels, ExpertNames, Facts};
use crate::model::op::{Norm, Rotary, Unary};
use crate::model::tensor_plans::{EXPERTS, GATHERED_ATTENTION};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// OLMoE.
pub const FAMILY: Family = Family {
    name: "OLMoE",
    model_types: &["olmoe"],
    facts: Facts {
        attention: AttentionKernels::Flash,
        experts: Some(ExpertNames::USUAL),
        tensor_plan: &[GATHERED_ATTENTION, EXPERTS],
        ..Facts::DEFAULT
    },
    build,
};

struct Olmoe {
    frame: Frame,
    attention: SelfAttention,
    clipped: bool,
    experts: FusedExperts,
    normalised: bool,
}

impl Olmoe {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame::read(c, 50304, 2048, 16)?;
        let heads = read::positive(c, &["num_attention_heads"], 16)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], heads)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, frame.hidden, heads)?);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.qk_norm = QkNorm::Whole(Norm::Rms, ["q_norm", "k_norm"]);
        let experts = FusedExperts::new(
            read::positive(c, &["num_experts", "num_local_experts"], 64)?,
            read::positive(c, &["num_experts_per_tok"], 8)?,
            c.size_or(&["intermediate_size"], 2048)?,
            read::activation(c, "hidden_act", "silu")?,
        );
        let normalised = c.flag("norm_topk_prob", false)?;
        Ok(Self { frame, attention, clipped: c.has("clip_qkv"), experts, normalised })
    }

    fn model(&self, g: &mut Graph, routers: &mut RouterLogits) -> Value {
        let context = |g: &mut Graph| Context::causal(g, None, self.attention.head_dim);
        self.frame.model(g, None, context, |g, _, input, context| {
            let attend = |g: &mut Graph, x: &Value| self.attend(g, x, context);
            self.frame.layer(g, input, attend, |g, x| {
                let flat = flatten(g, x);
                let (count, top_k) = (self.experts.count, self.experts.top_k);
                let routing = g.module("gate", |g| softmax_top_k(g, &flat, count, top_k, self.normalised));
                routers.record(&routing.logits);
                let output = self.experts.run(g, "experts", &flat, &routing.indices, &routing.weights);
                g.reshape(&output, x.shape())
            })
        })
    }

    fn attend(&self, g: &mut Graph, hidden: &Value, context: &Context) -> Value {
        if !self.clipped {
            return self.attention.run(g, hidden, Some(&context.rope), &context.mask);
        }
        let own = &self.attention;
        let mut query = own.project(g, hidden, 0, own.heads);
        let mut key = own.project(g, hidden, 1, own.kv_heads);
        let mut value = own.project(g, hidden, 2, own.kv_heads);
        query = g.unary(Unary::Clamp, &query);
        key = g.unary(Unary::Clamp, &key);
        value = g.unary(Unary::Clamp, &value);
        (query, key) = attention::rotate_whole(g, Rotary::Half, &query, &key, &context.rope.0, &context.rope.1);
        (key, value) = g.cache(own.cache(), &key, &value);
        let attended = attention::attend(g, own.spec(None), &query, &key, &value, Some(&context.mask));
        own.output(g, attended, hidden.size(-1))
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = Olmoe::read(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, routers))
}
