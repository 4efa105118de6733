//! MiniMax-M2: norms over whole queries and keys, sigmoid routing with a correction.

use super::frame::{Context, Frame, RouterLogits};
use super::routing::{Routing, flatten, normalise, project};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::attention::RotaryCut;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{QkNorm, SelfAttention, read};
use crate::model::facts::{AttentionKernels, ExpertNames, Facts};
use crate::model::op::{Norm, Op, Unary};
use crate::model::tensor_plans::{EXPERTS, GATHERED_ATTENTION};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// MiniMax-M2.
pub const FAMILY: Family = Family {
    name: "MiniMax-M2",
    model_types: &["minimax_m2"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        experts: Some(ExpertNames::MIXTRAL),
        tensor_plan: &[GATHERED_ATTENTION, EXPERTS],
        ..Facts::DEFAULT
    },
    build,
};

struct MiniMaxM2 {
    frame: Frame,
    attention: SelfAttention,
    experts: FusedExperts,
    jitter: bool,
}

impl MiniMaxM2 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame::read(c, 200064, 3072, 62)?;
        let heads = read::positive(c, &["num_attention_heads"], 48)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], 8)?;
        let head_dim = c.size_or(&["head_dim"], 128)?;
        let mut attention = SelfAttention::new(heads, kv_heads, head_dim);
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.qk_norm = QkNorm::Whole(Norm::Rms, ["q_norm", "k_norm"]);
        // transformers does not read the hub's `rotary_dim`.
        attention.rotary_dim = read::rotary_dim(c, head_dim, 1.0)?;
        attention.rotary_cut = RotaryCut::Always;
        let experts = FusedExperts::new(
            read::positive(c, &["num_local_experts", "num_experts"], 256)?,
            read::positive(c, &["num_experts_per_tok"], 8)?,
            c.size_or(&["intermediate_size"], 1536)?,
            read::activation(c, "hidden_act", "silu")?,
        );
        Ok(Self { frame, attention, experts, jitter: c.number("router_jitter_noise", 0.0)? > 0.0 })
    }

    fn model(&self, g: &mut Graph, routers: &mut RouterLogits) -> Value {
        let context = |g: &mut Graph| Context::causal(g, None, self.attention.rotary_dim);
        self.frame.model(g, None, context, |g, _, input, context| {
            let attend = |g: &mut Graph, x: &Value| self.attention.run(g, x, Some(&context.rope), &context.mask);
            self.frame.layer(g, input, attend, |g, x| self.experts(g, x, routers))
        })
    }

    fn experts(&self, g: &mut Graph, input: &Value, routers: &mut RouterLogits) -> Value {
        g.buffer("e_score_correction_bias", [self.experts.count], DType::F32, true);
        let mut hidden = input.clone();
        if self.jitter {
            hidden = g.run(Op::Jitter, &[&hidden], hidden.shape());
        }
        hidden = flatten(g, &hidden);
        let correction = g.run(Op::Buffer(DType::F32), &[], [self.experts.count]);
        let routing = g.module("gate", |g| self.route(g, &hidden, &correction));
        routers.record(&routing.logits);
        hidden = self.experts.run(g, "experts", &hidden, &routing.indices, &routing.weights);
        g.reshape(&hidden, input.shape())
    }

    fn route(&self, g: &mut Graph, x: &Value, correction: &Value) -> Routing {
        let logits = project(g, x, self.experts.count);
        let scores = {
            let wide = g.float(&logits);
            g.unary(Unary::Sigmoid, &wide)
        };
        let choice = g.add(&scores, correction);
        let (_, indices) = g.top_k(&choice, self.experts.top_k);
        let weights = g.gather(&scores, 1, &indices);
        Routing { logits, weights: normalise(g, weights), indices }
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = MiniMaxM2::read(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, routers))
}
