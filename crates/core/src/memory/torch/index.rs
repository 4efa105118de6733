//! Tables, gathers, sorts and scatters.

use super::Torch;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;
use smallvec::smallvec;

/// Parts of CUB's scratch are aligned to this, and the whole can be moved to such an address (`AliasTemporaries`).
const ALIGNED: u64 = 256;

/// Elements of a tile of CUB's sort of pairs of 8 bytes, as traces of an H200 show them; other cards' may differ, which
/// makes 1 KiB of difference in some 60,000 elements.
const SORT_TILE: u64 = 4608;

/// Elements of a tile of CUB's scan of 8 bytes: 128 threads with 15 of 4 bytes (tuning_scan.cuh).
const SCAN_TILE: u64 = 128 * 7;

/// Elements of a tile of CUB's `UniqueByKey`: traces have 16 or fewer tiles for 50,000 elements and more for 100,000.
const UNIQUE_TILE: u64 = 4096;

/// CUB's scratch of a radix sort of pairs by their lowest `bits` (`InvokeOnesweep` of dispatch_radix_sort.cuh): 256
/// counts of 8 bytes for each pass over 8 bits, 256 of 4 bytes for each tile, copies of keys and values where there is more
/// than one pass, and the passes' counters. Lists of one tile (256 threads with 19 elements of 4 bytes) need none.
fn radix_sort(count: u64, [key, value]: [u64; 2], bits: u32) -> u64 {
    if count <= 256 * (19 * 4 / key.max(value).max(4)) {
        return 1;
    }
    let passes = u64::from(bits.div_ceil(8)).max(1);
    let copies = if passes > 1 { [key, value].map(|size| (size * count).next_multiple_of(ALIGNED)) } else { [0, 0] };
    let counts = 256 * 8 * passes + 256 * 4 * count.div_ceil(SORT_TILE);
    counts + copies[0] + copies[1] + ALIGNED + (ALIGNED - 1)
}

/// CUB's scratch of a scan: 16 bytes for each tile and for 32 before the first (`ScanTileState`), and one part more.
fn scan(count: u64, tile: u64) -> u64 {
    (16 * (count.div_ceil(tile) + 32)).next_multiple_of(ALIGNED) + ALIGNED + (ALIGNED - 1)
}

impl Torch {
    /// Rows of a table.
    pub fn embedding(&mut self, weight: &Tensor, ids: &Tensor) -> Tensor {
        let records = self.records(&[weight]);
        let saved = records.then(|| Saved::new(self, ids));
        // index_select reads a flat list of indices.
        let _flat = self.reshape(&ids.detached(), Shape::from([ids.elements()]));
        let output = self.fresh("embedding", ids.shape.inserted(-1, weight.shape.last()), weight.dtype);
        if !records {
            return output;
        }
        let (shape, tokens) = (weight.shape, ids.elements());
        self.attach(output, &[weight], move |torch, gradient| {
            let ids = saved.map(|saved| saved.get(torch));
            let dense = torch.contiguous(&gradient);
            let result = torch.embedding_gradient(tokens, shape, &dense);
            drop((dense, ids));
            smallvec![Some(result)]
        })
    }

    /// The gradient of a table. Over 3072 tokens it is made by sorting: partial sums of segments of ten, or, where tokens
    /// are many to a row, sums straight into the (fp32) table (`embedding_dense_backward_cuda`, and
    /// `embedding_backward_cuda_kernel` of EmbeddingBackwardKernel.cu).
    pub(super) fn embedding_gradient(&mut self, tokens: u64, table: Shape, gradient: &Tensor) -> Tensor {
        const NAME: &str = "embedding_dense_backward";
        if tokens <= 3072 {
            return self.fresh(NAME, table, gradient.dtype);
        }
        let (rows, list) = (table.size(0), 8 * tokens);
        let order = [(); 2].map(|()| self.scratch(NAME, list));
        let range = self.scratch(NAME, list);
        drop(self.scratch(NAME, radix_sort(tokens, [8, 8], 64)));
        drop(range);
        let result = self.fresh(NAME, table, gradient.dtype);
        let offsets = [list, 8].map(|bytes| self.scratch(NAME, bytes));
        let unique = self.scratch(NAME, list);
        drop(self.scratch(NAME, scan(tokens, UNIQUE_TILE)));
        drop(unique);
        let segments = tokens.min(rows);
        let partials = [(); 2].map(|()| self.scratch(NAME, 8 * segments));
        drop(self.scratch(NAME, scan(segments, SCAN_TILE)));
        let parts = tokens / 10 + segments;
        let mut sums = vec![8, 8 * parts];
        match (tokens / rows.max(1) >= 30, gradient.dtype.size()) {
            (false, _) => sums.push(4 * parts * table.last()),
            (true, 4) => sums.push(8 * parts),
            (true, _) => sums.extend([8 * parts, 4 * table.elements()]),
        }
        let sums: Vec<_> = sums.into_iter().map(|bytes| self.scratch(NAME, bytes)).collect();
        drop((sums, partials, offsets, order));
        result
    }

    /// Whole rows, or elements, by index.
    pub fn index(&mut self, x: &Tensor, index: &Tensor, shape: Shape) -> Tensor {
        let records = self.records(&[x]);
        let saved = records.then(|| Saved::new(self, index));
        let output = self.fresh("index", shape, x.dtype);
        if !records {
            return output;
        }
        let (whole, count) = (x.shape, index.elements());
        let slice = shape.elements() / count.max(1);
        self.attach(output, &[x], move |torch, gradient| {
            let index = saved.map(|saved| saved.get(torch));
            let result = torch.fresh("new_zeros", whole, gradient.dtype);
            torch.index_put_scratch(count, whole.elements() / slice.max(1));
            drop(index);
            smallvec![Some(result)]
        })
    }

    /// `index_put_` with accumulation sorts the indices: four lists of them and the sort's own buffer, for as many bits as
    /// the places have (`index_put_with_sort_kernel` of Indexing.cu).
    fn index_put_scratch(&mut self, count: u64, places: u64) {
        const NAME: &str = "index_put_";
        let list = 8 * count;
        let linear = self.scratch(NAME, list);
        drop(self.scratch(NAME, list));
        let lists = [(); 3].map(|()| self.scratch(NAME, list));
        let bits = u64::BITS - places.saturating_sub(1).leading_zeros();
        drop(self.scratch(NAME, radix_sort(count, [8, 8], bits)));
        drop((linear, lists));
    }

    /// Scratch of sorting a list of integers: the places they come from and, over what one block of threads sorts, the
    /// sort's own buffer (`should_use_small_sort` of Sort.cpp).
    pub fn sort_scratch(&mut self, count: u64) {
        let places = self.scratch("sort", 8 * count);
        if count > 4096 {
            drop(self.scratch("sort", radix_sort(count, [8, 8], 64)));
        }
        drop(places);
    }

    /// Elements by index along a dimension. Backward asks for the input too, if only for its sizes (derivatives.yaml).
    pub fn gather(&mut self, x: &Tensor, index: &Tensor) -> Tensor {
        let records = self.records(&[x]);
        let saved = records.then(|| [x, index].map(|tensor| Saved::new(self, tensor)));
        let output = self.fresh("gather", index.shape, x.dtype);
        if !records {
            return output;
        }
        let whole = x.shape;
        self.attach(output, &[x], move |torch, gradient| {
            let kept = saved.map(|saved| saved.map(|saved| saved.get(torch)));
            let result = torch.fresh("gather_backward", whole, gradient.dtype);
            drop(kept);
            smallvec![Some(result)]
        })
    }

    /// The largest along the last dimension: values and indices.
    pub fn top_k(&mut self, x: &Tensor, k: u64) -> (Tensor, Tensor) {
        let shape = x.shape.with(-1, k);
        let values = self.fresh("topk", shape, x.dtype);
        let indices = self.fresh("topk", shape, DType::I64);
        if !self.records(&[x]) {
            return (values, indices);
        }
        let saved = Saved::new(self, &indices);
        let whole = x.shape;
        let values = self.attach(values, &[x], move |torch, gradient| {
            let indices = saved.get(torch);
            let result = torch.fresh("value_selecting_reduction_backward", whole, gradient.dtype);
            drop(indices);
            smallvec![Some(result)]
        });
        (values, indices)
    }

    /// The first input with rows or elements of another written in by index or mask: a copy of the first.
    pub fn scattered(
        &mut self,
        name: &'static str,
        x: &Tensor,
        index: &Tensor,
        source: Option<&Tensor>,
        in_place: bool,
    ) -> Tensor {
        let mut written = vec![x];
        written.extend(source);
        let records = self.records(&written);
        let saved = records.then(|| Saved::new(self, index));
        let output = if in_place { x.detached() } else { self.fresh_like(name, x, x.dtype) };
        if !records {
            return output;
        }
        let (need_x, need_source) = (x.needs_grad(), source.is_some_and(Tensor::needs_grad));
        let (whole, part) = (x.shape, source.map_or(x.shape, |source| source.shape));
        self.attach(output, &written, move |torch, gradient| {
            let index = saved.map(|saved| saved.get(torch));
            let for_x = need_x.then(|| torch.fresh("masked_fill", whole, gradient.dtype));
            let for_source = need_source.then(|| torch.fresh("gather", part, gradient.dtype));
            drop(index);
            smallvec![for_x, for_source]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// torch 2.11 on an H200.
    #[test]
    fn sorts_take_what_traces_show() {
        assert_eq!([4608, 4609, 100_000].map(|count| radix_sort(count, [8, 8], 64)), [91_647, 93_183, 1_639_423]);
        assert_eq!([8, 16, 17].map(|bits| radix_sort(3000, [8, 8], bits)), [3583, 53_759, 55_807]);
        assert_eq!(radix_sort(1000, [8, 8], 64), 1);
        assert_eq!([9217, 20_000, 50_000, 100_000].map(|count| scan(count, SCAN_TILE)), [1279, 1535, 2047, 2815]);
        assert_eq!([50_000, 100_000].map(|count| scan(count, UNIQUE_TILE)), [1279, 1535]);
    }
}
