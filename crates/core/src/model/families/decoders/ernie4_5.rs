//! ERNIE 4.5 (dense): Llama that rotates neighbouring pairs in fp32.

use super::decoder::{self, Decoder, Defaults, Norms, Sizes, Vocabulary, pre_norm_layer, run_layers};
use crate::model::Family;
use crate::model::blocks::{attention, gated_mlp};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Mask, Norm, Rotary};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// ERNIE 4.5, dense.
pub const FAMILY: Family = Family {
    name: "ERNIE 4.5",
    model_types: &["ernie4_5"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        tensor_plan: &[ATTENTION, GATED_MLP],
        tasks: super::UNSCORED,
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Ernie::read(c)?),
};

struct Ernie {
    sizes: Sizes,
    bias: bool,
}

impl Ernie {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 103_424,
                hidden: 1024,
                width: 3072,
                layers: 18,
                heads: 16,
                kv_heads: Some(2),
                head_dim: Some(128),
                activation: "silu",
                tied: true,
            },
        )?;
        let bias = c.flag("use_bias", false)?;
        (sizes.attention.qkv_bias, sizes.attention.out_bias) = (bias, bias);
        sizes.attention.dropout = 0.0;
        sizes.attention.rotary = Some(Rotary::InterleavedPromoted);
        sizes.attention.rotary_pairs = true;
        Ok(Self { sizes, bias })
    }
}

impl Decoder for Ernie {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let Sizes { width, activation, attention, .. } = &self.sizes;
        let mask = attention::mask(g, Mask::Causal);
        let rope = decoder::rope(g, attention.rotary_dim, true);
        let hidden = run_layers(g, embeddings.clone(), &self.sizes.no_windows(), |g, _, _, hidden| {
            let attend = |g: &mut Graph, x: &Value| attention.run(g, x, Some(&rope), &mask);
            let names = ["gate_proj", "up_proj", "down_proj"];
            let mlp = |g: &mut Graph, x: &Value| gated_mlp(g, x, names, *width, *activation, self.bias);
            pre_norm_layer(g, hidden, Norms::LLAMA, attend, mlp)
        });
        g.norm("norm", &hidden, Norm::Rms, false)
    }
}
