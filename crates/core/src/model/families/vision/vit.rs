//! ViT, the vision transformer.

use super::Patches;
use crate::model::Family;
use crate::model::blocks::head::{Labels, classification_head};
use crate::model::blocks::{EncoderAttention, encoder, mlp, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, EagerStyle, Norm, Op, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// ViT.
pub const FAMILY: Family = Family {
    name: "ViT",
    model_types: &["vit"],
    facts: Facts { attention: AttentionKernels::FlashAndFlex, ..Facts::DEFAULT },
    build,
};

pub(crate) struct Vit {
    patches: Patches,
    hidden: u64,
    layers: u64,
    width: u64,
    activation: Activation,
    dropout: f64,
    attention: EncoderAttention,
    pooler_size: u64,
    pooler_activation: Activation,
}

impl Vit {
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], 768)?;
        let heads = read::positive(c, &["num_attention_heads"], 12)?;
        let names = ["q_proj", "k_proj", "v_proj", "o_proj"];
        let mut attention = EncoderAttention::new(heads, read::head_dim(c, hidden, heads)?, names);
        let qkv_bias = c.flag("qkv_bias", true)?;
        attention.bias = [qkv_bias, qkv_bias, qkv_bias, true];
        attention.dropout = c.number("attention_probs_dropout_prob", 0.0)?;
        attention.eager = EagerStyle::Fp32Softmax;
        Ok(Self {
            patches: Patches::read(c, 224, 16)?,
            hidden,
            layers: c.layers(&["num_hidden_layers"], 12)?,
            width: c.size_or(&["intermediate_size"], 3072)?,
            activation: read::activation(c, "hidden_act", "gelu")?,
            dropout: c.number("hidden_dropout_prob", 0.0)?,
            attention,
            pooler_size: c.size_or(&["pooler_output_size"], hidden)?,
            pooler_activation: read::activation(c, "pooler_act", "tanh")?,
        })
    }

    /// The last hidden state, and the pooled one where there is a pooler.
    pub(crate) fn model(&self, g: &mut Graph, pooler: bool) -> (Value, Option<Value>) {
        let mut pixels = self.patches.input(g);
        pixels = g.to_model_type(&pixels);
        let embeddings = g.module("embeddings", |g| self.embeddings(g, &pixels));
        let mask = encoder::full_mask(g, &embeddings);
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            hidden = g.layer("layers", index, |g| self.layer(g, &hidden, &mask));
        }
        let output = g.norm("layernorm", &hidden, Norm::Layer, true);
        let pooled = pooler.then(|| {
            g.module("pooler", |g| {
                let first = g.slice(&output, 1, 0, 1);
                let first = g.squeeze(&first, 1);
                let pooled = g.linear("dense", &first, self.pooler_size, true);
                g.activation(self.pooler_activation, &pooled)
            })
        });
        (output, pooled)
    }

    fn embeddings(&self, g: &mut Graph, pixels: &Value) -> Value {
        let batch = pixels.size(0);
        self.patches.fixed(g, pixels);
        let class = g.parameter("cls_token", [1, 1, self.hidden], Role::Other);
        let mut embeddings =
            g.module("patch_embeddings", |g| self.patches.project(g, "projection", pixels, self.hidden, true));
        let class = g.read(class, [1, 1, self.hidden]);
        let class = g.expand(&class, [batch, 1, self.hidden]);
        embeddings = g.cat(&[&class, &embeddings], 1);
        let positions = [1, self.patches.count().saturating_add(1), self.hidden];
        let table = g.parameter("position_embeddings", positions, Role::Other);
        let table = g.read(table, positions);
        embeddings = g.add(&embeddings, &table);
        g.dropout(&embeddings, self.dropout)
    }

    fn layer(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let mut hidden = g.norm("layernorm_before", input, Norm::Layer, true);
        hidden = g.module("attention", |g| self.attention.run(g, &hidden, Some(mask)));
        hidden = g.dropout(&hidden, self.dropout);
        hidden = g.add(&hidden, input);
        let residual = hidden.clone();
        hidden = g.norm("layernorm_after", &hidden, Norm::Layer, true);
        hidden = g.module("mlp", |g| mlp(g, &hidden, ["fc1", "fc2"], self.width, self.activation, true));
        hidden = g.dropout(&hidden, self.dropout);
        g.add(&hidden, &residual)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let vit = Vit::read(c)?;
    if task == Task::ImageClassification {
        let labels = Labels::read(c)?;
        let (hidden, _) = g.module("vit", |g| vit.model(g, false));
        let first = g.slice(&hidden, 1, 0, 1);
        let first = g.squeeze(&first, 1);
        classification_head(g, "classifier", &first, &labels);
    } else {
        let (hidden, pooled) = vit.model(g, true);
        let outputs: Vec<&Value> = std::iter::once(&hidden).chain(&pooled).collect();
        g.run(Op::Return, &outputs, []);
    }
    Ok(())
}
