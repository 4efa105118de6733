//! ModernBERT: rotary positions, gated MLPs, local attention in two of three layers.

use super::heads::{first_token, no_head, return_base};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::attention::{attend, join_heads, rotate_whole};
use crate::model::blocks::encoder::{full_mask, mask_over};
use crate::model::blocks::head::{Labels, answer_head, classification_head, loss_and_return, token_head};
use crate::model::blocks::{EncoderAttention, read};
use crate::model::facts::Facts;
use crate::model::op::{Activation, EagerStyle, Input, Loss, Mask, Norm, Reduction, Rotary, RotaryTable};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// ModernBERT.
pub const FAMILY: Family = Family { name: "ModernBERT", model_types: &["modernbert"], facts: Facts::DEFAULT, build };

struct ModernBert {
    vocab: u64,
    hidden: u64,
    width: u64,
    /// Whether each layer sees only its neighbourhood.
    local: Vec<bool>,
    half_window: u64,
    activation: Activation,
    norm_bias: bool,
    mlp_bias: bool,
    embedding_dropout: f64,
    mlp_dropout: f64,
    attention: EncoderAttention,
    head: Head,
}

struct Head {
    activation: Activation,
    bias: bool,
    decoder_bias: bool,
    mean: bool,
    dropout: f64,
    tied: bool,
}

impl ModernBert {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], 768)?;
        let heads = read::positive(c, &["num_attention_heads"], 12)?;
        let layers = c.layers(&["num_hidden_layers"], 22)?;
        let every = read::positive(c, &["global_attn_every_n_layers"], 3)?;
        let mut local: Vec<bool> = (0..layers).map(|index| index % every != 0).collect();
        if let Some(types) = c.strings("layer_types")? {
            local = types.iter().map(|kind| *kind == "sliding_attention").collect();
            local.resize(layers as usize, false);
        }
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["Wqkv", "Wqkv", "Wqkv", "Wo"]);
        attention.bias = [c.flag("attention_bias", false)?; 4];
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.eager = EagerStyle::Fp32Softmax;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 50368)?,
            hidden,
            width: c.size_or(&["intermediate_size"], 1152)?,
            local,
            half_window: c.size_or(&["local_attention"], 128)? / 2,
            activation: read::activation(c, "hidden_activation", "gelu")?,
            norm_bias: c.flag("norm_bias", false)?,
            mlp_bias: c.flag("mlp_bias", false)?,
            embedding_dropout: c.number("embedding_dropout", 0.0)?,
            mlp_dropout: c.number("mlp_dropout", 0.0)?,
            attention,
            head: Head {
                activation: read::activation(c, "classifier_activation", "gelu")?,
                bias: c.flag("classifier_bias", false)?,
                decoder_bias: c.flag("decoder_bias", true)?,
                mean: c.str_or("classifier_pooling", "cls") == "mean",
                dropout: c.number("classifier_dropout", 0.0)?,
                tied: c.flag("tie_word_embeddings", true)?,
            },
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let (batch, seq) = (g.inputs.batch, g.inputs.seq);
        let ids = g.input(Input::Tokens, [batch, seq]);
        let mut hidden = g.module("embeddings", |g| {
            let mut hidden = g.embedding("tok_embeddings", &ids, self.vocab, self.hidden);
            hidden = g.norm("norm", &hidden, Norm::Layer, self.norm_bias);
            g.dropout(&hidden, self.embedding_dropout)
        });
        let full = full_mask(g, &hidden);
        let near = mask_over(g, Mask::FullSliding(self.half_window), batch, seq, seq);
        let table = RotaryTable { dim: self.attention.head_dim, axes: 1, doubled: true, fp32: false };
        let [full_rope, near_rope] = ["full_attention", "sliding_attention"].map(|kind| {
            for buffer in ["inv_freq", "original_inv_freq"] {
                g.buffer(&format!("rotary_emb.{kind}_{buffer}"), [table.dim / 2], DType::F32, false);
            }
            g.rotary_table_bare(seq, table)
        });
        for (index, &local) in self.local.iter().enumerate() {
            let (mask, rope) = if local { (&near, &near_rope) } else { (&full, &full_rope) };
            hidden = g.layer("layers", index as u64, |g| self.layer(g, index, &hidden, rope, mask));
        }
        g.norm("final_norm", &hidden, Norm::Layer, self.norm_bias)
    }

    fn layer(&self, g: &mut Graph, index: usize, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let attended = {
            // The embeddings of the first layer are normed already.
            let normed =
                if index == 0 { input.clone() } else { g.norm("attn_norm", input, Norm::Layer, self.norm_bias) };
            g.module("attn", |g| self.attention(g, &normed, rope, mask))
        };
        let mut hidden = g.add(input, &attended);
        let output = {
            let normed = g.norm("mlp_norm", &hidden, Norm::Layer, self.norm_bias);
            g.module("mlp", |g| self.mlp(g, &normed))
        };
        hidden = g.add(&hidden, &output);
        hidden
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let (batch, seq) = (hidden.size(0), hidden.size(1));
        let (heads, head_dim) = (self.attention.heads, self.attention.head_dim);
        let mut joined = g.linear("Wqkv", hidden, 3 * heads.saturating_mul(head_dim), self.attention.bias[0]);
        joined = g.view(&joined, [batch, seq, 3, heads, head_dim]);
        let (query, key, value) = g.split3(&joined, 2, [1; 3]);
        let [mut query, mut key, value] = [query, key, value].map(|x| {
            let x = g.squeeze(&x, 2);
            g.transpose(&x, 1, 2)
        });
        (query, key) = rotate_whole(g, Rotary::HalfFp32, &query, &key, &rope.0, &rope.1);
        let attended = attend(g, self.attention.spec(), &query, &key, &value, Some(mask));
        let context = join_heads(g, attended);
        let output = g.linear("Wo", &context, self.hidden, self.attention.bias[3]);
        g.dropout(&output, self.attention.dropout)
    }

    fn mlp(&self, g: &mut Graph, x: &Value) -> Value {
        let (input, gate) = {
            let both = g.linear("Wi", x, 2 * self.width, self.mlp_bias);
            g.split2(&both, -1, self.width, self.width)
        };
        let mut product = g.glu(self.activation, &input, &gate);
        product = g.dropout(&product, self.mlp_dropout);
        g.linear("Wo", &product, self.hidden, self.mlp_bias)
    }

    fn prediction_head(&self, g: &mut Graph, x: &Value) -> Value {
        g.module("head", |g| {
            let mut x = g.linear("dense", x, self.hidden, self.head.bias);
            x = g.activation(self.head.activation, &x);
            g.norm("norm", &x, Norm::Layer, self.norm_bias)
        })
    }

    /// The mean over the tokens of the mask.
    fn mean(&self, g: &mut Graph, hidden: &Value) -> Value {
        let mask = g.fill(DType::Bool, [hidden.size(0), hidden.size(1)]);
        let sum = {
            let wide = g.unsqueeze(&mask, -1);
            let masked = g.mul(hidden, &wide);
            g.reduce(Reduction::Sum, &masked, 1, false)
        };
        let count = g.to(&mask, DType::I64);
        let count = g.reduce(Reduction::Sum, &count, 1, true);
        g.div(&sum, &count)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let bert = ModernBert::read(c)?;
    match task {
        Task::Base => {
            let hidden = bert.model(g);
            return_base(g, &hidden, None);
        }
        Task::MaskedLm | Task::CausalLm | Task::PreTraining => {
            let hidden = g.module("model", |g| bert.model(g));
            let logits = {
                let x = bert.prediction_head(g, &hidden);
                match if bert.head.tied { g.find("model.embeddings.tok_embeddings.weight") } else { None } {
                    Some(table) => g.linear_with("decoder", table, &x, bert.vocab, bert.head.decoder_bias),
                    None => g.linear("decoder", &x, bert.vocab, bert.head.decoder_bias),
                }
            };
            loss_and_return(g, Loss::CrossEntropyFp32, logits);
        }
        Task::SequenceClassification => {
            let labels = Labels::read(c)?;
            let hidden = g.module("model", |g| bert.model(g));
            let pooled = if bert.head.mean { bert.mean(g, &hidden) } else { first_token(g, &hidden) };
            let mut x = bert.prediction_head(g, &pooled);
            x = g.dropout(&x, bert.head.dropout);
            classification_head(g, "classifier", &x, &labels);
        }
        Task::TokenClassification | Task::QuestionAnswering => {
            let hidden = g.module("model", |g| bert.model(g));
            let mut x = bert.prediction_head(g, &hidden);
            x = g.dropout(&x, bert.head.dropout);
            match task {
                Task::QuestionAnswering => answer_head(g, "classifier", &x),
                _ => token_head(g, "classifier", &x, (Labels::read(c)?.count, Loss::CrossEntropy), true),
            }
        }
        _ => return Err(no_head("ModernBERT", task)),
    }
    Ok(())
}
