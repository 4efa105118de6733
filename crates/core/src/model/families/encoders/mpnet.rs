//! MPNet: BERT with a relative position bias shared by all layers; its attention has no fused kernel.

use super::bert::{counted_positions, feed_forward};
use super::heads::{LmHead, choice_head, dense_classifier, no_head, over_tokens, pooler, return_base};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::attention::split_heads;
use crate::model::blocks::head::{Labels, loss_and_return};
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Binary, Input, Loss, Norm};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// MPNet.
pub const FAMILY: Family = Family { name: "MPNet", model_types: &["mpnet"], facts: Facts::DEFAULT, build };

struct MpNet {
    vocab: u64,
    hidden: u64,
    layers: u64,
    heads: u64,
    width: u64,
    positions: u64,
    buckets: u64,
    activation: Activation,
    dropout: f64,
    attention_dropout: f64,
    tied: bool,
}

impl MpNet {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 30527)?,
            hidden: read::positive(c, &["hidden_size"], 768)?,
            layers: c.layers(&["num_hidden_layers"], 12)?,
            heads: read::positive(c, &["num_attention_heads"], 12)?,
            width: c.size_or(&["intermediate_size"], 3072)?,
            positions: c.size_or(&["max_position_embeddings"], 512)?,
            buckets: c.size_or(&["relative_attention_num_buckets"], 32)?,
            activation: read::activation(c, "hidden_act", "gelu")?,
            dropout: c.number("hidden_dropout_prob", 0.1)?,
            attention_dropout: c.number("attention_probs_dropout_prob", 0.1)?,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let embeddings = g.module("embeddings", |g| self.embeddings(g, &ids));
        g.module("encoder", |g| {
            let bias = self.position_bias(g, ids.size(0), ids.size(1));
            let mut hidden = embeddings.clone();
            for index in 0..self.layers {
                hidden = g.layer("layer", index, |g| self.layer(g, &hidden, &bias));
            }
            hidden
        })
    }

    fn embeddings(&self, g: &mut Graph, ids: &Value) -> Value {
        g.buffer("position_ids", [1, self.positions], DType::I64, false);
        // The first token's row comes after the padding's, which is 1 (`padding_idx` of modeling_mpnet.py).
        g.limit_positions(self.positions.saturating_sub(2));
        let positions = counted_positions(g, ids);
        let words = g.embedding("word_embeddings", ids, self.vocab, self.hidden);
        let places = g.embedding("position_embeddings", &positions, self.positions, self.hidden);
        let mut embeddings = g.add(&words, &places);
        embeddings = g.norm("LayerNorm", &embeddings, Norm::Layer, true);
        g.dropout(&embeddings, self.dropout)
    }

    /// One bias per head and pair of positions, copied for every sample. The buckets are computed on the host.
    fn position_bias(&self, g: &mut Graph, batch: u64, seq: u64) -> Value {
        let buckets = g.fill(DType::I64, [seq, seq]);
        let mut bias = g.embedding("relative_attention_bias", &buckets, self.buckets, self.heads);
        bias = g.permute(&bias, &[2, 0, 1]);
        bias = g.unsqueeze(&bias, 0);
        bias = g.expand(&bias, [batch, self.heads, seq, seq]);
        g.contiguous(&bias)
    }

    fn layer(&self, g: &mut Graph, input: &Value, bias: &Value) -> Value {
        let attended = g.module("attention", |g| {
            let attended = g.module("attn", |g| self.attention(g, input, bias));
            let sum = {
                let dropped = g.dropout(&attended, self.dropout);
                g.add(&dropped, input)
            };
            g.norm("LayerNorm", &sum, Norm::Layer, true)
        });
        feed_forward(g, &attended, self.width, self.activation, self.dropout)
    }

    /// The mask of a batch without padding is none.
    fn attention(&self, g: &mut Graph, hidden: &Value, bias: &Value) -> Value {
        let head_dim = self.hidden / self.heads;
        let mut parts = ["q", "k", "v"].map(|name| {
            let x = g.linear(name, hidden, self.heads.saturating_mul(head_dim), true);
            split_heads(g, x, self.heads, head_dim)
        });
        let [query, key, value] = &mut parts;
        let mut scores = {
            let turned = g.transpose(key, -1, -2);
            g.matmul(query, &turned)
        };
        scores = g.scalar(Binary::Div, &scores);
        scores = g.in_place(Binary::Add, &scores, bias);
        let mut weights = g.softmax(&scores, -1, None);
        weights = g.dropout(&weights, self.attention_dropout);
        let mut context = g.matmul(&weights, value);
        context = g.permute(&context, &[0, 2, 1, 3]);
        context = g.contiguous(&context);
        context = g.view(&context, [hidden.size(0), hidden.size(1), self.heads.saturating_mul(head_dim)]);
        g.linear("o", &context, self.hidden, true)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let mpnet = MpNet::read(c)?;
    match task {
        Task::Base => {
            let hidden = mpnet.model(g);
            let pooled = g.module("pooler", |g| pooler(g, &hidden));
            return_base(g, &hidden, Some(&pooled));
        }
        Task::MaskedLm | Task::CausalLm | Task::PreTraining => {
            let hidden = g.module("mpnet", |g| mpnet.model(g));
            let table = if mpnet.tied { g.find("mpnet.embeddings.word_embeddings.weight") } else { None };
            let names = ["dense", "layer_norm"];
            let head = LmHead { names, width: mpnet.hidden, activation: Activation::Gelu, vocab: mpnet.vocab };
            let logits = g.module("lm_head", |g| head.logits(g, &hidden, table));
            loss_and_return(g, Loss::CrossEntropy, logits);
        }
        Task::SequenceClassification => {
            let labels = Labels::read(c)?;
            let hidden = g.module("mpnet", |g| mpnet.model(g));
            dense_classifier(g, &hidden, Activation::Tanh, mpnet.dropout, &labels);
        }
        Task::MultipleChoice => {
            let hidden = g.module("mpnet", |g| mpnet.model(g));
            let mut pooled = g.module("mpnet", |g| g.module("pooler", |g| pooler(g, &hidden)));
            pooled = g.dropout(&pooled, mpnet.dropout);
            choice_head(g, &pooled);
        }
        Task::TokenClassification | Task::QuestionAnswering => {
            let hidden = g.module("mpnet", |g| mpnet.model(g));
            over_tokens(c, task, g, &hidden, mpnet.dropout)?;
        }
        _ => return Err(no_head("MPNet", task)),
    }
    Ok(())
}
