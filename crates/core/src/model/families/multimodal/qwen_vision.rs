//! What the vision towers of Qwen2-VL, 2.5-VL and 3-VL share: packed patches, axial rotary, attention by segments.

use super::parts::{dimension, turn};
use crate::dtype::DType;
use crate::model::blocks::attention;
use crate::model::op::{Attention, Convolution, EagerStyle, Input, Op, Unary};
use crate::model::{Config, Graph, ImagePatches, ModelError, Value};

/// Sizes that all three towers have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patches {
    /// Width of a patch's embedding.
    pub hidden: u64,
    /// Attention heads.
    pub heads: u64,
    /// Colour channels.
    pub channels: u64,
    /// Side of a patch in pixels.
    pub patch: u64,
    /// Frames joined in one patch.
    pub temporal: u64,
    /// Side of the square of patches that becomes one token.
    pub merge: u64,
}

/// The patches of a batch: images (or clips) of one size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    /// Images of the batch.
    pub images: u64,
    /// Temporal patches of each.
    pub frames: u64,
    /// Patches from top to bottom.
    pub height: u64,
    /// Patches from left to right.
    pub width: u64,
}

impl Grid {
    /// All patches of the batch.
    pub(super) fn patches(&self) -> u64 {
        [self.frames, self.height, self.width].iter().fold(self.images, |product, size| product.saturating_mul(*size))
    }

    /// Segments that full attention stays within: one per frame.
    pub(super) fn frame_lengths(&self) -> Vec<u64> {
        vec![self.height.saturating_mul(self.width); self.images.saturating_mul(self.frames) as usize]
    }
}

/// No batch has more segments than this: a bound on the work a bad request can ask for.
const MAX_SEGMENTS: u64 = 1 << 16;

impl Patches {
    /// Reads them; `width` names the key of the embedding's width.
    pub(super) fn read(c: &Config<'_>, width: (&str, u64), patch: u64) -> Result<Self, ModelError> {
        Ok(Self {
            hidden: dimension(c, &[width.0], width.1)?,
            heads: dimension(c, &["num_heads", "num_attention_heads"], 16)?,
            channels: dimension(c, &["in_channels"], 3)?,
            patch: dimension(c, &["patch_size"], patch)?,
            temporal: dimension(c, &["temporal_patch_size"], 2)?,
            merge: dimension(c, &["spatial_merge_size"], 2)?,
        })
    }

    /// Patches that become one token.
    pub(super) fn unit(&self) -> u64 {
        self.merge.saturating_mul(self.merge)
    }

    /// Width of the patches of one token, joined.
    pub(super) fn merged(&self) -> u64 {
        self.hidden.saturating_mul(self.unit())
    }

    /// The patches of this batch; a small square when it has no images.
    pub(super) fn grid(&self, g: &mut Graph) -> Grid {
        let side = self.merge.saturating_mul(2);
        let cut = ImagePatches { side: self.patch, merge: self.merge };
        let grid = g.inputs.images.map_or(Grid { images: 1, frames: 1, height: side, width: side }, |images| Grid {
            images: images.count,
            frames: images.frames.div_ceil(self.temporal).max(1),
            height: cut.along(images.height),
            width: cut.along(images.width),
        });
        let fits =
            grid.height.is_multiple_of(self.merge) && grid.width.is_multiple_of(self.merge) && grid.patches() > 0;
        if !fits || grid.images.saturating_mul(grid.frames) > MAX_SEGMENTS || grid.patches() > 1 << 32 {
            g.fail(format!("a grid of {grid:?} patches cannot be merged by {}", self.merge));
            return Grid { images: 1, frames: 1, height: side, width: side };
        }
        grid
    }

    /// `patch_embed`: a convolution that sees each patch once, `[patches, hidden]`.
    pub(super) fn embed(&self, g: &mut Graph, grid: Grid, bias: bool) -> Value {
        let (patch, frames) = (self.patch, self.temporal);
        let pixels = g.input(Input::Pixels, [grid.patches(), self.channels * frames * patch * patch]);
        let pixels = g.to_model_type(&pixels);
        g.module("patch_embed", |g| {
            let pixels = g.view(&pixels, [grid.patches(), self.channels, frames, patch, patch]);
            let stride = [frames as u32, patch as u32, patch as u32];
            let spec = Convolution { stride, padding: [0; 3], groups: 1, transposed: false };
            let embedded = g.convolution("proj", &pixels, self.hidden, &[frames, patch, patch], spec, bias);
            g.view(&embedded, [grid.patches(), self.hidden])
        })
    }

    /// Cosine and sine of rows and columns, `[patches, head_dim]` in fp32.
    pub(super) fn rotary(&self, g: &mut Graph, grid: Grid) -> (Value, Value) {
        let positions = g.fill(DType::I64, [grid.patches(), 2]);
        g.module("rotary_pos_emb", |g| {
            let quarter = self.hidden / self.heads / 4;
            for buffer in ["inv_freq", "original_inv_freq"] {
                g.buffer(buffer, [quarter], DType::F32, false);
            }
            g.without_grad(|g| {
                let positions = g.unsqueeze(&positions, -1);
                let positions = g.float(&positions);
                let frequencies = g.run(Op::Buffer(DType::F32), &[], [quarter]);
                let angles = g.mul(&positions, &frequencies);
                let cosine = g.unary(Unary::Cos, &angles);
                let cosine = scaled(g, cosine);
                let sine = g.unary(Unary::Sin, &angles);
                let sine = scaled(g, sine);
                (rows_and_columns(g, cosine), rows_and_columns(g, sine))
            })
        })
    }

    /// Attention within segments of the packed patches.
    pub(super) fn attention(&self, g: &mut Graph, hidden: &Value, rope: &(Value, Value), lengths: &[u64]) -> Value {
        let (patches, head_dim) = (hidden.size(0), self.hidden / self.heads);
        let (query, key, value) = {
            let joined = g.linear("qkv", hidden, 3 * self.hidden, true);
            let joined = g.reshape(&joined, [patches, 3, self.heads, head_dim]);
            let joined = g.permute(&joined, &[1, 0, 2, 3]);
            let (query, key, value) = g.split3(&joined, 0, [1; 3]);
            (g.squeeze(&query, 0), g.squeeze(&key, 0), g.squeeze(&value, 0))
        };
        let (query, key) = rotate(g, query, key, rope);
        let [query, key, value] = [query, key, value].map(|x| {
            let x = g.transpose(&x, 0, 1);
            g.unsqueeze(&x, 0)
        });
        let splits = [&query, &key, &value].map(|x| g.split(x, 2, lengths));
        let spec = Attention {
            groups: 1,
            causal: false,
            dropout_per_mille: 0,
            softcap: false,
            sinks: None,
            eager: EagerStyle::Fp32Softmax,
            sdpa: true,
        };
        let [queries, keys, values] = &splits;
        let segments = queries.iter().zip(keys).zip(values);
        let outputs: Vec<Value> = segments.map(|((q, k), v)| attention::attend(g, spec, q, k, v, None)).collect();
        let attended = g.cat(&outputs.iter().collect::<Vec<_>>(), 1);
        let attended = g.reshape(&attended, [patches, self.hidden]);
        let attended = g.contiguous(&attended);
        g.linear("proj", &attended, self.hidden, true)
    }
}

fn scaled(g: &mut Graph, x: Value) -> Value {
    g.scale(&x)
}

/// `[patches, 2, quarter] → [patches, 4 · quarter]`: rows, columns, rows, columns.
fn rows_and_columns(g: &mut Graph, x: Value) -> Value {
    let half = {
        let rows = g.slice(&x, 1, 0, 1);
        let rows = g.squeeze(&rows, 1);
        let columns = g.slice(&x, 1, 1, 1);
        let columns = g.squeeze(&columns, 1);
        g.cat(&[&rows, &columns], -1)
    };
    g.cat(&[&half, &half], -1)
}

/// `apply_rotary_pos_emb_vision`: in fp32, cast back; queries and keys are `[patches, heads, head_dim]`.
fn rotate(g: &mut Graph, query: Value, key: Value, (cosine, sine): &(Value, Value)) -> (Value, Value) {
    let (wide_query, wide_key) = (g.float(&query), g.float(&key));
    let cosine = g.unsqueeze(cosine, -2);
    let sine = g.unsqueeze(sine, -2);
    let turned_query = turn(g, &wide_query, &cosine, &sine);
    let turned_key = turn(g, &wide_key, &cosine, &sine);
    (g.type_as(&turned_query, &query), g.type_as(&turned_key, &key))
}
