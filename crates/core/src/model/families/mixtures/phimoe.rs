//! Phi-3.5-MoE: LayerNorm, biases, and the "sparse mixer" that picks two experts one after the other.

use super::frame::{Context, Frame, RouterLogits};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, read};
use crate::model::facts::{AttentionKernels, Facts, VllmFacts};
use crate::model::op::{Binary, Norm, Op, Reduction, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Phi-3.5-MoE.
pub const FAMILY: Family = Family {
    name: "Phi-MoE",
    model_types: &["phimoe"],
    facts: Facts { attention: AttentionKernels::Flash, vllm: VllmFacts::ADAPTED, ..Facts::DEFAULT },
    build,
};

struct PhiMoe {
    frame: Frame,
    attention: SelfAttention,
    experts: FusedExperts,
    jitter: bool,
}

impl PhiMoe {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame {
            norm: Norm::Layer,
            norm_bias: true,
            head_bias: c.flag("lm_head_bias", false)?,
            ..Frame::read(c, 32064, 4096, 32)?
        };
        let heads = read::positive(c, &["num_attention_heads"], 32)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], 8)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, frame.hidden, heads)?);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.window = Some(c.size_or(&["sliding_window"], 0)?).filter(|&window| window > 0);
        let experts = FusedExperts::new(
            read::positive(c, &["num_local_experts"], 16)?,
            read::positive(c, &["num_experts_per_tok"], 2)?,
            c.size_or(&["intermediate_size"], 6400)?,
            read::activation(c, "hidden_act", "silu")?,
        );
        Ok(Self { frame, attention, experts, jitter: c.number("input_jitter_noise", 0.0)? > 0.0 })
    }

    fn model(&self, g: &mut Graph, routers: &mut RouterLogits) -> Value {
        let context = |g: &mut Graph| Context::causal(g, self.attention.window, self.attention.head_dim);
        self.frame.model(g, None, context, |g, _, input, context| {
            let attend = |g: &mut Graph, x: &Value| self.attention.run(g, x, Some(&context.rope), &context.mask);
            self.frame.layer(g, input, attend, |g, x| self.experts(g, x, routers))
        })
    }

    fn experts(&self, g: &mut Graph, input: &Value, routers: &mut RouterLogits) -> Value {
        let mut hidden = self.jittered(g, input);
        hidden = g.reshape(&hidden, [input.size(0).saturating_mul(input.size(1)), input.size(2)]);
        hidden = self.jittered(g, &hidden);
        let logits = g.linear("router", &hidden, self.experts.count, false);
        let (weights, indices) = mix(g, &logits);
        routers.record(&logits);
        let output = self.experts.run(g, "experts", &hidden, &indices, &weights);
        g.reshape(&output, input.shape())
    }

    fn jittered(&self, g: &mut Graph, x: &Value) -> Value {
        if self.jitter { g.run(Op::Jitter, &[x], x.shape()) } else { x.clone() }
    }
}

/// Two experts per token: the best by noisy scores, then the best of the rest.
fn mix(g: &mut Graph, scores: &Value) -> (Value, Value) {
    let (first_weight, first) = pick(g, scores, scores);
    let rest = g.run(Op::Scatter { dim: 1, in_place: false }, &[scores, &first], scores.shape());
    let (second_weight, second) = pick(g, scores, &rest);
    let weights = g.cat(&[&first_weight, &second_weight], -1);
    let indices = g.cat(&[&first, &second], -1);
    (weights, indices)
}

/// One expert per token and its weight, both `[tokens, 1]`.
fn pick(g: &mut Graph, scores: &Value, left: &Value) -> (Value, Value) {
    let column = scores.shape().with(-1, 1);
    let far = g.without_grad(|g| {
        let largest = g.reduce(Reduction::Max, left, -1, true);
        let factor = {
            let size = g.unary(Unary::Abs, scores);
            g.binary(Binary::Max, &size, &largest)
        };
        let difference = g.sub(&largest, scores);
        let relative = g.div(&difference, &factor);
        g.compare(&relative)
    });
    let mut gates = g.masked_fill(left, &far);
    // Labels stand for training, where the choice is noisy and the gradient has a function of its own.
    let training = g.inputs.labels;
    let chosen = if training {
        let noise = g.without_grad(|g| g.unary(Unary::Clone, &gates));
        let noisy = {
            let logs = g.without_grad(|g| g.unary(Unary::Log, &noise));
            g.sub(&gates, &logs)
        };
        drop(noise);
        g.run(Op::ArgMax, &[&noisy], column)
    } else {
        g.run(Op::ArgMax, &[left], column)
    };
    gates = g.softmax(&gates, -1, None);
    let mut weight = g.gather(&gates, 1, &chosen);
    if training {
        let scale = g.without_grad(|g| {
            let drawn = g.fill(DType::F32, column);
            g.type_as(&drawn, &gates)
        });
        weight = g.mul(&weight, &scale);
    }
    (weight, chosen)
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = PhiMoe::read(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, routers))
}
