//! The way back through each operation, after torch's own decompositions (`torch/_decomp/decompositions.py`).

use super::float8::Scaling;
use super::graph::{Graph, Id, Kind};
use crate::dtype::DType;
use crate::model::Shape;
use crate::model::op::LinearLayout;

/// How a gradient goes back through a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Rule {
    /// It does not.
    None,
    View,
    Cast,
    Add,
    Mul,
    /// Times or divided by a number.
    Scaled,
    /// Plus a number.
    Shifted,
    Negative,
    Square,
    /// Mean over the last dimension.
    Mean,
    Rsqrt,
    /// A pointwise function of this node, whose way back needs its input (silu, gelu).
    Function(Id),
    /// Tanh: its way back needs the result.
    Tanh,
    /// Relu: likewise.
    Relu,
    /// What of this node a mask let through.
    Masked {
        x: Id,
        mask: Id,
    },
    LayerNorm {
        x: Id,
        mean: Id,
        inverse: Id,
        weight: Option<Id>,
        bias: Option<Id>,
    },
    /// Heads of this node, repeated.
    RepeatOf(Id),
    /// Rotation of this node by tables.
    Rotation {
        x: Id,
        cosine: Id,
        sine: Id,
    },
    /// A part of a dimension.
    Slice,
    Join,
    /// `x · Wᵀ + b` on flat rows: x, weight as it is stored, bias.
    Linear {
        x: Id,
        weight: Id,
        bias: Option<Id>,
        layout: LinearLayout,
    },
    /// The same by padded matrices.
    PaddedLinear {
        x: Id,
        weight: Id,
        bias: Option<Id>,
    },
    /// The same on bytes with scales: x, weight as it is stored.
    Float8 {
        x: Id,
        weight: Id,
        how: Scaling,
    },
    /// Of two stacks of matrices.
    Batched {
        a: Id,
        b: Id,
    },
    /// The first result of attention: q, k, v, and the mask.
    Attention {
        q: Id,
        k: Id,
        v: Id,
        mask: Option<Id>,
        kernel: Id,
    },
    /// The same of all rounds over cards: q, k, v, and a number per row.
    Ring {
        q: Id,
        k: Id,
        v: Id,
        statistic: Id,
    },
    Softmax,
    /// Softmax of this node, in its parts.
    SoftmaxOf(Id),
    /// The largest of this node, and where they are.
    TopK {
        x: Id,
        indices: Id,
    },
    /// The sum of the last dimension, which stays.
    Summed,
    Div,
    /// Rows of this node by index.
    Gathered {
        x: Id,
        ids: Id,
    },
    /// The sum over the second dimension of this node.
    SumOf(Id),
    /// A product by groups of rows.
    Grouped {
        x: Id,
        weight: Id,
        offsets: Id,
    },
    Embedding {
        table: Id,
        ids: Id,
    },
    /// This part of a sequence, gathered over cards.
    GatherSequence {
        part: Id,
        ways: u64,
    },
    /// This sequence, summed over cards and scattered; its gradient is gathered as bytes or as it is.
    ScatterSequence {
        whole: Id,
        ways: u64,
        bytes: bool,
    },
    /// This node in another type: the gradient is the same.
    Straight(Id),
    /// Cross entropy: logits in fp32, largest per row, log of sums, labels, how many count.
    CrossEntropy {
        logits: Id,
        largest: Id,
        log: Id,
        labels: Id,
        count: Id,
    },
}

impl Graph {
    /// Appends the backward pass.
    pub(super) fn differentiate(&mut self) {
        let last = self.nodes.len();
        let mut gradients: Vec<Option<Id>> = vec![None; last];
        self.checkpoint = None;
        for output in self.outputs.clone() {
            if self.needs[output as usize] {
                let (shape, dtype) = (self.shape(output), self.dtype(output));
                let tangent = self.node(Kind::Tangent, &[], shape, dtype);
                self.tangents.push(tangent);
                self.collect(&mut gradients, output, tangent);
            }
        }
        for at in (0..last).rev() {
            let Some(gradient) = gradients[at] else { continue };
            if self.nodes[at].kind == Kind::Primal {
                continue;
            }
            self.module = self.nodes[at].module;
            for (input, gradient) in self.back(at as Id, gradient) {
                if self.needs[input as usize] {
                    self.collect(&mut gradients, input, gradient);
                }
            }
        }
        self.gradients = self.primals.iter().map(|primal| gradients[*primal as usize]).collect();
    }

    fn collect(&mut self, gradients: &mut [Option<Id>], of: Id, gradient: Id) {
        gradients[of as usize] = Some(match gradients[of as usize] {
            // `add(mm(a, b), c)` becomes `addmm` where both are dense (post_grad.py): a tied table's gradient by the head
            // waits for the one by the embedding.
            Some(known)
                if self.nodes[known as usize].kind == Kind::Product && self.nodes[of as usize].kind == Kind::Primal =>
            {
                let mut inputs = self.nodes[known as usize].inputs.clone();
                inputs.push(gradient);
                self.node(Kind::Product, &inputs, self.shape(known), self.dtype(known))
            }
            // So much is computed for a loss that what it adds to is written down (`realize_opcount_threshold`).
            Some(known) if self.nodes[known as usize].kind == Kind::Tangent && self.is_of_narrow_loss(gradient) => {
                self.both("add to a gradient", known, gradient)
            }
            Some(known) => self.both("add", known, gradient),
            None => gradient,
        });
    }

    /// Whether a gradient is that of logits in a narrow type.
    fn is_of_narrow_loss(&self, mut gradient: Id) -> bool {
        let narrow = self.dtype(gradient).size() == 2;
        let node = |id: Id| &self.nodes[id as usize];
        while matches!(node(gradient).kind, Kind::View(_) | Kind::Pointwise("convert")) {
            gradient = node(gradient).inputs[0];
        }
        narrow && node(gradient).kind == Kind::Pointwise("loss back")
    }

    /// Summed down to the sizes of what was broadcast, in its type.
    pub(super) fn reduced(&mut self, gradient: Id, to: Id) -> Id {
        let (shape, dtype) = (self.shape(to), self.dtype(to));
        let mut gradient = gradient;
        if self.shape(gradient).elements() != shape.elements() {
            let rows = shape.rank() == self.shape(gradient).rank() && shape.last() == 1;
            let name = if rows { "sum" } else { "column sum" };
            let own = self.dtype(gradient);
            gradient = self.node(Kind::Reduce(name), &[gradient], shape, own);
        }
        self.cast(gradient, dtype)
    }

    fn back(&mut self, at: Id, gradient: Id) -> Vec<(Id, Id)> {
        let rule = self.rules[at as usize];
        let inputs = self.nodes[at as usize].inputs.clone();
        let shape = self.shape(gradient);
        match rule {
            Rule::None => Vec::new(),
            Rule::View => {
                let to = self.shape(inputs[0]);
                vec![(inputs[0], self.view("view", gradient, to))]
            }
            Rule::Cast => vec![(inputs[0], self.cast(gradient, self.dtype(inputs[0])))],
            Rule::Add => inputs.iter().map(|input| (*input, self.reduced(gradient, *input))).collect(),
            Rule::Mul => {
                let (a, b) = (inputs[0], inputs[1]);
                let mut found = Vec::new();
                for (of, other) in [(a, b), (b, a)] {
                    if self.needs[of as usize] {
                        let product = self.both("mul", gradient, other);
                        found.push((of, self.reduced(product, of)));
                    }
                }
                found
            }
            Rule::Div => {
                let (a, b) = (inputs[0], inputs[1]);
                let over = self.both("div", gradient, b);
                let mut found = vec![(a, self.reduced(over, a))];
                if self.needs[b as usize] {
                    let product = self.both("mul", over, at);
                    found.push((b, self.reduced(product, b)));
                }
                found
            }
            Rule::Softmax => vec![(inputs[0], self.softmax_back(at, gradient))],
            Rule::SoftmaxOf(x) => vec![(x, self.softmax_back(at, gradient))],
            Rule::Negative => vec![(inputs[0], self.map("neg", gradient, self.dtype(gradient)))],
            Rule::TopK { x, indices } => {
                let (sizes, dtype) = (self.shape(x), self.dtype(gradient));
                vec![(x, self.scatter(gradient, indices, sizes, dtype))]
            }
            Rule::Summed => {
                let to = self.shape(inputs[0]);
                vec![(inputs[0], self.node(Kind::View("expand"), &[gradient], to, self.dtype(gradient)))]
            }
            Rule::Gathered { x, ids } => {
                let (sizes, dtype) = (self.shape(x), self.dtype(gradient));
                vec![(x, self.scatter(gradient, ids, sizes, dtype))]
            }
            Rule::SumOf(x) => {
                let to = self.shape(x);
                vec![(x, self.node(Kind::View("expand"), &[gradient], to, self.dtype(gradient)))]
            }
            Rule::Grouped { x, weight, offsets } => self.grouped_back(gradient, [x, weight, offsets]),
            Rule::Scaled => vec![(inputs[0], self.map("scale", gradient, self.dtype(gradient)))],
            Rule::Shifted => vec![(inputs[0], gradient)],
            Rule::Square => {
                let power = self.map("pow 1", inputs[0], self.dtype(inputs[0]));
                let double = self.map("twice", power, self.dtype(inputs[0]));
                vec![(inputs[0], self.both("mul", gradient, double))]
            }
            Rule::Mean => {
                let wide = self.node(Kind::View("expand"), &[gradient], self.shape(inputs[0]), self.dtype(gradient));
                vec![(inputs[0], self.map("div", wide, self.dtype(gradient)))]
            }
            Rule::Rsqrt => {
                let cube = self.map("pow 3", at, self.dtype(at));
                let half = self.map("half", gradient, self.dtype(gradient));
                vec![(inputs[0], self.both("mul", half, cube))]
            }
            Rule::Function(x) => {
                // silu_backward: sigmoid again, then a few products; all of it in fp32.
                let wide = if self.dtype(x).size() == 2 { DType::F32 } else { self.dtype(x) };
                let gradient = self.cast(gradient, wide);
                let from = self.cast(x, wide);
                let inner = self.map("function of it", from, wide);
                let own = self.map("derivative", inner, wide);
                let slope = self.both("slope", from, own);
                let product = self.both("mul", gradient, slope);
                vec![(x, self.cast(product, self.dtype(x)))]
            }
            Rule::Tanh => {
                let square = self.map("1 - y²", at, self.dtype(at));
                vec![(inputs[0], self.both("mul", gradient, square))]
            }
            Rule::Relu => {
                let closed = self.map("le", at, DType::Bool);
                let dtype = self.dtype(gradient);
                vec![(inputs[0], self.node(Kind::Pointwise("where"), &[closed, gradient], shape, dtype))]
            }
            Rule::Masked { x, mask } => {
                let dtype = self.dtype(gradient);
                vec![(x, self.node(Kind::Pointwise("mul"), &[gradient, mask], shape, dtype))]
            }
            Rule::LayerNorm { x, mean, inverse, weight, bias } => {
                self.layer_norm_back(gradient, [x, mean, inverse], weight, bias)
            }
            Rule::RepeatOf(x) => {
                let summed =
                    self.node(Kind::Pointwise("sum of heads"), &[gradient], self.shape(x), self.dtype(gradient));
                vec![(x, summed)]
            }
            Rule::Rotation { x, cosine, sine } => {
                let turned = self.both("mul", gradient, sine);
                let turned = self.map("rotate back", turned, self.dtype(turned));
                let straight = self.both("mul", gradient, cosine);
                let sum = self.both("add", straight, turned);
                vec![(x, self.cast(sum, self.dtype(x)))]
            }
            Rule::Slice => {
                let whole = self.node(
                    Kind::Pointwise("slice_backward"),
                    &[gradient],
                    self.shape(inputs[0]),
                    self.dtype(gradient),
                );
                vec![(inputs[0], whole)]
            }
            Rule::Join => {
                let mut found = Vec::new();
                for (place, input) in inputs.iter().enumerate() {
                    let name = ["slice 0", "slice 1", "slice 2"][place.min(2)];
                    let to = self.shape(*input);
                    found.push((*input, self.node(Kind::View(name), &[gradient], to, self.dtype(gradient))));
                }
                found
            }
            Rule::Linear { x, weight, bias, layout } => self.linear_back(gradient, (x, weight, bias), layout),
            Rule::PaddedLinear { x, weight, bias } => self.padded_back(gradient, x, weight, bias),
            Rule::GatherSequence { part, ways } => vec![(part, self.scatter_sequence(gradient, ways, (false, false)))],
            Rule::ScatterSequence { whole, ways, bytes } => {
                let gradient = if bytes { self.cast_once(gradient, DType::F8E5M2) } else { gradient };
                vec![(whole, self.gather_sequence(gradient, ways))]
            }
            Rule::Straight(x) => vec![(x, gradient)],
            Rule::Batched { a, b } => self.batched_back(gradient, a, b),
            Rule::Float8 { x, weight, how } => self.float8_back(at, gradient, [x, weight], how),
            Rule::Attention { q, k, v, mask, kernel } => {
                let mut inputs = vec![gradient, q, k, v];
                inputs.extend(mask);
                inputs.push(at);
                let statistic = self.statistic(kernel);
                inputs.push(statistic);
                let run = self.node(Kind::AttentionBackward, &inputs, shape, self.dtype(q));
                [q, k, v]
                    .iter()
                    .enumerate()
                    .map(|(place, input)| {
                        (*input, self.node(Kind::Item(place as u8), &[run], self.shape(*input), self.dtype(*input)))
                    })
                    .collect()
            }
            Rule::Ring { q, k, v, statistic } => self.ring_back(at, gradient, [q, k, v], statistic),
            Rule::Embedding { table, ids } => {
                let wide = self.cast(gradient, DType::F32);
                let masked = self.both("where", wide, ids);
                let masked = self.map("mask", masked, DType::F32);
                let summed = self.node(Kind::Scatter, &[masked, ids], self.shape(table), DType::F32);
                vec![(table, self.cast(summed, self.dtype(table)))]
            }
            Rule::CrossEntropy { logits, largest, log, labels, count } => {
                let seed = self.both("div", gradient, count);
                let shifted = self.both("sub", logits, largest);
                let normal = self.both("sub", shifted, log);
                let exponential = self.map("exp", normal, DType::F32);
                let rows = self.both("where", labels, seed);
                let rows = self.map("row", rows, DType::F32);
                let hot = self.node(Kind::Pointwise("one hot"), &[labels, rows], self.shape(logits), DType::F32);
                let sums = self.node(Kind::Reduce("sum"), &[hot], self.shape(largest), DType::F32);
                let product = self.both("mul", exponential, sums);
                vec![(logits, self.both("loss back", hot, product))]
            }
        }
    }

    fn linear_back(
        &mut self,
        gradient: Id,
        (x, weight, bias): (Id, Id, Option<Id>),
        layout: LinearLayout,
    ) -> Vec<(Id, Id)> {
        let mut found = Vec::new();
        let (rows, columns) = (self.shape(weight).size(0), self.shape(weight).size(1));
        let dtype = self.dtype(gradient);
        let input = |graph: &mut Self| {
            let product = graph.node(Kind::Product, &[gradient, weight], graph.shape(x), dtype);
            (x, product)
        };
        // `addmm` goes to its input first.
        if bias.is_some() && self.needs[x as usize] {
            found.push(input(self));
        }
        if self.needs[weight as usize] {
            let (left, right) = if layout == LinearLayout::OutIn { (gradient, x) } else { (x, gradient) };
            let turned_shape = Shape::from([self.shape(left).size(1), self.shape(left).size(0)]);
            let turned = self.node(Kind::View("permute"), &[left], turned_shape, dtype);
            found.push((weight, self.node(Kind::Product, &[turned, right], Shape::from([rows, columns]), dtype)));
        }
        if bias.is_none() && self.needs[x as usize] {
            found.push(input(self));
        }
        found.extend(self.bias_back(gradient, bias));
        found
    }

    /// The gradient of a bias.
    pub(super) fn bias_back(&mut self, gradient: Id, bias: Option<Id>) -> Option<(Id, Id)> {
        let bias = bias.filter(|bias| self.needs[*bias as usize])?;
        let sum = self.node(Kind::Reduce("column sum"), &[gradient], self.shape(bias), self.dtype(gradient));
        Some((bias, self.cast(sum, self.dtype(bias))))
    }
}
