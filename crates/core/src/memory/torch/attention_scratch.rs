//! What the fused attention kernels need besides their results: rules of the kernels' sources, checked against the
//! allocations of 30 shapes each in three types on an H200 (torch 2.11).

use super::Torch;
use super::attention::Kernel;
use super::flash_attn::second_width;
use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::model::Shape;

impl Torch {
    /// The memory-efficient kernel wants rows of a mask aligned: others are copied into padded ones, which are kept.
    pub(super) fn aligned_mask(&mut self, kernel: Kernel, mask: &Tensor) -> Tensor {
        if kernel != Kernel::MemoryEfficient || mask.shape.last().is_multiple_of(8) {
            return mask.clone();
        }
        let padded = mask.shape.with(-1, mask.shape.last().next_multiple_of(8));
        let copy = self.fresh("constant_pad_nd", padded, mask.dtype);
        Tensor { edge: mask.edge.clone(), ..copy }
    }

    /// The gradient of a bias as the memory-efficient kernel writes it: for every score, rows aligned to 16 columns; seen
    /// as the `columns` of the aligned bias.
    pub(super) fn raw_bias_gradient(&mut self, scores: Shape, columns: u64, dtype: DType) -> Tensor {
        let raw = self.fresh("attention bias gradient", scores.with(-1, columns.next_multiple_of(16)), dtype);
        let strides = raw.strides;
        raw.with_layout(scores.with(-1, columns), strides)
    }

    /// That gradient brought back to the bias: summed where the bias was expanded, and cut where its rows were padded.
    pub(super) fn bias_gradient(&mut self, raw: Tensor, bias: Shape) -> Tensor {
        let columns = raw.shape.last();
        let dtype = raw.dtype;
        let mut gradient = self.reduce_to(raw, bias.with(-1, columns), dtype);
        if columns != bias.last() {
            let whole = self.fresh("slice_backward", gradient.shape, dtype);
            drop(gradient);
            gradient = self.fresh("constant_pad_nd", bias, dtype);
            drop(whole);
        }
        gradient
    }

    /// Scratch of the forward kernels.
    pub(super) fn attention_forward_scratch(
        &mut self,
        kernel: Kernel,
        query: &Tensor,
        key: &Tensor,
        value_dim: u64,
        dropout: bool,
    ) -> Vec<Tensor> {
        let [batch, heads, rows, dim] = [0, 1, 2, 3].map(|axis| query.shape.size(axis));
        let sizes = match kernel {
            // Partial results of several blocks per row, where there are too few rows to fill the card.
            Kernel::Flash if !dropout => {
                let splits = self.flash_splits(batch * heads, rows, key.shape.size(2), dim);
                let sums = if splits > 1 { 4 * splits * batch * heads * rows } else { 0 };
                vec![sums, sums * second_width(dim)]
            }
            // Wide heads are summed in fp32 outside of the registers.
            Kernel::MemoryEfficient if value_dim > 128 && query.dtype.size() == 2 => {
                vec![4 * batch * heads * rows * value_dim]
            }
            _ => Vec::new(),
        };
        sizes.into_iter().filter_map(|bytes| self.scratch("attention scratch", bytes)).collect()
    }

    /// `num_splits_heuristic` of FlashAttention's flash_api.cpp: the fewest splits that come near the best use of the card.
    pub(super) fn flash_splits(&self, heads: u64, rows: u64, columns: u64, dim: u64) -> u64 {
        let places = 2 * self.device.multiprocessors;
        let blocks = heads * rows.div_ceil(64);
        let width = match dim {
            0..=64 => 256,
            65..=128 => 128,
            _ => 64,
        };
        let parts = columns.div_ceil(width);
        if 10 * blocks >= 8 * places {
            return 1;
        }
        let eligible = |splits: u64| splits == 1 || parts.div_ceil(splits) != parts.div_ceil(splits - 1);
        // The share of the card's places that are busy, in millionths.
        let busy = |splits: u64| {
            let work = blocks * splits;
            1_000_000 * work / (work.div_ceil(places).max(1) * places)
        };
        let choices = || (1..=places.min(parts).min(128)).filter(|splits| eligible(*splits));
        let best = choices().map(busy).max().unwrap_or(0);
        choices().find(|splits| 100 * busy(*splits) >= 85 * best).unwrap_or(1)
    }

    /// Scratch of the backward kernels, allocated after their results and gone when they return.
    pub(in crate::memory) fn attention_backward_scratch(
        &mut self,
        kernel: Kernel,
        query: &Shape,
        key: &Shape,
        value_dim: u64,
        dtype: DType,
    ) {
        const NAME: &str = "attention scratch";
        let [batch, heads, rows, dim] = [0, 1, 2, 3].map(|axis| query.size(axis));
        let expanded = |width: u64| batch * heads * key.size(2) * width * dtype.size();
        let sums = 4 * batch * heads * rows;
        let padded = rows.next_multiple_of(128);
        let sizes = match kernel {
            // One workspace: dq in fp32, the row sums, 256 bytes, and dk and dv of every head where heads share them (traces
            // of 190 shapes; cuDNN's source is closed).
            Kernel::Cudnn => {
                let shared = if key.size(1) != heads { expanded(dim) + expanded(value_dim) } else { 0 };
                vec![sums * dim + sums + 256 + shared]
            }
            Kernel::Flash => {
                let mut sizes = vec![4 * batch * heads * padded, 4 * batch * padded * heads * second_width(dim)];
                if key.size(1) != heads {
                    sizes.extend([expanded(dim), expanded(value_dim)]);
                }
                sizes
            }
            Kernel::MemoryEfficient => {
                let tiles = Tiles::of(self.device.capability, dtype, dim.max(value_dim));
                let workspace = tiles.workspace(batch * heads, [rows, key.size(2)], [dim, value_dim]);
                if dtype.size() == 4 {
                    // The row sums of gradient times output, as three operations; the last is the layout they need.
                    let product = self.scratch(NAME, sums * value_dim);
                    let sum = self.scratch(NAME, sums);
                    let turned = self.scratch(NAME, sums);
                    drop((sum, product));
                    drop(self.scratch(NAME, workspace));
                    drop(turned);
                    return;
                }
                vec![sums, workspace]
            }
            Kernel::Math => Vec::new(),
        };
        let held: Vec<_> = sizes.into_iter().map(|bytes| self.scratch(NAME, bytes)).collect();
        drop(held);
    }
}

/// The tiles of the memory-efficient backward kernel (`BwdKernel.get_all` of mem_eff_attention/kernels/generate_kernels.py
/// in torch): queries and keys of a tile, and whether dk and dv are summed in memory, not in registers or their results.
#[derive(Debug, Clone, Copy)]
struct Tiles {
    queries: u64,
    keys: u64,
    summed: bool,
}

impl Tiles {
    /// The first kernel whose heads are wide enough and whose tiles fit the card's shared memory.
    fn of(capability: u32, dtype: DType, dim: u64) -> Self {
        let half = dtype.size() == 2;
        let tiles = |queries, keys, summed| Self { queries, keys, summed };
        // 64 and 99 KiB of shared memory have no room for the larger tiles of heads from 65 to 128.
        let narrow = matches!(capability, 75 | 86 | 89);
        match (half, dim) {
            (_, 0..=64) => tiles(64, 64, false),
            (true, 65..=96) if narrow && capability > 80 => tiles(128, 64, false),
            (true, 65..=128) if narrow => tiles(64, 64, true),
            (true, 65..=128) => tiles(128, if capability >= 80 { 128 } else { 64 }, false),
            (true, _) => tiles(128, 64, true),
            (false, _) => tiles(if capability >= 80 { 128 } else { 64 }, 64, false),
        }
    }

    /// Bytes of the accumulators (`workspace_size` of kernel_backward.h): dq in fp32, 16 bytes before each of its tiles;
    /// dk and dv for as many splits of the keys as attention_backward.cu takes.
    fn workspace(self, heads: u64, [rows, columns]: [u64; 2], dims: [u64; 2]) -> u64 {
        let tile = 16 + 4 * self.queries * self.keys;
        let queries = rows.div_ceil(self.queries) * dims[0].div_ceil(self.keys) * tile;
        let splits = columns.div_ceil(self.keys).min(200 / heads.max(1)).max(1);
        let of = |dim: u64| 4 * splits * self.keys * dim.next_multiple_of(self.queries);
        let others = if self.summed { of(dims[0]) + of(dims[1]) } else { 0 };
        heads * (queries + others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::device::Device;

    #[test]
    fn the_memory_efficient_kernel_takes_what_traces_show() {
        // Two samples of four heads on an H200, torch 2.11.
        let workspace =
            |dtype: DType, rows: u64, dim: u64| Tiles::of(90, dtype, dim).workspace(8, [rows, rows], [dim, dim]);
        assert_eq!(workspace(DType::F32, 100, 16), 262_400);
        assert_eq!(workspace(DType::F32, 128, 80), 524_544);
        assert_eq!(workspace(DType::F32, 1000, 64), 2_099_200);
        assert_eq!(workspace(DType::F32, 1000, 192), 6_294_528);
        assert_eq!(workspace(DType::BF16, 1000, 128), 4_195_328);
        assert_eq!(workspace(DType::BF16, 1000, 160), 23_071_744);
        assert_eq!(workspace(DType::F16, 128, 256), 3_146_240);
    }

    #[test]
    fn flash_attention_splits_as_traces_show() {
        let a100 = Torch::new(Device { capability: 80, multiprocessors: 108, ..Device::h200() });
        assert_eq!(a100.flash_splits(8, 1000, 1000, 64), 4);
        assert_eq!(a100.flash_splits(8, 1000, 1000, 128), 3);
        assert_eq!(a100.flash_splits(8, 128, 128, 64), 1);
        assert_eq!(a100.flash_splits(8, 512, 512, 64), 2);
    }
}
