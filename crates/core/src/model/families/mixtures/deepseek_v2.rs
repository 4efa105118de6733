//! DeepSeek-V2 and V2-Lite: latent attention, shared experts, softmax routing.

use super::frame::{Context, Frame, RouterLogits};
use super::latent::{Latent, Rotation};
use super::routing::{Routing, SharedExperts, mask_groups, project_fp32};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::{attention, gated_mlp, read};
use crate::model::facts::{AttentionKernels, ExpertNames, Facts, Liger};
use crate::model::op::{Mask, Reduction, RotaryTable};
use crate::model::tensor_plans::{EXPERTS, GATED_MLP, SHARED_EXPERTS, TensorRules, TensorStyle};
use crate::model::{Config, Graph, Inputs, ModelError, Task, Value};

/// DeepSeek-V2.
pub const FAMILY: Family = Family {
    name: "DeepSeek-V2",
    model_types: &["deepseek_v2"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::NotSimulated,
        experts: Some(ExpertNames::USUAL),
        tensor_plan: &[LATENT_ATTENTION, GATED_MLP, EXPERTS, SHARED_EXPERTS],
        whole_heads: true,
        ..Facts::DEFAULT
    },
    build,
};

/// How transformers splits its attention.
const LATENT_ATTENTION: TensorRules = &[
    ("self_attn.kv_a_proj_with_mqa", TensorStyle::LatentKeys),
    ("self_attn.q_proj", TensorStyle::Column),
    ("self_attn.q_b_proj", TensorStyle::Column),
    ("self_attn.kv_b_proj", TensorStyle::Column),
    ("self_attn.o_proj", TensorStyle::Row),
];

struct DeepSeekV2 {
    frame: Frame,
    attention: Latent,
    dense_layers: u64,
    dense_width: u64,
    experts: SharedExperts,
    /// Groups of experts and groups kept, where groups are chosen first.
    groups: Option<(u64, u64)>,
}

impl DeepSeekV2 {
    fn read(c: &Config<'_>, counted: bool) -> Result<Self, ModelError> {
        let frame = Frame { router_loss: false, ..Frame::read(c, 102400, 4096, 32)? };
        let count = read::positive(c, &["n_routed_experts", "num_experts"], 64)?;
        // The class has no default: without it there are parameters, and nothing runs.
        let top_k = if counted { c.size_or(&["num_experts_per_tok"], 1)? } else { c.size(&["num_experts_per_tok"])? };
        let groups = match c.str_or("topk_method", "greedy") {
            "greedy" => None,
            "group_limited_greedy" => {
                let groups = read::positive(c, &["n_group"], 0)?;
                if !count.is_multiple_of(groups) {
                    return Err(c.refuse("n_group", "a divisor of the number of experts"));
                }
                Some((groups, c.size(&["topk_group"])?))
            }
            _ => return Err(c.refuse("topk_method", "greedy or group_limited_greedy")),
        };
        Ok(Self {
            attention: Latent::read(c, 32, 1536, Rotation::Complex)?,
            dense_layers: c.size_or(&["first_k_dense_replace"], 0)?,
            dense_width: c.size_or(&["intermediate_size"], 11008)?,
            experts: SharedExperts::read(c, count, top_k, 1407, 2)?,
            groups,
            frame,
        })
    }

    fn model(&self, g: &mut Graph, routers: &mut RouterLogits) -> Value {
        let context = |g: &mut Graph| {
            let mask = attention::mask(g, Mask::Causal);
            // One complex tensor: as many bytes as cosine and sine in fp32.
            let table = RotaryTable { dim: self.attention.turned, axes: 1, doubled: false, fp32: true };
            Context { mask, rope: g.rotary_table("rotary_emb", g.inputs.seq, table) }
        };
        self.frame.model(g, None, context, |g, index, input, context| {
            let attend = |g: &mut Graph, x: &Value| self.attention.run(g, x, &context.rope, &context.mask);
            self.frame.layer(g, input, attend, |g, x| {
                if index < self.dense_layers {
                    let names = ["gate_proj", "up_proj", "down_proj"];
                    return gated_mlp(g, x, names, self.dense_width, self.experts.activation, self.experts.bias);
                }
                self.experts.run(g, x, routers, |g, flat| self.route(g, flat))
            })
        })
    }

    fn route(&self, g: &mut Graph, x: &Value) -> Routing {
        let count = self.experts.routed.count;
        let logits = project_fp32(g, x, count);
        let mut scores = g.softmax(&logits, -1, Some(DType::F32));
        if let Some((groups, kept)) = self.groups {
            let group_scores = {
                let split = g.split_last(&scores, groups, count / groups);
                g.reduce(Reduction::Max, &split, -1, false)
            };
            scores = mask_groups(g, &scores, &group_scores, kept);
        }
        let (mut weights, indices) = g.top_k(&scores, self.experts.routed.top_k);
        weights = g.scale(&weights);
        Routing { logits, weights, indices }
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = DeepSeekV2::read(c, g.inputs == Inputs::inventory())?;
    model.frame.build(c, g, task, |g, routers| model.model(g, routers))
}
