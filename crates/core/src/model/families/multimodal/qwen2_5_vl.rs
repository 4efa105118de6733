//! Qwen2.5-VL: Qwen2-VL with a tower of RMSNorm, gated MLPs and attention within windows.

use super::parts::dimension;
use super::qwen_vision::{Grid, Patches};
use super::{qwen2_vl, qwen2_vl::merge};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::{gated_mlp, read};
use crate::model::facts::{Facts, ImageTokens, Liger};
use crate::model::op::{Activation, Norm};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Qwen2.5-VL.
pub const FAMILY: Family = Family {
    name: "Qwen2.5-VL",
    model_types: &["qwen2_5_vl"],
    facts: Facts {
        liger: Liger::NotSimulated,
        patch_side: Some(14),
        image_tokens: Some(ImageTokens::QWEN2),
        ..Facts::DEFAULT
    },
    build,
};

struct Vision {
    patches: Patches,
    depth: u64,
    width: u64,
    activation: Activation,
    /// Side of a window, in tokens.
    window: u64,
    /// Blocks that see whole images.
    full: Vec<u64>,
    out: u64,
}

impl Vision {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let patches = Patches::read(c, ("hidden_size", 3584), 14)?;
        let window = dimension(c, &["window_size"], 112)? / patches.merge / patches.patch;
        if window == 0 {
            return Err(c.refuse("window_size", "at least one merged patch wide"));
        }
        Ok(Self {
            patches,
            depth: c.layers(&["depth"], 32)?,
            width: c.size_or(&["intermediate_size"], 3420)?,
            activation: read::activation(c, "hidden_act", "silu")?,
            window,
            full: c.sizes("fullatt_block_indexes")?.unwrap_or_else(|| vec![7, 15, 23, 31]),
            out: dimension(c, &["out_hidden_size"], 3584)?,
        })
    }

    /// One row per token: `[tokens, out]`.
    fn model(&self, g: &mut Graph) -> Value {
        let grid = self.patches.grid(g);
        let tokens = grid.patches() / self.patches.unit();
        let (frames, windows) = (grid.frame_lengths(), self.window_lengths(grid));
        let order = g.fill(DType::I64, [tokens]);
        let mut hidden = self.patches.embed(g, grid, false);
        hidden = self.by_windows(g, &hidden, &order);
        let mut rope = self.patches.rotary(g, grid);
        rope = (self.by_windows(g, &rope.0, &order), self.by_windows(g, &rope.1, &order));
        for index in 0..self.depth {
            let lengths = if self.full.contains(&index) { &frames } else { &windows };
            hidden = g.layer("blocks", index, |g| self.block(g, &hidden, &rope, lengths));
        }
        let back = g.fill(DType::I64, [tokens]);
        let merged = g.module("merger", |g| merge(g, &self.patches, &hidden, Norm::Rms, self.out));
        g.index(&merged, &back)
    }

    fn block(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), lengths: &[u64]) -> Value {
        let hidden = {
            let mut branch = g.norm("norm1", input, Norm::Rms, false);
            branch = g.module("attn", |g| self.patches.attention(g, &branch, rope, lengths));
            g.add(input, &branch)
        };
        let mut branch = g.norm("norm2", &hidden, Norm::Rms, false);
        let names = ["gate_proj", "up_proj", "down_proj"];
        branch = g.module("mlp", |g| gated_mlp(g, &branch, names, self.width, self.activation, true));
        g.add(&hidden, &branch)
    }

    /// Patches (or their rotary rows) in the order of windows.
    fn by_windows(&self, g: &mut Graph, x: &Value, order: &Value) -> Value {
        let (rows, width) = (x.size(0), x.size(1));
        let mut x = g.reshape(x, [rows / self.patches.unit(), self.patches.unit(), width]);
        x = g.index(&x, order);
        g.reshape(&x, [rows, width])
    }

    /// Patches per window: the last of a row or column may be smaller.
    fn window_lengths(&self, grid: Grid) -> Vec<u64> {
        let merge = self.patches.merge;
        let cuts = |tokens: u64| {
            let whole = std::iter::repeat_n(self.window, (tokens / self.window) as usize);
            whole.chain(Some(tokens % self.window).filter(|&rest| rest > 0)).collect::<Vec<_>>()
        };
        let (rows, columns) = (cuts(grid.height / merge), cuts(grid.width / merge));
        let frame = rows.iter().flat_map(|row| columns.iter().map(move |column| row * column * self.patches.unit()));
        frame.collect::<Vec<_>>().repeat(grid.images.saturating_mul(grid.frames) as usize)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let vision = Vision::read(&c.section("vision_config"))?;
    qwen2_vl::run(c, task, g, |g| vision.model(g))
}
