//! StableLM 3B and 2: LayerNorms, a quarter of each head rotated, in the 12B a norm per head and parallel halves.

use super::decoder::{self, Decoder, Defaults, Sizes, Vocabulary, llama_mlp, run_layers};
use crate::model::Family;
use crate::model::blocks::attention::{self, attend, rotate_part};
use crate::model::blocks::read;
use crate::model::config::MAX_LAYERS;
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Mask, Norm, Rotary};
use crate::model::{Config, Graph, ModelError, Value};

/// StableLM.
pub const FAMILY: Family = Family {
    name: "StableLM",
    model_types: &["stablelm"],
    facts: Facts { attention: AttentionKernels::Flash, lora: &["q_proj", "v_proj"], ..Facts::DEFAULT },
    build: |c, task, g| decoder::build(c, task, g, &StableLm::read(c)?),
};

struct StableLm {
    sizes: Sizes,
    head_norms: bool,
    parallel: bool,
    dropout: f64,
}

impl StableLm {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let mut sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 50304,
                hidden: 2560,
                width: 6912,
                layers: 32,
                heads: 32,
                kv_heads: Some(32),
                head_dim: None,
                activation: "silu",
                tied: false,
            },
        )?;
        let attention = &mut sizes.attention;
        attention.qkv_bias = c.flag("use_qkv_bias", false)?;
        attention.out_bias = false;
        attention.rotary_dim = read::rotary_dim(c, attention.head_dim, 0.25)?;
        let head_norms = c.flag("qk_layernorm", false)?;
        // Each head becomes a module of its own.
        if head_norms && attention.heads.max(attention.kv_heads) > MAX_LAYERS {
            return Err(c.refuse("num_attention_heads", "at most 4096 with qk_layernorm"));
        }
        Ok(Self {
            sizes,
            head_norms,
            parallel: c.flag("use_parallel_residual", false)?,
            dropout: c.number("hidden_dropout", 0.0)?,
        })
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let hidden = g.norm("input_layernorm", input, Norm::Layer, true);
        let attended = g.module("self_attn", |g| self.attention(g, &hidden, rope, mask));
        if self.parallel {
            let mut fed = g.module("mlp", |g| llama_mlp(g, &hidden, &self.sizes));
            fed = g.dropout(&fed, self.dropout);
            let sum = g.add(input, &attended);
            return g.add(&sum, &fed);
        }
        let residual = g.add(input, &attended);
        let mut fed = {
            let normed = g.norm("post_attention_layernorm", &residual, Norm::Layer, true);
            g.module("mlp", |g| llama_mlp(g, &normed, &self.sizes))
        };
        fed = g.dropout(&fed, self.dropout);
        g.add(&residual, &fed)
    }

    fn attention(&self, g: &mut Graph, hidden: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let attention = &self.sizes.attention;
        let mut query = attention.project(g, hidden, 0, attention.heads);
        let mut key = attention.project(g, hidden, 1, attention.kv_heads);
        let mut value = attention.project(g, hidden, 2, attention.kv_heads);
        if self.head_norms {
            query = g.module("q_layernorm", |g| norm_each_head(g, &query));
            key = g.module("k_layernorm", |g| norm_each_head(g, &key));
        }
        // The code keeps names for the parts to the end.
        let _parts;
        (query, key, _parts) = rotate_part(g, Rotary::Half, attention.rotary_dim, &query, &key, &rope.0, &rope.1);
        (key, value) = g.cache(attention.cache(), &key, &value);
        let attended = attend(g, attention.spec(None), &query, &key, &value, Some(mask));
        attention.output(g, attended, hidden.size(-1))
    }
}

impl Decoder for StableLm {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.sizes.rope(g);
        let windows = self.sizes.no_windows();
        let hidden = run_layers(g, embeddings.clone(), &windows, |g, _, _, hidden| self.layer(g, hidden, &rope, &mask));
        g.norm("norm", &hidden, Norm::Layer, true)
    }
}

/// `[batch, heads, seq, dim]` cut by head, each normed with its own weights, joined again.
fn norm_each_head(g: &mut Graph, x: &Value) -> Value {
    let heads = g.split(x, 1, &vec![1; x.size(1) as usize]);
    let normed: Vec<Value> = (0..).zip(&heads).map(|(index, head)| norm_one_head(g, index, head)).collect();
    g.cat(&normed.iter().collect::<Vec<_>>(), 1)
}

fn norm_one_head(g: &mut Graph, index: u64, head: &Value) -> Value {
    g.norm(&format!("norms.{index}"), head, Norm::Layer, false)
}
