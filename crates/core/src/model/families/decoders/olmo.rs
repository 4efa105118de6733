//! OLMo 1: LayerNorms without weights, and queries, keys and values that may be clipped.

use super::decoder::{self, Decoder, Defaults, Norms, Sizes, Vocabulary, llama_mlp, pre_norm_layer, run_layers};
use crate::model::Family;
use crate::model::blocks::attention::{self, attend, rotate_whole, split_heads};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Mask, Norm, Rotary, Unary};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// OLMo.
pub const FAMILY: Family = Family {
    name: "OLMo",
    model_types: &["olmo"],
    facts: Facts { attention: AttentionKernels::FlashAndFlex, tensor_plan: &[ATTENTION, GATED_MLP], ..Facts::DEFAULT },
    build: |c, task, g| decoder::build(c, task, g, &Olmo::read(c)?),
};

struct Olmo {
    sizes: Sizes,
    clips: bool,
}

impl Olmo {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 50304,
                hidden: 4096,
                width: 11008,
                layers: 32,
                heads: 32,
                kv_heads: None,
                head_dim: None,
                activation: "silu",
                tied: false,
            },
        )?;
        Ok(Self { sizes, clips: c.has("clip_qkv") })
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let attention = &self.sizes.attention;
        let (heads, kv_heads, dim) = (attention.heads, attention.kv_heads, attention.head_dim);
        let mut query = g.linear("q_proj", hidden, heads.saturating_mul(dim), attention.qkv_bias);
        let mut key = g.linear("k_proj", hidden, kv_heads.saturating_mul(dim), attention.qkv_bias);
        let mut value = g.linear("v_proj", hidden, kv_heads.saturating_mul(dim), attention.qkv_bias);
        if self.clips {
            // In place in the source; autograd then keeps a copy of the input, which is what these cost.
            for x in [&mut query, &mut key, &mut value] {
                *x = g.unary(Unary::Clamp, x);
            }
        }
        query = split_heads(g, query, heads, dim);
        key = split_heads(g, key, kv_heads, dim);
        value = split_heads(g, value, kv_heads, dim);
        (query, key) = rotate_whole(g, Rotary::HalfPromoted, &query, &key, &rope.0, &rope.1);
        (key, value) = g.cache(attention.cache(), &key, &value);
        let attended = attend(g, attention.spec(None), &query, &key, &value, Some(mask));
        attention.output(g, attended, hidden.size(-1))
    }
}

impl Decoder for Olmo {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let norms = Norms { kind: Norm::LayerBare, ..Norms::LLAMA };
        let mask = attention::mask(g, Mask::Causal);
        let rope = decoder::rope(g, self.sizes.attention.rotary_dim, true);
        let hidden = run_layers(g, embeddings.clone(), &self.sizes.no_windows(), |g, _, _, hidden| {
            let attend = |g: &mut Graph, x: &Value| self.attention(g, x, &rope, &mask);
            pre_norm_layer(g, hidden, norms, attend, |g, x| llama_mlp(g, x, &self.sizes))
        });
        g.norm("norm", &hidden, Norm::LayerBare, false)
    }
}
