//! GaLore (galore-torch's `GaLoreAdamW`) and APOLLO (apollo-torch's `APOLLOAdamW`): moments of projected gradients for the
//! matrices of the layers, AdamW for everything else.

use super::Trained;
use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::OptimizerKind;

/// A matrix and what it is projected to: the shorter side goes down to the rank.
struct Projection {
    rows: u64,
    columns: u64,
    rank: u64,
}

impl Projection {
    fn of(parameter: &Tensor, whole: bool, rank: u64) -> Option<Self> {
        let matrix = parameter.shape.rank() == 2 && !whole;
        matrix.then(|| {
            let (rows, columns) = (parameter.shape.size(0), parameter.shape.size(1));
            Self { rows, columns, rank: rank.min(rows).min(columns) }
        })
    }

    fn shorter(&self) -> u64 {
        self.rows.min(self.columns)
    }

    fn projected(&self) -> Shape {
        Shape::from([self.rows.max(self.columns), self.rank])
    }
}

/// The projection and two moments of one parameter.
pub(super) fn states(
    torch: &mut Torch,
    kind: OptimizerKind,
    parameter: &Tensor,
    whole: bool,
    rank: u64,
) -> Vec<Tensor> {
    let dtype = parameter.dtype;
    let Some(projection) = Projection::of(parameter, whole, rank) else {
        return (0..2).map(|_| torch.fresh_like("optimizer state", parameter, dtype)).collect();
    };
    let side = projection.shorter();
    // In fp32 GaLore's projection is a view of all singular vectors; in other types a copy of the first ones.
    let kept = if kind == OptimizerKind::GaLoreAdamW && dtype == DType::F32 { side } else { projection.rank };
    let mut states = vec![torch.fresh("projection", Shape::from([kept, side]), dtype)];
    if kind == OptimizerKind::ApolloAdamW {
        // The norm of the last scaled gradient limits the growth of the next.
        states.push(torch.fresh("optimizer state", Shape::new(&[]), dtype));
    }
    states.extend((0..2).map(|_| torch.fresh("optimizer state", projection.projected(), dtype)));
    states
}

/// One step, one parameter at a time; `first`: projections are made.
pub(super) fn step(
    torch: &mut Torch,
    kind: OptimizerKind,
    parameters: &[Trained],
    rank: u64,
    first: bool,
    mut prepare: impl FnMut(&mut Torch, usize),
) {
    // `grad`, `denom` and `norm_grad` stay bound until the next parameter rebinds them.
    let mut bound: [Option<Tensor>; 4] = [None, None, None, None];
    for (index, parameter) in parameters.iter().enumerate() {
        if parameter.leaf.grad.borrow().is_none() {
            continue;
        }
        let tensor = &parameter.tensor;
        let Some(projection) = Projection::of(tensor, parameter.apart.whole, rank) else {
            prepare(torch, index);
            bound[1] = Some(torch.fresh_like("sqrt", tensor, tensor.dtype));
            bound[2] = Some(torch.fresh_like("div", tensor, tensor.dtype));
            continue;
        };
        if first && kind == OptimizerKind::GaLoreAdamW {
            singular_vectors(torch, tensor, &projection);
        }
        let low = projection.projected();
        torch.use_blas();
        bound[0] = Some(torch.fresh("mm", low, tensor.dtype));
        prepare(torch, index);
        bound[1] = Some(torch.fresh("sqrt", low, tensor.dtype));
        bound[2] = Some(torch.fresh("div", low, tensor.dtype));
        if kind == OptimizerKind::GaLoreAdamW {
            let back = torch.fresh_like("mm", tensor, tensor.dtype);
            let scaled = torch.fresh_like("mul", tensor, tensor.dtype);
            drop(back);
            bound[2] = Some(scaled);
        } else {
            // The gradient scaled by channel, then limited, then scaled as a whole.
            let channels = Shape::from([projection.rows.max(projection.columns)]);
            let factors = torch.fresh("norm", channels, tensor.dtype);
            bound[3] = Some(torch.fresh_like("mul", tensor, tensor.dtype));
            // From the second step on; the first is taken alike.
            bound[3] = Some(torch.fresh_like("div", tensor, tensor.dtype));
            bound[2] = Some(torch.fresh_like("mul", tensor, tensor.dtype));
            drop(factors);
        }
    }
    drop(bound);
}

/// `torch.linalg.svd(full_matrices=False)` of the gradient in fp32: its copy, both sets of vectors, and the scaled left
/// ones.
fn singular_vectors(torch: &mut Torch, parameter: &Tensor, projection: &Projection) {
    let side = projection.shorter();
    let wide = (parameter.dtype != DType::F32).then(|| torch.fresh_like("_to_copy", parameter, DType::F32));
    let copy = torch.fresh_like("linalg_svd", parameter, DType::F32);
    let left = torch.fresh("linalg_svd", Shape::from([projection.rows, side]), DType::F32);
    let values = torch.fresh("linalg_svd", Shape::from([side]), DType::F32);
    let right = torch.fresh("linalg_svd", Shape::from([side, projection.columns]), DType::F32);
    drop(copy);
    let longer = torch.fresh("mm", projection.projected(), DType::F32);
    drop((longer, right, values, left, wide));
}
