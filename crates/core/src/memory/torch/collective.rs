//! Collectives of tensor parallel as DTensor runs them: functional, so every result is a tensor of its own.
//!
//! Source: torch/distributed/tensor/_redistribute.py and placement_types.py of torch 2.11.

use smallvec::smallvec;

use super::Torch;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;

/// What becomes of the rows that cards found in their parts of a table.
#[derive(Debug, Clone, Copy)]
pub enum RowsOutput {
    /// Summed on every card.
    Whole,
    /// Summed and scattered along the sequence over so many cards.
    Sequence(u64),
}

impl Torch {
    /// `all_reduce` of torch's functional collectives: a copy that is summed. Its result is a subclass of a tensor until it
    /// is first used, so gradients are not summed into it.
    fn summed(&mut self, x: &Tensor) -> Tensor {
        Tensor { viewed: true, ..self.fresh("all_reduce", x.shape, x.dtype) }
    }

    /// A whole tensor that enters a part split by columns: its gradient is summed over the cards.
    pub fn enter_columns(&mut self, x: &Tensor) -> Tensor {
        if !self.records(&[x]) {
            return x.clone();
        }
        let inside = Tensor { viewed: true, ..x.detached() };
        self.attach(inside, &[x], |torch, gradient| smallvec![Some(torch.summed(&gradient))])
    }

    /// Partial results of all cards, summed; the gradient passes as it is.
    pub fn leave_rows(&mut self, x: &Tensor) -> Tensor {
        let sum = self.summed(x);
        if !self.records(&[x]) {
            return sum;
        }
        self.attach(sum, &[x], |_, gradient| smallvec![Some(gradient)])
    }

    /// The parts of all cards gathered along a dimension: a buffer of parts, then the parts joined unless they lie in order,
    /// as they do where every dimension before it has one entry (`_maybe_view_chunk_cat`).
    fn gathered(&mut self, x: &Tensor, dim: i64, ways: u64, size: u64) -> Tensor {
        let parts = x.shape.with(0, x.shape.size(0).saturating_mul(ways));
        let buffer = self.fresh("all_gather_into_tensor", parts, x.dtype);
        let before = x.shape.axis(dim).and_then(|axis| x.shape.sizes().get(..axis));
        if before.is_some_and(|sizes| sizes.iter().all(|size| *size == 1)) {
            return buffer.with_shape(x.shape.with(dim, size));
        }
        self.fresh("cat", x.shape.with(dim, size), x.dtype)
    }

    /// This card's part of a whole tensor, as a copy.
    fn part(&mut self, x: &Tensor, dim: i64, size: u64) -> Tensor {
        self.fresh("clone", x.shape.with(dim, size), x.dtype)
    }

    /// The parts of all cards joined; the gradient is cut again.
    pub fn gather_parts(&mut self, x: &Tensor, dim: i64, (ways, size): (u64, u64)) -> Tensor {
        let whole = self.gathered(x, dim, ways, size);
        let own = x.shape.size(dim);
        if !self.records(&[x]) {
            return whole;
        }
        self.attach(whole, &[x], move |torch, gradient| smallvec![Some(torch.part(&gradient, dim, own))])
    }

    /// This card's part; gradients of all parts are joined.
    pub fn cut(&mut self, x: &Tensor, dim: i64, ways: u64) -> Tensor {
        let whole = x.shape.size(dim);
        let part = self.part(x, dim, whole.div_ceil(ways.max(1)));
        if !self.records(&[x]) {
            return part;
        }
        self.attach(part, &[x], move |torch, gradient| smallvec![Some(torch.gathered(&gradient, dim, ways, whole))])
    }

    /// `all_gather` along the sequence (dimension 1); the gradient, a partial sum on every card, is reduced and scattered.
    pub fn gather_sequence(&mut self, x: &Tensor, ways: u64) -> Tensor {
        let whole = self.gathered(x, 1, ways, x.shape.size(1).saturating_mul(ways));
        if !self.records(&[x]) {
            return whole;
        }
        self.attach(whole, &[x], move |torch, gradient| smallvec![Some(torch.scattered_sum(&gradient, ways))])
    }

    /// Partial results summed and scattered along the sequence; gradients are gathered.
    pub fn scatter_sequence(&mut self, x: &Tensor, ways: u64) -> Tensor {
        let part = self.scattered_sum(x, ways);
        if !self.records(&[x]) {
            return part;
        }
        let size = x.shape.size(1);
        self.attach(part, &[x], move |torch, gradient| smallvec![Some(torch.gathered(&gradient, 1, ways, size))])
    }

    /// `reduce_scatter` along dimension 1: the parts are first laid one after the other.
    fn scattered_sum(&mut self, x: &Tensor, ways: u64) -> Tensor {
        let laid = self.fresh("cat", x.shape, x.dtype);
        let part = x.shape.with(1, x.shape.size(1).div_ceil(ways.max(1)));
        let sum = self.fresh("reduce_scatter_tensor", part, x.dtype);
        drop(laid);
        Tensor { viewed: true, ..sum }
    }

    /// Rows of a table that is split by rows: ids of other cards' rows are masked, what is found is summed. The gradient of
    /// the table is made whole on every card.
    pub fn embedding_rows(&mut self, weight: &Tensor, ids: &Tensor, rows: u64, output: RowsOutput) -> Tensor {
        let records = self.records(&[weight]);
        let kept = records.then(|| Saved::new(self, ids));
        let mask = self.fresh("mask", ids.shape, DType::Bool);
        let shifted = self.fresh("sub", ids.shape, ids.dtype);
        let found = self.fresh("embedding", ids.shape.inserted(-1, weight.shape.last()), weight.dtype);
        drop(shifted);
        let sum = match output {
            RowsOutput::Whole => self.summed(&found),
            RowsOutput::Sequence(ways) => self.scattered_sum(&found, ways),
        };
        drop((found, mask));
        if !records {
            return sum;
        }
        let (own, tokens, length) = (weight.shape, ids.elements(), ids.shape.last());
        self.attach(sum, &[weight], move |torch, gradient| {
            let ids = kept.map(|kept| kept.get(torch));
            let dense = match output {
                RowsOutput::Whole => torch.contiguous(&gradient),
                RowsOutput::Sequence(ways) => torch.gathered(&gradient, 1, ways, length),
            };
            drop(gradient);
            let whole = torch.embedding_gradient(tokens, Shape::from([rows, own.last()]), &dense);
            drop((ids, dense));
            smallvec![Some(match output {
                RowsOutput::Whole => torch.rows_of(whole, own),
                // Nobody cuts it before the optimizer or `fully_shard` does.
                RowsOutput::Sequence(_) => whole,
            })]
        })
    }

    /// `loss_parallel`: log-softmax and likelihood on this card's classes, and one gradient for both.
    pub fn parallel_cross_entropy(&mut self, logits: &Tensor, target: &Tensor) -> Tensor {
        let shifted = self.pointwise("sub", &[logits], logits.dtype);
        drop(self.pointwise("exp", &[logits], logits.dtype));
        let log_probabilities = self.pointwise("sub", &[logits], logits.dtype);
        drop(shifted);
        let loss = self.fresh("nll_loss_forward", Shape::new(&[]), logits.dtype);
        if !self.records(&[logits]) {
            return loss;
        }
        let saved = [Saved::new(self, &log_probabilities), Saved::new(self, target)];
        self.attach(loss, &[logits], move |torch, gradient| {
            let [kept, target] = saved.map(|saved| saved.get(torch));
            let marks = torch.pointwise("zeros_like", &[&kept], kept.dtype);
            let exponents = torch.pointwise("exp", &[&kept], kept.dtype);
            let sum = torch.pointwise("add", &[&kept], kept.dtype);
            drop(exponents);
            let result = torch.pointwise("mul", &[&kept], kept.dtype);
            drop((marks, sum, kept, target, gradient));
            smallvec![Some(result)]
        })
    }

    /// The rows of a whole gradient that are this card's. The table is the head's too, whose gradient waits: their sum is
    /// made while the whole one is still there.
    fn rows_of(&mut self, whole: Tensor, own: Shape) -> Tensor {
        let part = self.fresh("clone", own, whole.dtype);
        let sum = self.fresh("add", own, whole.dtype);
        drop((whole, sum));
        part
    }
}
