//! gpt-oss (20B, 120B): attention sinks, windows on every other layer, biased experts.

use super::frame::{Frame, RouterLogits};
use super::latent::turn;
use super::routing::Routing;
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, attention, read};
use crate::model::facts::{Facts, Liger, VllmFacts};
use crate::model::op::{Activation, ExpertStyle, LinearLayout, Mask, Norm, Op, Role, RotaryTable};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// gpt-oss.
pub const FAMILY: Family = Family {
    name: "gpt-oss",
    model_types: &["gpt_oss"],
    facts: Facts {
        liger: Liger::NotSimulated,
        // `GptOssForCausalLMConfig` of models/config.py, `OAIAttention` of gpt_oss.py.
        vllm: VllmFacts { largest_graph: Some(1024), turns_in_single: true, ..VllmFacts::DEFAULT },
        ..Facts::DEFAULT
    },
    build,
};

struct GptOss {
    frame: Frame,
    attention: SelfAttention,
    window: u64,
    sliding: Vec<bool>,
    experts: FusedExperts,
}

impl GptOss {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame { norm: Norm::RmsWeightFirst, ..Frame::read(c, 201088, 2880, 36)? };
        let heads = read::positive(c, &["num_attention_heads"], 64)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], 8)?;
        let mut attention = SelfAttention::new(heads, kv_heads, c.size_or(&["head_dim"], 64)?);
        attention.qkv_bias = c.flag("attention_bias", true)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        let kinds = c.strings("layer_types")?;
        let sliding = |index: u64| match &kinds {
            Some(kinds) => kinds.get(index as usize) == Some(&"sliding_attention"),
            None => index.is_multiple_of(2),
        };
        let mut experts = FusedExperts::new(
            read::positive(c, &["num_local_experts"], 128)?,
            read::positive(c, &["num_experts_per_tok", "experts_per_token"], 4)?,
            c.size_or(&["intermediate_size"], 2880)?,
            Activation::Silu,
        );
        experts.bias = true;
        experts.transposed = true;
        experts.style = ExpertStyle::InterfaceClamped;
        Ok(Self {
            window: c.size_or(&["sliding_window"], 128)?,
            sliding: (0..frame.layers).map(sliding).collect(),
            experts,
            frame,
            attention,
        })
    }

    fn model(&self, g: &mut Graph, routers: &mut RouterLogits) -> Value {
        let context = |g: &mut Graph| {
            let masks = [Mask::CausalEager, Mask::SlidingEager(self.window)].map(|kind| attention::mask(g, kind));
            let table = RotaryTable { dim: self.attention.head_dim, axes: 1, doubled: false, fp32: false };
            (masks, g.rotary_table("rotary_emb", g.inputs.seq, table))
        };
        self.frame.model(g, None, context, |g, index, input, (masks, rope)| {
            let sliding = self.sliding.get(index as usize).copied().unwrap_or(false);
            let attend = |g: &mut Graph, x: &Value| self.attend(g, x, rope, &masks[usize::from(sliding)], sliding);
            self.frame.layer(g, input, attend, |g, x| {
                let flat = g.reshape(x, [x.size(0).saturating_mul(x.size(1)), x.size(2)]);
                let routing = g.module("router", |g| self.route(g, &flat));
                routers.record(&routing.logits);
                let output = self.experts.run(g, "experts", &flat, &routing.indices, &routing.weights);
                g.reshape(&output, x.shape())
            })
        })
    }

    fn attend(
        &self,
        g: &mut Graph,
        hidden: &Value,
        (cosine, sine): &(Value, Value),
        mask: &Value,
        sliding: bool,
    ) -> Value {
        let own = &self.attention;
        let sinks = g.parameter("sinks", [own.heads], Role::Other);
        let mut query = own.project(g, hidden, 0, own.heads);
        let mut key = own.project(g, hidden, 1, own.kv_heads);
        let mut value = own.project(g, hidden, 2, own.kv_heads);
        let (cosine, sine) = (g.unsqueeze(cosine, 1), g.unsqueeze(sine, 1));
        (query, key) = (rotate(g, &query, &cosine, &sine), rotate(g, &key, &cosine, &sine));
        let window = sliding.then_some(self.window);
        (key, value) = g.cache(attention::grouped_cache(own.kv_heads, own.head_dim, window), &key, &value);
        let spec = crate::model::op::Attention { sdpa: false, ..own.spec(Some(sinks)) };
        let attended = attention::attend(g, spec, &query, &key, &value, Some(mask));
        own.output(g, attended, hidden.size(-1))
    }

    fn route(&self, g: &mut Graph, x: &Value) -> Routing {
        let count = self.experts.count;
        let weight = g.parameter("weight", [count, x.size(-1)], Role::Other);
        let bias = Some(g.parameter("bias", [count], Role::Bias));
        let op = Op::Linear { weight, bias, layout: LinearLayout::OutIn };
        let logits = g.run(op, &[x], x.shape().with(-1, count));
        let (best, indices) = g.top_k(&logits, self.experts.top_k);
        let weights = g.softmax(&best, 1, None);
        Routing { logits, weights, indices }
    }
}

fn rotate(g: &mut Graph, x: &Value, cosine: &Value, sine: &Value) -> Value {
    let half = x.size(-1) / 2;
    let (first, second) = g.split2(x, -1, half, half);
    turn(g, &first, &second, cosine, sine)
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = GptOss::read(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, routers))
}
