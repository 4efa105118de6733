//! LFM 2: short gated convolutions, with attention in some layers.

use super::state::{self, CausalConvolution};
use crate::model::Family;
use crate::model::blocks::{QkNorm, SelfAttention, attention, gated_mlp, read};
use crate::model::facts::{Facts, VllmFacts};
use crate::model::families::decoders::decoder::{self, Decoder, Vocabulary};
use crate::model::op::{Activation, Mask, Norm, RotaryTable};
use crate::model::{Config, Graph, ModelError, Value};

/// LFM 2.
pub const FAMILY: Family = Family {
    name: "LFM2",
    model_types: &["lfm2"],
    facts: Facts { text: Some(|c| Ok(Box::new(Lfm2::read(c)?))), vllm: VllmFacts::ADAPTED, ..Facts::DEFAULT },
    build: |c, task, g| decoder::build(c, task, g, &Lfm2::read(c)?),
};

/// The text model, also of the vision models built on it.
#[derive(Debug, Clone)]
pub(crate) struct Lfm2 {
    vocabulary: Vocabulary,
    attends: Vec<bool>,
    width: u64,
    convolution: CausalConvolution,
    attention: SelfAttention,
}

impl Lfm2 {
    /// Reads an LFM 2.
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut vocabulary = Vocabulary::read(c, 65536, 2560, true)?;
        vocabulary.tied = c.flag("tie_embedding", vocabulary.tied)?;
        let hidden = vocabulary.width;
        let heads = read::positive(c, &["num_attention_heads", "num_heads"], 32)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], 8)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, hidden, heads)?);
        attention.names = ["q_proj", "k_proj", "v_proj", "out_proj"];
        attention.qk_norm = QkNorm::HeadLast(Norm::Rms, ["q_layernorm", "k_layernorm"]);
        let layers = c.layers(&["num_hidden_layers"], 32)?;
        let listed = c.sizes("full_attn_idxs")?;
        let by_index = |index| listed.as_ref().is_none_or(|listed| listed.contains(&index));
        Ok(Self {
            vocabulary,
            attends: state::attention_layers(c, &["layer_types"], layers, by_index)?,
            width: feed_forward_width(c)?,
            convolution: CausalConvolution {
                name: "conv",
                kernel: read::positive(c, &["conv_L_cache"], 3)?,
                bias: c.flag("conv_bias", false)?,
                activation: None,
            },
            attention,
        })
    }

    fn layer(&self, g: &mut Graph, attends: bool, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let mut hidden = {
            let normed = g.norm("operator_norm", input, Norm::Rms, false);
            if attends {
                g.module("self_attn", |g| self.attention.run(g, &normed, Some(rope), mask))
            } else {
                g.module("conv", |g| self.short_convolution(g, &normed))
            }
        };
        hidden = g.add(&hidden, input);
        let change = {
            let normed = g.norm("ffn_norm", &hidden, Norm::Rms, false);
            let names = ["w1", "w3", "w2"];
            g.module("feed_forward", |g| gated_mlp(g, &normed, names, self.width, Activation::Silu, false))
        };
        g.add(&hidden, &change)
    }

    fn short_convolution(&self, g: &mut Graph, input: &Value) -> Value {
        let width = self.vocabulary.width;
        let mut projected = g.linear("in_proj", input, 3 * width, self.convolution.bias);
        projected = g.transpose(&projected, -1, -2);
        let (b, c, x) = g.split3(&projected, -2, [width; 3]);
        let mut hidden = g.mul(&b, &x);
        hidden = self.convolution.run(g, hidden);
        let mut output = g.mul(&c, &hidden);
        output = g.transpose(&output, -1, -2);
        output = g.contiguous(&output);
        g.linear("out_proj", &output, width, self.convolution.bias)
    }
}

/// The width of the MLP, which most configs give as the width that an ungated one would have.
fn feed_forward_width(c: &Config<'_>) -> Result<u64, ModelError> {
    let width = c.size_or(&["block_ff_dim", "intermediate_size"], 12288)?;
    if !c.flag("block_auto_adjust_ff_dim", true)? {
        return Ok(width);
    }
    let width = 2 * width / 3;
    let multiplier = c.number("block_ffn_dim_multiplier", 1.0)?.clamp(0.0, 1e6);
    let multiple = read::positive(c, &["block_multiple_of"], 256)?;
    let width = (multiplier * width as f64) as u64;
    state::product(c, "intermediate_size", &[multiple, width.div_ceil(multiple)])
}

impl Decoder for Lfm2 {
    fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let mask = attention::mask(g, Mask::Causal);
        let table = RotaryTable { dim: self.attention.head_dim, axes: 1, doubled: true, fp32: false };
        let rope = g.rotary_table("rotary_emb", g.inputs.seq, table);
        let mut hidden = embeddings.clone();
        for (index, attends) in (0..).zip(&self.attends) {
            hidden = g.layer("layers", index, |g| self.layer(g, *attends, &hidden, &rope, &mask));
        }
        g.norm("embedding_norm", &hidden, Norm::Rms, false)
    }
}
