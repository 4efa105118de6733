//! Seed-OSS: Llama with biases on queries, keys and values, and dropout after both halves of a layer.

use super::decoder::{self, Decoder, Defaults, Norms, Sizes, Vocabulary, pre_norm_layer, run_layers};
use crate::model::Family;
use crate::model::blocks::{attention, gated_mlp};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Mask, Norm};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// Seed-OSS.
pub const FAMILY: Family = Family {
    name: "Seed-OSS",
    model_types: &["seed_oss"],
    facts: Facts { attention: AttentionKernels::FlashAndFlex, tensor_plan: &[ATTENTION, GATED_MLP], ..Facts::DEFAULT },
    build: |c, task, g| decoder::build(c, task, g, &SeedOss::read(c)?),
};

struct SeedOss {
    sizes: Sizes,
    mlp_bias: bool,
    residual_dropout: f64,
}

impl SeedOss {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 155_136,
                hidden: 4096,
                width: 27648,
                layers: 64,
                heads: 80,
                kv_heads: Some(8),
                head_dim: Some(128),
                activation: "silu",
                tied: false,
            },
        )?;
        sizes.attention.qkv_bias = c.flag("attention_bias", true)?;
        sizes.attention.out_bias = c.flag("attention_out_bias", false)?;
        sizes.attention.dropout = c.number("attention_dropout", 0.1)?;
        Ok(Self { sizes, mlp_bias: c.flag("mlp_bias", false)?, residual_dropout: c.number("residual_dropout", 0.1)? })
    }
}

impl Decoder for SeedOss {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let Sizes { width, activation, attention, .. } = &self.sizes;
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.sizes.rope(g);
        let hidden = run_layers(g, embeddings.clone(), &self.sizes.no_windows(), |g, _, _, hidden| {
            let attend = |g: &mut Graph, x: &Value| {
                let attended = attention.run(g, x, Some(&rope), &mask);
                g.dropout(&attended, self.residual_dropout)
            };
            let mlp = |g: &mut Graph, x: &Value| {
                let names = ["gate_proj", "up_proj", "down_proj"];
                let narrow = gated_mlp(g, x, names, *width, *activation, self.mlp_bias);
                g.dropout(&narrow, self.residual_dropout)
            };
            pre_norm_layer(g, hidden, Norms::LLAMA, attend, mlp)
        });
        g.norm("norm", &hidden, Norm::Rms, false)
    }
}
