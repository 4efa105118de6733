//! Attention around its fused kernels, and without one.

use super::graph::{Graph, Id, Kind};
use super::rules::Rule;
use super::trace::dropout;
use crate::dtype::DType;
use crate::model::Shape;

/// How a family's eager attention is written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Eager {
    /// The type of its softmax, where that is not the scores'.
    pub(super) softmax: Option<DType>,
    /// Whether shares are cast before some are dropped.
    pub(super) cast: bool,
    pub(super) drops: bool,
}

impl Graph {
    /// The statistic per row of a fused attention.
    pub(super) fn statistic(&mut self, kernel: Id) -> Id {
        let rows = self.shape(kernel).with(-1, 1);
        self.node(Kind::Item(1), &[kernel], rows, DType::F32)
    }

    /// `repeat_kv`: `[batch, kv heads, seq, dim]` copied for each head of its group.
    pub(super) fn repeated(&mut self, x: Id, groups: u64) -> Id {
        let [batch, heads, seq, dim] = [0, 1, 2, 3].map(|axis| self.shape(x).size(axis));
        let dtype = self.dtype(x);
        let opened = self.node(Kind::View("unsqueeze"), &[x], Shape::from([batch, heads, 1, seq, dim]), dtype);
        let wide = Shape::from([batch, heads, groups, seq, dim]);
        let spread = self.node(Kind::View("expand"), &[opened], wide, dtype);
        let copied = self.node(Kind::Pointwise("clone"), &[spread], wide, dtype);
        let whole = Shape::from([batch, heads * groups, seq, dim]);
        self.with_rule(Kind::View("view"), &[copied], whole, dtype, Rule::RepeatOf(x))
    }

    /// `_scaled_dot_product_attention_math`: scores and their softmax are tensors, in fp32, and the result lies by heads. The mask
    /// is causal where none is given.
    pub(super) fn attention_in_full(&mut self, [q, k, v]: [Id; 3], groups: u64, mask: Option<Id>, drops: bool) -> Id {
        let dtype = self.dtype(q);
        let [q, k, v] = [q, k, v].map(|x| self.cast(x, DType::F32));
        let [k, v] = if groups > 1 { [k, v].map(|x| self.repeated(x, groups)) } else { [k, v] };
        let [q, k] =
            [q, k].map(|x| self.with_rule(Kind::Pointwise("scale"), &[x], self.shape(x), self.dtype(x), Rule::Scaled));
        let turned = self.swapped(k);
        let scores = self.batched(q, turned);
        let [rows, columns] = [2, 3].map(|axis| self.shape(scores).size(axis));
        let mask = match mask {
            Some(mask) => self.node(Kind::Pointwise("where"), &[mask], self.shape(mask), self.dtype(q)),
            None => self.node(Kind::Pointwise("mask"), &[], Shape::from([rows, columns]), self.dtype(q)),
        };
        let masked = self.add(scores, mask);
        let shares = self.softmax(masked, None);
        let shares = if drops { dropout(self, shares) } else { shares };
        let result = self.batched(shares, v);
        let [batch, heads, seq, dim] = [0, 1, 2, 3].map(|axis| self.shape(result).size(axis));
        let joined = self.view("permute", result, Shape::from([batch, seq, heads, dim]));
        let dense =
            self.with_rule(Kind::Pointwise("clone"), &[joined], self.shape(joined), self.dtype(joined), Rule::Shifted);
        self.cast(dense, dtype)
    }

    /// Eager attention: scores, what is added to them, their softmax in fp32 where that is so, and the product with the values.
    pub(super) fn attention_by_hand(&mut self, [q, k, v]: [Id; 3], mask: Option<Id>, how: Eager) -> Id {
        let dtype = self.dtype(v);
        let turned = self.swapped(k);
        let scores = self.matmul(q, turned);
        let scaled =
            self.with_rule(Kind::Pointwise("scale"), &[scores], self.shape(scores), self.dtype(scores), Rule::Scaled);
        let masked = mask.map_or(scaled, |mask| self.add(scaled, mask));
        let shares = self.softmax_in_parts(masked, how.softmax.unwrap_or(self.dtype(masked)));
        let shares = if how.cast { self.cast(shares, dtype) } else { shares };
        let shares = if how.drops { dropout(self, shares) } else { shares };
        let shares = self.cast(shares, dtype);
        let result = self.matmul(shares, v);
        let [batch, heads, seq, dim] = [0, 1, 2, 3].map(|axis| self.shape(result).size(axis));
        let joined = self.view("permute", result, Shape::from([batch, seq, heads, dim]));
        self.with_rule(Kind::Pointwise("clone"), &[joined], self.shape(joined), dtype, Rule::Shifted)
    }

    /// `_softmax` in its parts, of which any may be computed again.
    pub(super) fn softmax_in_parts(&mut self, x: Id, dtype: DType) -> Id {
        let x = self.cast(x, dtype);
        let row = self.shape(x).with(-1, 1);
        let largest = self.node(Kind::Reduce("amax"), &[x], row, dtype);
        let shifted = self.both("sub", x, largest);
        let exponential = self.map("exp", shifted, dtype);
        let sum = self.node(Kind::Reduce("sum"), &[exponential], row, dtype);
        let shares = self.both("div", exponential, sum);
        self.rules[shares as usize] = Rule::SoftmaxOf(x);
        shares
    }

    /// `torch.matmul` of stacks of matrices: what was turned is copied first.
    pub(super) fn matmul(&mut self, a: Id, b: Id) -> Id {
        let [a, b] = [a, b].map(|x| self.dense(x));
        self.batched(a, b)
    }

    fn dense(&mut self, x: Id) -> Id {
        let turned = matches!(self.nodes[x as usize].kind, Kind::View("permute")) && self.shape(x).rank() == 4;
        match turned {
            true => self.with_rule(Kind::Pointwise("clone"), &[x], self.shape(x), self.dtype(x), Rule::Shifted),
            false => x,
        }
    }

    /// The product of two stacks of matrices (`bmm`).
    fn batched(&mut self, a: Id, b: Id) -> Id {
        let sizes = self.shape(a).with(-1, self.shape(b).last());
        self.with_rule(Kind::Product, &[a, b], sizes, self.dtype(a), Rule::Batched { a, b })
    }

    pub(super) fn batched_back(&mut self, gradient: Id, a: Id, b: Id) -> Vec<(Id, Id)> {
        let dtype = self.dtype(gradient);
        let turned = self.swapped(a);
        let second = self.node(Kind::Product, &[turned, gradient], self.shape(b), dtype);
        let turned = self.swapped(b);
        let first = self.node(Kind::Product, &[gradient, turned], self.shape(a), dtype);
        vec![(a, first), (b, second)]
    }

    /// The last two dimensions in the other order.
    fn swapped(&mut self, x: Id) -> Id {
        let sizes = self.shape(x);
        let (rows, columns) = (sizes.size(-2), sizes.last());
        let sizes = sizes.with(-1, rows).with(-2, columns);
        self.view("permute", x, sizes)
    }
}
