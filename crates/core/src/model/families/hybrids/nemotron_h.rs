//! Nemotron-H and Nemotron 3: every layer is one thing, Mamba-2, attention, an MLP or experts.

use super::mamba2_mixer::Mamba2Mixer;
use super::state::{self, CausalConvolution};
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{SelfAttention, attention, mlp, read};
use crate::model::config::MAX_LAYERS;
use crate::model::facts::{Facts, VllmFacts};
use crate::model::families::decoders::decoder::{self, Decoder, Vocabulary};
use crate::model::families::mixtures::routing::{Grouped, Routing};
use crate::model::op::{Activation, Mask, Norm};
use crate::model::{Config, Graph, ModelError, Value};

/// Nemotron-H.
pub const FAMILY: Family = Family {
    name: "Nemotron-H",
    model_types: &["nemotron_h"],
    facts: Facts {
        unturned: true,
        lora: &["q_proj", "k_proj", "v_proj", "o_proj"],
        lora_refused: &["out_proj", "conv1d"],
        vllm: VllmFacts::ADAPTED,
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &NemotronH::read(c)?),
};

struct NemotronH {
    vocabulary: Vocabulary,
    layers: Vec<Kind>,
    width: u64,
    shared_width: u64,
    activation: Activation,
    mlp_bias: bool,
    experts: FusedExperts,
    router: Grouped,
    latent: Option<u64>,
    attention: SelfAttention,
    mixer: Mamba2Mixer,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

impl NemotronH {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let heads = read::positive(c, &["num_attention_heads"], 32)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], 8)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::positive(c, &["head_dim"], 128)?);
        attention.rotary = None;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        let mamba_heads = read::positive(c, &["mamba_num_heads"], 128)?;
        let mamba_dim = read::positive(c, &["mamba_head_dim"], 64)?;
        state::product(c, "mamba_num_heads", &[mamba_heads, mamba_dim])?;
        let groups = read::positive(c, &["mamba_n_groups", "n_groups"], 8)?;
        let mixer = Mamba2Mixer {
            heads: mamba_heads,
            head_dim: mamba_dim,
            state: read::positive(c, &["ssm_state_size"], 128)?,
            groups,
            chunk: read::positive(c, &["mamba_chunk_size", "chunk_size"], 128)?,
            bias: c.flag("use_bias", false)?,
            convolution: CausalConvolution {
                name: "conv1d",
                kernel: read::positive(c, &["mamba_d_conv", "conv_kernel"], 4)?,
                bias: c.flag(if c.has("mamba_conv_bias") { "mamba_conv_bias" } else { "use_conv_bias" }, true)?,
                activation: Some(read::activation(c, "mamba_hidden_act", "silu")?),
            },
            norm: Norm::RmsGatedGroups(u32::try_from(groups).unwrap_or(u32::MAX)),
        };
        mixer.check(c, "n_groups")?;
        let activation = read::activation(c, "mlp_hidden_act", "relu2")?;
        let mut router = Grouped::read(c, [8, 1, 1])?;
        router.top_k = read::positive(c, &["num_experts_per_tok"], 2)?;
        let expert_width = c.size_or(&["moe_intermediate_size"], 7688)?;
        let latent = c.size_or(&["moe_latent_size"], 0)?;
        Ok(Self {
            // The head is never tied.
            vocabulary: Vocabulary { tied: false, ..Vocabulary::read(c, 131_072, 4096, false)? },
            layers: layer_kinds(c)?,
            width: c.size_or(&["intermediate_size"], 21504)?,
            shared_width: c.size_or(&["moe_shared_expert_intermediate_size"], 7688)?,
            activation,
            mlp_bias: c.flag("mlp_bias", false)?,
            experts: FusedExperts {
                gated: false,
                ..FusedExperts::new(router.experts, router.top_k, expert_width, activation)
            },
            router,
            latent: (latent > 0).then_some(latent),
            attention,
            mixer,
        })
    }

    fn layer(&self, g: &mut Graph, kind: Kind, input: &Value, mask: &Value) -> Value {
        let mut hidden = {
            let cast = g.to_model_type(input);
            g.norm("norm", &cast, Norm::Rms, false)
        };
        hidden = g.module("mixer", |g| match kind {
            Kind::Mamba => self.mixer.run(g, &hidden),
            Kind::Attention => self.attention.run(g, &hidden, None, mask),
            Kind::Mlp => mlp(g, &hidden, ["up_proj", "down_proj"], self.width, self.activation, self.mlp_bias),
            Kind::Experts => self.sparse(g, &hidden),
        });
        g.add(input, &hidden)
    }

    fn sparse(&self, g: &mut Graph, input: &Value) -> Value {
        let tokens = input.size(0).saturating_mul(input.size(1));
        let Routing { logits: _, weights, indices } = g.module("gate", |g| {
            let hidden = g.view(input, [tokens, self.vocabulary.width]);
            self.router.run(g, &hidden)
        });
        let mut hidden = g.view(input, [tokens, self.vocabulary.width]);
        if let Some(latent) = self.latent {
            hidden = g.linear("fc1_latent_proj", &hidden, latent, self.mlp_bias);
        }
        hidden = self.experts.run(g, "experts", &hidden, &indices, &weights);
        if self.latent.is_some() {
            hidden = g.linear("fc2_latent_proj", &hidden, self.vocabulary.width, self.mlp_bias);
        }
        hidden = g.view(&hidden, input.shape());
        let names = ["up_proj", "down_proj"];
        let shared =
            g.module("shared_experts", |g| mlp(g, input, names, self.shared_width, self.activation, self.mlp_bias));
        g.add(&hidden, &shared)
    }
}

/// What each layer is: a list of names, or a pattern of `M`, `*`, `-` and `E`.
fn layer_kinds(c: &Config<'_>) -> Result<Vec<Kind>, ModelError> {
    let mut key = "hybrid_override_pattern";
    let kinds: Option<Vec<Kind>> = match (c.strings("layers_block_type")?, c.strings("layer_types")?) {
        (Some(names), _) | (None, Some(names)) => {
            key = if c.has("layers_block_type") { "layers_block_type" } else { "layer_types" };
            names.iter().map(|name| Kind::named(name)).collect()
        }
        (None, None) => c.str_or(key, "M E * -").chars().filter(|letter| *letter != ' ').map(Kind::lettered).collect(),
    };
    let kinds = kinds.ok_or_else(|| c.refuse(key, "a list of Mamba, attention, MLP and expert layers"))?;
    if kinds.len() as u64 > MAX_LAYERS {
        return Err(c.refuse(key, "at most 4096 layers"));
    }
    Ok(kinds)
}

impl Kind {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "linear_attention" | "mamba" => Self::Mamba,
            "full_attention" | "attention" => Self::Attention,
            "mlp" => Self::Mlp,
            "moe" => Self::Experts,
            _ => return None,
        })
    }

    fn lettered(letter: char) -> Option<Self> {
        Some(match letter {
            'M' => Self::Mamba,
            '*' => Self::Attention,
            '-' => Self::Mlp,
            'E' => Self::Experts,
            _ => return None,
        })
    }
}

impl Decoder for NemotronH {
    fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    fn embed(&self, g: &mut Graph, ids: &Value) -> Value {
        g.embedding("embeddings", ids, self.vocabulary.rows, self.vocabulary.width)
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let mask = attention::mask(g, Mask::Causal);
        let mut hidden = embeddings.clone();
        for (index, kind) in (0..).zip(&self.layers) {
            hidden = g.layer("layers", index, |g| self.layer(g, *kind, &hidden, &mask));
        }
        g.norm("norm_f", &hidden, Norm::Rms, false)
    }

    fn finish_logits(&self, g: &mut Graph, logits: Value) -> Value {
        g.float(&logits)
    }
}
