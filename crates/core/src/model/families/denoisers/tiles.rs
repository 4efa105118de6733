//! Large pictures piece by piece, as diffusers' autoencoders decode them (0.42: `use_slicing`, `tiled_decode`).

use crate::model::{Graph, Value};

/// Sides in latents of a tile and of the way to the next, and pixels that are kept of a decoded one. Tiles overlap, and all wait for the end.
pub(super) struct Tiles {
    pub(super) side: u64,
    pub(super) stride: u64,
    pub(super) kept: u64,
}

impl Tiles {
    /// Given in pixels, `factor` of which are a latent (`tile_sample_min_height`, `tile_sample_stride_height`).
    pub(super) fn of_pixels([side, kept]: [u64; 2], factor: u64) -> Self {
        let [side, stride] = [side, kept].map(|pixels| (pixels / factor.max(1)).max(1));
        Self { side, stride, kept: stride.saturating_mul(factor) }
    }

    /// Whether tiles are asked for, and there are several.
    pub(super) fn are_needed(&self, g: &Graph, latents: &Value) -> bool {
        g.inputs.making.tiles && [-2, -1].into_iter().any(|dim| latents.size(dim) > self.side)
    }

    /// Tile by tile where they are needed, else in one piece.
    pub(super) fn decode(
        &self,
        g: &mut Graph,
        latents: &Value,
        mut decode: impl FnMut(&mut Graph, &Value) -> Value,
    ) -> Value {
        if self.are_needed(g, latents) { self.join(g, latents, decode) } else { decode(g, latents) }
    }

    /// Every tile, then what is kept of each, row by row.
    pub(super) fn join(
        &self,
        g: &mut Graph,
        latents: &Value,
        mut decode: impl FnMut(&mut Graph, &Value) -> Value,
    ) -> Value {
        let [height, width] = [-2, -1].map(|dim| latents.size(dim));
        let starts = |size: u64| (0..size).step_by(self.stride as usize);
        let mut rows: Vec<Vec<Value>> = Vec::new();
        for top in starts(height) {
            let mut row = Vec::new();
            for left in starts(width) {
                let high = g.slice(latents, -2, top, self.side.min(height - top));
                let tile = g.slice(&high, -1, left, self.side.min(width - left));
                drop(high);
                row.push(decode(g, &tile));
            }
            rows.push(row);
        }
        let mut joined = Vec::new();
        for row in &rows {
            let mut cut = Vec::new();
            for tile in row {
                let high = g.slice(tile, -2, 0, self.kept.min(tile.size(-2)));
                cut.push(g.slice(&high, -1, 0, self.kept.min(tile.size(-1))));
            }
            joined.push(g.cat(&cut.iter().collect::<Vec<_>>(), -1));
        }
        g.cat(&joined.iter().collect::<Vec<_>>(), -2)
    }
}

/// One sample after the other where that is asked for.
pub(super) fn one_by_one(g: &mut Graph, latents: &Value, mut decode: impl FnMut(&mut Graph, &Value) -> Value) -> Value {
    let samples = latents.size(0);
    if !g.inputs.making.slices || samples < 2 {
        return decode(g, latents);
    }
    let one = |at| {
        let slice = g.slice(latents, 0, at, 1);
        decode(g, &slice)
    };
    let decoded: Vec<Value> = (0..samples).map(one).collect();
    g.cat(&decoded.iter().collect::<Vec<_>>(), 0)
}
