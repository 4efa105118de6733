//! GPT-BigCode (SantaCoder, StarCoder, Granite-34B-code): GPT-2 with one key head for all queries.

use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::causal::{LmHead, Tokens, classifier};
use crate::model::blocks::{attention, mlp, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Activation, Attention, EagerStyle, Input, Mask, Norm};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// GPT-BigCode.
pub const FAMILY: Family = Family {
    name: "GPT-BigCode",
    model_types: &["gpt_bigcode"],
    facts: Facts {
        attention: AttentionKernels::Flash,
        lora: &["c_attn"],
        ia3: &["c_attn", "mlp.c_proj"],
        ia3_feedforward: &["mlp.c_proj"],
        ..Facts::DEFAULT
    },
    build,
};

struct BigCode {
    vocab: u64,
    hidden: u64,
    layers: u64,
    heads: u64,
    multi_query: bool,
    width: u64,
    positions: u64,
    activation: Activation,
    residual_dropout: f64,
    embedding_dropout: f64,
    attention_dropout: f64,
    tied: bool,
}

impl BigCode {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["n_embd", "hidden_size"], 768)?;
        if c.flag("add_cross_attention", false)? {
            return Err(c.refuse("add_cross_attention", "false"));
        }
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 50257)?,
            hidden,
            layers: c.layers(&["n_layer", "num_hidden_layers"], 12)?,
            heads: read::positive(c, &["n_head", "num_attention_heads"], 12)?,
            multi_query: c.flag("multi_query", true)?,
            width: c.size_or(&["n_inner"], 4 * hidden)?,
            positions: c.size_or(&["n_positions", "max_position_embeddings"], 1024)?,
            activation: read::activation(c, "activation_function", "gelu_pytorch_tanh")?,
            residual_dropout: c.number("resid_pdrop", 0.1)?,
            embedding_dropout: c.number("embd_pdrop", 0.1)?,
            attention_dropout: c.number("attn_pdrop", 0.1)?,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let (batch, seq) = (g.inputs.batch, g.inputs.seq);
        g.buffer("bias", [self.positions, self.positions], DType::Bool, false);
        let ids = g.input(Input::Tokens, [batch, seq]);
        let embeddings = g.embedding("wte", &ids, self.vocab, self.hidden);
        let positions = g.positions(seq);
        let mask = attention::mask(g, Mask::Causal);
        let position_embeddings = g.embedding("wpe", &positions, self.positions, self.hidden);
        let mut hidden = g.add(&embeddings, &position_embeddings);
        hidden = g.dropout(&hidden, self.embedding_dropout);
        for index in 0..self.layers {
            hidden = g.layer("h", index, |g| self.layer(g, &hidden, &mask));
        }
        g.norm("ln_f", &hidden, Norm::Layer, true)
    }

    fn layer(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let mut hidden = g.norm("ln_1", input, Norm::Layer, true);
        let attended = g.module("attn", |g| self.attention(g, &hidden, mask));
        hidden = g.add(&attended, input);
        let residual = hidden.clone();
        hidden = g.norm("ln_2", &hidden, Norm::Layer, true);
        let wide = g.module("mlp", |g| {
            let wide = mlp(g, &hidden, ["c_fc", "c_proj"], self.width, self.activation, true);
            g.dropout(&wide, self.residual_dropout)
        });
        g.add(&residual, &wide)
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, mask: &Value) -> Value {
        let (heads, head_dim) = (self.heads, self.hidden / self.heads);
        let kv_heads = if self.multi_query { 1 } else { heads };
        let joined = g.linear("c_attn", hidden, self.hidden + 2 * kv_heads * head_dim, true);
        let (mut query, mut key, mut value) = if self.multi_query {
            let joined = g.unsqueeze(&joined, 1);
            g.split3(&joined, 3, [self.hidden, head_dim, head_dim])
        } else {
            let joined = attention::split_heads(g, joined.clone(), heads, 3 * head_dim);
            g.split3(&joined, 3, [head_dim; 3])
        };
        drop(joined);
        if self.multi_query {
            query = g.view(&query, [hidden.size(0), hidden.size(1), heads, head_dim]);
            query = g.transpose(&query, 1, 2);
        }
        (key, value) = g.cache(attention::grouped_cache(kv_heads, head_dim, None), &key, &value);
        let spec = Attention {
            groups: heads / kv_heads,
            causal: true,
            dropout_per_mille: (self.attention_dropout.clamp(0.0, 1.0) * 1000.0).round() as u32,
            softcap: false,
            sinks: None,
            eager: EagerStyle::Fp32Softmax,
            sdpa: true,
        };
        let attended = attention::attend(g, spec, &query, &key, &value, Some(mask));
        let mut output = attention::join_heads(g, attended);
        output = g.linear("c_proj", &output, self.hidden, true);
        g.dropout(&output, self.residual_dropout)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = BigCode::read(c)?;
    let head = LmHead { vocab: model.vocab, tied: model.tied.then_some("wte"), bias: false };
    classifier(c, g, task, "transformer", (head, &Tokens::USUAL), |g| model.model(g))
}
