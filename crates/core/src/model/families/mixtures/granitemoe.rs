//! Granite 3 MoE (1B-A400M, 3B-A800M): multipliers on embeddings, residuals and logits.

use super::frame::{Context, Frame};
use super::routing::{Routing, flatten, project};
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, read};
use crate::model::facts::{AttentionKernels, Facts, VllmFacts};
use crate::model::op::Input;
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Granite MoE.
pub const FAMILY: Family = Family {
    name: "Granite MoE",
    model_types: &["granitemoe"],
    facts: Facts { attention: AttentionKernels::FlashAndFlex, vllm: VllmFacts::ADAPTED, ..Facts::DEFAULT },
    build,
};

struct GraniteMoe {
    frame: Frame,
    attention: SelfAttention,
    experts: FusedExperts,
}

impl GraniteMoe {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        // Router logits are never recorded, so that their loss is a plain zero.
        let frame = Frame { scaled_logits: true, router_loss: false, ..Frame::read(c, 32000, 4096, 32)? };
        let heads = read::positive(c, &["num_attention_heads"], 32)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], heads)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, frame.hidden, heads)?);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        let experts = FusedExperts::new(
            read::positive(c, &["num_local_experts"], 8)?,
            read::positive(c, &["num_experts_per_tok"], 2)?,
            c.size_or(&["intermediate_size"], 11008)?,
            read::activation(c, "hidden_act", "silu")?,
        );
        Ok(Self { frame, attention, experts })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let mut embeddings = g.embedding("embed_tokens", &ids, self.frame.vocab, self.frame.hidden);
        embeddings = g.scale(&embeddings);
        let context = |g: &mut Graph| Context::causal(g, None, self.attention.head_dim);
        self.frame.model(g, Some(embeddings), context, |g, _, input, context| self.layer(g, input, context))
    }

    fn layer(&self, g: &mut Graph, input: &Value, context: &Context) -> Value {
        let mut hidden = g.norm("input_layernorm", input, self.frame.norm, false);
        hidden = g.module("self_attn", |g| self.attention.run(g, &hidden, Some(&context.rope), &context.mask));
        hidden = add_scaled(g, input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, self.frame.norm, false);
        hidden = g.module("block_sparse_moe", |g| {
            let flat = flatten(g, &hidden);
            let routing = g.module("router", |g| self.route(g, &flat));
            let output = self.experts.run(g, "experts", &flat, &routing.indices, &routing.weights);
            g.view(&output, hidden.shape())
        });
        add_scaled(g, &residual, &hidden)
    }

    /// The largest logits first, then softmax over those.
    fn route(&self, g: &mut Graph, x: &Value) -> Routing {
        let logits = {
            let narrow = project(g, x, self.experts.count);
            g.float(&narrow)
        };
        let (best, indices) = g.top_k(&logits, self.experts.top_k);
        let weights = {
            let soft = g.softmax(&best, -1, None);
            g.type_as(&soft, x)
        };
        Routing { logits, weights, indices }
    }
}

fn add_scaled(g: &mut Graph, residual: &Value, x: &Value) -> Value {
    let scaled = g.scale(x);
    g.add(residual, &scaled)
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = GraniteMoe::read(c)?;
    model.frame.build(c, g, task, |g, _| model.model(g))
}
