//! Mixtral (8x7B, 8x22B).

use super::frame::{Context, Frame, RouterLogits};
use super::routing::{Routing, flatten, normalise, project};
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, read};
use crate::model::facts::{AttentionKernels, ExpertNames, Facts, Liger, VllmFacts};
use crate::model::op::Op;
use crate::model::tensor_plans::{ATTENTION, EXPERTS};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Mixtral.
pub const FAMILY: Family = Family {
    name: "Mixtral",
    model_types: &["mixtral"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::NotSimulated,
        lora: &["q_proj", "v_proj"],
        ia3: &["k_proj", "v_proj", "w2"],
        ia3_feedforward: &["w2"],
        experts: Some(ExpertNames::MIXTRAL),
        tensor_plan: &[ATTENTION, EXPERTS],
        leaf_blocks: true,
        vllm: VllmFacts::ADAPTED,
        ..Facts::DEFAULT
    },
    build,
};

struct Mixtral {
    frame: Frame,
    attention: SelfAttention,
    experts: FusedExperts,
    jitter: bool,
}

impl Mixtral {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame::read(c, 32000, 4096, 32)?;
        let heads = read::positive(c, &["num_attention_heads"], 32)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], 8)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, frame.hidden, heads)?);
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.window = Some(c.size_or(&["sliding_window"], 0)?).filter(|&window| window > 0);
        let experts = FusedExperts::new(
            read::positive(c, &["num_local_experts", "num_experts"], 8)?,
            read::positive(c, &["num_experts_per_tok"], 2)?,
            c.size_or(&["intermediate_size"], 14336)?,
            read::activation(c, "hidden_act", "silu")?,
        );
        Ok(Self { frame, attention, experts, jitter: c.number("router_jitter_noise", 0.0)? > 0.0 })
    }

    fn model(&self, g: &mut Graph, routers: &mut RouterLogits) -> Value {
        let context = |g: &mut Graph| Context::causal(g, self.attention.window, self.attention.head_dim);
        self.frame.model(g, None, context, |g, _, input, context| {
            let attend = |g: &mut Graph, x: &Value| self.attention.run(g, x, Some(&context.rope), &context.mask);
            self.frame.layer(g, input, attend, |g, x| self.experts(g, x, routers))
        })
    }

    fn experts(&self, g: &mut Graph, input: &Value, routers: &mut RouterLogits) -> Value {
        let mut hidden = input.clone();
        if self.jitter {
            hidden = g.run(Op::Jitter, &[&hidden], hidden.shape());
        }
        hidden = flatten(g, &hidden);
        let routing = g.module("gate", |g| self.route(g, &hidden));
        routers.record(&routing.logits);
        hidden = self.experts.run(g, "experts", &hidden, &routing.indices, &routing.weights);
        g.reshape(&hidden, input.shape())
    }

    /// The weights stay in fp32.
    fn route(&self, g: &mut Graph, x: &Value) -> Routing {
        let logits = project(g, x, self.experts.count);
        let scores = {
            let wide = g.float(&logits);
            g.softmax(&wide, -1, None)
        };
        let (weights, indices) = g.top_k(&scores, self.experts.top_k);
        Routing { logits, weights: normalise(g, weights), indices }
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = Mixtral::read(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, routers))
}
