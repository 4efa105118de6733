//! BLIP-2 over OPT: a ViT, a Q-Former whose queries read the image, one linear, the text model.

use super::parts::{dimension, patches, placeholder_mask, resized_pixels, tower};
use crate::model::Family;
use crate::model::blocks::{EncoderAttention, attention, causal_lm_head, encoder, mlp, read};
use crate::model::facts::Facts;
use crate::model::families::gpt::opt::Opt;
use crate::model::families::vision::Patches;
use crate::model::op::{Activation, Attention, EagerStyle, Input, Norm, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// BLIP-2.
pub const FAMILY: Family = Family {
    name: "BLIP-2",
    model_types: &["blip-2"],
    facts: Facts {
        lora: &["q", "v", "q_proj", "v_proj"],
        registration: &[&["class_embedding", "position_embedding", "patch_embedding"]],
        ..Facts::DEFAULT
    },
    build,
};

struct Vision {
    patches: Patches,
    hidden: u64,
    heads: u64,
    layers: u64,
    width: u64,
    activation: Activation,
    qkv_bias: bool,
    dropout: f64,
}

impl Vision {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            patches: patches(c, 224, 14)?,
            hidden: dimension(c, &["hidden_size"], 1408)?,
            heads: dimension(c, &["num_attention_heads"], 16)?,
            layers: c.layers(&["num_hidden_layers"], 39)?,
            width: c.size_or(&["intermediate_size"], 6144)?,
            activation: read::activation(c, "hidden_act", "gelu")?,
            qkv_bias: c.flag("qkv_bias", true)?,
            dropout: c.number("attention_dropout", 0.0)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let pixels = resized_pixels(g, &self.patches);
        let mut hidden = g.module("embeddings", |g| self.embeddings(g, &pixels));
        g.module("encoder", |g| {
            for index in 0..self.layers {
                hidden = g.layer("layers", index, |g| self.layer(g, &hidden));
            }
        });
        hidden = g.norm("post_layernorm", &hidden, Norm::Layer, true);
        let first = g.slice(&hidden, 1, 0, 1);
        let first = g.squeeze(&first, 1);
        let _pooled = g.norm("post_layernorm", &first, Norm::Layer, true);
        hidden
    }

    fn embeddings(&self, g: &mut Graph, pixels: &Value) -> Value {
        let class = g.parameter("class_embedding", [1, 1, self.hidden], Role::Other);
        let rows = {
            let pixels = g.to_model_type(pixels);
            self.patches.project(g, "patch_embedding", &pixels, self.hidden, true)
        };
        let class = g.read(class, [1, 1, self.hidden]);
        let class = g.expand(&class, [pixels.size(0), 1, self.hidden]);
        let embeddings = g.cat(&[&class, &rows], 1);
        let shape = [1, self.patches.count().saturating_add(1), self.hidden];
        let positions = g.parameter("position_embedding", shape, Role::Other);
        let positions = g.read(positions, shape);
        g.add(&embeddings, &positions)
    }

    fn layer(&self, g: &mut Graph, input: &Value) -> Value {
        let mut hidden = g.norm("layer_norm1", input, Norm::Layer, true);
        hidden = g.module("self_attn", |g| self.attend(g, &hidden));
        hidden = g.add(&hidden, input);
        let residual = hidden.clone();
        hidden = g.norm("layer_norm2", &hidden, Norm::Layer, true);
        hidden = g.module("mlp", |g| mlp(g, &hidden, ["fc1", "fc2"], self.width, self.activation, true));
        g.add(&hidden, &residual)
    }

    fn attend(&self, g: &mut Graph, hidden: &Value) -> Value {
        let (batch, rows) = (hidden.size(0), hidden.size(1));
        let mut joined = g.linear("qkv", hidden, self.hidden.saturating_mul(3), self.qkv_bias);
        joined = g.reshape(&joined, [batch, rows, 3, self.heads, self.hidden / self.heads]);
        joined = g.permute(&joined, &[2, 0, 3, 1, 4]);
        let [query, key, value] = [0, 1, 2].map(|which| {
            let part = g.slice(&joined, 0, which, 1);
            g.squeeze(&part, 0)
        });
        let spec = Attention {
            groups: 1,
            causal: false,
            dropout_per_mille: (self.dropout.clamp(0.0, 1.0) * 1000.0).round() as u32,
            softcap: false,
            sinks: None,
            eager: EagerStyle::PlainSoftmax,
            sdpa: true,
        };
        let attended = attention::attend(g, spec, &query, &key, &value, None);
        let joined = attention::join_heads(g, attended);
        g.linear("projection", &joined, self.hidden, true)
    }
}

/// The Q-Former, which transformers keeps in fp32.
struct QFormer {
    hidden: u64,
    layers: u64,
    width: u64,
    activation: Activation,
    dropout: f64,
    /// Every so many layers the queries read the image.
    frequency: u64,
    /// Width of the image's rows.
    seen: u64,
    /// Whether there is an MLP for text beside the one for queries.
    text_mlp: bool,
    attention: EncoderAttention,
}

impl QFormer {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = dimension(c, &["hidden_size"], 768)?;
        let heads = dimension(c, &["num_attention_heads"], 12)?;
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["query", "key", "value", ""]);
        attention.dropout = c.number("attention_probs_dropout_prob", 0.1)?;
        Ok(Self {
            hidden,
            layers: c.layers(&["num_hidden_layers"], 12)?,
            width: c.size_or(&["intermediate_size"], 3072)?,
            activation: read::activation(c, "hidden_act", "gelu")?,
            dropout: c.number("hidden_dropout_prob", 0.1)?,
            frequency: dimension(c, &["cross_attention_frequency"], 2)?,
            seen: dimension(c, &["encoder_hidden_size"], 1408)?,
            text_mlp: c.flag("use_qformer_text_input", false)?,
            attention,
        })
    }

    fn model(&self, g: &mut Graph, queries: &Value, image: &Value) -> Value {
        if image.size(-1) != self.seen {
            g.fail(format!("qformer_config.encoder_hidden_size is {}, the tower's is {}", self.seen, image.size(-1)));
        }
        let mut hidden = g.norm("layernorm", queries, Norm::Layer, true);
        hidden = g.dropout(&hidden, self.dropout);
        let mask = encoder::full_mask(g, &hidden);
        let image = g.type_as(image, &hidden);
        g.module("encoder", |g| {
            for index in 0..self.layers {
                hidden = g.layer("layer", index, |g| self.layer(g, index, &hidden, &image, &mask));
            }
        });
        hidden
    }

    fn layer(&self, g: &mut Graph, index: u64, input: &Value, image: &Value, mask: &Value) -> Value {
        let mut hidden = g.module("attention", |g| self.attend(g, input, input, Some(mask)));
        hidden = g.slice(&hidden, 1, 0, hidden.size(1));
        if index.is_multiple_of(self.frequency) {
            hidden = g.module("crossattention", |g| self.attend(g, &hidden, image, None));
        }
        if self.text_mlp {
            g.declare_only(|g| self.mlp(g, &hidden, "intermediate", "output"));
        }
        self.mlp(g, &hidden, "intermediate_query", "output_query")
    }

    fn attend(&self, g: &mut Graph, hidden: &Value, over: &Value, mask: Option<&Value>) -> Value {
        let attended = g.module("attention", |g| {
            let query = self.attention.project(g, hidden, 0);
            let key = self.attention.project(g, over, 1);
            let value = self.attention.project(g, over, 2);
            let attended = attention::attend(g, self.attention.spec(), &query, &key, &value, mask);
            attention::join_heads(g, attended)
        });
        g.module("output", |g| self.output(g, &attended, hidden))
    }

    fn mlp(&self, g: &mut Graph, input: &Value, wide: &str, narrow: &str) -> Value {
        let mut hidden = g.linear(&format!("{wide}.dense"), input, self.width, true);
        hidden = g.activation(self.activation, &hidden);
        g.module(narrow, |g| self.output(g, &hidden, input))
    }

    fn output(&self, g: &mut Graph, hidden: &Value, input: &Value) -> Value {
        let mut hidden = g.linear("dense", hidden, self.hidden, true);
        hidden = g.dropout(&hidden, self.dropout);
        hidden = g.add(&hidden, input);
        g.norm("LayerNorm", &hidden, Norm::Layer, true)
    }
}

fn build(c: &Config<'_>, _task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let text_config = c.section("text_config");
    if text_config.str_or("model_type", "opt") != "opt" {
        return Err(text_config.refuse("model_type", "opt, the text model of BLIP-2 that vramcast knows"));
    }
    let vision = Vision::read(&c.section("vision_config"))?;
    let qformer = QFormer::read(&c.section("qformer_config"))?;
    let opt = Opt::read(&text_config)?;
    let count = dimension(c, &["num_query_tokens"], 32)?;
    let queries = g.parameter("query_tokens", [1, count, qformer.hidden], Role::Other);
    let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
    let given = g.inputs.images.is_some();
    let features = tower(g, given, |g| {
        let image = g.module("vision_model", |g| vision.model(g));
        let queries = g.read(queries, [1, count, qformer.hidden]);
        let queries = g.expand(&queries, [image.size(0), count, qformer.hidden]);
        let seen = g.module("qformer", |g| qformer.model(g, &queries, &image));
        let seen = g.type_as(&seen, &image);
        g.linear("language_projection", &seen, opt.hidden, true)
    });
    let mut embeddings = g.embedding("language_model.model.decoder.embed_tokens", &ids, opt.vocab, opt.embedding);
    let features = features.map(|features| g.type_as(&features, &embeddings));
    if let Some(features) = &features {
        let mask = placeholder_mask(g, &ids);
        embeddings = g.masked_scatter(&embeddings, &mask, features);
    }
    g.module("language_model", |g| {
        let hidden = g.module("model", |g| opt.model(g, Some(embeddings.clone())));
        let tied = if opt.tied { g.find("language_model.model.decoder.embed_tokens.weight") } else { None };
        causal_lm_head(g, hidden, opt.vocab, tied, false);
    });
    Ok(())
}
