//! BitNet b1.58: Llama with a norm before the last linear of both halves of a layer.

use super::decoder::{self, Decoder, Defaults, Norms, Sizes, Vocabulary, pre_norm_layer, run_layers};
use crate::model::Family;
use crate::model::blocks::attention::{self, attend, join_heads, rotate_whole};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Mask, Norm, Rotary};
use crate::model::{Config, Graph, ModelError, Value};

/// BitNet.
pub const FAMILY: Family = Family {
    name: "BitNet",
    model_types: &["bitnet"],
    facts: Facts { attention: AttentionKernels::FlashAndFlex, tasks: super::UNSCORED, ..Facts::DEFAULT },
    build: |c, task, g| decoder::build(c, task, g, &BitNet::read(c)?),
};

struct BitNet {
    sizes: Sizes,
}

impl BitNet {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 128_256,
                hidden: 2560,
                width: 6912,
                layers: 30,
                heads: 20,
                kv_heads: Some(5),
                head_dim: None,
                activation: "relu2",
                tied: false,
            },
        )?;
        Ok(Self { sizes })
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let attention = &self.sizes.attention;
        let mut query = attention.project(g, hidden, 0, attention.heads);
        let mut key = attention.project(g, hidden, 1, attention.kv_heads);
        let mut value = attention.project(g, hidden, 2, attention.kv_heads);
        (query, key) = rotate_whole(g, Rotary::Half, &query, &key, &rope.0, &rope.1);
        (key, value) = g.cache(attention.cache(), &key, &value);
        let attended = attend(g, attention.spec(None), &query, &key, &value, Some(mask));
        let mut joined = join_heads(g, attended);
        joined = g.norm("attn_sub_norm", &joined, Norm::Rms, false);
        g.linear("o_proj", &joined, hidden.size(-1), attention.out_bias)
    }

    fn mlp(&self, g: &mut Graph, x: &Value) -> Value {
        let product = {
            let gate = {
                let gate = g.linear("gate_proj", x, self.sizes.width, false);
                g.activation(self.sizes.activation, &gate)
            };
            let up = g.linear("up_proj", x, self.sizes.width, false);
            g.mul(&gate, &up)
        };
        let normed = g.norm("ffn_sub_norm", &product, Norm::Rms, false);
        drop(product);
        g.linear("down_proj", &normed, x.size(-1), false)
    }
}

impl Decoder for BitNet {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.sizes.rope(g);
        let hidden = run_layers(g, embeddings.clone(), &self.sizes.no_windows(), |g, _, _, hidden| {
            let attend = |g: &mut Graph, x: &Value| self.attention(g, x, &rope, &mask);
            pre_norm_layer(g, hidden, Norms::LLAMA, attend, |g, x| self.mlp(g, x))
        });
        g.norm("norm", &hidden, Norm::Rms, false)
    }
}
