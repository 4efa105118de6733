//! Tables, gathers, sorts and scatters.

use super::Torch;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;

impl Torch {
    /// Rows of a table.
    pub fn embedding(&mut self, weight: &Tensor, ids: &Tensor) -> Tensor {
        let records = self.records(&[weight]);
        let saved = records.then(|| Saved::new(self, ids));
        let output = self.fresh("embedding", ids.shape.inserted(-1, weight.shape.last()), weight.dtype);
        if !records {
            return output;
        }
        let (shape, tokens) = (weight.shape, ids.elements());
        self.attach(output, &[weight], move |torch, gradient| {
            let ids = saved.map(|saved| saved.get(torch));
            let dense = torch.contiguous(&gradient);
            let result = torch.fresh("embedding_dense_backward", shape, gradient.dtype);
            let scratch = torch.embedding_scratch(tokens, shape);
            drop((scratch, dense, ids));
            vec![Some(result)]
        })
    }

    /// Over 3072 tokens the gradient of a table is made by sorting: partial sums of segments of ten, and the sort's own
    /// buffers (embedding_dense_backward_cuda_kernel; traces of 4096 to 16384 tokens).
    fn embedding_scratch(&mut self, tokens: u64, table: Shape) -> Option<Tensor> {
        if tokens <= 3072 {
            return None;
        }
        let segments = tokens / 10 + tokens.min(table.size(0));
        self.scratch("embedding sort", segments * table.last().next_multiple_of(32) * 4 + 48 * tokens)
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
            let zeros = torch.fresh("new_zeros", whole, gradient.dtype);
            // index_put with accumulation sorts the indices.
            let scratch = torch.scratch("index_put sort", count * 48);
            let result = torch.fresh("index_put", whole, gradient.dtype);
            drop((zeros, scratch, index));
            vec![Some(result)]
        })
    }

    /// Elements by index along a dimension.
    pub fn gather(&mut self, x: &Tensor, index: &Tensor) -> Tensor {
        let records = self.records(&[x]);
        let saved = records.then(|| Saved::new(self, index));
        let output = self.fresh("gather", index.shape, x.dtype);
        if !records {
            return output;
        }
        let whole = x.shape;
        self.attach(output, &[x], move |torch, gradient| {
            let index = saved.map(|saved| saved.get(torch));
            let result = torch.fresh("gather_backward", whole, gradient.dtype);
            drop(index);
            vec![Some(result)]
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
            vec![Some(result)]
        });
        (values, indices)
    }

    /// The first input with rows or elements of another written in by index or mask: a copy of the first.
    pub fn scattered(
        &mut self,
        name: &'static str,
        x: &Tensor,
        index: &Tensor,
        source: &Tensor,
        in_place: bool,
    ) -> Tensor {
        let records = self.records(&[x, source]);
        let saved = records.then(|| Saved::new(self, index));
        let output = if in_place { x.detached() } else { self.fresh_like(name, x, x.dtype) };
        if !records {
            return output;
        }
        let (need_x, need_source) = (x.needs_grad(), source.needs_grad());
        let (whole, part) = (x.shape, source.shape);
        self.attach(output, &[x, source], move |torch, gradient| {
            let index = saved.map(|saved| saved.get(torch));
            let for_x = need_x.then(|| torch.fresh("masked_fill", whole, gradient.dtype));
            let for_source = need_source.then(|| torch.fresh("gather", part, gradient.dtype));
            drop(index);
            vec![for_x, for_source]
        })
    }
}
