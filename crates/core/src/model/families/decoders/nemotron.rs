//! Nemotron 4, Minitron: `1 + w` LayerNorms, half of each head rotated, no gates, squared ReLU.

use super::decoder::{self, Decoder, Defaults, Norms, Sizes, Vocabulary, pre_norm_layer, run_layers};
use crate::model::Family;
use crate::model::blocks::{attention, mlp, read};
use crate::model::facts::{AttentionKernels, Facts, Liger, LigerPatch, VllmFacts};
use crate::model::op::{Mask, Norm};
use crate::model::{Config, Graph, ModelError, Value};

/// Nemotron.
pub const FAMILY: Family = Family {
    name: "Nemotron",
    model_types: &["nemotron"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::Patched(LigerPatch { norms: &[], norms_in_place: false, rope: false, glu: false }),
        vllm: VllmFacts::ADAPTED,
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Nemotron::read(c)?),
};

struct Nemotron {
    sizes: Sizes,
    mlp_bias: bool,
}

impl Nemotron {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 256_000,
                hidden: 6144,
                width: 24576,
                layers: 32,
                heads: 48,
                kv_heads: None,
                head_dim: None,
                activation: "relu2",
                tied: false,
            },
        )?;
        sizes.attention.rotary_dim = read::rotary_dim(c, sizes.attention.head_dim, 0.5)?;
        sizes.attention.rotary_cut = attention::RotaryCut::Named;
        Ok(Self { sizes, mlp_bias: c.flag("mlp_bias", false)? })
    }
}

impl Decoder for Nemotron {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let Sizes { width, activation, attention, .. } = &self.sizes;
        let norms = Norms { kind: Norm::LayerPlusOne, bias: true, ..Norms::LLAMA };
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.sizes.rope(g);
        let hidden = run_layers(g, embeddings.clone(), &self.sizes.no_windows(), |g, _, _, hidden| {
            let attend = |g: &mut Graph, x: &Value| attention.run(g, x, Some(&rope), &mask);
            let narrow =
                |g: &mut Graph, x: &Value| mlp(g, x, ["up_proj", "down_proj"], *width, *activation, self.mlp_bias);
            pre_norm_layer(g, hidden, norms, attend, narrow)
        });
        g.norm("norm", &hidden, Norm::LayerPlusOne, true)
    }
}
