//! Routers: which experts a token goes to, and with what weight.

use super::frame::RouterLogits;
use crate::dtype::DType;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{gated_mlp, read};
use crate::model::op::{Activation, Binary, LinearLayout, Op, Reduction, Role, Unary};
use crate::model::{Config, Graph, ModelError, Value};

/// What a router returns.
#[derive(Debug)]
pub(crate) struct Routing {
    /// `[tokens, experts]`.
    pub(crate) logits: Value,
    /// `[tokens, top_k]`.
    pub(crate) weights: Value,
    /// `[tokens, top_k]`.
    pub(crate) indices: Value,
}

/// `F.linear` with a matrix the router holds itself: the module is no `nn.Linear`.
pub(crate) fn project(g: &mut Graph, x: &Value, experts: u64) -> Value {
    let weight = g.parameter("weight", [experts, x.size(-1)], Role::Other);
    let op = Op::Linear { weight, bias: None, layout: LinearLayout::OutIn };
    g.run(op, &[x], x.shape().with(-1, experts))
}

/// The same with hidden states and matrix cast to fp32 first.
pub(crate) fn project_fp32(g: &mut Graph, x: &Value, experts: u64) -> Value {
    let shape = [experts, x.size(-1)];
    let weight = g.parameter("weight", shape, Role::Other);
    let x = g.float(x);
    let weight = g.read(weight, shape);
    let weight = g.float(&weight);
    let weight = g.transpose(&weight, 0, 1);
    g.matmul(&x, &weight)
}

/// Softmax over all experts in fp32, then the largest (OLMoE, Qwen).
pub(crate) fn softmax_top_k(g: &mut Graph, x: &Value, experts: u64, top_k: u64, normalised: bool) -> Routing {
    let logits = project(g, x, experts);
    let scores = g.softmax(&logits, -1, Some(DType::F32));
    let (mut weights, indices) = g.top_k(&scores, top_k);
    if normalised {
        weights = normalise(g, weights);
    }
    weights = g.type_as(&weights, &logits);
    Routing { logits, weights, indices }
}

/// `weights /= weights.sum(-1)`.
pub(crate) fn normalise(g: &mut Graph, weights: Value) -> Value {
    let sum = g.reduce(Reduction::Sum, &weights, -1, true);
    g.in_place(Binary::Div, &weights, &sum)
}

/// DeepSeek-V3's router (also GLM's): sigmoid scores, groups of experts chosen before experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grouped {
    /// How many experts.
    pub(crate) experts: u64,
    /// How many run for a token.
    pub(crate) top_k: u64,
    /// Groups of experts.
    pub(crate) groups: u64,
    /// Groups that are kept for a token.
    pub(crate) top_groups: u64,
    /// Whether the weights are made to add up to one.
    pub(crate) normalised: bool,
}

impl Grouped {
    /// Reads the usual keys with these class defaults: experts, groups and kept groups.
    pub(crate) fn read(c: &Config<'_>, defaults: [u64; 3]) -> Result<Self, ModelError> {
        let experts = read::positive(c, &["n_routed_experts", "num_experts", "num_local_experts"], defaults[0])?;
        let groups = read::positive(c, &["n_group"], defaults[1])?;
        if !experts.is_multiple_of(groups) {
            return Err(c.refuse("n_group", "a divisor of the number of experts"));
        }
        Ok(Self {
            experts,
            top_k: read::positive(c, &["num_experts_per_tok"], 8)?,
            groups,
            top_groups: read::positive(c, &["topk_group"], defaults[2])?,
            normalised: c.flag("norm_topk_prob", true)?,
        })
    }

    /// Runs it in the current module on `[tokens, hidden]`.
    pub(crate) fn run(&self, g: &mut Graph, x: &Value) -> Routing {
        g.buffer("e_score_correction_bias", [self.experts], DType::F32, true);
        let logits = project_fp32(g, x, self.experts);
        let scores = g.unary(Unary::Sigmoid, &logits);
        let correction = g.run(Op::Buffer(DType::F32), &[], [self.experts]);
        let mut choice = g.add(&scores, &correction);
        let group_scores = {
            let groups = g.split_last(&choice, self.groups, self.experts / self.groups);
            let (best, _) = g.top_k(&groups, 2.min(self.experts / self.groups));
            g.reduce(Reduction::Sum, &best, -1, false)
        };
        choice = mask_groups(g, &choice, &group_scores, self.top_groups);
        let (_, indices) = g.top_k(&choice, self.top_k);
        let mut weights = g.gather(&scores, 1, &indices);
        if self.normalised {
            let sum = g.reduce(Reduction::Sum, &weights, -1, true);
            let denominator = g.scalar(Binary::Add, &sum);
            weights = g.in_place(Binary::Div, &weights, &denominator);
        }
        weights = g.scale(&weights);
        Routing { logits, weights, indices }
    }
}

/// Scores with those outside the best groups filled: `scores` `[tokens, experts]`, `group_scores` `[tokens, groups]`.
pub(crate) fn mask_groups(g: &mut Graph, scores: &Value, group_scores: &Value, top_groups: u64) -> Value {
    let (tokens, groups) = (group_scores.size(0), group_scores.size(1));
    let (_, best) = g.top_k(group_scores, top_groups);
    let zeros = g.fill(DType::F32, group_scores.shape());
    let group_mask = g.run(Op::Scatter { dim: 1, in_place: true }, &[&zeros, &best], zeros.shape());
    drop(zeros);
    let score_mask = {
        let each = g.unsqueeze(&group_mask, -1);
        let wide = g.expand(&each, [tokens, groups, scores.size(-1) / groups.max(1)]);
        g.reshape(&wide, scores.shape())
    };
    let outside = {
        let inside = g.to(&score_mask, DType::Bool);
        g.unary(Unary::Not, &inside)
    };
    g.masked_fill(scores, &outside)
}

/// Routed experts beside experts that every token goes to (DeepSeek, GLM): the routed ones first, then the shared.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedExperts {
    /// The routed ones.
    pub(crate) routed: FusedExperts,
    /// Width of the shared ones together.
    pub(crate) width: u64,
    /// The activation.
    pub(crate) activation: Activation,
    /// Whether their linears have a bias.
    pub(crate) bias: bool,
}

impl SharedExperts {
    /// Reads widths: `moe_intermediate_size` with this default, times `n_shared_experts` with this default.
    pub(crate) fn read(c: &Config<'_>, experts: u64, top_k: u64, width: u64, shared: u64) -> Result<Self, ModelError> {
        let width = c.size_or(&["moe_intermediate_size"], width)?;
        let activation = read::activation(c, "hidden_act", "silu")?;
        Ok(Self {
            routed: FusedExperts::new(experts, top_k, width, activation),
            width: width.saturating_mul(c.size_or(&["n_shared_experts"], shared)?),
            activation,
            bias: c.flag("mlp_bias", false)?,
        })
    }

    /// Runs both on `[batch, seq, hidden]`.
    pub(crate) fn run(
        &self,
        g: &mut Graph,
        input: &Value,
        routers: &mut RouterLogits,
        route: impl FnOnce(&mut Graph, &Value) -> Routing,
    ) -> Value {
        let flat = flatten(g, input);
        let routing = g.module("gate", |g| route(g, &flat));
        routers.record(&routing.logits);
        let mut hidden = self.routed.run(g, "experts", &flat, &routing.indices, &routing.weights);
        hidden = g.view(&hidden, input.shape());
        let shared = g.module("shared_experts", |g| {
            gated_mlp(g, input, ["gate_proj", "up_proj", "down_proj"], self.width, self.activation, self.bias)
        });
        g.add(&hidden, &shared)
    }
}

/// `[batch, seq, hidden] → [tokens, hidden]`.
pub(crate) fn flatten(g: &mut Graph, x: &Value) -> Value {
    g.view(x, [x.size(0).saturating_mul(x.size(1)), x.size(2)])
}
