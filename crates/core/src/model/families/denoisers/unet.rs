//! `UNet2DConditionModel` of diffusers: the denoiser of Stable Diffusion 1, 2 and XL.

use super::Pictures;
use super::parts::{self, Transformer};
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Input};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// The UNet of Stable Diffusion.
pub(super) const FAMILY: Family = Family {
    name: "UNet of diffusers",
    model_types: &["UNet2DConditionModel"],
    facts: Facts {
        tasks: Some(&[Task::Base]),
        served: false,
        registration: &[
            &[
                "conv_in",
                "time_embedding",
                "add_embedding",
                "down_blocks",
                "up_blocks",
                "mid_block",
                "conv_norm_out",
                "conv_out",
            ],
            &["attentions", "resnets", "downsamplers", "upsamplers"],
            &["norm1", "conv1", "time_emb_proj", "norm2", "conv2", "conv_shortcut"],
            &["norm", "proj_in", "transformer_blocks", "proj_out"],
            &["norm1", "attn1", "norm2", "attn2", "norm3", "ff"],
            &["to_q", "to_k", "to_v", "to_out"],
        ],
        ..Facts::DEFAULT
    },
    build,
};

/// Pixels of a latent's side, as the autoencoders of Stable Diffusion have it.
pub(super) const PICTURES: Pictures = Pictures::stills(64, 8);
/// Tokens of a prompt: CLIP's length.
const TOKENS: u64 = 77;
/// What the second text encoder and the picture's own sizes say beside the prompt.
const SIZES: u64 = 6;

struct Block {
    channels: u64,
    resnets: u64,
    transformer: Option<Transformer>,
}

struct Unet {
    channels: [u64; 2],
    sample: u64,
    down: Vec<Block>,
    up: Vec<Block>,
    middle: Transformer,
    text: u64,
    groups: u64,
    /// Width of the steps' sines for each of the picture's sizes, and of all that comes in.
    added: Option<[u64; 2]>,
}

/// A size for each block, given once or for each.
fn each(c: &Config<'_>, key: &str, blocks: usize, default: u64) -> Result<Vec<u64>, ModelError> {
    let sizes = match c.get(key) {
        Some(value) if value.is_array() => c.sizes(key)?.unwrap_or_default(),
        _ => vec![read::positive(c, &[key], default)?; blocks],
    };
    let fits = sizes.len() == blocks && sizes.iter().all(|size| *size > 0);
    if fits { Ok(sizes) } else { Err(c.refuse(key, "a positive size, or one for each block")) }
}

fn kinds<'a>(
    c: &Config<'a>,
    key: &str,
    [plain, crossed]: [&'a str; 2],
    usual: &[bool],
) -> Result<Vec<bool>, ModelError> {
    let Some(names) = c.strings(key)? else { return Ok(usual.to_vec()) };
    let known = names.iter().all(|name| [plain, crossed].contains(name));
    if known {
        Ok(names.iter().map(|name| *name == crossed).collect())
    } else {
        Err(c.refuse(key, &format!("{plain} and {crossed} alone")))
    }
}

impl Unet {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        for key in [
            "class_embed_type",
            "encoder_hid_dim_type",
            "encoder_hid_dim",
            "time_cond_proj_dim",
            "num_class_embeds",
            "time_embedding_act_fn",
            "timestep_post_act",
        ] {
            if c.has(key) {
                return Err(c.refuse(key, "nothing: other conditions than a prompt are not modelled"));
            }
        }
        for key in [
            "dual_cross_attention",
            "only_cross_attention",
            "center_input_sample",
            "class_embeddings_concat",
            "upcast_attention",
        ] {
            if c.get(key).is_some_and(|value| *value != false) {
                return Err(c.refuse(key, "false"));
            }
        }
        let fixed = [
            ("resnet_time_scale_shift", "default"),
            ("time_embedding_type", "positional"),
            ("attention_type", "default"),
            ("act_fn", "silu"),
            ("mid_block_type", "UNetMidBlock2DCrossAttn"),
        ];
        for (key, usual) in fixed {
            if c.str_or(key, usual) != usual {
                return Err(c.refuse(key, usual));
            }
        }
        let down = kinds(c, "down_block_types", ["DownBlock2D", "CrossAttnDownBlock2D"], &[true, true, true, false])?;
        let up = kinds(c, "up_block_types", ["UpBlock2D", "CrossAttnUpBlock2D"], &[false, true, true, true])?;
        let count = down.len();
        let channels = c.sizes("block_out_channels")?.unwrap_or_else(|| vec![320, 640, 1280, 1280]);
        if channels.len() != count || up.len() != count || count == 0 {
            return Err(c.refuse("block_out_channels", "as many sizes as there are blocks down and up"));
        }
        let layers = each(c, "layers_per_block", count, 2)?;
        // What the config calls the size of a head is how many there are (diffusers #2011).
        let key = if c.has("num_attention_heads") { "num_attention_heads" } else { "attention_head_dim" };
        let heads = each(c, key, count, 8)?;
        let blocks = each(c, "transformer_layers_per_block", count, 1)?;
        let (groups, linear) = (read::positive(c, &["norm_num_groups"], 32)?, c.flag("use_linear_projection", false)?);
        if c.has("reverse_transformer_layers_per_block") {
            return Err(c.refuse("reverse_transformer_layers_per_block", "null"));
        }
        let transformer = |at: usize| Transformer { heads: heads[at], blocks: blocks[at], groups, linear };
        let block = |at: usize, crossed: bool, more: u64| Block {
            channels: channels[at],
            resnets: layers[at].saturating_add(more),
            transformer: crossed.then(|| transformer(at)),
        };
        let text = read::positive(c, &["cross_attention_dim"], 1280)?;
        let added = match c.str_or("addition_embed_type", "") {
            "" => None,
            "text_time" => {
                let (own, all) =
                    (c.size(&["addition_time_embed_dim"])?, c.size(&["projection_class_embeddings_input_dim"])?);
                Some([own, all])
            }
            _ => return Err(c.refuse("addition_embed_type", "text_time, or nothing")),
        };
        Ok(Self {
            channels: [read::positive(c, &["in_channels"], 4)?, read::positive(c, &["out_channels"], 4)?],
            sample: read::positive(c, &["sample_size"], 64)?,
            down: (0..count).map(|at| block(at, down[at], 0)).collect(),
            up: (0..count).map(|at| block(count - 1 - at, up[at], 1)).collect(),
            middle: transformer(count - 1),
            text,
            groups,
            added,
        })
    }

    fn run(&self, g: &mut Graph) {
        let (batch, images) = (g.inputs.batch, g.inputs.images);
        let [height, width] =
            images.map_or([self.sample; 2], |images| [images.height, images.width].map(|side| side / PICTURES.pixels));
        let steps = g.input(Input::Pixels, [batch]);
        let latents = g.input(Input::Pixels, [batch, self.channels[0], height.max(1), width.max(1)]);
        let text = g.input(Input::Pixels, [batch, TOKENS, self.text]);
        let beside = self.added.map(|[own, all]| {
            let pooled = all.saturating_sub(own.saturating_mul(SIZES)).max(1);
            (g.input(Input::Pixels, [batch, pooled]), g.input(Input::Pixels, [batch, SIZES]), own)
        });
        let time = self.time(g, &steps, beside);
        let mut sample = parts::convolution(g, "conv_in", &latents, self.down[0].channels, 3, 1);
        let mut kept = vec![sample.clone()];
        for (at, block) in self.down.iter().enumerate() {
            let last = at + 1 == self.down.len();
            sample = g.module(&format!("down_blocks.{at}"), |g| {
                self.descend(g, block, &sample, (&time, &text), last, &mut kept)
            });
        }
        sample = g.module("mid_block", |g| {
            let channels = sample.size(1);
            // Not one of those that gradient checkpointing runs again.
            let mut hidden = g.module("resnets.0", |g| parts::resnet(g, &sample, Some(&time), channels, self.groups));
            hidden = g.module("attentions.0", |g| self.middle.run(g, &hidden, &text));
            g.layer("resnets", 1, |g| parts::resnet(g, &hidden, Some(&time), channels, self.groups))
        });
        for (at, block) in self.up.iter().enumerate() {
            let own = kept.split_off(kept.len().saturating_sub(block.resnets as usize));
            let size = kept.last().map(|next| [next.size(2), next.size(3)]);
            sample =
                g.module(&format!("up_blocks.{at}"), |g| self.ascend(g, block, &sample, (&time, &text), own, size));
        }
        sample = parts::group_norm(g, "conv_norm_out", &sample, self.groups);
        sample = g.activation(Activation::Silu, &sample);
        sample = parts::convolution(g, "conv_out", &sample, self.channels[1], 3, 1);
        drop((time, text, latents, steps));
        parts::noise_loss(g, &sample);
    }

    /// What says how noisy the picture is.
    fn time(&self, g: &mut Graph, steps: &Value, beside: Option<(Value, Value, u64)>) -> Value {
        let first = self.down[0].channels;
        let sines = parts::time_projection(g, steps, first);
        let time = parts::embedding(g, "time_embedding", &sines, first.saturating_mul(4));
        let Some((pooled, sizes, own)) = beside else { return time };
        let flat = g.view(&sizes, [sizes.shape().elements()]);
        let sines = parts::time_projection(g, &flat, own);
        let rows = g.view(&sines, [sizes.size(0), own.saturating_mul(SIZES)]);
        let all = g.cat(&[&pooled, &rows], -1);
        let more = parts::embedding(g, "add_embedding", &all, first.saturating_mul(4));
        g.add(&time, &more)
    }

    fn descend(
        &self,
        g: &mut Graph,
        block: &Block,
        input: &Value,
        (time, text): (&Value, &Value),
        last: bool,
        kept: &mut Vec<Value>,
    ) -> Value {
        let mut hidden = input.clone();
        for index in 0..block.resnets {
            hidden = g.layer("resnets", index, |g| parts::resnet(g, &hidden, Some(time), block.channels, self.groups));
            if let Some(transformer) = &block.transformer {
                hidden = g.module(&format!("attentions.{index}"), |g| transformer.run(g, &hidden, text));
            }
            kept.push(hidden.clone());
        }
        if !last {
            hidden = g.module("downsamplers.0", |g| parts::convolution(g, "conv", &hidden, block.channels, 3, 2));
            kept.push(hidden.clone());
        }
        hidden
    }

    /// `size`: how large it is made for what comes next.
    fn ascend(
        &self,
        g: &mut Graph,
        block: &Block,
        input: &Value,
        (time, text): (&Value, &Value),
        own: Vec<Value>,
        size: Option<[u64; 2]>,
    ) -> Value {
        let mut hidden = input.clone();
        for (index, other) in own.iter().rev().enumerate() {
            hidden = g.cat(&[&hidden, other], 1);
            hidden = g
                .layer("resnets", index as u64, |g| parts::resnet(g, &hidden, Some(time), block.channels, self.groups));
            if let Some(transformer) = &block.transformer {
                hidden = g.module(&format!("attentions.{index}"), |g| transformer.run(g, &hidden, text));
            }
        }
        match size {
            Some(size) => g.module("upsamplers.0", |g| parts::upsample(g, &hidden, size)),
            None => hidden,
        }
    }
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    Unet::read(c)?.run(g);
    Ok(())
}
