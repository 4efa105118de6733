//! Jais 2: Llama with LayerNorm and biases, without gates, its activation the square of a ReLU.

use super::decoder::{self, Decoder, Defaults, Norms, Sizes, Vocabulary, pre_norm_layer, run_layers};
use crate::model::Family;
use crate::model::blocks::{attention, mlp};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Mask, Norm};
use crate::model::tensor_plans::{ATTENTION, MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// Jais 2.
pub const FAMILY: Family = Family {
    name: "Jais 2",
    model_types: &["jais2"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        tensor_plan: &[ATTENTION, MLP],
        tasks: super::UNSCORED,
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Jais2::read(c)?),
};

struct Jais2 {
    sizes: Sizes,
    mlp_bias: bool,
}

impl Jais2 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 150_272,
                hidden: 3328,
                width: 26624,
                layers: 32,
                heads: 26,
                kv_heads: None,
                head_dim: None,
                activation: "relu2",
                tied: false,
            },
        )?;
        let bias = c.flag("attention_bias", true)?;
        (sizes.attention.qkv_bias, sizes.attention.out_bias) = (bias, bias);
        Ok(Self { sizes, mlp_bias: c.flag("mlp_bias", true)? })
    }
}

impl Decoder for Jais2 {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let Sizes { width, activation, attention, .. } = &self.sizes;
        let norms = Norms { kind: Norm::Layer, bias: true, ..Norms::LLAMA };
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.sizes.rope(g);
        let hidden = run_layers(g, embeddings.clone(), &self.sizes.no_windows(), |g, _, _, hidden| {
            let attend = |g: &mut Graph, x: &Value| attention.run(g, x, Some(&rope), &mask);
            let narrow =
                |g: &mut Graph, x: &Value| mlp(g, x, ["up_proj", "down_proj"], *width, *activation, self.mlp_bias);
            pre_norm_layer(g, hidden, norms, attend, narrow)
        });
        g.norm("norm", &hidden, Norm::Layer, true)
    }
}
