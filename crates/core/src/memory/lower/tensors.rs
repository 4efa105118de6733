//! Plain tensor operations: one rule each.

use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Cast, Op, Unary, ValueId};

#[allow(clippy::too_many_arguments, reason = "one call site; everything an operation may need")]
pub(super) fn lower<'a>(
    torch: &mut Torch,
    op: &Op,
    inputs: &'a [Option<Tensor>],
    input: &dyn Fn(usize) -> &'a Tensor,
    shape: Shape,
    outputs: &[ValueId],
    shapes: &[Shape],
    weights: DType,
) -> Vec<Option<Tensor>> {
    let x = || input(0);
    let all = || inputs.iter().flatten().collect::<Vec<&Tensor>>();
    let made = match op {
        Op::Buffer(dtype) => torch.phantom(shape, *dtype),
        Op::FillModel => torch.fresh("fill", shape, weights),
        Op::Detach => x().detached(),
        Op::FillLike if shape == x().shape => torch.fresh_like("fill", x(), x().dtype),
        Op::FillLike => torch.fresh("fill", shape, x().dtype),
        Op::Assign { .. } => torch.assign(x(), input(1)),
        Op::AddToSlice { dim, length } => torch.add_to_slice(x(), input(1), x().shape.with(i64::from(*dim), *length)),
        Op::CopySlices(_) => torch.copy_slices(&all(), shape),
        Op::Jitter => torch.jitter(x()),
        Op::IndexAddInPlace => torch.index_add_in_place(x(), input(1), input(2)),
        Op::IndexCopyInPlace => torch.index_copy_in_place(x(), input(1), input(2)),
        Op::AddMatMul => torch.add_matmul(x(), input(1), input(2)),
        Op::SolveTriangular => torch.solve_triangular(x(), input(1)),
        Op::GatedDeltaRule { recurrent } => {
            let inputs = [x(), input(1), input(2), input(3), input(4)];
            let keeps = outputs.len() > 1;
            let made = if *recurrent { torch.recurrent_rule(inputs, keeps) } else { torch.chunked_rule(inputs, keeps) };
            return made.into_iter().map(Some).collect();
        }
        Op::Fill(dtype) => torch.fresh("fill", shape, *dtype),
        Op::CachedState { fp32 } => torch.phantom(shape, if *fp32 { DType::F32 } else { weights }),
        Op::View | Op::Reshape => torch.reshape(x(), shape),
        Op::Transpose(a, b) => torch.transpose(x(), i64::from(*a), i64::from(*b)),
        Op::Permute(order) => torch.permute(x(), &order[..shape.rank()]),
        Op::Contiguous => torch.contiguous(x()),
        Op::Expand => torch.expand(x(), shape),
        Op::Slice { dim, step, .. } => torch.slice(x(), *dim, shape.size(i64::from(*dim)), *step),
        Op::Select(dim) => torch.select(x(), *dim),
        Op::Split(dim) => {
            let parts: Vec<u64> = outputs.iter().map(|v| shapes[v.0 as usize].size(i64::from(*dim))).collect();
            return torch.split(x(), *dim, &parts).into_iter().map(Some).collect();
        }
        Op::Cat(dim) => torch.cat(&all(), *dim),
        Op::Stack(dim) => torch.stack(&all(), *dim),
        Op::Pad => torch.pad(x(), shape),
        Op::Unary(kind) => torch.unary(*kind, x()),
        Op::Binary(kind) => torch.binary(*kind, x(), input(1)),
        Op::Scalar(kind) => torch.scalar(*kind, x()),
        Op::InPlace(kind) => torch.in_place(*kind, x(), input(1)),
        Op::InPlaceUnary(kind) => torch.in_place_unary(*kind, x()),
        Op::Cast(Cast::To(dtype)) => torch.cast(x(), *dtype),
        Op::Cast(Cast::Like) => torch.cast(x(), input(1).dtype),
        Op::Cast(Cast::Dense(dtype)) => torch.cast_dense(x(), *dtype),
        Op::Cast(Cast::DenseLike) => torch.cast_dense(x(), input(1).dtype),
        Op::Cast(Cast::Model) => torch.cast(x(), weights),
        Op::Softmax { dtype, .. } => torch.softmax(x(), *dtype, "_softmax"),
        Op::Reduce { kind, dim, keep } => torch.reduce(*kind, x(), *dim, *keep),
        Op::MatMul => torch.matmul(x(), input(1)),
        Op::TopK { .. } | Op::Sort => {
            let (values, indices) = torch.top_k(x(), shape.last());
            return vec![Some(values), Some(indices)];
        }
        Op::ArgMax => torch.fresh("argmax", shape, DType::I64),
        Op::Gather(_) => torch.gather(x(), input(1)),
        Op::Index => torch.index(x(), input(1), shape),
        Op::IndexAdd => torch.scattered("index_add", x(), input(1), Some(input(2)), false),
        Op::Scatter { in_place, .. } => {
            // Without a source it is a number that is written.
            let source = inputs.get(2).and_then(Option::as_ref);
            torch.scattered("scatter", x(), input(1), source, *in_place)
        }
        Op::MaskedFill { in_place } => torch.masked_fill(x(), input(1), *in_place),
        Op::MaskedScatter => torch.scattered("masked_scatter", x(), input(1), Some(input(2)), false),
        Op::Where => torch.where_(x(), input(1), input(2)),
        Op::CumulativeSum(_) => torch.cumulative_sum(x()),
        Op::RepeatInterleave(_) => torch.repeated("repeat_interleave", x(), shape),
        Op::Repeat => torch.repeated("repeat", x(), shape),
        Op::Roll(_) | Op::Triangle => torch.unary(Unary::Neg, x()),
        Op::Pool { places } => return torch.pool(x(), shape, *places).into_iter().map(Some).collect(),
        Op::AveragePool => torch.repeated("avg_pool", x(), shape),
        Op::Interpolate => torch.upsampled(x(), shape),
        Op::Compare => torch.pointwise("compare", &[x()], DType::Bool),
        Op::Fourier => torch.repeated("fft", x(), shape),
        _ => torch.phantom(shape, DType::F32),
    };
    vec![Some(made)]
}
