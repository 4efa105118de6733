//! Layers of BART's kind, as BART, mBART, M2M-100 and Whisper have them.

use crate::model::blocks::{Encoded, EncoderAttention, read};
use crate::model::op::{Activation, Input, Loss, Norm, Op, ParameterId, Unary};
use crate::model::{Config, Graph, ModelError, Value};

/// The layers of an encoder or a decoder.
#[derive(Debug, Clone)]
pub(crate) struct Stack {
    pub(crate) layers: u64,
    pub(crate) attention: EncoderAttention,
    pub(crate) width: u64,
    pub(crate) activation: Activation,
    pub(crate) dropout: f64,
    pub(crate) activation_dropout: f64,
    /// Whether norms come before attention and feed-forward instead of after.
    pub(crate) norm_first: bool,
}

/// Class defaults of a stack.
pub(crate) struct Defaults {
    pub(crate) hidden: u64,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) width: u64,
    pub(crate) activation: &'static str,
    pub(crate) dropout: f64,
    pub(crate) attention_dropout: f64,
}

impl Stack {
    /// Reads the keys of one side, `encoder` or `decoder`.
    pub(crate) fn read(c: &Config<'_>, side: &str, defaults: &Defaults) -> Result<Self, ModelError> {
        let key = |name: &str| format!("{side}_{name}");
        let hidden = read::positive(c, &["d_model", "hidden_size"], defaults.hidden)?;
        let heads = read::positive(c, &[&key("attention_heads")], defaults.heads)?;
        let names = ["q_proj", "k_proj", "v_proj", "out_proj"];
        let mut attention = EncoderAttention::new(heads, hidden / heads, names);
        attention.dropout = c.number("attention_dropout", defaults.attention_dropout)?;
        Ok(Self {
            layers: c.layers(&[&key("layers")], defaults.layers)?,
            attention,
            width: c.size_or(&[&key("ffn_dim")], defaults.width)?,
            activation: read::activation(c, "activation_function", defaults.activation)?,
            dropout: c.number("dropout", defaults.dropout)?,
            activation_dropout: c.number("activation_dropout", 0.0)?,
            norm_first: true,
        })
    }

    /// One layer of an encoder.
    pub(crate) fn encoder_layer(&self, g: &mut Graph, input: &Value, mask: Option<&Value>) -> Value {
        let hidden = self.block(g, "self_attn_layer_norm", input, |g, mut x| {
            x = g.module("self_attn", |g| self.attention.run(g, &x, mask));
            g.dropout(&x, self.dropout)
        });
        let hidden = self.block(g, "final_layer_norm", &hidden, |g, x| self.feed_forward(g, x));
        // BART and Marian clamp what is infinite, which nothing is in a run that goes well.
        if self.norm_first { g.unary(Unary::ClampHalf, &hidden) } else { hidden }
    }

    /// One layer of a decoder.
    pub(crate) fn decoder_layer(
        &self,
        g: &mut Graph,
        input: &Value,
        mask: &Value,
        encoded: &Encoded,
        cross_mask: Option<&Value>,
    ) -> Value {
        let mut own = self.attention.clone();
        own.causal = true;
        let mut hidden = self.block(g, "self_attn_layer_norm", input, |g, mut x| {
            x = g.module("self_attn", |g| own.run_cached(g, &x, Some(mask)));
            g.dropout(&x, self.dropout)
        });
        hidden = self.block(g, "encoder_attn_layer_norm", &hidden, |g, mut x| {
            x = g.module("encoder_attn", |g| self.attention.run_cross(g, &x, encoded, cross_mask));
            g.dropout(&x, self.dropout)
        });
        self.block(g, "final_layer_norm", &hidden, |g, x| self.feed_forward(g, x))
    }

    /// `input + body(norm(input))`, or `norm(input + body(input))`.
    fn block(&self, g: &mut Graph, norm: &str, input: &Value, body: impl FnOnce(&mut Graph, Value) -> Value) -> Value {
        if self.norm_first {
            let mut hidden = g.norm(norm, input, Norm::Layer, true);
            hidden = body(g, hidden);
            g.add(input, &hidden)
        } else {
            let mut hidden = body(g, input.clone());
            hidden = g.add(input, &hidden);
            g.norm(norm, &hidden, Norm::Layer, true)
        }
    }

    fn feed_forward(&self, g: &mut Graph, mut x: Value) -> Value {
        let hidden = x.size(-1);
        x = {
            let wide = g.linear("fc1", &x, self.width, true);
            g.activation(self.activation, &wide)
        };
        x = g.dropout(&x, self.activation_dropout);
        x = g.linear("fc2", &x, hidden, true);
        g.dropout(&x, self.dropout)
    }
}

/// The token ids of the decoder.
pub(crate) fn decoder_ids(g: &mut Graph) -> Value {
    g.input(Input::DecoderTokens, [g.inputs.batch, g.inputs.target_seq])
}

/// The logits of a head, tied or not.
pub(crate) fn logits(g: &mut Graph, name: &str, hidden: &Value, vocab: u64, tied: Option<ParameterId>) -> Value {
    match tied {
        Some(table) => g.linear_with(name, table, hidden, vocab, false),
        None => g.linear(name, hidden, vocab, false),
    }
}

/// The loss on logits in the model's type; what is returned holds the encoder's states too.
pub(crate) fn finish(g: &mut Graph, logits: &Value, encoded: &Encoded) {
    let loss = g.inputs.labels.then(|| {
        let labels = g.input(Input::Labels, [logits.size(0), logits.size(1)]);
        g.run(Op::Loss(Loss::CrossEntropy), &[logits, &labels], [])
    });
    let outputs: Vec<&Value> = loss.iter().chain([logits]).chain(&encoded.states).collect();
    g.run(Op::Return, &outputs, []);
}
