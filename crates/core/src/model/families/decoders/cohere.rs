//! Command R and Command A (Cohere 1 and 2): one LayerNorm per layer for an attention and an MLP side by side,
//! neighbouring pairs rotated in fp32, scaled logits.

use super::decoder::{self, Decoder, Defaults, Sizes, Vocabulary, llama_mlp, run_layers};
use crate::model::Family;
use crate::model::blocks::attention::{Masks, attend, rotate_whole};
use crate::model::blocks::read;
use crate::model::facts::{AttentionKernels, Facts, VllmFacts};
use crate::model::op::{Norm, Rotary};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP};
use crate::model::{Config, Graph, ModelError, Shape, Value};

/// Command R.
pub const COHERE: Family = Family {
    name: "Cohere",
    model_types: &["cohere"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        tensor_plan: &[ATTENTION, GATED_MLP],
        text: Some(|c| Ok(Box::new(Cohere::read(c)?))),
        tasks: super::UNSCORED,
        vllm: VllmFacts::ADAPTED,
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Cohere::read(c)?),
};

/// Command A and R7B: windows in three layers of four, and rotary positions only there.
pub const COHERE2: Family = Family {
    name: "Cohere 2",
    model_types: &["cohere2"],
    facts: Facts { text: Some(|c| Ok(Box::new(Cohere::read_second(c)?))), ..COHERE.facts },
    build: |c, task, g| decoder::build(c, task, g, &Cohere::read_second(c)?),
};

/// Cohere 1 and 2.
#[derive(Debug, Clone)]
pub(crate) struct Cohere {
    sizes: Sizes,
    head_norms: bool,
    windows: Vec<Option<u64>>,
    /// Whether layers without a window rotate.
    full_rotates: bool,
}

impl Cohere {
    /// Reads a Cohere 1.
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 256_000,
                hidden: 8192,
                width: 22528,
                layers: 40,
                heads: 64,
                kv_heads: None,
                head_dim: None,
                activation: "silu",
                tied: true,
            },
        )?;
        sizes.attention.rotary = Some(Rotary::InterleavedFp32);
        Ok(Self { head_norms: c.flag("use_qk_norm", false)?, windows: sizes.no_windows(), full_rotates: true, sizes })
    }

    /// Reads a Cohere 2.
    pub(crate) fn read_second(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut cohere = Self::read(c)?;
        let head_dim = read::head_dim(c, cohere.sizes.vocabulary.width, cohere.sizes.attention.heads)?;
        (cohere.sizes.attention.head_dim, cohere.sizes.attention.rotary_dim) = (head_dim, head_dim);
        let window = read::window(c, "sliding_window", Some(4096))?;
        let pattern = read::positive(c, &["sliding_window_pattern"], 4)?;
        let windows = read::layer_windows(c, cohere.sizes.layers, window, |index| (index + 1) % pattern != 0)?;
        Ok(Self { windows, head_norms: false, full_rotates: false, ..cohere })
    }

    fn layer(
        &self,
        g: &mut Graph,
        input: &Value,
        rope: Option<&(Value, Value)>,
        mask: &Value,
        window: Option<u64>,
    ) -> Value {
        let hidden = g.norm("input_layernorm", input, Norm::LayerCohere, false);
        let attended = g.module("self_attn", |g| match self.head_norms {
            true => self.normed_attention(g, &hidden, rope, mask),
            false => self.sizes.attention.windowed(window).run(g, &hidden, rope, mask),
        });
        let fed = g.module("mlp", |g| llama_mlp(g, &hidden, &self.sizes));
        let sum = g.add(input, &attended);
        g.add(&sum, &fed)
    }

    /// The attention of Command R+: every head of queries and keys has norm weights of its own.
    fn normed_attention(&self, g: &mut Graph, hidden: &Value, rope: Option<&(Value, Value)>, mask: &Value) -> Value {
        let attention = &self.sizes.attention;
        let (heads, kv_heads, dim) = (attention.heads, attention.kv_heads, attention.head_dim);
        let project = |g: &mut Graph, name: &str, heads: u64| {
            let x = g.linear(name, hidden, heads.saturating_mul(dim), attention.qkv_bias);
            g.split_last(&x, heads, dim)
        };
        let mut query = project(g, "q_proj", heads);
        let mut key = project(g, "k_proj", kv_heads);
        let mut value = project(g, "v_proj", kv_heads);
        query = g.norm_shaped("q_norm", &[&query], Norm::LayerCohere, false, Shape::from([heads, dim]));
        key = g.norm_shaped("k_norm", &[&key], Norm::LayerCohere, false, Shape::from([kv_heads, dim]));
        query = g.transpose(&query, 1, 2);
        key = g.transpose(&key, 1, 2);
        value = g.transpose(&value, 1, 2);
        if let Some((cosine, sine)) = rope {
            (query, key) = rotate_whole(g, Rotary::InterleavedFp32, &query, &key, cosine, sine);
        }
        (key, value) = g.cache(attention.cache(), &key, &value);
        let attended = attend(g, attention.spec(None), &query, &key, &value, Some(mask));
        attention.output(g, attended, hidden.size(-1))
    }
}

impl Decoder for Cohere {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let masks = Masks::new(g, &self.windows, true);
        let rope = self.sizes.rope(g);
        let hidden = run_layers(g, embeddings.clone(), &self.windows, |g, _, window, hidden| {
            let rope = (self.full_rotates || window.is_some()).then_some(&rope);
            self.layer(g, hidden, rope, masks.of(window), window)
        });
        g.norm("norm", &hidden, Norm::LayerCohere, false)
    }

    fn finish_logits(&self, g: &mut Graph, logits: Value) -> Value {
        g.scale(&logits)
    }
}
