//! Qwen3-VL, dense or with experts: learned positions resampled to the image, and deepstack: features of several
//! depths of the tower added to the first layers of the decoder.

use super::parts::{Head, dimension, placeholder_mask, tower, with_head};
use super::qwen_text::{Deepstack, QwenText, Sections, SparseLayers};
use super::qwen_vision::{Grid, Patches};
use super::qwen2_vl::join_images;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{QkNorm, SelfAttention, mlp, read};
use crate::model::facts::{Facts, ImageTokens, Liger};
use crate::model::op::{Activation, Input, Norm, Reduction};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Qwen3-VL.
pub const FAMILY: Family = Family {
    name: "Qwen3-VL",
    model_types: &["qwen3_vl", "qwen3_vl_moe"],
    facts: Facts {
        liger: Liger::NotSimulated,
        patch_side: Some(16),
        image_tokens: Some(ImageTokens::QWEN3),
        registration: &[&["experts", "gate"]],
        ..Facts::DEFAULT
    },
    build,
};

/// The tower, which Qwen3.5 has too.
pub(super) struct Vision {
    patches: Patches,
    depth: u64,
    width: u64,
    activation: Activation,
    positions: u64,
    deepstack: Vec<u64>,
    out: u64,
}

/// What the tower gives: its last hidden state, which lives as long as the output object; tokens `[tokens, out]`; and
/// tokens from inner blocks.
pub(super) type Features = (Value, Value, Vec<Value>);

impl Vision {
    /// Reads it; Qwen3.5 has no deepstack.
    pub(super) fn read(c: &Config<'_>, default_deepstack: &[u64]) -> Result<Self, ModelError> {
        Ok(Self {
            patches: Patches::read(c, ("hidden_size", 1152), 16)?,
            depth: c.layers(&["depth"], 27)?,
            width: c.size_or(&["intermediate_size"], 4304)?,
            activation: read::activation(c, "hidden_act", "gelu_pytorch_tanh")?,
            positions: dimension(c, &["num_position_embeddings"], 2304)?,
            deepstack: c.sizes("deepstack_visual_indexes")?.unwrap_or_else(|| default_deepstack.to_vec()),
            out: dimension(c, &["out_hidden_size"], 3584)?,
        })
    }

    /// Runs it on the images of the batch.
    pub(super) fn model(&self, g: &mut Graph) -> Features {
        let grid = self.patches.grid(g);
        let mut hidden = self.patches.embed(g, grid, true);
        let positions = self.learned_positions(g, grid);
        {
            let positions = g.type_as(&positions, &hidden);
            hidden = g.add(&hidden, &positions);
        }
        let rope = self.patches.rotary(g, grid);
        let lengths = grid.frame_lengths();
        let mut inner = Vec::new();
        for index in 0..self.depth {
            hidden = g.layer("blocks", index, |g| self.block(g, &hidden, &rope, &lengths));
            if let Some(place) = self.deepstack.iter().position(|&at| at == index) {
                inner.push(g.module(&format!("deepstack_merger_list.{place}"), |g| self.merge(g, &hidden, true)));
            }
        }
        let merged = g.module("merger", |g| self.merge(g, &hidden, false));
        (hidden, merged, inner)
    }

    /// Four neighbours of the learned grid per patch, weighted and summed.
    fn learned_positions(&self, g: &mut Graph, grid: Grid) -> Value {
        let neighbours = g.fill(DType::I64, [grid.patches(), 4]);
        let weights = g.fill(DType::F32, [grid.patches(), 4]);
        let rows = g.embedding("pos_embed", &neighbours, self.positions, self.patches.hidden);
        let weights = g.unsqueeze(&weights, -1);
        let weighted = g.mul(&rows, &weights);
        drop(rows);
        g.reduce(Reduction::Sum, &weighted, 1, false)
    }

    fn block(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), lengths: &[u64]) -> Value {
        let hidden = {
            let mut branch = g.norm("norm1", input, Norm::Layer, true);
            branch = g.module("attn", |g| self.patches.attention(g, &branch, rope, lengths));
            g.add(input, &branch)
        };
        let mut branch = g.norm("norm2", &hidden, Norm::Layer, true);
        let names = ["linear_fc1", "linear_fc2"];
        branch = g.module("mlp", |g| mlp(g, &branch, names, self.width, self.activation, true));
        g.add(&hidden, &branch)
    }

    /// The patches of each token joined and projected; inner ones are normed after joining.
    fn merge(&self, g: &mut Graph, hidden: &Value, inner: bool) -> Value {
        let joined = [hidden.size(0) / self.patches.unit(), self.patches.merged()];
        let mut x = if inner { g.view(hidden, joined) } else { hidden.clone() };
        x = g.norm("norm", &x, Norm::Layer, true);
        x = g.view(&x, joined);
        x = g.linear("linear_fc1", &x, self.patches.merged(), true);
        x = g.activation(Activation::Gelu, &x);
        g.linear("linear_fc2", &x, self.out, true)
    }
}

fn text(c: &Config<'_>, sparse: bool) -> Result<QwenText, ModelError> {
    let defaults = if sparse { [2048, 5632, 24, 16, 16] } else { [4096, 22016, 32, 32, 32] };
    let hidden = dimension(c, &["hidden_size"], defaults[0])?;
    let heads = dimension(c, &["num_attention_heads"], defaults[3])?;
    let kv_heads = dimension(c, &["num_key_value_heads"], defaults[4])?;
    let head_dim = if sparse { read::head_dim(c, hidden, heads)? } else { dimension(c, &["head_dim"], 128)? };
    let mut attention = SelfAttention::new(heads, kv_heads, head_dim);
    attention.qkv_bias = c.flag("attention_bias", false)?;
    attention.out_bias = attention.qkv_bias;
    attention.qk_norm = QkNorm::HeadLast(Norm::Rms, ["q_norm", "k_norm"]);
    attention.dropout = c.number("attention_dropout", 0.0)?;
    let activation = read::activation(c, "hidden_act", "silu")?;
    let experts = if sparse {
        let count = c.size_or(&["num_experts", "num_local_experts"], 60)?;
        let top_k = c.size_or(&["num_experts_per_tok"], 4)?;
        let width = c.size_or(&["moe_intermediate_size"], 1408)?;
        Some(SparseLayers {
            experts: FusedExperts::new(count, top_k, width, activation),
            step: dimension(c, &["decoder_sparse_step"], 1)?,
            dense: c.sizes("mlp_only_layers")?.unwrap_or_default(),
        })
    } else {
        None
    };
    Ok(QwenText {
        vocab: c.size_or(&["vocab_size"], 151936)?,
        hidden,
        layers: c.layers(&["num_hidden_layers"], defaults[2])?,
        width: c.size_or(&["intermediate_size"], defaults[1])?,
        activation,
        attention,
        sections: Sections::Interleaved,
        window: None,
        experts,
    })
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let vision = Vision::read(&c.section("vision_config"), &[8, 16, 24])?;
    let text = text(&c.section("text_config"), c.model_type() == "qwen3_vl_moe")?;
    let tied = c.flag("tie_word_embeddings", false)?;
    with_head(g, task, Head { vocab: text.vocab, tied }, |g| {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let mut embeddings = text.embed(g, &ids);
        let given = g.inputs.images.is_some();
        let features = tower(g, given, |g| g.module("visual", |g| vision.model(g)));
        let joined = features.as_ref().map(|(_, merged, _)| join_images(g, merged, &embeddings));
        let mut deepstack = None;
        if let (Some((_, _, inner)), Some(joined)) = (&features, &joined) {
            let mask = placeholder_mask(g, &ids);
            let _video_mask = placeholder_mask(g, &ids);
            embeddings = g.masked_scatter(&embeddings, &mask, joined);
            let mask = g.squeeze(&mask, -1);
            deepstack = Some(Deepstack { mask, features: inner.clone() });
        }
        let positions = g.fill(DType::I64, [3, g.inputs.batch, g.inputs.seq]);
        g.module("language_model", |g| text.model(g, &embeddings, &positions, deepstack.as_ref()))
    });
    Ok(())
}
