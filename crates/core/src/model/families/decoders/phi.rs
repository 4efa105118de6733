//! Phi-1, Phi-1.5, Phi-2: one LayerNorm per layer for an attention and an MLP side by side, biases everywhere.

use super::decoder::{self, Decoder, Defaults, Sizes, Vocabulary, run_layers};
use crate::model::Family;
use crate::model::blocks::attention::{self, attend, rotate_part};
use crate::model::blocks::{mlp, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Mask, Norm, Rotary};
use crate::model::tensor_plans::{TensorRules, TensorStyle};
use crate::model::{Config, Graph, ModelError, Value};

/// Phi.
pub const FAMILY: Family = Family {
    name: "Phi",
    model_types: &["phi"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        lora: &["q_proj", "v_proj", "fc1", "fc2"],
        vera: Some(&["q_proj", "v_proj"]),
        ia3: &["q_proj", "v_proj", "fc2"],
        ia3_feedforward: &["fc2"],
        tensor_plan: &[SPLIT],
        text: Some(|c| Ok(Box::new(Phi::read(c)?))),
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Phi::read(c)?),
};

/// How transformers splits its layers.
const SPLIT: TensorRules = &[
    ("self_attn.q_proj", TensorStyle::Column),
    ("self_attn.k_proj", TensorStyle::Column),
    ("self_attn.v_proj", TensorStyle::Column),
    ("self_attn.dense", TensorStyle::Row),
    ("mlp.fc1", TensorStyle::Column),
    ("mlp.fc2", TensorStyle::Row),
];

/// Phi-1 to Phi-2.
#[derive(Debug, Clone)]
pub(crate) struct Phi {
    sizes: Sizes,
    head_norms: bool,
    residual_dropout: f64,
    embedding_dropout: f64,
}

impl Phi {
    /// Reads a Phi.
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 51200,
                hidden: 2048,
                width: 8192,
                layers: 24,
                heads: 32,
                kv_heads: None,
                head_dim: None,
                activation: "gelu_new",
                tied: false,
            },
        )?;
        let attention = &mut sizes.attention;
        attention.names = ["q_proj", "k_proj", "v_proj", "dense"];
        (attention.qkv_bias, attention.out_bias) = (true, true);
        attention.rotary_dim = read::rotary_dim(c, attention.head_dim, 0.5)?;
        Ok(Self {
            sizes,
            head_norms: c.flag("qk_layernorm", false)?,
            residual_dropout: c.number("resid_pdrop", 0.0)?,
            embedding_dropout: c.number("embd_pdrop", 0.0)?,
        })
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let hidden = g.norm("input_layernorm", input, Norm::Layer, true);
        let mut attended = g.module("self_attn", |g| self.attention(g, &hidden, rope, mask));
        attended = g.dropout(&attended, self.residual_dropout);
        let fed = {
            let names = ["fc1", "fc2"];
            let narrow = g.module("mlp", |g| mlp(g, &hidden, names, self.sizes.width, self.sizes.activation, true));
            g.dropout(&narrow, self.residual_dropout)
        };
        let both = g.add(&attended, &fed);
        g.add(&both, input)
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let attention = &self.sizes.attention;
        let mut query = attention.project(g, hidden, 0, attention.heads);
        let mut key = attention.project(g, hidden, 1, attention.kv_heads);
        let mut value = attention.project(g, hidden, 2, attention.kv_heads);
        if self.head_norms {
            query = g.norm("q_layernorm", &query, Norm::Layer, true);
            key = g.norm("k_layernorm", &key, Norm::Layer, true);
        }
        // The code keeps names for the parts to the end.
        let _parts;
        (query, key, _parts) = rotate_part(g, Rotary::Half, attention.rotary_dim, &query, &key, &rope.0, &rope.1);
        (key, value) = g.cache(attention.cache(), &key, &value);
        let attended = attend(g, attention.spec(None), &query, &key, &value, Some(mask));
        attention.output(g, attended, hidden.size(-1))
    }
}

impl Decoder for Phi {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, mut embeddings: Value) -> Value {
        let mask = attention::mask(g, Mask::Causal);
        embeddings = g.dropout(&embeddings, self.embedding_dropout);
        let rope = self.sizes.rope(g);
        let windows = self.sizes.no_windows();
        let hidden = run_layers(g, embeddings.clone(), &windows, |g, _, _, hidden| self.layer(g, hidden, &rope, &mask));
        g.norm("final_layernorm", &hidden, Norm::Layer, true)
    }

    fn head_bias(&self) -> bool {
        true
    }
}
