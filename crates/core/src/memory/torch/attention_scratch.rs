//! What the fused attention kernels need besides their results. Sizes are read off the kernels' own allocations for a
//! range of shapes, types and cards.

use super::Torch;
use super::attention::Kernel;
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
                let width = if dim <= 64 { 64 } else { dim.next_multiple_of(32) };
                let sums = if splits > 1 { 4 * splits * batch * heads * rows } else { 0 };
                vec![sums, sums * width]
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
    pub(super) fn attention_backward_scratch(
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
            // One workspace: dq in fp32 and the row sums.
            Kernel::Cudnn => vec![sums * dim + sums],
            Kernel::Flash => {
                let mut sizes = vec![4 * batch * heads * padded, 4 * batch * padded * heads * dim.next_multiple_of(32)];
                if key.size(1) != heads {
                    sizes.extend([expanded(dim), expanded(value_dim)]);
                }
                sizes
            }
            Kernel::MemoryEfficient => {
                if dtype.size() == 4 {
                    // The row sums of gradient times output, as three operations; the last is the layout they need.
                    let product = self.scratch(NAME, sums * value_dim);
                    let sum = self.scratch(NAME, sums);
                    let turned = self.scratch(NAME, sums);
                    drop((sum, product));
                    drop(self.scratch(NAME, efficient_workspace(batch * heads, padded, dim, dtype)));
                    drop(turned);
                    return;
                }
                vec![sums, efficient_workspace(batch * heads, padded, dim, dtype)]
            }
            Kernel::Math => Vec::new(),
        };
        let held: Vec<_> = sizes.into_iter().map(|bytes| self.scratch(NAME, bytes)).collect();
        drop(held);
    }
}

/// Accumulators of the memory-efficient backward kernel: dq in fp32 (dk and dv too for wide heads in half precision), and
/// counters of blocks.
fn efficient_workspace(heads: u64, rows: u64, dim: u64, dtype: DType) -> u64 {
    let width = match dim {
        0..=32 => 32,
        33..=64 => 64,
        65..=128 => 128,
        _ => dim.next_multiple_of(32),
    };
    let (accumulators, counters) = match (dtype.size(), width) {
        (2, 129..) => (3, rows / 2),
        (2, 65..=128) => (1, rows / 8),
        _ => (1, rows / 4),
    };
    heads * (accumulators * 4 * rows * width + counters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::device::Device;

    #[test]
    fn the_memory_efficient_kernel_takes_what_traces_show() {
        assert_eq!(efficient_workspace(8, 128, 80, DType::F32), 524_544);
        assert_eq!(efficient_workspace(8, 1024, 64, DType::F32), 2_099_200);
        assert_eq!(efficient_workspace(8, 1024, 128, DType::BF16), 4_195_328);
        assert_eq!(efficient_workspace(8, 128, 256, DType::F16), 3_146_240);
    }

    #[test]
    fn flash_attention_splits_as_traces_show() {
        let a100 = Torch::new(Device { capability: 80, multiprocessors: 108, ..Device::H200 });
        assert_eq!(a100.flash_splits(8, 1000, 1000, 64), 4);
        assert_eq!(a100.flash_splits(8, 1000, 1000, 128), 3);
        assert_eq!(a100.flash_splits(8, 128, 128, 64), 1);
        assert_eq!(a100.flash_splits(8, 512, 512, 64), 2);
    }
}
