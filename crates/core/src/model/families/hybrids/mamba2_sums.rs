//! The sums of a Mamba-2 scan as transformers has them from 5.18: `torch.einsum`, which copies both sides into the order of a batched product.
//! Before, a product of all pairs was made and summed up, which is larger by the width of a state.

use crate::model::{Graph, Value};

/// Sizes of a scan.
pub(super) struct Sums {
    pub(super) batch: u64,
    pub(super) chunks: u64,
    pub(super) chunk: u64,
    pub(super) heads: u64,
    pub(super) dim: u64,
    pub(super) width: u64,
}

/// A side of a product, and the order in which it is read.
type Side<'a> = (&'a Value, &'a [u8]);

impl Sums {
    /// Products of so many matrices.
    fn product(&self, g: &mut Graph, left: Side<'_>, right: Side<'_>, sizes: [u64; 4]) -> Value {
        let [all, rows, sum, columns] = sizes;
        let side = |g: &mut Graph, (x, order): Side<'_>, sizes: [u64; 3]| {
            let turned = g.permute(x, order);
            g.reshape(&turned, sizes)
        };
        let left = side(g, left, [all, rows, sum]);
        let right = side(g, right, [all, sum, columns]);
        g.matmul(&left, &right)
    }

    fn matrices(&self) -> u64 {
        self.batch.saturating_mul(self.chunks).saturating_mul(self.heads)
    }

    /// One for every chunk and head, and what it is in the order of the scan.
    fn by_head(&self, g: &mut Graph, left: Side<'_>, right: Side<'_>, sizes: [u64; 3], order: &[u8]) -> Value {
        let [rows, sum, columns] = sizes;
        let all = self.product(g, left, right, [self.matrices(), rows, sum, columns]);
        let all = g.view(&all, [self.batch, self.chunks, self.heads, rows, columns]);
        g.permute(&all, order)
    }

    /// `bclhn,bcshn->bclsh`.
    pub(super) fn scores(&self, g: &mut Graph, c: &Value, b: &Value) -> Value {
        let sides: [&[u8]; 2] = [&[0, 1, 3, 2, 4], &[0, 1, 3, 4, 2]];
        self.by_head(g, (c, sides[0]), (b, sides[1]), [self.chunk, self.width, self.chunk], &[0, 1, 3, 4, 2])
    }

    /// `bclsh,bcshp->bclhp`.
    pub(super) fn inside(&self, g: &mut Graph, weights: &Value, x: &Value) -> Value {
        let sides: [&[u8]; 2] = [&[0, 1, 4, 2, 3], &[0, 1, 3, 2, 4]];
        self.by_head(g, (weights, sides[0]), (x, sides[1]), [self.chunk, self.chunk, self.dim], &[0, 1, 3, 2, 4])
    }

    /// `bclhn,bclhp->bchpn`.
    pub(super) fn states(&self, g: &mut Graph, b: &Value, x: &Value) -> Value {
        let sides: [&[u8]; 2] = [&[0, 1, 3, 4, 2], &[0, 1, 3, 2, 4]];
        self.by_head(g, (b, sides[0]), (x, sides[1]), [self.width, self.chunk, self.dim], &[0, 1, 2, 4, 3])
    }

    /// `bclhn,bchpn->bclhp`.
    pub(super) fn outputs(&self, g: &mut Graph, c: &Value, states: &Value) -> Value {
        let sides: [&[u8]; 2] = [&[0, 1, 3, 2, 4], &[0, 1, 2, 4, 3]];
        self.by_head(g, (c, sides[0]), (states, sides[1]), [self.chunk, self.width, self.dim], &[0, 1, 3, 2, 4])
    }

    /// `bzch,bzhpn->bchpn`: what every chunk hands on to those behind it.
    pub(super) fn carried(&self, g: &mut Graph, decays: &Value, states: &Value) -> Value {
        let (chunks, state) = (self.chunks + 1, self.dim.saturating_mul(self.width));
        let sides: [&[u8]; 2] = [&[0, 3, 2, 1], &[0, 2, 1, 3, 4]];
        let sizes = [self.batch.saturating_mul(self.heads), chunks, chunks, state];
        let all = self.product(g, (decays, sides[0]), (states, sides[1]), sizes);
        let all = g.view(&all, [self.batch, self.heads, chunks, self.dim, self.width]);
        g.permute(&all, &[0, 2, 1, 3, 4])
    }
}
