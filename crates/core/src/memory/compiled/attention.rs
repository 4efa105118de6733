//! Attention around its fused kernels, and without one.

use super::graph::{Graph, Id, Kind};
use super::rules::Rule;
use super::trace::{SPREAD, Tracer, dropout};
use crate::dtype::DType;
use crate::memory::torch::ring::Round;
use crate::model::Shape;
use crate::model::op::{Attention, EagerStyle};

/// How a family's eager attention is written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Eager {
    /// The type of its softmax, where that is not the scores'.
    pub(super) softmax: Option<DType>,
    /// Whether shares are cast before some are dropped.
    pub(super) cast: bool,
    pub(super) drops: bool,
}

impl Tracer<'_> {
    pub(super) fn attention(&mut self, spec: &Attention, [q, k, v]: [Id; 3], mask: Option<Id>) -> Result<Id, String> {
        // SDPA knows no cap, and transformers does without.
        let flex = self.around.flex;
        let eager = self.around.eager || !spec.sdpa && !flex;
        if spec.sinks.is_some() || eager && (spec.softcap || spec.eager == EagerStyle::Falcon) {
            return Err("attention with sinks, or eager with a cap or in Falcon's way,".into());
        }
        self.graph.flex = flex;
        // Its mask is a list of blocks, and it wants keys for every head where those are no power of two.
        let mask = mask.filter(|_| !flex);
        let repeats = if flex { !self.graph.shape(q).size(1).is_power_of_two() } else { eager || mask.is_some() };
        let [mut k, mut v] = [k, v];
        let falcon = spec.eager == EagerStyle::Falcon && !flex;
        if repeats && spec.groups > 1 && !falcon {
            [k, v] = [k, v].map(|x| self.graph.repeated(x, spec.groups));
        }
        let [q, k, v] = [q, k, v].map(|x| self.narrow(x));
        let g = &mut self.graph;
        let dtype = g.dtype(q);
        if eager {
            let wide = spec.eager == EagerStyle::Fp32Softmax || self.autocast.is_some();
            let how = Eager {
                softmax: wide.then_some(DType::F32),
                cast: spec.eager != EagerStyle::UncastSoftmax,
                drops: spec.dropout_per_mille > 0,
            };
            return Ok(g.attention_by_hand([q, k, v], mask, how));
        }
        // Kernels for fp32 have as many heads of keys as of queries.
        if spec.groups > 1 && (falcon || dtype == DType::F32 && mask.is_none() && !flex) {
            return Ok(g.attention_in_full([q, k, v], spec.groups, None, spec.dropout_per_mille > 0));
        }
        if let Some(mask) = mask.filter(|mask| g.nodes[*mask as usize].kind == Kind::Pointwise(SPREAD)) {
            return Ok(g.attention_in_full([q, k, v], 1, Some(mask), spec.dropout_per_mille > 0));
        }
        let mask = mask.map(|mask| match g.dtype(mask) {
            DType::Bool => g.node(Kind::Pointwise("where"), &[mask], g.shape(mask), dtype),
            _ => g.cast(mask, dtype),
        });
        let sizes = g.shape(q).with(-1, g.shape(v).last());
        let joined = Shape::from([sizes.size(0), sizes.size(2), sizes.size(1), sizes.size(3)]);
        let kept = self.around.selective.is_some();
        if let Some(ring) = self.around.ring {
            if mask.is_some() || flex {
                return Err("context parallel with a mask or flex attention".into());
            }
            let output = g.ring_attention([q, k, v], ring, kept);
            let tokens = g.view("permute", output, joined);
            // Halves that were put together lie by heads.
            let by_heads = (0..ring.ranks).any(|index| ring.round(index) == Round::SecondQueries);
            return Ok(match by_heads {
                true => g.with_rule(Kind::Pointwise("clone"), &[tokens], joined, dtype, Rule::Shifted),
                false => tokens,
            });
        }
        let mut inputs = vec![q, k, v];
        inputs.extend(mask);
        let kernel = g.node(Kind::Attention, &inputs, sizes, dtype);
        let rule = Rule::Attention { q, k, v, mask, kernel };
        let output = g.with_rule(Kind::Item(0), &[kernel], sizes, dtype, rule);
        let statistic = g.statistic(kernel);
        g.needs[statistic as usize] = false;
        for id in [kernel, output, statistic] {
            g.nodes[id as usize].kept = kept;
        }
        Ok(g.view("permute", output, joined))
    }
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
