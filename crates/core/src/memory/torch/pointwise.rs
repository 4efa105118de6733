//! Arithmetic, casts and dropout: what each keeps for backward, and what its backward makes.

use super::{Torch, promote};
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;
use crate::model::op::{Binary, Unary};
use smallvec::smallvec;

impl Torch {
    /// To another type; nothing when it has it already.
    pub fn cast(&mut self, x: &Tensor, dtype: DType) -> Tensor {
        if x.dtype == dtype {
            return x.clone();
        }
        let output = self.fresh_like("_to_copy", x, dtype);
        if !self.records(&[x]) {
            return output;
        }
        let old = x.dtype;
        self.attach(output, &[x], move |torch, gradient| smallvec![Some(torch.cast(&gradient, old))])
    }

    /// To another type and dense, in one copy; nothing when it is both already.
    pub fn cast_dense(&mut self, x: &Tensor, dtype: DType) -> Tensor {
        // The layout alone is no reason for a copy.
        if x.dtype == dtype {
            return x.clone();
        }
        let output = self.fresh("_to_copy", x.shape, dtype);
        if !self.records(&[x]) {
            return output;
        }
        let old = x.dtype;
        self.attach(output, &[x], move |torch, gradient| smallvec![Some(torch.cast(&gradient, old))])
    }

    /// An input of an operation that autocast runs in the narrow type; casts of weights are kept for the region.
    pub fn narrow(&mut self, x: &Tensor) -> Tensor {
        let Some(dtype) = self.autocast else { return x.clone() };
        if x.dtype == dtype || !is_float(x.dtype) {
            return x.clone();
        }
        let id = x.storage.id();
        if let Some(known) = self.cast_cache.get(&id).filter(|known| known.shape == x.shape) {
            return known.clone();
        }
        let cast = self.cast(x, dtype);
        if x.edge.as_ref().is_some_and(|edge| edge.node.is_leaf()) {
            self.cast_cache.insert(id, cast.clone());
        }
        cast
    }

    /// An input of an operation that autocast runs in fp32.
    pub fn widen(&mut self, x: &Tensor) -> Tensor {
        if self.autocast.is_some() && is_float(x.dtype) { self.cast(x, DType::F32) } else { x.clone() }
    }

    /// `a op b`, broadcast.
    pub fn binary(&mut self, kind: Binary, a: &Tensor, b: &Tensor) -> Tensor {
        let dtype = result_type(a, b);
        let records = self.records(&[a, b]);
        let saved = (records && matches!(kind, Binary::Mul | Binary::Div | Binary::Pow | Binary::Max | Binary::Min))
            .then(|| {
                // Which of the two was larger is asked again.
                let both = matches!(kind, Binary::Max | Binary::Min);
                let other = (a.needs_grad() || both || kind == Binary::Div).then(|| Saved::new(self, b));
                let own = (b.needs_grad() || both).then(|| Saved::new(self, a));
                (own, other)
            });
        let output = self.pointwise(binary_name(kind), &[a, b], dtype);
        if !records {
            return output;
        }
        self.attach_binary(kind, output, a, b, saved.unwrap_or_default())
    }

    /// `where(self == other, gradient / 2, gradient).masked_fill_(self < other, 0)`.
    fn larger_backward(&mut self, gradient: &Tensor) -> Tensor {
        let equal = self.pointwise("compare", &[gradient], DType::Bool);
        let half = self.pointwise("div", &[gradient], gradient.dtype);
        let chosen = self.pointwise("where", &[gradient], gradient.dtype);
        let smaller = self.pointwise("compare", &[gradient], DType::Bool);
        drop((equal, half, smaller));
        chosen
    }

    /// `x op number`.
    pub fn scalar(&mut self, kind: Binary, x: &Tensor) -> Tensor {
        let x = &if kind == Binary::Pow { self.widen(x) } else { x.clone() };
        let records = self.records(&[x]);
        let saved = (records && matches!(kind, Binary::Pow | Binary::Max | Binary::Min)).then(|| Saved::new(self, x));
        let dtype = if kind == Binary::Div && !is_float(x.dtype) { DType::F32 } else { x.dtype };
        let output = self.pointwise(binary_name(kind), &[x], dtype);
        if !records {
            return output;
        }
        self.attach(output, &[x], move |torch, gradient| {
            let gradient = match kind {
                Binary::Add | Binary::Sub => gradient,
                Binary::Mul | Binary::Div => torch.pointwise("mul", &[&gradient], gradient.dtype),
                Binary::Pow => {
                    // grad * (n * x.pow(n - 1)): all three live until the expression ends.
                    let x = saved.map(|saved| saved.get(torch));
                    let power = torch.pointwise("pow", &[x.as_ref().unwrap_or(&gradient)], gradient.dtype);
                    let scaled = torch.pointwise("mul", &[&power], gradient.dtype);
                    torch.pointwise("mul", &[&gradient, &scaled], gradient.dtype)
                }
                Binary::Max | Binary::Min => {
                    let x = saved.map(|saved| saved.get(torch));
                    let mask = torch.pointwise("compare", &[x.as_ref().unwrap_or(&gradient)], DType::Bool);
                    let masked = torch.pointwise("where", &[&gradient], gradient.dtype);
                    drop(mask);
                    masked
                }
            };
            smallvec![Some(gradient)]
        })
    }

    /// `a op= b`: the first input's storage is used again; where its old contents decide a gradient, torch keeps a copy.
    pub fn in_place(&mut self, kind: Binary, a: &Tensor, b: &Tensor) -> Tensor {
        let keeps = self.records(&[a, b]) && matches!(kind, Binary::Mul | Binary::Div);
        let other = (keeps && (a.needs_grad() || kind == Binary::Div)).then(|| Saved::new(self, b));
        let own = (keeps && b.needs_grad()).then(|| {
            let copy = self.pointwise("clone", &[&a.detached()], a.dtype);
            Saved::new(self, &copy)
        });
        let output = a.detached();
        if !self.records(&[a, b]) {
            return output;
        }
        self.attach_binary(kind, output, a, b, (own, other))
    }

    /// The gradients of `a op b`, by what of them was kept: `a`, `b`.
    fn attach_binary(
        &mut self,
        kind: Binary,
        output: Tensor,
        a: &Tensor,
        b: &Tensor,
        (own, other): (Option<Saved>, Option<Saved>),
    ) -> Tensor {
        let (need_a, need_b) = (a.needs_grad(), b.needs_grad());
        let (to_a, to_b) = ((a.shape, a.dtype), (b.shape, b.dtype));
        self.attach(output, &[a, b], move |torch, gradient| {
            let own = own.map(|saved| saved.get(torch));
            let other = other.map(|saved| saved.get(torch));
            // Gradients are computed in the alphabetical order of the arguments' names: `other` before `self`.
            let mut keep = Vec::new();
            let for_b = need_b.then(|| match kind {
                Binary::Add => gradient.clone(),
                Binary::Sub => torch.pointwise("neg", &[&gradient], gradient.dtype),
                Binary::Div => {
                    let ratio = torch.pointwise("div", &[&gradient], gradient.dtype);
                    let again = torch.pointwise("div", &[&gradient], gradient.dtype);
                    let negative = torch.pointwise("neg", &[&gradient], gradient.dtype);
                    keep.extend([ratio, again, negative]);
                    torch.pointwise("mul", &[&gradient], gradient.dtype)
                }
                Binary::Max | Binary::Min => torch.larger_backward(&gradient),
                _ => product(torch, &gradient, own.as_ref()),
            });
            let for_a = need_a.then(|| match kind {
                Binary::Add | Binary::Sub => gradient.clone(),
                Binary::Div => torch.pointwise("div", &[&gradient], gradient.dtype),
                Binary::Max | Binary::Min => torch.larger_backward(&gradient),
                _ => product(torch, &gradient, other.as_ref()),
            });
            drop((own, other, keep));
            let for_a = for_a.map(|g| torch.reduce_to(g, to_a.0, to_a.1));
            let for_b = for_b.map(|g| torch.reduce_to(g, to_b.0, to_b.1));
            smallvec![for_a, for_b]
        })
    }

    /// An operation that overwrites its one input: its result is kept where the gradient follows from it.
    pub fn in_place_unary(&mut self, kind: Unary, x: &Tensor) -> Tensor {
        let output = x.detached();
        if !self.records(&[x]) {
            return output;
        }
        let saved = (kind == Unary::Relu).then(|| Saved::new(self, &output));
        self.attach(output, &[x], move |torch, gradient| {
            let kept = saved.map(|saved| saved.get(torch));
            let result = torch.pointwise(unary_backward_name(kind), &[&gradient], gradient.dtype);
            drop(kept);
            smallvec![Some(result)]
        })
    }

    /// One input, one output of the same shape.
    pub fn unary(&mut self, kind: Unary, x: &Tensor) -> Tensor {
        match kind {
            Unary::ClampFp16 => return self.clamp_fp16(x),
            Unary::ClampHalf if x.dtype == DType::F16 => return self.unary(Unary::Clamp, x),
            Unary::ClampHalf => return x.clone(),
            _ => {}
        }
        use Unary::{Abs, Clamp, Clone, Cos, Exp, Expm1, Log, LogSigmoid, Neg, Not, Reciprocal, Relu, Round, Rsqrt};
        use Unary::{ClampFp16, ClampHalf, Sigmoid, Silu, Sin, Softplus, Sqrt, SqrtBound, Square, Tanh};
        let wide = matches!(kind, Exp | Expm1 | Log | Rsqrt | Reciprocal | Softplus | Square);
        let x = &if wide { self.widen(x) } else { x.clone() };
        let records = self.records(&[x]);
        let keeps_input =
            matches!(kind, Log | Cos | Sin | Abs | Square | Softplus | Silu | LogSigmoid | Clamp | SqrtBound);
        let saved_input = (records && keeps_input).then(|| Saved::new(self, x));
        let dtype = if kind == Not { DType::Bool } else { x.dtype };
        let output = self.pointwise(unary_name(kind), &[x], dtype);
        if !records || matches!(kind, Not | Round) {
            return output;
        }
        let keeps_output = matches!(kind, Exp | Expm1 | Sqrt | Rsqrt | Reciprocal | Tanh | Sigmoid | Relu);
        let saved_output = keeps_output.then(|| Saved::new(self, &output));
        self.attach(output, &[x], move |torch, gradient| {
            let kept = saved_input.or(saved_output).map(|saved| saved.get(torch));
            let like = gradient.dtype;
            let mut keep = Vec::new();
            let mut middle = |torch: &mut Torch, count: usize| {
                for _ in 0..count {
                    let temporary = torch.pointwise("temporary", &[&gradient], like);
                    keep.push(temporary);
                }
            };
            match kind {
                Clone => return smallvec![Some(gradient)],
                SqrtBound => middle(torch, 3),
                Square | Rsqrt | Sqrt | Clamp => middle(torch, 2),
                // Of `expm1` it is grad * (result + 1).
                Expm1 | Cos | Sin | Abs | Reciprocal => middle(torch, 1),
                Neg | Exp | Log | Tanh | Sigmoid | Softplus | Silu | Relu | LogSigmoid | Round | Not | ClampFp16
                | ClampHalf => {}
            }
            let result = torch.pointwise(unary_backward_name(kind), &[&gradient], like);
            drop((kept, keep));
            smallvec![Some(result)]
        })
    }

    /// `clamp(x, -limit, limit)` with a limit that depends on whether anything is infinite.
    fn clamp_fp16(&mut self, x: &Tensor) -> Tensor {
        if x.dtype != DType::F16 {
            return x.clone();
        }
        let magnitudes = self.pointwise("abs", &[x], x.dtype);
        let infinite = self.pointwise("eq", &[x], DType::Bool);
        drop(magnitudes);
        let any = self.fresh("any", Shape::new(&[]), DType::Bool);
        drop(infinite);
        let limits = [self.fresh("where", Shape::new(&[]), DType::F32), self.fresh("neg", Shape::new(&[]), DType::F32)];
        drop(any);
        let records = self.records(&[x]);
        let saved = records.then(|| [x, &limits[0], &limits[1]].map(|tensor| Saved::new(self, tensor)));
        let output = self.pointwise("clamp", &[x], x.dtype);
        let Some(saved) = saved else { return output };
        self.attach(output, &[x], move |torch, gradient| {
            let kept = saved.map(|saved| saved.get(torch));
            let sides = [(); 2].map(|()| torch.pointwise("ge", &[&gradient], DType::Bool));
            let inside = torch.pointwise("logical_and", &[&gradient], DType::Bool);
            drop(sides);
            let result = torch.pointwise("where", &[&gradient], gradient.dtype);
            drop((kept, inside));
            smallvec![Some(result)]
        })
    }

    /// Dropout: the output and a mask of one byte an element, which is kept.
    pub fn dropout(&mut self, x: &Tensor) -> Tensor {
        if !(self.training && self.drops) {
            return x.clone();
        }
        let records = self.records(&[x]);
        let mask = self.fresh_like("native_dropout", x, DType::Bool);
        let output = self.fresh_like("native_dropout", x, x.dtype);
        if !records {
            return output;
        }
        let saved = Saved::new(self, &mask);
        self.attach(output, &[x], move |torch, gradient| {
            let mask = saved.get(torch);
            let result = torch.pointwise("native_dropout_backward", &[&gradient], gradient.dtype);
            drop(mask);
            smallvec![Some(result)]
        })
    }

    /// The first input with a number where the mask is set.
    pub fn masked_fill(&mut self, x: &Tensor, mask: &Tensor, in_place: bool) -> Tensor {
        let records = self.records(&[x]);
        let saved = records.then(|| Saved::new(self, mask));
        let output = if in_place { x.detached() } else { self.pointwise("masked_fill", &[x, mask], x.dtype) };
        if !records {
            return output;
        }
        let to = (x.shape, x.dtype);
        self.attach(output, &[x], move |torch, gradient| {
            let mask = saved.map(|saved| saved.get(torch));
            let result = torch.pointwise("masked_fill", &[&gradient], gradient.dtype);
            drop(mask);
            smallvec![Some(torch.reduce_to(result, to.0, to.1))]
        })
    }

    /// One of two inputs by a mask.
    pub fn where_(&mut self, mask: &Tensor, a: &Tensor, b: &Tensor) -> Tensor {
        let dtype = result_type(a, b);
        let records = self.records(&[a, b]);
        let saved = records.then(|| Saved::new(self, mask));
        let output = self.pointwise("where", &[mask, a, b], dtype);
        if !records {
            return output;
        }
        let (need_a, need_b) = (a.needs_grad(), b.needs_grad());
        let (to_a, to_b) = ((a.shape, a.dtype), (b.shape, b.dtype));
        self.attach(output, &[a, b], move |torch, gradient| {
            let mask = saved.map(|saved| saved.get(torch));
            let for_b = need_b.then(|| torch.pointwise("where", &[&gradient], gradient.dtype));
            let for_a = need_a.then(|| torch.pointwise("where", &[&gradient], gradient.dtype));
            drop(mask);
            let for_a = for_a.map(|g| torch.reduce_to(g, to_a.0, to_a.1));
            let for_b = for_b.map(|g| torch.reduce_to(g, to_b.0, to_b.1));
            smallvec![for_a, for_b]
        })
    }
}

fn product(torch: &mut Torch, gradient: &Tensor, factor: Option<&Tensor>) -> Tensor {
    match factor {
        Some(factor) => torch.pointwise("mul", &[gradient, factor], promote(gradient.dtype, factor.dtype)),
        None => gradient.clone(),
    }
}

/// The type of a result: a scalar tensor does not widen a tensor of the same kind.
pub fn result_type(a: &Tensor, b: &Tensor) -> DType {
    match (a.shape.rank(), b.shape.rank()) {
        (0, n) if n > 0 && is_float(a.dtype) == is_float(b.dtype) => b.dtype,
        (n, 0) if n > 0 && is_float(a.dtype) == is_float(b.dtype) => a.dtype,
        _ => promote(a.dtype, b.dtype),
    }
}

/// Whether a type is a floating point one.
pub fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

fn binary_name(kind: Binary) -> &'static str {
    match kind {
        Binary::Add => "add",
        Binary::Sub => "sub",
        Binary::Mul => "mul",
        Binary::Div => "div",
        Binary::Pow => "pow",
        Binary::Max => "maximum",
        Binary::Min => "minimum",
    }
}

fn unary_name(kind: Unary) -> &'static str {
    match kind {
        Unary::Neg => "neg",
        Unary::Exp => "exp",
        Unary::Expm1 => "expm1",
        Unary::Log => "log",
        Unary::Sqrt | Unary::SqrtBound => "sqrt",
        Unary::Rsqrt => "rsqrt",
        Unary::Cos => "cos",
        Unary::Sin => "sin",
        Unary::Abs => "abs",
        Unary::Square => "square",
        Unary::Reciprocal => "reciprocal",
        Unary::Tanh => "tanh",
        Unary::Sigmoid => "sigmoid",
        Unary::Softplus => "softplus",
        Unary::Silu => "silu",
        Unary::Relu => "relu",
        Unary::LogSigmoid => "log_sigmoid",
        Unary::Clamp | Unary::ClampFp16 | Unary::ClampHalf => "clamp",
        Unary::Round => "round",
        Unary::Not => "logical_not",
        Unary::Clone => "clone",
    }
}

fn unary_backward_name(kind: Unary) -> &'static str {
    match kind {
        Unary::Silu => "silu_backward",
        Unary::Tanh => "tanh_backward",
        Unary::Sigmoid => "sigmoid_backward",
        Unary::Relu => "threshold_backward",
        Unary::Softplus => "softplus_backward",
        _ => "mul",
    }
}
