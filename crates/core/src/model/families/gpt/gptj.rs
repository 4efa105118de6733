//! GPT-J: rotary positions on neighbouring pairs, attention and MLP side by side.

use super::early;
use crate::model::Family;
use crate::model::blocks::causal::{LmHead, Tokens, classifier};
use crate::model::blocks::{attention, mlp, read};
use crate::model::facts::Facts;
use crate::model::op::{Activation, Binary, Input, Mask, Norm, Op};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// GPT-J.
pub const FAMILY: Family = Family {
    name: "GPT-J",
    model_types: &["gptj"],
    facts: Facts {
        lora: &["q_proj", "v_proj"],
        ia3: &["q_proj", "v_proj", "fc_out"],
        ia3_feedforward: &["fc_out"],
        ..Facts::DEFAULT
    },
    build,
};

/// The sizes of GPT-J and of CodeGen, whose configs have the same keys.
#[derive(Debug)]
pub(super) struct Sizes {
    pub(super) vocab: u64,
    pub(super) hidden: u64,
    pub(super) layers: u64,
    pub(super) heads: u64,
    pub(super) width: u64,
    pub(super) positions: u64,
    pub(super) rotary_dim: Option<u64>,
    pub(super) activation: Activation,
    pub(super) residual_dropout: f64,
    pub(super) embedding_dropout: f64,
    pub(super) attention_dropout: f64,
    pub(super) tied: bool,
}

impl Sizes {
    pub(super) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["n_embd", "hidden_size"], 4096)?;
        // A `null` means every dimension; an absent key the class default.
        let rotary_dim = if c.has("rotary_dim") || !c.keys().any(|key| key == "rotary_dim") {
            Some(c.size_or(&["rotary_dim"], 64)?)
        } else {
            None
        };
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 50400)?,
            hidden,
            layers: c.layers(&["n_layer", "num_hidden_layers"], 28)?,
            heads: read::positive(c, &["n_head", "num_attention_heads"], 16)?,
            width: c.size_or(&["n_inner"], 4 * hidden)?,
            positions: c.size_or(&["n_positions", "max_position_embeddings"], 2048)?,
            rotary_dim,
            activation: read::activation(c, "activation_function", "gelu_new")?,
            residual_dropout: c.number("resid_pdrop", 0.0)?,
            embedding_dropout: c.number("embd_pdrop", 0.0)?,
            attention_dropout: c.number("attn_pdrop", 0.0)?,
            tied: c.flag("tie_word_embeddings", false)?,
        })
    }

    pub(super) fn table_width(&self) -> u64 {
        self.rotary_dim.filter(|&dim| dim > 0).unwrap_or(self.hidden)
    }

    /// The model around its attention, which returns its output and the probabilities.
    pub(super) fn model(
        &self,
        g: &mut Graph,
        attend: impl Fn(&mut Graph, &Value, &Value, &Value) -> (Value, Value),
    ) -> Value {
        let (batch, seq) = (g.inputs.batch, g.inputs.seq);
        let ids = g.input(Input::Tokens, [batch, seq]);
        let embeddings = g.embedding("wte", &ids, self.vocab, self.hidden);
        let positions = g.positions(seq);
        let mask = attention::mask(g, Mask::CausalEager);
        let mut hidden = g.dropout(&embeddings, self.embedding_dropout);
        // The loop's `outputs` keeps the probabilities of a layer until the next one has run.
        let mut outputs: Option<(Value, Value)> = None;
        for index in 0..self.layers {
            let layer = g.layer("h", index, |g| {
                let normed = g.norm("ln_1", &hidden, Norm::Layer, true);
                let (attended, weights) = g.module("attn", |g| attend(g, &normed, &mask, &positions));
                let wide = g.module("mlp", |g| {
                    let wide = mlp(g, &normed, ["fc_in", "fc_out"], self.width, self.activation, true);
                    g.dropout(&wide, self.residual_dropout)
                });
                let sum = g.add(&attended, &wide);
                (g.add(&sum, &hidden), weights)
            });
            hidden = layer.0.clone();
            outputs = Some(layer);
        }
        let normed = g.norm("ln_f", &hidden, Norm::Layer, true);
        drop(outputs);
        normed
    }

    /// The output projection of the attended values.
    pub(super) fn output(&self, g: &mut Graph, attended: Value) -> Value {
        let merged = early::merge_heads(g, &attended);
        drop(attended);
        let projected = g.linear("out_proj", &merged, self.hidden, false);
        drop(merged);
        g.dropout(&projected, self.residual_dropout)
    }
}

fn attend(sizes: &Sizes, g: &mut Graph, hidden: &Value, mask: &Value, positions: &Value) -> (Value, Value) {
    let (heads, head_dim) = (sizes.heads, sizes.hidden / sizes.heads);
    let mut query = g.linear("q_proj", hidden, sizes.hidden, false);
    let mut key = g.linear("k_proj", hidden, sizes.hidden, false);
    let mut value = g.linear("v_proj", hidden, sizes.hidden, false);
    query = g.split_last(&query, heads, head_dim);
    key = g.split_last(&key, heads, head_dim);
    value = g.split_last(&value, heads, head_dim);
    value = g.permute(&value, &[0, 2, 1, 3]);
    let table = early::position_table(g, sizes.positions, sizes.table_width());
    let repeated_table = g.run(Op::Repeat, &[&table], [positions.size(0), table.size(0), table.size(1)]);
    let column = g.unsqueeze(positions, -1);
    let index = g.run(Op::Repeat, &[&column], [positions.size(0), positions.size(1), table.size(1)]);
    let sincos = {
        let rows = g.gather(&repeated_table, 1, &index);
        g.type_as(&rows, &key)
    };
    let parts;
    (query, key, parts) = early::rotate(g, sizes.rotary_dim, &query, &key, &sincos);
    key = g.permute(&key, &[0, 2, 1, 3]);
    query = g.permute(&query, &[0, 2, 1, 3]);
    (key, value) = g.cache(attention::grouped_cache(heads, head_dim, None), &key, &value);
    let (attended, weights) = early::attention(g, [&query, &key, &value], sizes.attention_dropout, |g, mut scores| {
        scores = g.scalar(Binary::Div, &scores);
        g.add(&scores, mask)
    });
    let output = sizes.output(g, attended);
    drop(parts);
    (output, weights)
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let sizes = Sizes::read(c)?;
    let head = LmHead { vocab: sizes.vocab, tied: sizes.tied.then_some("wte"), bias: true };
    classifier(c, g, task, "transformer", (head, &Tokens::USUAL), |g| {
        sizes.model(g, |g, hidden, mask, positions| attend(&sizes, g, hidden, mask, positions))
    })
}
