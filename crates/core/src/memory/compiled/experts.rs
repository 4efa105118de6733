//! Routers and experts in torch's smallest operations: `grouped_mm_experts_forward` of transformers/integrations/moe.py.

use super::graph::{Graph, Id, Kind};
use super::rules::Rule;
use super::trace::activation;
use crate::dtype::DType;
use crate::model::Shape;
use crate::model::op::{ExpertStyle, Experts};

impl Graph {
    /// Softmax over the last dimension, in a type where one is forced.
    pub(super) fn softmax(&mut self, x: Id, dtype: Option<DType>) -> Id {
        let x = self.cast(x, dtype.unwrap_or(self.dtype(x)));
        self.with_rule(Kind::Pointwise("softmax"), &[x], self.shape(x), self.dtype(x), Rule::Softmax)
    }

    pub(super) fn softmax_back(&mut self, result: Id, gradient: Id) -> Id {
        let weighted = self.both("mul", gradient, result);
        let row = self.shape(result).with(-1, 1);
        let sum = self.node(Kind::Reduce("sum"), &[weighted], row, self.dtype(weighted));
        let share = self.both("mul", result, sum);
        self.both("sub", weighted, share)
    }

    /// The largest and where they are.
    pub(super) fn top_k(&mut self, x: Id, shape: Shape) -> [Id; 2] {
        let indices = self.node(Kind::Library("topk indices"), &[x], shape, DType::I64);
        self.needs[indices as usize] = false;
        let rule = Rule::TopK { x, indices };
        [self.with_rule(Kind::Library("topk"), &[x], shape, self.dtype(x), rule), indices]
    }

    /// Rows of a tensor by index; backward adds them up (`index_put`).
    pub(super) fn gathered(&mut self, x: Id, ids: Id, shape: Shape) -> Id {
        self.with_rule(Kind::Pointwise("index"), &[x, ids], shape, self.dtype(x), Rule::Gathered { x, ids })
    }

    /// What is not marked as surplus (`masked_fill`).
    fn unmarked(&mut self, x: Id, mask: Id) -> Id {
        self.with_rule(Kind::Pointwise("where"), &[x, mask], self.shape(x), self.dtype(x), Rule::Masked { x, mask })
    }

    fn grouped(&mut self, x: Id, weight: Id, offsets: Id, width: u64) -> Id {
        let shape = Shape::from([self.shape(x).size(0), width]);
        let rule = Rule::Grouped { x, weight, offsets };
        self.with_rule(Kind::Library("_grouped_mm"), &[x, weight, offsets], shape, self.dtype(x), rule)
    }

    /// The matrices' gradient first, as in the formula of `_grouped_mm`.
    pub(super) fn grouped_back(&mut self, gradient: Id, [x, weight, offsets]: [Id; 3]) -> Vec<(Id, Id)> {
        let dtype = self.dtype(gradient);
        let mut found = Vec::new();
        for (of, other) in [(weight, x), (x, weight)] {
            if self.needs[of as usize] {
                let inputs = [gradient, other, offsets];
                found.push((of, self.node(Kind::Library("_grouped_mm"), &inputs, self.shape(of), dtype)));
            }
        }
        found
    }

    /// Experts that each token was sent to: rows by expert, a product up, a gate, a product down, and the sum.
    pub(super) fn experts(
        &mut self,
        spec: &Experts,
        [gate_up, down]: [Id; 2],
        [hidden, indices, weights]: [Id; 3],
    ) -> Result<Id, String> {
        let narrow = self.dtype(hidden);
        if spec.style != ExpertStyle::Interface || spec.biases.is_some() || !spec.gated {
            return Err(format!("experts of the kind {:?}", spec.style));
        }
        // Products by group are for narrow types; the fallback's sizes are data, which breaks the graph.
        if narrow.size() != 2 || self.dtype(gate_up) != narrow {
            return Err("experts in fp32".into());
        }
        let (tokens, size) = (self.shape(hidden).size(0), self.shape(hidden).last());
        let pairs = self.shape(indices).elements();
        let (list, rows) = (Shape::from([pairs]), Shape::from([pairs, size]));
        let ids = self.view("view", indices, list);
        let sorted = self.node(Kind::Library("sort"), &[ids], list, DType::I64);
        let permutation = self.node(Kind::Library("sort places"), &[ids], list, DType::I64);
        let inverse = self.node(Kind::Kept("index_put"), &[permutation], list, DType::I64);
        let tokens_of = self.map("floor_divide", permutation, DType::I64);
        let flat = self.view("view", weights, list);
        let shares = self.gathered(flat, permutation, list);
        let short = self.map("convert", sorted, DType::I32);
        let offsets = self.node(Kind::Library("histc"), &[short], Shape::from([spec.count]), DType::I32);
        let mask = self.node(Kind::Pointwise("ge"), &[sorted], Shape::from([pairs, 1]), DType::Bool);
        let selected = self.gathered(hidden, tokens_of, rows);
        let selected = self.unmarked(selected, mask);
        let wide = self.grouped(selected, gate_up, offsets, 2 * spec.width);
        let wide = self.unmarked(wide, mask);
        let half = Shape::from([pairs, spec.width]);
        let [gate, up] =
            ["slice 0", "slice 1"].map(|name| self.with_rule(Kind::View(name), &[wide], half, narrow, Rule::Slice));
        let gate = activation(self, spec.activation, gate)?;
        let inner = self.mul(gate, up);
        let output = self.grouped(inner, down, offsets, size);
        let output = self.unmarked(output, mask);
        let column = self.view("unsqueeze", shares, Shape::from([pairs, 1]));
        let weighted = self.mul(output, column);
        let restored = self.gathered(weighted, inverse, rows);
        let (shape, dtype) = (Shape::from([tokens, size]), self.dtype(restored));
        let stacked = self.view("view", restored, Shape::from([tokens, pairs / tokens.max(1), size]));
        let rule = Rule::SumOf(stacked);
        let sum = self.with_rule(Kind::Pointwise("sum of experts"), &[stacked], shape, dtype, rule);
        Ok(self.cast(sum, narrow))
    }
}
