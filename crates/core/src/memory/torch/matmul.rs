//! Matrix products and linears.

use super::Torch;
use crate::memory::autograd::Saved;
use crate::memory::saved::Costly;
use crate::memory::tensor::Tensor;
use crate::model::Shape;
use smallvec::smallvec;

impl Torch {
    /// A product of two matrices, or of two stacks of matrices.
    fn product(&mut self, name: &'static str, a: &Tensor, b: &Tensor) -> Tensor {
        let records = self.records(&[a, b]);
        let kept_a = (records && b.needs_grad()).then(|| Saved::new(self, a));
        let kept_b = (records && a.needs_grad()).then(|| Saved::new(self, b));
        let shape = a.shape.with(-1, b.shape.size(-1));
        let kind = if name == "mm" { Costly::Product } else { Costly::OtherProduct };
        let [output] = self.costly(kind, |torch| {
            let output = torch.fresh(name, shape, a.dtype);
            torch.multiply_stacks(a, b);
            torch.use_blas();
            [output]
        });
        if !records {
            return output;
        }
        let (shape_a, shape_b) = (a.shape, b.shape);
        let transposed_b = is_transposed(b);
        let transposed_a = is_transposed(a);
        let (need_a, need_b) = (a.needs_grad(), b.needs_grad());
        self.attach(output, &[a, b], move |torch, gradient| {
            let kept_a = kept_a.map(|saved| saved.get(torch));
            let kept_b = kept_b.map(|saved| saved.get(torch));
            // `mat2` before `self`; a transposed operand gets its gradient in its own layout.
            let for_b =
                need_b.then(|| torch.product_gradient(name, shape_b, transposed_b, &gradient, shape_b.size(-2)));
            let for_a = need_a.then(|| torch.product_gradient(name, shape_a, transposed_a, &gradient, shape_a.last()));
            drop((kept_a, kept_b));
            smallvec![for_a, for_b]
        })
    }

    /// What a product of two stacks computes.
    fn multiply_stacks(&mut self, a: &Tensor, b: &Tensor) {
        let [rows, inner, columns] = [a.shape.size(-2), a.shape.last(), b.shape.size(-1)];
        let count = a.elements() / rows.saturating_mul(inner).max(1);
        self.multiply(a.dtype, count, [rows, inner, columns]);
    }

    /// The gradient of an operand; `inner` is what was summed over on the way there.
    fn product_gradient(
        &mut self,
        name: &'static str,
        shape: Shape,
        transposed: bool,
        gradient: &Tensor,
        inner: u64,
    ) -> Tensor {
        let (rows, columns) = (gradient.shape.size(-2), gradient.shape.last());
        let count = gradient.elements() / rows.saturating_mul(columns).max(1);
        self.multiply(gradient.dtype, count, [rows, columns, inner]);
        // Only `mm` keeps the layout of the operand; `bmm` gives a dense result.
        let transposed = transposed && name == "mm";
        let made = if transposed { shape.with(-1, shape.size(-2)).with(-2, shape.size(-1)) } else { shape };
        let dense = self.fresh(name, made, gradient.dtype);
        self.use_blas();
        if transposed { self.transpose(&dense, -1, -2) } else { dense }
    }

    /// `torch.matmul`: stacks are folded into one dimension, with copies where their strides do not allow a view.
    pub fn matmul(&mut self, a: &Tensor, b: &Tensor) -> Tensor {
        let (b, a) = (&self.narrow(b), &self.narrow(a));
        if b.shape.rank() == 2 && a.shape.rank() >= 2 {
            let folded = self.fold(a);
            let product = self.product("mm", &folded, b);
            return self.reshape(&product, a.shape.with(-1, b.shape.size(-1)));
        }
        let rank = a.shape.rank().max(b.shape.rank());
        let mut batch: Vec<u64> =
            (3..=rank as i64).rev().map(|back| a.shape.size(-back).max(b.shape.size(-back))).collect();
        let count = batch.iter().product();
        let stack = |torch: &mut Self, x: &Tensor| {
            let mut sizes = batch.clone();
            sizes.extend([x.shape.size(-2), x.shape.size(-1)]);
            let spread = torch.expand(x, Shape::new(&sizes));
            torch.reshape(&spread, Shape::from([count, x.shape.size(-2), x.shape.size(-1)]))
        };
        let left = stack(self, a);
        let right = stack(self, b);
        let product = self.product("bmm", &left, &right);
        batch.extend([a.shape.size(-2), b.shape.size(-1)]);
        self.reshape(&product, Shape::new(&batch))
    }

    /// `baddbmm`: a broadcast bias and a scaled product in one kernel.
    pub fn add_matmul(&mut self, bias: &Tensor, a: &Tensor, b: &Tensor) -> Tensor {
        let (b, a, bias) = (&self.narrow(b), &self.narrow(a), &self.narrow(bias));
        let records = self.records(&[bias, a, b]);
        let kept_a = (records && b.needs_grad()).then(|| Saved::new(self, a));
        let kept_b = (records && a.needs_grad()).then(|| Saved::new(self, b));
        let [output] = self.costly(Costly::OtherProduct, |torch| {
            let output = torch.fresh("baddbmm", a.shape.with(-1, b.shape.size(-1)), a.dtype);
            torch.multiply_stacks(a, b);
            torch.use_blas();
            [output]
        });
        if !records {
            return output;
        }
        let needs = [bias, a, b].map(Tensor::needs_grad);
        let (shape_a, shape_b, to_bias) = (a.shape, b.shape, (bias.shape, bias.dtype));
        let inner = a.shape.last();
        self.attach(output, &[bias, a, b], move |torch, gradient| {
            let kept = [kept_a, kept_b].map(|kept| kept.map(|saved| saved.get(torch)));
            let mut scaled = |needed: bool, shape: Shape| {
                needed.then(|| {
                    let product = torch.product_gradient("bmm", shape, false, &gradient, inner);
                    torch.pointwise("mul", &[&product], gradient.dtype)
                })
            };
            let (for_a, for_b) = (scaled(needs[1], shape_a), scaled(needs[2], shape_b));
            drop(kept);
            let for_bias = needs[0].then(|| torch.reduce_to(gradient.clone(), to_bias.0, to_bias.1));
            smallvec![for_bias, for_a, for_b]
        })
    }

    /// `torch.linalg.solve_triangular`: both operands are copied column by column, the solution is written over one.
    pub fn solve_triangular(&mut self, a: &Tensor, b: &Tensor) -> Tensor {
        let (a, b) = (&self.widen(a), &self.widen(b));
        // Solutions lie column by column.
        let flipped = b.shape.with(-1, b.shape.size(-2)).with(-2, b.shape.size(-1));
        let mut output = self.fresh("linalg_solve_triangular", flipped, b.dtype);
        output = self.transpose(&output, -1, -2);
        if !self.records(&[a, b]) {
            return output;
        }
        let saved = [Saved::new(self, a), Saved::new(self, &output)];
        let (shape_a, shape_b, needs) = (a.shape, b.shape, [a, b].map(Tensor::needs_grad));
        self.attach(output, &[a, b], move |torch, gradient| {
            let kept = saved.map(|saved| saved.get(torch));
            let for_b = torch.fresh("linalg_solve_triangular", shape_b, gradient.dtype);
            let for_a = needs[0].then(|| {
                let product = torch.product_gradient("bmm", shape_a, false, &gradient, shape_a.last());
                torch.pointwise("triu", &[&product], gradient.dtype)
            });
            drop(kept);
            smallvec![for_a, needs[1].then_some(for_b)]
        })
    }

    /// `F.linear` with a `[out, in]` matrix.
    pub fn linear(&mut self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
        // Autocast casts arguments from the last to the first, in the order C++ evaluates them.
        let bias = bias.map(|bias| self.narrow(bias));
        let weight = &self.narrow(weight);
        let x = &self.narrow(x);
        if self.linears_are_functions && (bias.is_none() || x.shape.rank() > 2) {
            return self.linear_function(x, weight, bias.as_ref());
        }
        let matrix = self.transpose(weight, 0, 1);
        match &bias {
            Some(bias) if x.shape.rank() == 2 || x.is_contiguous() => self.addmm(x, &matrix, bias),
            Some(bias) => {
                let folded = self.fold(x);
                let product = self.product("mm", &folded, &matrix);
                let product = self.reshape(&product, x.shape.with(-1, matrix.shape.size(-1)));
                self.in_place(crate::model::op::Binary::Add, &product, bias)
            }
            None => {
                let folded = self.fold(x);
                let product = self.product("mm", &folded, &matrix);
                self.reshape(&product, x.shape.with(-1, matrix.shape.size(-1)))
            }
        }
    }

    /// DeepSpeed's `LinearFunctionForZeroStage3`: input and weight are kept whoever needs them, the input's gradient comes
    /// first and is no view, a bias is added in place.
    fn linear_function(&mut self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
        let inputs: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
        let records = self.records(&inputs);
        let saved = records.then(|| [x, weight].map(|tensor| Saved::new(self, tensor)));
        let folded = self.fold(&x.detached());
        let shape = x.shape.with(-1, weight.shape.size(0));
        let [output] = self.costly(Costly::Product, |torch| {
            let output = torch.fresh("mm", shape, x.dtype);
            let (width, outputs) = (x.shape.last(), shape.last());
            torch.multiply(x.dtype, 1, [x.elements() / width.max(1), width, outputs]);
            torch.use_blas();
            [output]
        });
        drop(folded);
        let Some(saved) = saved else { return output };
        let needs: Vec<bool> = inputs.iter().map(|tensor| tensor.needs_grad()).collect();
        let (shape_x, shape_weight) = (x.shape, weight.shape);
        let to_bias = bias.map(|bias| (bias.shape, bias.dtype));
        self.attach(output, &inputs, move |torch, gradient| {
            let kept = saved.map(|saved| saved.get(torch));
            let for_x = needs[0].then(|| torch.product_gradient("mm", shape_x, false, &gradient, shape_x.last()));
            let for_weight =
                needs[1].then(|| torch.product_gradient("mm", shape_weight, false, &gradient, shape_weight.last()));
            drop(kept);
            let mut gradients = smallvec![for_x, for_weight];
            if let Some((shape, dtype)) = to_bias {
                gradients.push(needs[2].then(|| torch.reduce_to(gradient.clone(), shape, dtype)));
            }
            gradients
        })
    }

    /// GPT-2's `Conv1D`: `addmm` with an `[in, out]` matrix.
    pub fn conv1d_linear(&mut self, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Tensor {
        // Under autocast `addmm` casts all three; the view that Conv1D makes first is of the wide input.
        let folded = self.fold(x);
        let (weight, folded, bias) = (self.narrow(weight), self.narrow(&folded), self.narrow(bias));
        let output = self.addmm(&folded, &weight, &bias);
        self.reshape(&output, x.shape.with(-1, weight.shape.size(-1)))
    }

    /// `bias + x · matrix` over folded rows.
    fn addmm(&mut self, x: &Tensor, matrix: &Tensor, bias: &Tensor) -> Tensor {
        let folded = &self.fold(x);
        let records = self.records(&[folded, matrix, bias]);
        let kept_x = (records && matrix.needs_grad()).then(|| Saved::new(self, folded));
        let kept_matrix = (records && folded.needs_grad()).then(|| Saved::new(self, matrix));
        let [output] = self.costly(Costly::OtherProduct, |torch| {
            let output = torch.fresh("addmm", folded.shape.with(-1, matrix.shape.size(-1)), x.dtype);
            torch.multiply_stacks(folded, matrix);
            torch.use_blas();
            torch.use_blas_lt();
            [output]
        });
        let full = x.shape.with(-1, matrix.shape.size(-1));
        if !records {
            return self.reshape(&output, full);
        }
        let (need_x, need_matrix, need_bias) = (folded.needs_grad(), matrix.needs_grad(), bias.needs_grad());
        let (shape_x, shape_matrix, transposed) = (folded.shape, matrix.shape, is_transposed(matrix));
        let to_bias = (bias.shape, bias.dtype);
        let output = self.attach(output, &[folded, matrix, bias], move |torch, gradient| {
            let kept_x = kept_x.map(|saved| saved.get(torch));
            let kept_matrix = kept_matrix.map(|saved| saved.get(torch));
            let for_x = need_x.then(|| torch.product_gradient("mm", shape_x, false, &gradient, shape_x.last()));
            let for_matrix = need_matrix
                .then(|| torch.product_gradient("mm", shape_matrix, transposed, &gradient, shape_matrix.size(-2)));
            drop((kept_x, kept_matrix));
            let for_bias = need_bias.then(|| torch.reduce_to(gradient.clone(), to_bias.0, to_bias.1));
            smallvec![for_x, for_matrix, for_bias]
        });
        self.reshape(&output, full)
    }

    /// `[…, width] → [rows, width]`.
    fn fold(&mut self, x: &Tensor) -> Tensor {
        if x.shape.rank() == 2 {
            return x.clone();
        }
        let width = x.shape.last();
        self.reshape(x, Shape::from([x.elements() / width.max(1), width]))
    }
}

/// Whether the last two dimensions lie column by column.
fn is_transposed(x: &Tensor) -> bool {
    let rank = x.shape.rank();
    rank >= 2 && x.strides[rank - 2] == 1 && x.strides[rank - 1] == x.shape.size(-2) && x.shape.size(-2) > 1
}
