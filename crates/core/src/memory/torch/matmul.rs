//! Matrix products and linears.

use super::Torch;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;

impl Torch {
    /// A product of two matrices, or of two stacks of matrices.
    fn product(&mut self, name: &'static str, a: &Tensor, b: &Tensor) -> Tensor {
        let records = self.records(&[a, b]);
        let kept_a = (records && b.needs_grad()).then(|| Saved::new(self, a));
        let kept_b = (records && a.needs_grad()).then(|| Saved::new(self, b));
        let shape = a.shape.with(-1, b.shape.size(-1));
        let output = self.fresh(name, shape, a.dtype);
        self.use_blas();
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
            torch.use_blas();
            // `mat2` before `self`; a transposed operand gets its gradient in its own layout.
            let for_b = need_b.then(|| torch.product_gradient(name, shape_b, transposed_b, &gradient));
            let for_a = need_a.then(|| torch.product_gradient(name, shape_a, transposed_a, &gradient));
            drop((kept_a, kept_b));
            vec![for_a, for_b]
        })
    }

    fn product_gradient(&mut self, name: &'static str, shape: Shape, transposed: bool, gradient: &Tensor) -> Tensor {
        // Only `mm` keeps the layout of the operand; `bmm` gives a dense result.
        if transposed && name == "mm" {
            let flipped = shape.with(-1, shape.size(-2)).with(-2, shape.size(-1));
            let dense = self.fresh(name, flipped, gradient.dtype);
            return self.transpose(&dense, -1, -2);
        }
        self.fresh(name, shape, gradient.dtype)
    }

    /// `torch.matmul`: stacks are folded into one dimension, with copies where their strides do not allow a view.
    pub fn matmul(&mut self, a: &Tensor, b: &Tensor) -> Tensor {
        let (a, b) = (&self.narrow(a), &self.narrow(b));
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

    /// `torch.linalg.solve_triangular(a, b)`.
    pub fn solve_triangular(&mut self, a: &Tensor, b: &Tensor) -> Tensor {
        let records = self.records(&[a, b]);
        let saved_a = records.then(|| Saved::new(self, a));
        // Solutions lie column by column.
        let flipped = b.shape.with(-1, b.shape.size(-2)).with(-2, b.shape.size(-1));
        let columns = self.fresh("linalg_solve_triangular", flipped, b.dtype);
        let output = self.transpose(&columns, -1, -2);
        drop(columns);
        if !records {
            return output;
        }
        let saved_x = a.needs_grad().then(|| Saved::new(self, &output));
        let (need_a, need_b, shape) = (a.needs_grad(), b.needs_grad(), a.shape);
        self.attach(output, &[a, b], move |torch, gradient| {
            let kept_a = saved_a.map(|saved| saved.get(torch));
            let kept_x = saved_x.map(|saved| saved.get(torch));
            let for_b = torch.fresh("linalg_solve_triangular", gradient.shape, gradient.dtype);
            let for_a = need_a.then(|| {
                let product = torch.fresh("bmm", shape, gradient.dtype);
                let negated = torch.pointwise("neg", &[&product], gradient.dtype);
                drop(product);
                torch.pointwise("tril", &[&negated], gradient.dtype)
            });
            drop((kept_a, kept_x));
            vec![for_a, need_b.then_some(for_b)]
        })
    }

    /// `F.linear` with a `[out, in]` matrix.
    pub fn linear(&mut self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
        let x = &self.narrow(x);
        let weight = &self.narrow(weight);
        let bias = bias.map(|bias| self.narrow(bias));
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

    /// GPT-2's `Conv1D`: `addmm` with an `[in, out]` matrix.
    pub fn conv1d_linear(&mut self, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Tensor {
        // Under autocast `addmm` casts all three; the view that Conv1D makes first is of the wide input.
        let folded = self.fold(x);
        let (folded, weight, bias) = (self.narrow(&folded), self.narrow(weight), self.narrow(bias));
        let output = self.addmm(&folded, &weight, &bias);
        self.reshape(&output, x.shape.with(-1, weight.shape.size(-1)))
    }

    /// `bias + x · matrix` over folded rows.
    fn addmm(&mut self, x: &Tensor, matrix: &Tensor, bias: &Tensor) -> Tensor {
        let folded = &self.fold(x);
        let records = self.records(&[folded, matrix, bias]);
        let kept_x = (records && matrix.needs_grad()).then(|| Saved::new(self, folded));
        let kept_matrix = (records && folded.needs_grad()).then(|| Saved::new(self, matrix));
        let output = self.fresh("addmm", folded.shape.with(-1, matrix.shape.size(-1)), x.dtype);
        self.use_blas();
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
            torch.use_blas();
            let for_x = need_x.then(|| torch.fresh("mm", shape_x, gradient.dtype));
            let for_matrix = need_matrix.then(|| torch.product_gradient("mm", shape_matrix, transposed, &gradient));
            let for_bias = need_bias.then(|| torch.reduce_to(gradient.clone(), to_bias.0, to_bias.1));
            drop((kept_x, kept_matrix));
            vec![for_x, for_matrix, for_bias]
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
