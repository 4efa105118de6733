//! Tables, gathers, sorts and scatters.

use super::Torch;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;
use smallvec::smallvec;

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
    /// are many to a row, sums straight into the (fp32) table (embedding_dense_backward_cuda; traces of 3072 to 16384
    /// tokens, tables of 2 to 30522 rows).
    pub(super) fn embedding_gradient(&mut self, tokens: u64, table: Shape, gradient: &Tensor) -> Tensor {
        const NAME: &str = "embedding_dense_backward";
        if tokens <= 3072 {
            return self.fresh(NAME, table, gradient.dtype);
        }
        let (rows, list) = (table.size(0), 8 * tokens);
        let order = [(); 2].map(|()| self.scratch(NAME, list));
        let range = self.scratch(NAME, list);
        drop(self.scratch(NAME, 2 * list.next_multiple_of(256) + 16895 + 1024 * tokens.div_ceil(4608)));
        drop(range);
        let result = self.fresh(NAME, table, gradient.dtype);
        let offsets = [list, 8].map(|bytes| self.scratch(NAME, bytes));
        let unique = self.scratch(NAME, list);
        drop(self.scratch(NAME, 1279));
        drop(unique);
        let segments = tokens.min(rows);
        let partials = [(); 2].map(|()| self.scratch(NAME, 8 * segments));
        drop(self.scratch(NAME, 1279));
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
        self.attach(output, &[x], move |torch, gradient| {
            let index = saved.map(|saved| saved.get(torch));
            let result = torch.fresh("new_zeros", whole, gradient.dtype);
            torch.index_put_scratch(count);
            drop(index);
            smallvec![Some(result)]
        })
    }

    /// `index_put_` with accumulation sorts the indices: four lists of them and the sort's own buffer.
    fn index_put_scratch(&mut self, count: u64) {
        const NAME: &str = "index_put_";
        let list = 8 * count;
        let linear = self.scratch(NAME, list);
        drop(self.scratch(NAME, list));
        let lists = [(); 3].map(|()| self.scratch(NAME, list));
        drop(self.scratch(NAME, 2 * list.next_multiple_of(256) + 6655));
        drop((linear, lists));
    }

    /// Scratch of sorting a list of integers: the places they come from and the sort's own buffer.
    pub fn sort_scratch(&mut self, count: u64) {
        let list = 8 * count;
        let places = self.scratch("sort", list);
        drop(self.scratch("sort", 2 * list.next_multiple_of(256) + 16895 + 1024 * count.div_ceil(4608)));
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
