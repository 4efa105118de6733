//! Llama and everything built like it (Llama 1 to 3, Yi, Vicuna, SmolLM, TinyLlama, …), and the decoders that are
//! Llama with another attention: Mistral, Qwen2, Qwen3.

use super::decoder::{self, Decoder, Vocabulary};
use crate::model::Family;
use crate::model::blocks::attention::Masks;
use crate::model::blocks::{QkNorm, SelfAttention, gated_mlp, read};
use crate::model::facts::{AdaptedTables, AttentionKernels, Facts, Liger, LigerPatch, VllmFacts};
use crate::model::op::{Activation, Norm, RotaryTable};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// Llama.
pub const FAMILY: Family = Family {
    name: "Llama",
    model_types: &["llama"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::Patched(LigerPatch::LLAMA),
        lora: &["q_proj", "v_proj"],
        ia3: &["k_proj", "v_proj", "down_proj"],
        ia3_feedforward: &["down_proj"],
        tensor_plan: &[ATTENTION, GATED_MLP],
        text: Some(|c| Ok(Box::new(Llama::read(c)?))),
        vllm: VllmFacts::ADAPTED,
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Llama::read(c)?),
};

/// Mistral: Llama whose layers may all see a window only.
pub const MISTRAL: Family = Family {
    name: "Mistral",
    model_types: &["mistral"],
    facts: Facts { text: Some(|c| Ok(Box::new(Llama::read_mistral(c)?))), ..FAMILY.facts },
    build: |c, task, g| decoder::build(c, task, g, &Llama::read_mistral(c)?),
};

/// Qwen 1.5 to 2.5: Llama with biases on queries, keys and values.
pub const QWEN2: Family = Family {
    name: "Qwen2",
    model_types: &["qwen2"],
    facts: Facts {
        ia3: &["q_proj", "v_proj", "down_proj"],
        text: Some(|c| Ok(Box::new(Llama::read_qwen2(c)?))),
        vllm: VllmFacts::DEFAULT,
        ..FAMILY.facts
    },
    build: |c, task, g| decoder::build(c, task, g, &Llama::read_qwen2(c)?),
};

/// Qwen3: Llama with a norm over each head of queries and keys.
pub const QWEN3: Family = Family {
    name: "Qwen3",
    model_types: &["qwen3"],
    facts: Facts {
        liger: Liger::Patched(LigerPatch {
            norms: &["norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"],
            ..LigerPatch::LLAMA
        }),
        text: Some(|c| Ok(Box::new(Llama::read_qwen3(c)?))),
        vllm: VllmFacts { tables: AdaptedTables::Qwen3, ..VllmFacts::DEFAULT },
        ..QWEN2.facts
    },
    build: |c, task, g| decoder::build(c, task, g, &Llama::read_qwen3(c)?),
};

/// A decoder with Llama's layers.
#[derive(Debug, Clone)]
pub(crate) struct Llama {
    /// The token table.
    pub vocabulary: Vocabulary,
    /// Width of the MLP.
    pub width: u64,
    /// Its activation.
    pub activation: Activation,
    /// Whether its linears have biases.
    pub mlp_bias: bool,
    /// The attention of every layer, but for its window.
    pub attention: SelfAttention,
    /// The window of each layer.
    pub windows: Vec<Option<u64>>,
    /// Whether the mask of full layers is built even where there are none.
    pub always_full_mask: bool,
}

impl Llama {
    /// Reads a Llama.
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let vocabulary = Vocabulary::read(c, 32000, 4096, false)?;
        let heads = read::positive(c, &["num_attention_heads", "n_head", "n_heads"], 32)?;
        let kv_heads = read::kv_heads(c, heads, heads)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::head_dim(c, vocabulary.width, heads)?);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        let layers = c.layers(&["num_hidden_layers", "n_layer", "n_layers"], 32)?;
        Ok(Self {
            vocabulary,
            width: c.size_or(&["intermediate_size", "ffn_dim"], 11008)?,
            activation: read::activation(c, "hidden_act", "silu")?,
            mlp_bias: c.flag("mlp_bias", false)?,
            attention,
            windows: vec![None; layers as usize],
            always_full_mask: true,
        })
    }

    /// Reads a Mistral.
    pub(crate) fn read_mistral(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut llama = Self::read(c)?;
        llama.width = c.size_or(&["intermediate_size"], 14336)?;
        llama.attention.kv_heads = read::kv_heads(c, llama.attention.heads, 8)?;
        llama.unbiased();
        llama.windows.fill(read::window(c, "sliding_window", Some(4096))?);
        llama.always_full_mask = false;
        Ok(llama)
    }

    /// Reads a Qwen2.
    pub(crate) fn read_qwen2(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut llama = Self::read_qwen(c)?;
        llama.unbiased();
        llama.attention.qkv_bias = true;
        Ok(llama)
    }

    /// Reads a Qwen3.
    pub(crate) fn read_qwen3(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut llama = Self::read_qwen(c)?;
        llama.mlp_bias = false;
        let head_dim = read::positive(c, &["head_dim"], 128)?;
        (llama.attention.head_dim, llama.attention.rotary_dim) = (head_dim, head_dim);
        llama.attention.qk_norm = QkNorm::HeadLast(Norm::Rms, ["q_norm", "k_norm"]);
        Ok(llama)
    }

    fn read_qwen(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut llama = Self::read(c)?;
        llama.vocabulary.rows = c.size_or(&["vocab_size"], 151_936)?;
        llama.width = c.size_or(&["intermediate_size"], 22016)?;
        llama.attention.kv_heads = read::kv_heads(c, llama.attention.heads, 32)?;
        let slides = c.flag("use_sliding_window", false)?;
        let window = if slides { read::window(c, "sliding_window", Some(4096))? } else { None };
        let first = c.size_or(&["max_window_layers"], 28)?;
        llama.windows = read::layer_windows(c, llama.windows.len() as u64, window, |index| index >= first)?;
        Ok(llama)
    }

    fn unbiased(&mut self) {
        (self.attention.qkv_bias, self.attention.out_bias, self.mlp_bias) = (false, false, false);
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value, window: Option<u64>) -> Value {
        let attention = self.attention.windowed(window);
        let mut hidden = g.norm("input_layernorm", input, Norm::Rms, false);
        hidden = g.module("self_attn", |g| attention.run(g, &hidden, Some(rope), mask));
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::Rms, false);
        let names = ["gate_proj", "up_proj", "down_proj"];
        hidden = g.module("mlp", |g| gated_mlp(g, &hidden, names, self.width, self.activation, self.mlp_bias));
        g.add(&residual, &hidden)
    }
}

impl Decoder for Llama {
    fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let masks = Masks::new(g, &self.windows, self.always_full_mask);
        let table = RotaryTable { dim: self.attention.head_dim, axes: 1, doubled: true, fp32: false };
        let rope = g.rotary_table("rotary_emb", g.inputs.seq, table);
        let mut hidden = embeddings.clone();
        for (index, &window) in self.windows.iter().enumerate() {
            hidden = g.layer("layers", index as u64, |g| self.layer(g, &hidden, &rope, masks.of(window), window));
        }
        g.norm("norm", &hidden, Norm::Rms, false)
    }
}
