//! Zamba 2: Mamba-2 layers, before some of which one of a few shared transformer blocks runs.
//!
//! A shared block exists once; each of its uses adds low-rank adapters of its own.

use super::mamba2_mixer::Mamba2Mixer;
use super::state::{self, CausalConvolution};
use crate::model::Family;
use crate::model::blocks::{SelfAttention, attention, read};
use crate::model::config::MAX_LAYERS;
use crate::model::facts::Facts;
use crate::model::families::decoders::decoder::{self, Decoder, Vocabulary};
use crate::model::op::{Activation, Mask, Norm, Op, Role, Rotary, RotaryTable, Unary};
use crate::model::{Config, Graph, ModelError, Sharing, Task, Value};

/// Zamba 2.
pub const FAMILY: Family = Family {
    name: "Zamba2",
    model_types: &["zamba2"],
    facts: Facts {
        unturned: true,
        tasks: Some(&[Task::CausalLm, Task::Base, Task::SequenceClassification]),
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Zamba2::read(c)?),
};

struct Zamba2 {
    vocabulary: Vocabulary,
    hidden: u64,
    /// For each layer whether a shared block runs before it.
    hybrid: Vec<bool>,
    blocks: u64,
    width: u64,
    activation: Activation,
    mlp_bias: bool,
    adapter_rank: u64,
    attention_adapters: bool,
    rope: bool,
    attention: SelfAttention,
    mixer: Mamba2Mixer,
}

/// One use of a shared block: which use it is, and where the block's parameters live.
struct Use {
    index: u64,
    owner: String,
}

impl Zamba2 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let vocabulary = Vocabulary::read(c, 32000, 2560, true)?;
        let hidden = vocabulary.width;
        let heads = read::positive(c, &["num_attention_heads"], 32)?;
        let kv_heads = read::positive(c, &["num_key_value_heads"], heads)?;
        let mut attention = SelfAttention::new(heads, kv_heads, 2 * hidden / heads);
        attention.dropout = c.number("attention_dropout", 0.0)?;
        let mamba_heads = read::positive(c, &["n_mamba_heads"], 8)?;
        let channels = state::product(c, "mamba_expand", &[c.size_or(&["mamba_expand"], 2)?, hidden])?;
        let groups = read::positive(c, &["mamba_ngroups"], 1)?;
        let mixer = Mamba2Mixer {
            heads: mamba_heads,
            head_dim: channels / mamba_heads,
            state: read::positive(c, &["mamba_d_state"], 64)?,
            groups,
            chunk: read::positive(c, &["chunk_size"], 256)?,
            bias: c.flag("add_bias_linear", false)?,
            convolution: CausalConvolution {
                name: "conv1d",
                kernel: read::positive(c, &["mamba_d_conv"], 4)?,
                bias: true,
                activation: Some(Activation::Silu),
            },
            norm: Norm::RmsGatedGroups(u32::try_from(groups).unwrap_or(u32::MAX)),
        };
        mixer.check(c, "mamba_ngroups")?;
        Ok(Self {
            vocabulary,
            hidden,
            hybrid: hybrid_layers(c)?,
            blocks: read::positive(c, &["num_mem_blocks"], 1)?,
            width: match c.size_or(&["intermediate_size"], 0)? {
                0 => 4 * hidden,
                width => width,
            },
            activation: read::activation(c, "hidden_act", "gelu")?,
            mlp_bias: c.flag("add_bias_linear", false)?,
            adapter_rank: c.size_or(&["adapter_rank"], 128)?,
            attention_adapters: c.flag("use_shared_attention_adapter", false)?,
            rope: c.flag("use_mem_rope", false)?,
            attention,
            mixer,
        })
    }

    fn mamba_layer(&self, g: &mut Graph, input: &Value, transformed: Option<&Value>) -> Value {
        let mut hidden = match transformed {
            Some(transformed) => g.add(input, transformed),
            None => input.clone(),
        };
        hidden = g.norm("input_layernorm", &hidden, Norm::Rms, false);
        hidden = g.module("mamba", |g| self.mixer.run(g, &hidden));
        g.add(input, &hidden)
    }

    fn shared(
        &self,
        g: &mut Graph,
        which: &Use,
        input: &Value,
        original: &Value,
        rope: Option<&(Value, Value)>,
        mask: &Value,
    ) -> Value {
        self.name_block(g, which);
        let mut hidden = g.cat(&[input, original], -1);
        hidden = g.norm("input_layernorm", &hidden, Norm::Rms, false);
        hidden = g.module("self_attn", |g| self.attend(g, which, &hidden, rope, mask));
        hidden = g.norm("pre_ff_layernorm", &hidden, Norm::Rms, false);
        g.module("feed_forward", |g| self.feed_forward(g, which, &hidden))
    }

    /// Declares a block with its adapters for every use where it stands, and names it again everywhere else.
    fn name_block(&self, g: &mut Graph, which: &Use) {
        let wide = 2 * self.hidden;
        let mut adapters = Vec::new();
        for slot in self.slots(which) {
            for list in ["q", "k", "v"].into_iter().filter(|_| self.attention_adapters) {
                adapters.push((format!("self_attn.linear_{list}_adapter_list.{slot}"), wide, wide));
            }
            adapters.push((format!("feed_forward.gate_up_proj_adapter_list.{slot}"), self.hidden, 2 * self.width));
        }
        let first = g.find(&format!("{}.input_layernorm.weight", which.owner)).is_none();
        let mut names = Vec::new();
        if !first && g.inputs.sharing != Sharing::Apart {
            names.extend(["input_layernorm", "pre_ff_layernorm"].map(String::from));
        }
        if first || g.inputs.sharing != Sharing::Once {
            for (name, inputs, outputs) in &adapters {
                g.parameter(&format!("{name}.0.weight"), [self.adapter_rank, *inputs], Role::Linear);
                g.parameter(&format!("{name}.1.weight"), [*outputs, self.adapter_rank], Role::Linear);
            }
            adapters.clear();
        } else {
            names.extend(["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("self_attn.{name}")));
            names.extend(["gate_up_proj", "down_proj"].map(|name| format!("feed_forward.{name}")));
        }
        names.extend(adapters.iter().flat_map(|(name, ..)| [format!("{name}.0"), format!("{name}.1")]));
        for name in names {
            for part in ["weight", "bias"] {
                if let Some(parameter) = g.find(&format!("{}.{name}.{part}", which.owner)) {
                    g.alias(&format!("{name}.{part}"), parameter);
                }
            }
        }
    }

    /// The uses of the same block, each of which has adapters in every copy of it.
    fn slots(&self, which: &Use) -> impl Iterator<Item = u64> {
        let (blocks, own) = (self.blocks, which.index % self.blocks);
        let total = self.hybrid.iter().filter(|hybrid| **hybrid).count() as u64;
        (0..total).filter(move |slot| slot % blocks == own)
    }

    /// Adapters of the block's other uses are modules here too, which never run.
    fn declare_others(&self, g: &mut Graph, which: &Use, x: &Value, input: &Value, list: &str) {
        for slot in self.slots(which).filter(|slot| *slot != which.index) {
            g.declare_only(|g| self.adapted(g, x, input, &format!("{list}.{slot}")));
        }
    }

    fn attend(&self, g: &mut Graph, which: &Use, input: &Value, rope: Option<&(Value, Value)>, mask: &Value) -> Value {
        let SelfAttention { heads, kv_heads, head_dim, .. } = self.attention;
        let mut query = g.linear("q_proj", input, heads * head_dim, false);
        let mut key = g.linear("k_proj", input, kv_heads * head_dim, false);
        let mut value = g.linear("v_proj", input, kv_heads * head_dim, false);
        if self.attention_adapters {
            for (x, letter) in [(&query, 'q'), (&key, 'k'), (&value, 'v')] {
                self.declare_others(g, which, x, input, &format!("linear_{letter}_adapter_list"));
            }
            query = self.adapted(g, &query, input, &format!("linear_q_adapter_list.{}", which.index));
            key = self.adapted(g, &key, input, &format!("linear_k_adapter_list.{}", which.index));
            value = self.adapted(g, &value, input, &format!("linear_v_adapter_list.{}", which.index));
        }
        query = attention::split_heads(g, query, heads, head_dim);
        key = attention::split_heads(g, key, kv_heads, head_dim);
        value = attention::split_heads(g, value, kv_heads, head_dim);
        if let Some((cosine, sine)) = rope {
            (query, key) = attention::rotate_whole(g, Rotary::Half, &query, &key, cosine, sine);
        }
        (key, value) = g.cache(self.attention.cache(), &key, &value);
        let attended = attention::attend(g, self.attention.spec(None), &query, &key, &value, Some(mask));
        self.attention.output(g, attended, self.hidden)
    }

    fn feed_forward(&self, g: &mut Graph, which: &Use, input: &Value) -> Value {
        let mut wide = g.linear("gate_up_proj", input, 2 * self.width, self.mlp_bias);
        self.declare_others(g, which, &wide, input, "gate_up_proj_adapter_list");
        wide = self.adapted(g, &wide, input, &format!("gate_up_proj_adapter_list.{}", which.index));
        let (gate, up) = g.split2(&wide, -1, self.width, self.width);
        drop(wide);
        let product = g.glu(self.activation, &gate, &up);
        g.linear("down_proj", &product, self.hidden, self.mlp_bias)
    }

    /// `x + second(first(input))` with the adapter of this name.
    fn adapted(&self, g: &mut Graph, x: &Value, input: &Value, name: &str) -> Value {
        let mut change = g.linear(&format!("{name}.0"), input, self.adapter_rank, false);
        change = g.linear(&format!("{name}.1"), &change, x.size(-1), false);
        g.add(x, &change)
    }
}

/// The layers before which a shared block runs: `layers_block_type`, or the class's own list.
fn hybrid_layers(c: &Config<'_>) -> Result<Vec<bool>, ModelError> {
    let Some(kinds) = c.strings("layers_block_type")?.or(c.strings("layer_types")?) else {
        return Ok((0..54)
            .map(|index| matches!(index, 47 | 51) || (index > 0 && index < 43 && index % 6 == 0))
            .collect());
    };
    if kinds.len() as u64 > MAX_LAYERS {
        return Err(c.refuse("layers_block_type", "a list of at most 4096 layers"));
    }
    state::attention_layers(c, &["layers_block_type", "layer_types"], kinds.len() as u64, |_| false)
}

impl Decoder for Zamba2 {
    fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let mut hidden = embeddings.clone();
        let original = g.unary(Unary::Clone, &embeddings);
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.rope.then(|| {
            let table = RotaryTable { dim: self.attention.head_dim, axes: 1, doubled: true, fp32: false };
            g.rotary_table("rotary_emb", g.inputs.seq, table)
        });
        let (mut uses, mut owners) = (0, Vec::new());
        for (index, hybrid) in (0..).zip(&self.hybrid) {
            hidden = g.layer("layers", index, |g| {
                if !hybrid {
                    return self.mamba_layer(g, &hidden, None);
                }
                if (owners.len() as u64) < self.blocks {
                    owners.push(g.path_of("shared_transformer"));
                }
                let owner = owners[(uses % owners.len() as u64) as usize].clone();
                let which = Use { index: uses, owner };
                uses += 1;
                let mut transformed = g
                    .module("shared_transformer", |g| self.shared(g, &which, &hidden, &original, rope.as_ref(), &mask));
                transformed = g.linear("linear", &transformed, self.hidden, false);
                transformed = g.run(Op::Given, &[&transformed], transformed.shape());
                g.module("mamba_decoder", |g| self.mamba_layer(g, &hidden, Some(&transformed)))
            });
        }
        g.norm("final_layernorm", &hidden, Norm::Rms, false)
    }
}
