//! LoRA on parameters (`lora.ParamWrapper`): the adapted matrix is made in full where it is used, for a whole stack of
//! experts at once.

use super::Runner;
use super::lora::LoraWeights;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::torch::quantised::QuantisedWeight;
use crate::model::Shape;
use crate::model::op::{Binary, ParameterId};
use smallvec::smallvec;

/// A matrix that an operation reads when it needs it.
pub(super) enum Matrix<'a> {
    /// The parameter itself.
    Plain(&'a Tensor),
    /// One that is packed: made in full when it is read, outside of any graph.
    Packed(&'a QuantisedWeight),
    /// A stack of matrices and the two factors of its change.
    Folded {
        /// The parameter.
        base: &'a Tensor,
        /// `[experts, out, rank]` in the parameter's type.
        first: Tensor,
        /// `[experts, rank, in]` in the parameter's type.
        second: Tensor,
    },
    /// A matrix and its change in full.
    Changed {
        /// The parameter.
        base: &'a Tensor,
        /// The change, in the parameter's type.
        change: Tensor,
    },
}

impl Matrix<'_> {
    /// The matrix, made now.
    pub(super) fn get(&self, torch: &mut Torch) -> Tensor {
        match self {
            Self::Plain(tensor) => (*tensor).clone(),
            Self::Packed(weight) => torch.in_full(weight),
            Self::Folded { base, first, second } => torch.fold_factors(base, first, second),
            Self::Changed { base, change } => torch.binary(Binary::Add, base, change),
        }
    }
}

impl Runner {
    /// A stack of experts as an operation reads it.
    pub(super) fn experts(&self, torch: &mut Torch, id: ParameterId) -> Matrix<'_> {
        match self.wrapped.quantised.get(&id) {
            Some(packed) => Matrix::Packed(packed),
            None => self.matrix(torch, id),
        }
    }

    /// A parameter as an operation reads it, with what its adapter prepares on the way in.
    pub(super) fn matrix(&self, torch: &mut Torch, id: ParameterId) -> Matrix<'_> {
        let base = self.parameter(id);
        let Some(lora) = self.wrapped.lora_parameters.get(&id) else { return Matrix::Plain(base) };
        let matrix = if base.shape.rank() == 3 { factors(torch, base, lora) } else { change(torch, base, lora) };
        // Registering the parametrization computes it once, to check it.
        drop(matrix.get(torch));
        matrix
    }
}

fn factors<'a>(torch: &mut Torch, base: &'a Tensor, lora: &LoraWeights) -> Matrix<'a> {
    let experts = base.shape.size(0);
    let rank = lora.first.shape.size(0) / experts.max(1);
    let (outputs, inputs) = (lora.second.shape.size(0), lora.first.shape.size(1));
    let second = torch.reshape(&lora.first, Shape::from([experts, rank, inputs]));
    let first = torch.reshape(&lora.second, Shape::from([outputs, rank, experts]));
    let first = torch.permute(&first, &[2, 0, 1]);
    let first = torch.cast(&first, base.dtype);
    let second = torch.cast(&second, base.dtype);
    Matrix::Folded { base, first, second }
}

fn change<'a>(torch: &mut Torch, base: &'a Tensor, lora: &LoraWeights) -> Matrix<'a> {
    let product = torch.matmul(&lora.second, &lora.first);
    let scaled = torch.scalar(Binary::Mul, &product);
    drop(product);
    let change = torch.cast(&scaled, base.dtype);
    Matrix::Changed { base, change }
}

impl Torch {
    /// `baddbmm(base, first, second)` over a frozen base: one fresh stack. The first factor lies across the experts, so
    /// every product copies it.
    fn fold_factors(&mut self, base: &Tensor, first: &Tensor, second: &Tensor) -> Tensor {
        let records = self.records(&[first, second]);
        let kept = records.then(|| [Saved::new(self, first), Saved::new(self, second)]);
        let output = self.fresh("baddbmm", base.shape, base.dtype);
        self.use_blas();
        drop(self.fresh("clone", first.shape, first.dtype));
        let Some([kept_first, kept_second]) = kept else { return output };
        let (shape_first, shape_second) = (first.shape, second.shape);
        self.attach(output, &[first, second], move |torch, gradient| {
            let kept = (kept_first.get(torch), kept_second.get(torch));
            torch.use_blas();
            let mut product = |shape: Shape, copied: Option<Shape>| {
                let raw = torch.fresh("bmm", shape, gradient.dtype);
                drop(copied.map(|shape| torch.fresh("clone", shape, gradient.dtype)));
                let scaled = torch.fresh("mul", shape, gradient.dtype);
                drop(raw);
                scaled
            };
            let for_first = product(shape_first, None);
            let for_second = product(shape_second, Some(shape_first));
            drop(kept);
            smallvec![Some(for_first), Some(for_second)]
        })
    }
}
