//! GLM-4.5, 4.6 and Air: grouped heads, half of each rotated, DeepSeek-V3's routing.

use super::frame::{Context, Frame, RouterLogits};
use super::routing::{Grouped, SharedExperts};
use crate::model::Family;
use crate::model::blocks::{QkNorm, SelfAttention, gated_mlp, read};
use crate::model::facts::{AttentionKernels, ExpertNames, Facts};
use crate::model::op::Norm;
use crate::model::tensor_plans::{ATTENTION, EXPERTS, GATED_MLP, SHARED_EXPERTS};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// GLM-4 MoE.
pub const FAMILY: Family = Family {
    name: "GLM-4 MoE",
    model_types: &["glm4_moe"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        experts: Some(ExpertNames::USUAL),
        tensor_plan: &[ATTENTION, GATED_MLP, EXPERTS, SHARED_EXPERTS],
        ..Facts::DEFAULT
    },
    build,
};

struct Glm4Moe {
    frame: Frame,
    attention: SelfAttention,
    dense_layers: u64,
    dense_width: u64,
    router: Grouped,
    experts: SharedExperts,
}

impl Glm4Moe {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame { router_loss: false, ..Frame::read(c, 151552, 4096, 46)? };
        let heads = read::positive(c, &["num_attention_heads"], 96)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], 8)?;
        let head_dim = read::head_dim(c, frame.hidden, heads)?;
        let mut attention = SelfAttention::new(heads, kv_heads, head_dim);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.rotary_dim = read::rotary_dim(c, head_dim, 0.5)?;
        if c.flag("use_qk_norm", false)? {
            attention.qk_norm = QkNorm::Head(Norm::Rms, ["q_norm", "k_norm"]);
        }
        let router = Grouped::read(c, [128, 1, 1])?;
        Ok(Self {
            frame,
            attention,
            dense_layers: c.size_or(&["first_k_dense_replace"], 1)?,
            dense_width: c.size_or(&["intermediate_size"], 10944)?,
            experts: SharedExperts { bias: false, ..SharedExperts::read(c, router.experts, router.top_k, 1408, 1)? },
            router,
        })
    }

    fn model(&self, g: &mut Graph, routers: &mut RouterLogits) -> Value {
        let context = |g: &mut Graph| Context::causal(g, None, self.attention.rotary_dim);
        self.frame.model(g, None, context, |g, index, input, context| {
            let attend = |g: &mut Graph, x: &Value| self.attention.run(g, x, Some(&context.rope), &context.mask);
            self.frame.layer(g, input, attend, |g, x| {
                if index < self.dense_layers {
                    let names = ["gate_proj", "up_proj", "down_proj"];
                    return gated_mlp(g, x, names, self.dense_width, self.experts.activation, false);
                }
                self.experts.run(g, x, routers, |g, flat| self.router.run(g, flat))
            })
        })
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = Glm4Moe::read(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, routers))
}
