//! The flash-attn package: FlashAttention 2 (flash_attn 2.8, flash_attn_interface.py and csrc/flash_attn/flash_api.cpp)
//! and FlashAttention 3 (hopper/flash_attn_interface.py, flash_api.cpp).

use super::Torch;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;

const NAME: &str = "flash_attn";

/// Which of the two, and on what.
#[derive(Debug, Clone, Copy)]
pub struct FlashAttn {
    /// Whether it is FlashAttention 3.
    pub third: bool,
    /// Whether the module is causal.
    pub causal: bool,
    /// Whether probabilities are dropped.
    pub dropout: bool,
    /// How many samples lie one after the other in tensors `[tokens, heads, dim]`; `None`: `[batch, seq, heads, dim]`.
    pub samples: Option<u64>,
}

/// Sizes that scratch depends on.
struct Sizes {
    batch: u64,
    rows: u64,
    columns: u64,
    heads: u64,
    key_heads: u64,
    dim: u64,
}

impl Sizes {
    fn of(how: FlashAttn, query: &Shape, key: &Shape) -> Self {
        let (heads, key_heads, dim) = (query.size(-2), key.size(-2), query.last());
        let (batch, rows, columns) = match how.samples {
            Some(batch) => (batch, query.size(0), key.size(0)),
            None => (query.size(0), query.size(1), key.size(1)),
        };
        Self { batch, rows, columns, heads, key_heads, dim }
    }
}

impl Torch {
    /// `flash_attn_func`, or `flash_attn_varlen_func` on samples without padding.
    pub fn flash_attn(&mut self, how: FlashAttn, query: &Tensor, key: &Tensor, value: &Tensor) -> Tensor {
        let inputs = [query, key, value];
        let width = query.shape.last();
        let aligned = width.next_multiple_of(8);
        let padded = inputs.map(|x| match width == aligned || how.third {
            true => x.detached(),
            false => self.fresh("constant_pad_nd", x.shape.with(-1, aligned), x.dtype),
        });
        let [first, ..] = &padded;
        let sizes = Sizes::of(how, &first.shape, &padded[1].shape);
        let output = match how.third {
            true => self.fresh(NAME, first.shape, first.dtype),
            false => self.fresh_like(NAME, first, first.dtype),
        };
        let rows = match how.samples {
            Some(_) => Shape::from([sizes.heads, sizes.rows]),
            None => Shape::from([sizes.batch, sizes.heads, sizes.rows]),
        };
        let statistic = self.fresh("softmax_lse", rows, DType::F32);
        self.flash_products(how, &sizes, first.dtype, 2);
        let scratch = self.flash_forward_scratch(how, &sizes);
        let seeds = (!how.third).then(|| self.fresh("rng_state", Shape::from([2]), DType::I64));
        drop(scratch);
        let shown = move |torch: &mut Self, x: &Tensor| {
            if width == x.shape.last() {
                x.clone()
            } else {
                torch.slice(&x.detached(), (x.shape.rank() - 1) as u8, width, 1)
            }
        };
        let result = shown(self, &output);
        if !self.records(&inputs) {
            return result;
        }
        let kept = padded.iter().chain([&output, &statistic]).chain(&seeds);
        let saved: Vec<Saved> = kept.map(|tensor| Saved::new(self, tensor)).collect();
        let layouts = padded.map(|x| (x.shape, x.strides, x.dtype));
        self.attach(result, &inputs, move |torch, gradient| {
            let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let gradient = match layouts[0].0.last() == width {
                true => gradient,
                false => torch.fresh("constant_pad_nd", layouts[0].0, gradient.dtype),
            };
            let gradients = layouts.each_ref().map(|(shape, strides, dtype)| {
                let like = Tensor { dtype: *dtype, ..gradient.detached() }.with_layout(*shape, *strides);
                torch.fresh_like(NAME, &like, *dtype)
            });
            let sizes = Sizes::of(how, &layouts[0].0, &layouts[1].0);
            torch.flash_products(how, &sizes, gradient.dtype, 5);
            let scratch = torch.flash_backward_scratch(how, &sizes, gradient.dtype);
            drop((scratch, kept));
            gradients.iter().map(|x| Some(shown(torch, x))).collect()
        })
    }

    /// So many products over all rows and columns; packed samples see only their own.
    fn flash_products(&mut self, how: FlashAttn, sizes: &Sizes, dtype: DType, count: u64) {
        let Sizes { batch, rows, columns, heads, dim, .. } = *sizes;
        let (rows, columns) =
            if how.samples.is_some() { (rows / batch.max(1), columns / batch.max(1)) } else { (rows, columns) };
        self.multiply(dtype, count * batch * heads, [rows, dim, columns]);
    }

    /// Partial results of several blocks per row, where there are too few rows to fill the card; not of packed samples.
    fn flash_forward_scratch(&mut self, how: FlashAttn, sizes: &Sizes) -> Vec<Tensor> {
        if how.third || how.dropout || how.samples.is_some() {
            return Vec::new();
        }
        let splits = self.flash_splits(sizes.batch * sizes.heads, sizes.rows, sizes.columns, sizes.dim);
        if splits <= 1 {
            return Vec::new();
        }
        let sums = 4 * splits * sizes.batch * sizes.heads * sizes.rows;
        [sums, sums * second_width(sizes.dim)].into_iter().filter_map(|bytes| self.scratch(NAME, bytes)).collect()
    }

    fn flash_backward_scratch(&mut self, how: FlashAttn, sizes: &Sizes, dtype: DType) -> Vec<Tensor> {
        let Sizes { batch, rows, columns, heads, key_heads, dim } = *sizes;
        let grouped = heads != key_heads;
        let bytes = if how.third {
            let (block_rows, block_columns) = third_blocks(self.device.capability, dim, how.causal);
            let width = third_width(dim);
            let (rows, columns) = match how.samples {
                Some(_) => (
                    (rows + batch * block_rows).next_multiple_of(block_rows),
                    (columns + batch * block_columns).next_multiple_of(block_columns),
                ),
                None => (batch * rows.next_multiple_of(block_rows), batch * columns.next_multiple_of(block_columns)),
            };
            let sums = 4 * heads * rows;
            let summed = if grouped { 4 * key_heads * columns * width } else { 0 };
            vec![sums, sums, sums * width, summed, summed]
        } else {
            let padded = match how.samples {
                Some(_) => rows + 128 * batch,
                None => batch * rows.next_multiple_of(128),
            };
            let sums = 4 * heads * padded;
            let keys = if how.samples.is_some() { columns } else { batch * columns };
            let expanded = if grouped { keys * heads * dim * dtype.size() } else { 0 };
            vec![sums, sums * second_width(dim), expanded, expanded]
        };
        bytes.into_iter().filter_map(|bytes| self.scratch(NAME, bytes)).collect()
    }
}

/// Head sizes as FlashAttention 2 rounds them (`head_size_rounded` of flash_api.cpp, in torch's copy too).
pub(super) fn second_width(dim: u64) -> u64 {
    dim.next_multiple_of(if dim <= 128 { 32 } else { 64 })
}

/// Head sizes as FlashAttention 3 rounds them.
fn third_width(dim: u64) -> u64 {
    [64, 96, 128, 192, 256].into_iter().find(|width| dim <= *width).unwrap_or(256)
}

/// Blocks of rows and columns of FlashAttention 3's backward kernel.
fn third_blocks(capability: u32, dim: u64, causal: bool) -> (u64, u64) {
    let width = third_width(dim);
    match capability {
        86 | 89 => (
            if width <= 192 { 64 } else { 32 },
            if width <= 96 {
                128
            } else if width <= 128 {
                96
            } else {
                64
            },
        ),
        80..90 => (
            if width <= 64 { 128 } else { 64 },
            if width <= 128 {
                128
            } else if width <= 192 {
                80
            } else {
                64
            },
        ),
        _ => {
            let rows = match width {
                64 => 128,
                128 if !causal => 80,
                _ => 64,
            };
            (
                rows,
                if width <= 128 {
                    128
                } else if width <= 192 {
                    96
                } else {
                    80
                },
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_rounded_as_each_version_does() {
        assert_eq!([40, 64, 80, 160].map(second_width), [64, 64, 96, 192]);
        assert_eq!([40, 80, 112, 160, 256].map(third_width), [64, 96, 128, 192, 256]);
        assert_eq!(third_blocks(90, 128, true), (64, 128));
        assert_eq!(third_blocks(90, 128, false), (80, 128));
    }
}
