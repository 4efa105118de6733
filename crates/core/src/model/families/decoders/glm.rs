//! GLM-4-9B and GLM-4-0414: neighbouring pairs of half of each head rotated, one linear for gate and up.

use super::decoder::{self, Decoder, Defaults, Sizes, Vocabulary, run_layers};
use crate::model::Family;
use crate::model::blocks::{attention, joined_gated_mlp, read};
use crate::model::facts::{AttentionKernels, Facts, Liger, LigerPatch};
use crate::model::op::{Mask, Norm, Rotary};
use crate::model::tensor_plans::{ATTENTION, JOINED_MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// GLM-4-9B.
pub const GLM: Family = Family {
    name: "GLM",
    model_types: &["glm"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        tensor_plan: &[ATTENTION, JOINED_MLP],
        text: Some(|c| Ok(Box::new(Glm::read(c, false)?))),
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Glm::read(c, false)?),
};

/// GLM-4-0414: norms also after both halves of a layer.
pub const GLM4: Family = Family {
    name: "GLM-4",
    model_types: &["glm4"],
    facts: Facts {
        liger: Liger::Patched(LigerPatch {
            norms: &[
                "norm",
                "input_layernorm",
                "post_attention_layernorm",
                "post_mlp_layernorm",
                "post_self_attn_layernorm",
            ],
            norms_in_place: false,
            rope: false,
            ..LigerPatch::LLAMA
        }),
        text: Some(|c| Ok(Box::new(Glm::read(c, true)?))),
        ..GLM.facts
    },
    build: |c, task, g| decoder::build(c, task, g, &Glm::read(c, true)?),
};

/// GLM.
#[derive(Debug, Clone)]
pub(crate) struct Glm {
    sizes: Sizes,
    norms_after: bool,
}

impl Glm {
    /// Reads a GLM, with norms after both halves of a layer or without.
    pub(crate) fn read(c: &Config<'_>, norms_after: bool) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 151_552,
                hidden: 4096,
                width: 13696,
                layers: 40,
                heads: 32,
                kv_heads: Some(2),
                head_dim: Some(128),
                activation: "silu",
                tied: false,
            },
        )?;
        let attention = &mut sizes.attention;
        attention.qkv_bias = c.flag("attention_bias", true)?;
        attention.out_bias = false;
        attention.rotary = Some(Rotary::Interleaved);
        attention.rotary_dim = read::rotary_dim(c, attention.head_dim, 0.5)?;
        attention.rotary_pairs = true;
        attention.rotary_cut = attention::RotaryCut::Always;
        Ok(Self { sizes, norms_after })
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let Sizes { width, activation, attention, .. } = &self.sizes;
        let mut hidden = g.norm("input_layernorm", input, Norm::Rms, false);
        hidden = g.module("self_attn", |g| attention.run(g, &hidden, Some(rope), mask));
        if self.norms_after {
            hidden = g.norm("post_self_attn_layernorm", &hidden, Norm::Rms, false);
        }
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::Rms, false);
        hidden = g
            .module("mlp", |g| joined_gated_mlp(g, &hidden, ["gate_up_proj", "down_proj"], *width, *activation, false));
        if self.norms_after {
            hidden = g.norm("post_mlp_layernorm", &hidden, Norm::Rms, false);
        }
        g.add(&residual, &hidden)
    }
}

impl Decoder for Glm {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.sizes.rope(g);
        let windows = self.sizes.no_windows();
        let hidden = run_layers(g, embeddings.clone(), &windows, |g, _, _, hidden| self.layer(g, hidden, &rope, &mask));
        g.norm("norm", &hidden, Norm::Rms, false)
    }
}
