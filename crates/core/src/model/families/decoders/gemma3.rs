//! Gemma 2 and the text model of Gemma 3 (and EmbeddingGemma): norms before and after both halves of a layer, windows
//! in many layers; Gemma 2 squashes scores and logits, Gemma 3 norms queries and keys and has a rotary table per kind
//! of layer.

use super::decoder::{self, Decoder, Vocabulary, run_layers};
use super::gemma::{mlp, scaled_embedding};
use crate::model::Family;
use crate::model::blocks::attention::Masks;
use crate::model::blocks::{QkNorm, SelfAttention, read};
use crate::model::facts::{AttentionKernels, Facts, Liger, LigerPatch};
use crate::model::op::{Activation, Binary, Norm, Unary};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// Gemma 2.
pub const GEMMA2: Family = Family {
    name: "Gemma 2",
    model_types: &["gemma2"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::Patched(SANDWICH_NORMS),
        lora: &["q_proj", "v_proj"],
        ia3: &["q_proj", "v_proj", "down_proj"],
        ia3_feedforward: &["down_proj"],
        tensor_plan: &[ATTENTION, GATED_MLP],
        scaled_embedding: true,
        text: Some(|c| Ok(Box::new(Gemma3::read_gemma2(c)?))),
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Gemma3::read_gemma2(c)?),
};

/// Gemma 3, text alone.
pub const FAMILY: Family = Family {
    name: "Gemma 3 (text)",
    model_types: &["gemma3_text"],
    facts: Facts {
        positions: Some(131_072),
        scaled_positions: true,
        text: Some(|c| Ok(Box::new(Gemma3::read(c)?))),
        ..GEMMA2.facts
    },
    build: |c, task, g| decoder::build(c, task, g, &Gemma3::read(c)?),
};

/// Norms before and after attention and MLP.
const SANDWICH_NORMS: LigerPatch = LigerPatch {
    norms: &[
        "norm",
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "q_norm",
        "k_norm",
    ],
    norms_in_place: false,
    ..LigerPatch::LLAMA
};

/// The text model of Gemma 3, or Gemma 2.
#[derive(Debug, Clone)]
pub(crate) struct Gemma3 {
    vocabulary: Vocabulary,
    width: u64,
    activation: Activation,
    attention: SelfAttention,
    windows: Vec<Option<u64>>,
    softcap: bool,
    /// Whether full and windowed layers have rotary tables of their own.
    rope_by_kind: bool,
}

impl Gemma3 {
    /// Reads a Gemma 2.
    pub(crate) fn read_gemma2(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut gemma = Self::read(c)?;
        gemma.vocabulary.rows = c.size_or(&["vocab_size"], 256_000)?;
        gemma.attention.qk_norm = QkNorm::None;
        gemma.attention.softcap = !read::is_null(c, "attn_logit_softcapping");
        gemma.softcap = !read::is_null(c, "final_logit_softcapping");
        gemma.rope_by_kind = false;
        let window = read::window(c, "sliding_window", Some(4096))?;
        gemma.windows = read::layer_windows(c, gemma.windows.len() as u64, window, |index| index % 2 == 0)?;
        Ok(gemma)
    }

    /// Reads a Gemma 3 text config.
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let heads = read::positive(c, &["num_attention_heads"], 8)?;
        let kv_heads = read::kv_heads(c, heads, 4)?;
        let mut attention = SelfAttention::new(heads, kv_heads, read::positive(c, &["head_dim"], 256)?);
        attention.qk_norm = QkNorm::Head(Norm::RmsGemma, ["q_norm", "k_norm"]);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.causal = !c.flag("use_bidirectional_attention", false)?;
        let mut window = read::window(c, "sliding_window", Some(4096))?;
        if !attention.causal {
            window = window.map(|size| size / 2 + 1);
        }
        let layers = c.layers(&["num_hidden_layers"], 26)?;
        let pattern = read::positive(c, &["sliding_window_pattern", "_sliding_window_pattern"], 6)?;
        Ok(Self {
            vocabulary: Vocabulary::read(c, 262_208, 2304, true)?,
            width: c.size_or(&["intermediate_size"], 9216)?,
            activation: read::activation(c, "hidden_activation", "gelu_pytorch_tanh")?,
            attention,
            windows: read::layer_windows(c, layers, window, |index| (index + 1) % pattern != 0)?,
            softcap: c.has("final_logit_softcapping"),
            rope_by_kind: true,
        })
    }

    /// Runs the layers with these masks: a multimodal model lets the tokens of an image see each other.
    pub(crate) fn model_with(&self, g: &mut Graph, embeddings: Value, masks: &Masks) -> Value {
        let [full, sliding] = self.ropes(g);
        let hidden = run_layers(g, embeddings.clone(), &self.windows, |g, _, window, hidden| {
            let rope = if window.is_some() { &sliding } else { &full };
            self.layer(g, hidden, rope.as_ref(), masks.of(window), window)
        });
        g.norm("norm", &hidden, Norm::RmsGemma, false)
    }

    /// The masks of the text model alone.
    pub(crate) fn masks(&self, g: &mut Graph) -> Masks {
        if self.attention.causal {
            Masks::new(g, &self.windows, true)
        } else {
            Masks::bidirectional(g, &self.windows, true)
        }
    }

    /// The masks of a multimodal model whose batch has images.
    pub(crate) fn image_masks(&self, g: &mut Graph) -> Masks {
        Masks::with_images(g, &self.windows)
    }

    /// The rotary tables of full and of windowed layers.
    fn ropes(&self, g: &mut Graph) -> [Option<(Value, Value)>; 2] {
        if self.rope_by_kind {
            return decoder::ropes_by_kind(g, &self.windows, self.attention.head_dim, false);
        }
        let table = decoder::rope(g, self.attention.head_dim, false);
        [Some(table.clone()), Some(table)]
    }

    fn layer(
        &self,
        g: &mut Graph,
        input: &Value,
        rope: Option<&(Value, Value)>,
        mask: &Value,
        window: Option<u64>,
    ) -> Value {
        let attention = self.attention.windowed(window);
        let mut hidden = g.norm("input_layernorm", input, Norm::RmsGemma, false);
        hidden = g.module("self_attn", |g| attention.run(g, &hidden, rope, mask));
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::RmsGemma, false);
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("pre_feedforward_layernorm", &hidden, Norm::RmsGemma, false);
        hidden = mlp(g, &hidden, self.width, self.activation);
        hidden = g.norm("post_feedforward_layernorm", &hidden, Norm::RmsGemma, false);
        g.add(&residual, &hidden)
    }
}

impl Decoder for Gemma3 {
    fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    fn embed(&self, g: &mut Graph, ids: &Value) -> Value {
        scaled_embedding(g, ids, self.vocabulary)
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let masks = self.masks(g);
        self.model_with(g, embeddings, &masks)
    }

    fn finish_logits(&self, g: &mut Graph, logits: Value) -> Value {
        if self.softcap { soft_cap(g, logits) } else { logits }
    }
}

/// `tanh(logits / cap) * cap`, one name throughout.
pub(crate) fn soft_cap(g: &mut Graph, mut logits: Value) -> Value {
    logits = g.scalar(Binary::Div, &logits);
    logits = g.unary(Unary::Tanh, &logits);
    g.scale(&logits)
}
