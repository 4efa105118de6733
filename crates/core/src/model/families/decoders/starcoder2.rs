//! StarCoder2: LayerNorms, biases everywhere, a plain MLP, and a window in every layer.

use super::decoder::{self, Decoder, Defaults, Norms, Sizes, Vocabulary, pre_norm_layer, run_layers};
use crate::model::Family;
use crate::model::blocks::attention::Masks;
use crate::model::blocks::{mlp, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::Norm;
use crate::model::tensor_plans::{ATTENTION, TensorRules, TensorStyle};
use crate::model::{Config, Graph, ModelError, Value};

/// StarCoder2.
pub const FAMILY: Family = Family {
    name: "StarCoder2",
    model_types: &["starcoder2"],
    facts: Facts { attention: AttentionKernels::FlashAndFlex, tensor_plan: &[ATTENTION, SPLIT], ..Facts::DEFAULT },
    build: |c, task, g| decoder::build(c, task, g, &StarCoder2::read(c)?),
};

/// How transformers splits its MLP.
const SPLIT: TensorRules = &[("mlp.c_fc", TensorStyle::Column), ("mlp.c_proj", TensorStyle::Row)];

struct StarCoder2 {
    sizes: Sizes,
    bias: bool,
    residual_dropout: f64,
    embedding_dropout: f64,
}

impl StarCoder2 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 49152,
                hidden: 3072,
                width: 12288,
                layers: 30,
                heads: 24,
                kv_heads: Some(2),
                head_dim: None,
                activation: "gelu_pytorch_tanh",
                tied: true,
            },
        )?;
        let bias = c.flag("use_bias", true)?;
        (sizes.attention.qkv_bias, sizes.attention.out_bias) = (bias, bias);
        sizes.attention.window = read::window(c, "sliding_window", None)?;
        Ok(Self {
            sizes,
            bias,
            residual_dropout: c.number("residual_dropout", 0.0)?,
            embedding_dropout: c.number("embedding_dropout", 0.0)?,
        })
    }
}

impl Decoder for StarCoder2 {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let Sizes { layers, width, activation, attention, .. } = &self.sizes;
        let norms = Norms { kind: Norm::Layer, bias: true, ..Norms::LLAMA };
        let windows = vec![attention.window; *layers as usize];
        let masks = Masks::new(g, &windows, false);
        let hidden = g.dropout(&embeddings, self.embedding_dropout);
        let rope = self.sizes.rope(g);
        let hidden = run_layers(g, hidden, &windows, |g, _, window, hidden| {
            let attend = |g: &mut Graph, x: &Value| {
                let attended = attention.run(g, x, Some(&rope), masks.of(window));
                g.dropout(&attended, self.residual_dropout)
            };
            let narrow = |g: &mut Graph, x: &Value| {
                let narrow = mlp(g, x, ["c_fc", "c_proj"], *width, *activation, self.bias);
                g.dropout(&narrow, self.residual_dropout)
            };
            pre_norm_layer(g, hidden, norms, attend, narrow)
        });
        g.norm("norm", &hidden, Norm::Layer, true)
    }
}
