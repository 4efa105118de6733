//! Arcee's AFM: Llama without gates, its activation the square of a ReLU.

use super::decoder::{self, Decoder, Defaults, Norms, Sizes, Vocabulary, pre_norm_layer, run_layers};
use crate::model::Family;
use crate::model::blocks::{attention, mlp};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Mask, Norm};
use crate::model::tensor_plans::{ATTENTION, MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// Arcee.
pub const FAMILY: Family = Family {
    name: "Arcee",
    model_types: &["arcee"],
    facts: Facts { attention: AttentionKernels::FlashAndFlex, tensor_plan: &[ATTENTION, MLP], ..Facts::DEFAULT },
    build: |c, task, g| decoder::build(c, task, g, &Arcee::read(c)?),
};

struct Arcee {
    sizes: Sizes,
    mlp_bias: bool,
}

impl Arcee {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 32000,
                hidden: 2560,
                width: 18432,
                layers: 32,
                heads: 32,
                kv_heads: None,
                head_dim: None,
                activation: "relu2",
                tied: false,
            },
        )?;
        Ok(Self { sizes, mlp_bias: c.flag("mlp_bias", false)? })
    }
}

impl Decoder for Arcee {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let Sizes { width, activation, attention, .. } = &self.sizes;
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.sizes.rope(g);
        let hidden = run_layers(g, embeddings.clone(), &self.sizes.no_windows(), |g, _, _, hidden| {
            let attend = |g: &mut Graph, x: &Value| attention.run(g, x, Some(&rope), &mask);
            let narrow =
                |g: &mut Graph, x: &Value| mlp(g, x, ["up_proj", "down_proj"], *width, *activation, self.mlp_bias);
            pre_norm_layer(g, hidden, Norms::LLAMA, attend, narrow)
        });
        g.norm("norm", &hidden, Norm::Rms, false)
    }
}
