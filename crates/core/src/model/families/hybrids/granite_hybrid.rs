//! Granite 4: Mamba-2 and attention layers, each with a shared MLP and, in the sparse models, experts beside it.

use super::mamba2_mixer::Mamba2Mixer;
use super::state::{self, CausalConvolution};
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, attention, read};
use crate::model::facts::{Facts, VllmFacts};
use crate::model::families::decoders::decoder::{self, Decoder, Vocabulary};
use crate::model::families::mixtures::routing::project;
use crate::model::op::{Activation, Binary, Mask, Norm, RotaryTable};
use crate::model::{Config, Graph, ModelError, Value};

/// Granite 4.
pub const FAMILY: Family = Family {
    name: "Granite 4",
    model_types: &["granitemoehybrid"],
    facts: Facts { vllm: VllmFacts::ADAPTED, ..Facts::DEFAULT },
    build: |c, task, g| decoder::build(c, task, g, &GraniteHybrid::read(c)?),
};

struct GraniteHybrid {
    vocabulary: Vocabulary,
    /// For each layer whether it attends.
    attends: Vec<bool>,
    shared_width: u64,
    activation: Activation,
    experts: Option<FusedExperts>,
    rope: bool,
    attention: SelfAttention,
    mixer: Mamba2Mixer,
}

impl GraniteHybrid {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let vocabulary = Vocabulary::read(c, 32000, 4096, false)?;
        let hidden = vocabulary.width;
        let heads = read::positive(c, &["num_attention_heads"], 32)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], heads)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, hidden, heads)?);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        let activation = read::activation(c, "hidden_act", "silu")?;
        let mamba_heads = read::positive(c, &["mamba_n_heads"], 128)?;
        let channels = state::product(c, "mamba_expand", &[c.size_or(&["mamba_expand"], 2)?, hidden])?;
        let mixer = Mamba2Mixer {
            heads: mamba_heads,
            head_dim: channels / mamba_heads,
            state: read::positive(c, &["mamba_d_state"], 256)?,
            groups: read::positive(c, &["mamba_n_groups"], 1)?,
            chunk: read::positive(c, &["mamba_chunk_size"], 256)?,
            bias: c.flag("mamba_proj_bias", false)?,
            convolution: CausalConvolution {
                name: "conv1d",
                kernel: read::positive(c, &["mamba_d_conv"], 4)?,
                bias: c.flag("mamba_conv_bias", true)?,
                activation: Some(activation),
            },
            norm: Norm::RmsGated,
        };
        mixer.check(c, "mamba_n_groups")?;
        let layers = c.layers(&["num_hidden_layers"], 32)?;
        let experts = c.size_or(&["num_local_experts"], 8)?;
        let top_k = c.size_or(&["num_experts_per_tok"], 2)?;
        let width = c.size_or(&["intermediate_size"], 11008)?;
        Ok(Self {
            vocabulary,
            attends: state::attention_layers(c, &["layer_types", "layers_block_type"], layers, |_| false)?,
            shared_width: c.size_or(&["shared_intermediate_size"], 1024)?,
            activation,
            experts: (experts > 0).then(|| FusedExperts::new(experts, top_k, width, activation)),
            rope: c.str_or("position_embedding_type", "") == "rope",
            attention,
            mixer,
        })
    }

    fn layer(&self, g: &mut Graph, attends: bool, input: &Value, rope: Option<&(Value, Value)>, mask: &Value) -> Value {
        let mut hidden = g.norm("input_layernorm", input, Norm::Rms, false);
        hidden = if attends {
            g.module("self_attn", |g| self.attention.run(g, &hidden, rope, mask))
        } else {
            g.module("mamba", |g| self.mixer.run(g, &hidden))
        };
        hidden = add_scaled(g, input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::Rms, false);
        hidden = match &self.experts {
            Some(experts) => {
                let routed = g.module("block_sparse_moe", |g| self.sparse(g, experts, &hidden));
                let shared = g.module("shared_mlp", |g| self.shared(g, &hidden));
                g.add(&routed, &shared)
            }
            None => g.module("shared_mlp", |g| self.shared(g, &hidden)),
        };
        add_scaled(g, &residual, &hidden)
    }

    fn shared(&self, g: &mut Graph, input: &Value) -> Value {
        let wide = g.linear("input_linear", input, 2 * self.shared_width, false);
        let (gate, up) = g.split2(&wide, -1, self.shared_width, self.shared_width);
        drop(wide);
        let product = g.glu(self.activation, &gate, &up);
        g.linear("output_linear", &product, self.vocabulary.width, false)
    }

    fn sparse(&self, g: &mut Graph, experts: &FusedExperts, input: &Value) -> Value {
        let hidden = g.reshape(input, [input.size(0).saturating_mul(input.size(1)), self.vocabulary.width]);
        let (indices, weights) = g.module("router", |g| {
            let logits = {
                let logits = project(g, &hidden, experts.count);
                g.float(&logits)
            };
            let (chosen, indices) = g.top_k(&logits, experts.top_k);
            let weights = g.softmax(&chosen, -1, None);
            (indices, g.type_as(&weights, &hidden))
        });
        let output = experts.run(g, "experts", &hidden, &indices, &weights);
        g.view(&output, input.shape())
    }
}

fn add_scaled(g: &mut Graph, residual: &Value, hidden: &Value) -> Value {
    let scaled = g.scale(hidden);
    g.add(residual, &scaled)
}

impl Decoder for GraniteHybrid {
    fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    fn model(&self, g: &mut Graph, mut embeddings: Value) -> Value {
        embeddings = g.scale(&embeddings);
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.rope.then(|| {
            let table = RotaryTable { dim: self.attention.head_dim, axes: 1, doubled: true, fp32: false };
            g.rotary_table("rotary_emb", g.inputs.seq, table)
        });
        let mut hidden = embeddings.clone();
        for (index, attends) in (0..).zip(&self.attends) {
            hidden = g.layer("layers", index, |g| self.layer(g, *attends, &hidden, rope.as_ref(), &mask));
        }
        g.norm("norm", &hidden, Norm::Rms, false)
    }

    fn finish_logits(&self, g: &mut Graph, logits: Value) -> Value {
        g.scalar(Binary::Div, &logits)
    }
}
