//! RecurrentGemma: gated linear recurrences, with windowed attention in every third layer.

use super::state::{self, CausalConvolution};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::{SelfAttention, attention, read};
use crate::model::facts::Facts;
use crate::model::families::decoders::decoder::{self, Decoder, Vocabulary};
use crate::model::op::{Activation, Binary, Mask, Norm, Op, Reduction, Role, RotaryTable, Unary};
use crate::model::{Config, Graph, ModelError, Value};

/// RecurrentGemma.
pub const FAMILY: Family = Family {
    name: "RecurrentGemma",
    model_types: &["recurrent_gemma"],
    facts: Facts::DEFAULT,
    build: |c, task, g| decoder::build(c, task, g, &RecurrentGemma::read(c)?),
};

struct RecurrentGemma {
    vocabulary: Vocabulary,
    /// For each layer whether it attends.
    attends: Vec<bool>,
    width: u64,
    activation: Activation,
    window: u64,
    attention: SelfAttention,
    channels: u64,
    blocks: u64,
    kernel: u64,
}

impl RecurrentGemma {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let vocabulary = Vocabulary::read(c, 256_000, 2560, true)?;
        let heads = read::positive(c, &["num_attention_heads"], 10)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], heads)?;
        let head_dim = vocabulary.width / heads;
        let window = read::positive(c, &["attention_window_size", "sliding_window"], 2048)?;
        let mut attention = SelfAttention::new(heads, kv_heads, head_dim);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = true;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.rotary_dim = read::rotary_dim(c, head_dim, 0.5)?;
        attention.window = Some(window);
        let kinds = c.strings("block_types")?.unwrap_or_else(|| vec!["recurrent", "recurrent", "attention"]);
        if kinds.is_empty() || kinds.iter().any(|kind| !matches!(*kind, "recurrent" | "attention")) {
            return Err(c.refuse("block_types", "a list of recurrent and attention"));
        }
        let layers = c.layers(&["num_hidden_layers"], 26)?;
        let channels = read::positive(c, &["lru_width"], vocabulary.width)?;
        if channels % heads != 0 {
            return Err(c.refuse("lru_width", "a multiple of num_attention_heads"));
        }
        Ok(Self {
            vocabulary,
            attends: kinds.iter().cycle().take(layers as usize).map(|kind| *kind == "attention").collect(),
            width: c.size_or(&["intermediate_size"], 7680)? / 2,
            activation: read::activation(c, "hidden_activation", "gelu_pytorch_tanh")?,
            window,
            attention,
            channels,
            blocks: heads,
            kernel: read::positive(c, &["conv1d_width"], 4)?,
        })
    }

    fn layer(&self, g: &mut Graph, attends: bool, input: &Value, positions: &Value, mask: &Value) -> Value {
        let normed = g.norm("temporal_pre_norm", input, Norm::RmsGemma, false);
        let mut hidden = g.module("temporal_block", |g| {
            if attends { self.attend(g, &normed, mask) } else { self.recur(g, &normed, positions) }
        });
        let residual = g.add(&hidden, input);
        hidden = g.norm("channel_pre_norm", &residual, Norm::RmsGemma, false);
        hidden = g.module("mlp_block", |g| {
            let gate = {
                let gate = g.linear("gate_proj", &hidden, self.width, true);
                g.activation(self.activation, &gate)
            };
            let product = {
                let up = g.linear("up_proj", &hidden, self.width, true);
                g.mul(&gate, &up)
            };
            g.linear("down_proj", &product, self.vocabulary.width, true)
        });
        g.add(&hidden, &residual)
    }

    fn attend(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let table = RotaryTable { dim: self.attention.rotary_dim, axes: 1, doubled: true, fp32: false };
        let rope = g.rotary_table("rotary_emb", g.inputs.seq, table);
        self.attention.run(g, input, Some(&rope), mask)
    }

    fn recur(&self, g: &mut Graph, input: &Value, positions: &Value) -> Value {
        let mut y = g.linear("linear_y", input, self.channels, true);
        y = g.activation(self.activation, &y);
        let mut x = g.linear("linear_x", input, self.channels, true);
        x = g.transpose(&x, 1, 2);
        x = self.convolve(g, x);
        x = {
            let x = g.transpose(&x, 1, 2);
            g.module("rg_lru", |g| self.gated_recurrence(g, &x, positions))
        };
        let product = g.mul(&x, &y);
        g.linear("linear_out", &product, self.vocabulary.width, true)
    }

    /// The convolution, which keeps one position less than its kernel sees.
    fn convolve(&self, g: &mut Graph, x: Value) -> Value {
        let (batch, seq, kept) = (x.size(0), x.size(2), self.kernel - 1);
        let convolution = CausalConvolution { name: "conv_1d", kernel: self.kernel, bias: true, activation: None };
        if state::decodes(g) {
            let state = state::recall(g, [batch, self.channels, kept], false);
            let window = g.cat(&[&state, &x], -1);
            return self.weigh(g, &window);
        }
        if g.inputs.cache {
            let newest = g.pad(&x, [batch, self.channels, kept]);
            state::keep(g, &newest, self.channels.saturating_mul(kept));
        }
        let out = convolution.slide(g, &x, kept);
        g.slice(&out, 2, 0, seq)
    }

    /// One output of the convolution, as a weighted sum of its window.
    fn weigh(&self, g: &mut Graph, window: &Value) -> Value {
        let weight = g.parameter("conv_1d.weight", [self.channels, 1, self.kernel], Role::Convolution);
        let bias = g.parameter("conv_1d.bias", [self.channels], Role::Bias);
        let weight = g.read(weight, [self.channels, self.kernel]);
        let product = g.mul(window, &weight);
        let sum = g.reduce(Reduction::Sum, &product, -1, false);
        drop(product);
        let bias = g.read(bias, [self.channels]);
        let out = g.add(&sum, &bias);
        g.unsqueeze(&out, -1)
    }

    /// The real-gated linear recurrent unit on `[batch, seq, channels]`.
    fn gated_recurrence(&self, g: &mut Graph, x: &Value, positions: &Value) -> Value {
        let (batch, seq) = (x.size(0), x.size(1));
        let reset = {
            let positions = g.unsqueeze(positions, -1);
            g.compare(&positions)
        };
        let mut blocks = g.reshape(x, [batch.saturating_mul(seq), self.blocks, self.channels / self.blocks]);
        blocks = g.permute(&blocks, &[1, 0, 2]);
        // One name holds the products of both gates, the second one's until the end.
        let mut product = None;
        let input_gate = self.gate(g, "input_gate", &blocks, x, &mut product);
        let mut recurrent_gate = self.gate(g, "recurrent_gate", &blocks, x, &mut product);
        let log_gate = {
            let scaled = g.scale(&recurrent_gate);
            let decay = g.parameter("recurrent_param", [self.channels], Role::Other);
            let decay = g.read(decay, [self.channels]);
            let decay = g.unary(Unary::Softplus, &decay);
            g.mul(&scaled, &decay)
        };
        recurrent_gate = g.unary(Unary::Exp, &log_gate);
        let squared = {
            let twice = g.scale(&log_gate);
            g.unary(Unary::Exp, &twice)
        };
        let gated = g.mul(x, &input_gate);
        let mut multiplier = {
            let rest = g.scalar(Binary::Sub, &squared);
            g.unary(Unary::SqrtBound, &rest)
        };
        multiplier = {
            let others = g.unary(Unary::Not, &reset);
            let kept = g.mul(&others, &multiplier);
            drop(others);
            g.add(&reset, &kept)
        };
        let normalised = {
            let multiplier = g.type_as(&multiplier, x);
            g.mul(&gated, &multiplier)
        };
        let states = self.scan(g, &normalised, &recurrent_gate, &reset);
        drop(product);
        states
    }

    /// A gate by one small matrix per block of channels.
    fn gate(&self, g: &mut Graph, name: &str, blocks: &Value, like: &Value, kept: &mut Option<Value>) -> Value {
        let side = self.channels / self.blocks;
        let weight = g.parameter(&format!("{name}_weight"), [self.blocks, side, side], Role::Other);
        let bias = g.parameter(&format!("{name}_bias"), [self.blocks, side], Role::Other);
        // torch.baddbmm: the bias is added where the product lies.
        let mut product = {
            let weight = g.read(weight, [self.blocks, side, side]);
            g.matmul(blocks, &weight)
        };
        product = {
            let bias = g.read(bias, [self.blocks, 1, side]);
            g.in_place(Binary::Add, &product, &bias)
        };
        *kept = Some(product.clone());
        let flat = g.transpose(&product, 0, 1);
        let flat = g.reshape(&flat, like.shape());
        drop(product);
        g.unary(Unary::Sigmoid, &flat)
    }

    fn scan(&self, g: &mut Graph, x: &Value, gate: &Value, reset: &Value) -> Value {
        let (batch, seq) = (x.size(0), x.size(1));
        let gate = {
            let others = g.unary(Unary::Not, reset);
            g.mul(gate, &others)
        };
        let past = state::continues(g).then(|| state::recall(g, [batch, self.channels], true));
        if seq == 1 {
            let Some(past) = past else {
                // Without a cache one position is its own state.
                return x.clone();
            };
            let mut states = {
                let gate = g.float(&gate);
                let past = g.unsqueeze(&past, 1);
                g.mul(&gate, &past)
            };
            states = {
                let x = g.float(x);
                g.in_place(Binary::Add, &states, &x)
            };
            return g.type_as(&states, x);
        }
        let state = past.unwrap_or_else(|| g.fill(DType::F32, [batch, self.channels]));
        let mut carried = [state, g.fill_like(x, x.shape())];
        g.each_position(seq, &mut carried, |g, index, [state, states]| {
            *state = {
                let gate = g.select(&gate, 1, index);
                let gate = g.float(&gate);
                g.mul(&gate, state)
            };
            *state = {
                let x = g.select(x, 1, index);
                let x = g.float(&x);
                g.add(state, &x)
            };
            let narrow = g.type_as(state, x);
            let narrow = g.unsqueeze(&narrow, 1);
            *states = g.assign(states, 1, index, &narrow);
            None
        });
        let [state, states] = carried;
        state::keep(g, &state, self.channels);
        states
    }
}

impl Decoder for RecurrentGemma {
    fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let positions = g.fill(DType::I64, [1, g.inputs.seq]);
        let mask = attention::mask(g, Mask::Sliding(self.window));
        let mut hidden = {
            g.buffer("normalizer", [], DType::BF16, false);
            let normalizer = g.run(Op::Buffer(DType::BF16), &[], []);
            let normalizer = g.type_as(&normalizer, &embeddings);
            g.mul(&embeddings, &normalizer)
        };
        for (index, attends) in (0..).zip(&self.attends) {
            hidden = g.layer("layers", index, |g| self.layer(g, *attends, &hidden, &positions, &mask));
        }
        g.norm("final_norm", &hidden, Norm::RmsGemma, false)
    }

    fn finish_logits(&self, g: &mut Graph, logits: Value) -> Value {
        let mut squashed = g.scalar(Binary::Div, &logits);
        squashed = g.unary(Unary::Tanh, &squashed);
        g.scale(&squashed)
    }
}
