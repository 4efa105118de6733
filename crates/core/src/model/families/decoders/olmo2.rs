//! OLMo 2, OLMo 3 and EXAONE 4: decoders whose norms stand after the attention and after the MLP, not before.

use super::decoder::{self, Decoder, Defaults, Sizes, Vocabulary, llama_mlp, run_layers};
use crate::model::Family;
use crate::model::blocks::attention::Masks;
use crate::model::blocks::{QkNorm, read};
use crate::model::facts::{AttentionKernels, Facts, Liger, LigerPatch, VllmFacts};
use crate::model::op::{Norm, Rotary};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP, GATHERED_ATTENTION};
use crate::model::{Config, Graph, ModelError, Value};

/// OLMo 2.
pub const OLMO2: Family = Family {
    name: "OLMo 2",
    model_types: &["olmo2"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::Patched(POST_NORMS),
        tensor_plan: &[GATHERED_ATTENTION, GATED_MLP],
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &PostNorm::read_olmo2(c)?),
};

/// OLMo 3: OLMo 2 with windows in three layers of four.
pub const OLMO3: Family = Family {
    name: "OLMo 3",
    model_types: &["olmo3"],
    facts: OLMO2.facts,
    build: |c, task, g| decoder::build(c, task, g, &PostNorm::read_olmo3(c)?),
};

/// EXAONE 4: norms over each head, and rotary positions in windowed layers only, where there are any.
pub const EXAONE4: Family = Family {
    name: "EXAONE 4",
    model_types: &["exaone4"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::Patched(LigerPatch {
            norms: &["norm", "post_attention_layernorm", "post_feedforward_layernorm", "q_norm", "k_norm"],
            ..POST_NORMS
        }),
        tensor_plan: &[ATTENTION, GATED_MLP],
        vllm: VllmFacts::ADAPTED,
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &PostNorm::read_exaone4(c)?),
};

/// Norms after attention and MLP.
const POST_NORMS: LigerPatch = LigerPatch {
    norms: &["norm", "post_attention_layernorm", "post_feedforward_layernorm"],
    norms_in_place: false,
    ..LigerPatch::LLAMA
};

struct PostNorm {
    sizes: Sizes,
    norm: Norm,
    windows: Vec<Option<u64>>,
    rope: Rope,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rope {
    /// One table in fp32 for all layers.
    Promoted,
    /// One table in fp32 per kind of layer.
    PromotedByKind,
    /// One table in the model's type for all layers.
    All,
    /// The same, which layers without a window do not use.
    WindowedOnly,
}

impl PostNorm {
    fn read_olmo2(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 50304,
                hidden: 4096,
                width: 11008,
                layers: 32,
                heads: 32,
                kv_heads: None,
                head_dim: None,
                activation: "silu",
                tied: false,
            },
        )?;
        sizes.attention.qk_norm = QkNorm::Whole(Norm::RmsWeightFirst, ["q_norm", "k_norm"]);
        sizes.attention.rotary = Some(Rotary::HalfPromoted);
        Ok(Self { norm: Norm::RmsWeightFirst, windows: sizes.no_windows(), rope: Rope::Promoted, sizes })
    }

    fn read_olmo3(c: &Config<'_>) -> Result<Self, ModelError> {
        let olmo2 = Self::read_olmo2(c)?;
        let window = read::window(c, "sliding_window", Some(4096))?;
        let windows = read::layer_windows(c, olmo2.sizes.layers, window, |index| (index + 1) % 4 != 0)?;
        Ok(Self { windows, rope: Rope::PromotedByKind, ..olmo2 })
    }

    fn read_exaone4(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 102_400,
                hidden: 4096,
                width: 16384,
                layers: 32,
                heads: 32,
                kv_heads: Some(32),
                head_dim: None,
                activation: "silu",
                tied: false,
            },
        )?;
        (sizes.attention.qkv_bias, sizes.attention.out_bias) = (false, false);
        sizes.attention.qk_norm = QkNorm::Head(Norm::Rms, ["q_norm", "k_norm"]);
        let window = read::window(c, "sliding_window", Some(4096))?;
        // A number, or one letter per layer of the pattern: `LLLG`.
        let letters = c.str_or("sliding_window_pattern", "").as_bytes();
        let period = if letters.is_empty() { read::positive(c, &["sliding_window_pattern"], 4)? } else { 1 };
        let slides = |index: u64| match letters.get(index as usize % letters.len().max(1)) {
            Some(letter) => *letter == b'L',
            None => !(index + 1).is_multiple_of(period),
        };
        let windows = read::layer_windows(c, sizes.layers, window, slides)?;
        let rope = if window.is_some() { Rope::WindowedOnly } else { Rope::All };
        Ok(Self { sizes, norm: Norm::Rms, windows, rope })
    }

    /// The tables of full and of windowed layers.
    fn tables(&self, g: &mut Graph) -> [Option<(Value, Value)>; 2] {
        let dim = self.sizes.attention.rotary_dim;
        match self.rope {
            Rope::Promoted | Rope::All => {
                let table = decoder::rope(g, dim, self.rope == Rope::Promoted);
                [Some(table.clone()), Some(table)]
            }
            Rope::WindowedOnly => [None, Some(decoder::rope(g, dim, false))],
            Rope::PromotedByKind => decoder::ropes_by_kind(g, &self.windows, dim, true),
        }
    }

    fn layer(
        &self,
        g: &mut Graph,
        input: &Value,
        rope: Option<&(Value, Value)>,
        mask: &Value,
        window: Option<u64>,
    ) -> Value {
        let attention = self.sizes.attention.windowed(window);
        let mut hidden = g.module("self_attn", |g| attention.run(g, input, rope, mask));
        hidden = g.norm("post_attention_layernorm", &hidden, self.norm, false);
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.module("mlp", |g| llama_mlp(g, &hidden, &self.sizes));
        hidden = g.norm("post_feedforward_layernorm", &hidden, self.norm, false);
        g.add(&residual, &hidden)
    }
}

impl Decoder for PostNorm {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let masks = Masks::new(g, &self.windows, true);
        let [full, windowed] = self.tables(g);
        let hidden = run_layers(g, embeddings.clone(), &self.windows, |g, _, window, hidden| {
            let rope = if window.is_some() { &windowed } else { &full };
            self.layer(g, hidden, rope.as_ref(), masks.of(window), window)
        });
        g.norm("norm", &hidden, self.norm, false)
    }
}
