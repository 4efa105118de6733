//! Granite 3: Llama with multipliers on embeddings, residuals and logits.

use super::decoder::{self, Decoder, Defaults, Sizes, Vocabulary, run_layers};
use crate::model::Family;
use crate::model::blocks::{attention, gated_mlp};
use crate::model::facts::{AttentionKernels, Facts, Liger, VllmFacts};
use crate::model::op::{Binary, Mask, Norm};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// Granite.
pub const FAMILY: Family = Family {
    name: "Granite",
    model_types: &["granite"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::NotSimulated,
        tensor_plan: &[ATTENTION, GATED_MLP],
        text: Some(|c| Ok(Box::new(Granite::read(c)?))),
        tasks: super::UNSCORED,
        vllm: VllmFacts::ADAPTED,
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Granite::read(c)?),
};

/// Granite 3.
#[derive(Debug, Clone)]
pub(crate) struct Granite {
    sizes: Sizes,
    mlp_bias: bool,
}

impl Granite {
    /// Reads a Granite.
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 32000,
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
        Ok(Self { sizes, mlp_bias: c.flag("mlp_bias", false)? })
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let Sizes { width, activation, attention, .. } = &self.sizes;
        let mut hidden = g.norm("input_layernorm", input, Norm::Rms, false);
        hidden = g.module("self_attn", |g| attention.run(g, &hidden, Some(rope), mask));
        hidden = add_scaled(g, input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::Rms, false);
        let names = ["gate_proj", "up_proj", "down_proj"];
        hidden = g.module("mlp", |g| gated_mlp(g, &hidden, names, *width, *activation, self.mlp_bias));
        add_scaled(g, &residual, &hidden)
    }
}

impl Decoder for Granite {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, mut embeddings: Value) -> Value {
        embeddings = g.scale(&embeddings);
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.sizes.rope(g);
        let windows = self.sizes.no_windows();
        let hidden = run_layers(g, embeddings.clone(), &windows, |g, _, _, hidden| self.layer(g, hidden, &rope, &mask));
        g.norm("norm", &hidden, Norm::Rms, false)
    }

    fn finish_logits(&self, g: &mut Graph, logits: Value) -> Value {
        g.scalar(Binary::Div, &logits)
    }
}

/// `residual + x * multiplier`.
fn add_scaled(g: &mut Graph, residual: &Value, x: &Value) -> Value {
    let scaled = g.scale(x);
    g.add(residual, &scaled)
}
