//! Jamba: Mamba layers with an attention layer now and then, and experts in every other feed-forward.

use super::mamba_mixer::{MambaMixer, time_step_rank};
use super::state::{self, CausalConvolution};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, attention, gated_mlp, read};
use crate::model::facts::{Facts, VllmFacts};
use crate::model::families::decoders::decoder::{self, Decoder, Vocabulary};
use crate::model::op::{Activation, LinearLayout, Mask, Norm, Op, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Jamba.
pub const FAMILY: Family = Family {
    name: "Jamba",
    model_types: &["jamba"],
    facts: Facts {
        unturned: true,
        tasks: Some(&[Task::CausalLm, Task::Base, Task::SequenceClassification]),
        vllm: VllmFacts::ADAPTED,
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Jamba::read(c)?),
};

struct Jamba {
    vocabulary: Vocabulary,
    layers: Vec<Layer>,
    width: u64,
    activation: Activation,
    attention: SelfAttention,
    mixer: MambaMixer,
    experts: FusedExperts,
}

#[derive(Clone, Copy)]
struct Layer {
    attention: bool,
    sparse: bool,
}

impl Jamba {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let vocabulary = Vocabulary::read(c, 65536, 4096, false)?;
        let hidden = vocabulary.width;
        let heads = read::positive(c, &["num_attention_heads"], 32)?;
        let kv_heads = if c.has("num_key_value_heads") { read::positive(c, &["num_key_value_heads"], 8)? } else { 8 };
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, hidden, heads)?);
        attention.rotary = None;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        let activation = read::activation(c, "hidden_act", "silu")?;
        let mixer = MambaMixer {
            channels: state::product(c, "mamba_expand", &[c.size_or(&["mamba_expand"], 2)?, hidden])?,
            state: read::positive(c, &["mamba_d_state"], 16)?,
            rank: time_step_rank(c, "mamba_dt_rank", hidden)?,
            bias: c.flag("mamba_proj_bias", false)?,
            convolution: CausalConvolution {
                name: "conv1d",
                kernel: read::positive(c, &["mamba_d_conv"], 4)?,
                bias: c.flag("mamba_conv_bias", true)?,
                activation: Some(activation),
            },
            norms: Some(Norm::Rms),
        };
        let width = c.size_or(&["intermediate_size"], 14336)?;
        let experts = read::positive(c, &["num_experts", "num_local_experts"], 16)?;
        let top_k = read::positive(c, &["num_experts_per_tok"], 2)?;
        let (attention_period, attention_offset) =
            (read::positive(c, &["attn_layer_period"], 8)?, c.size_or(&["attn_layer_offset"], 4)?);
        let (expert_period, expert_offset) =
            (read::positive(c, &["expert_layer_period"], 2)?, c.size_or(&["expert_layer_offset"], 1)?);
        let layer = |index: u64| Layer {
            attention: index % attention_period == attention_offset,
            sparse: experts > 1 && index % expert_period == expert_offset,
        };
        Ok(Self {
            vocabulary,
            layers: (0..c.layers(&["num_hidden_layers"], 32)?).map(layer).collect(),
            width,
            activation,
            attention,
            mixer,
            experts: FusedExperts::new(experts, top_k, width, activation),
        })
    }

    fn layer(&self, g: &mut Graph, layer: Layer, input: &Value, mask: &Value) -> Value {
        let mut hidden = g.norm("input_layernorm", input, Norm::Rms, false);
        hidden = if layer.attention {
            g.module("self_attn", |g| self.attention.run(g, &hidden, None, mask))
        } else {
            g.module("mamba", |g| self.mixer.run(g, &hidden, None))
        };
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("pre_ff_layernorm", &hidden, Norm::Rms, false);
        hidden = g.module("feed_forward", |g| {
            if layer.sparse {
                self.sparse(g, &hidden)
            } else {
                gated_mlp(g, &hidden, ["gate_proj", "up_proj", "down_proj"], self.width, self.activation, false)
            }
        });
        g.add(&residual, &hidden)
    }

    fn sparse(&self, g: &mut Graph, input: &Value) -> Value {
        let mut hidden = g.view(input, [input.size(0).saturating_mul(input.size(1)), self.vocabulary.width]);
        // The router holds its matrix itself: it is no `nn.Linear`.
        let logits = g.module("router", |g| {
            let weight = g.parameter("weight", [self.experts.count, hidden.size(-1)], Role::Other);
            let op = Op::Linear { weight, bias: None, layout: LinearLayout::OutIn };
            g.run(op, &[&hidden], hidden.shape().with(-1, self.experts.count))
        });
        let (weights, indices) = {
            let probabilities = g.softmax(&logits, -1, Some(DType::F32));
            let (weights, indices) = g.top_k(&probabilities, self.experts.top_k);
            (g.type_as(&weights, &hidden), indices)
        };
        hidden = self.experts.run(g, "experts", &hidden, &indices, &weights);
        g.reshape(&hidden, input.shape())
    }
}

impl Decoder for Jamba {
    fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let mask = attention::mask(g, Mask::Causal);
        let mut hidden = embeddings.clone();
        for (index, layer) in (0..).zip(&self.layers) {
            hidden = g.layer("layers", index, |g| self.layer(g, *layer, &hidden, &mask));
        }
        g.norm("final_layernorm", &hidden, Norm::Rms, false)
    }
}
