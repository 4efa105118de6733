//! Rotary positions.

use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, Rotary, RotaryTable, Unary};

/// Cosine and sine: frequencies times positions in fp32, joined, taken and cast, all without a graph.
pub(super) fn table(torch: &mut Torch, table: RotaryTable, shape: Shape, weights: DType) -> Vec<Option<Tensor>> {
    let (grad, autocast) = (torch.grad_enabled, torch.autocast.take());
    torch.grad_enabled = false;
    let (rows, seq, half) = (shape.size(0), shape.size(1), table.dim / 2);
    let axes = table.axes * rows;
    let frequencies = torch.phantom(Shape::from([axes, half, 1]), DType::F32);
    let positions = torch.fresh("_to_copy", Shape::from([axes, 1, seq]), DType::F32);
    let angles = torch.matmul(&frequencies, &positions);
    let angles = torch.transpose(&angles, 1, 2);
    let angles = if table.doubled { torch.cat(&[&angles, &angles], 2) } else { angles };
    let kept = if table.fp32 || autocast.is_some() && weights == DType::F32 { DType::F32 } else { weights };
    let scaled = |torch: &mut Torch, kind: Unary| {
        let raw = torch.unary(kind, &angles);
        torch.scalar(Binary::Mul, &raw)
    };
    let (cosine, sine) = (scaled(torch, Unary::Cos), scaled(torch, Unary::Sin));
    let both = [torch.cast(&cosine, kept), torch.cast(&sine, kept)];
    torch.grad_enabled = grad;
    torch.autocast = autocast;
    // Several position axes are mixed into one table by the rotation itself.
    both.map(|t| {
        let (shape, strides) = (Shape::from([rows, seq, t.shape.last()]), t.strides);
        Some(t.with_layout(shape, strides))
    })
    .into()
}

/// [`crate::model::op::Op::Rotary`] over four inputs, or six where the dimensions that do not turn are joined at once.
pub(super) fn lower<'a>(
    torch: &mut Torch,
    style: Rotary,
    inputs: usize,
    input: &impl Fn(usize) -> &'a Tensor,
) -> Vec<Option<Tensor>> {
    let (query, key) = match inputs {
        6 => rotate_joined(torch, [0, 1, 2, 3, 4, 5].map(input)),
        _ => rotate(torch, style, input(0), input(1), input(2), input(3)),
    };
    vec![Some(query), Some(key)]
}

/// Queries rotated and joined with the dimensions that do not turn, then keys.
fn rotate_joined(torch: &mut Torch, inputs: [&Tensor; 6]) -> (Tensor, Tensor) {
    let [query, key, cosine, sine, query_rest, key_rest] = inputs;
    // cos.unsqueeze(1), whose name lives through both.
    let [cosine, sine] = [cosine, sine].map(|t| torch.reshape(t, t.shape.inserted(1, 1)));
    let mut one = |x: &Tensor, rest: &Tensor| {
        let turned = half(torch, x, &cosine, &sine);
        torch.cat(&[&turned, rest], x.shape.rank() as u8 - 1)
    };
    (one(query, query_rest), one(key, key_rest))
}

/// Queries and keys, rotated.
fn rotate(
    torch: &mut Torch,
    style: Rotary,
    query: &Tensor,
    key: &Tensor,
    cosine: &Tensor,
    sine: &Tensor,
) -> (Tensor, Tensor) {
    // cos.unsqueeze(1): the same tables for every head.
    let (positions, sizes) = (cosine.shape.size(1), query.shape);
    let heads_last = sizes.rank() == 4 && sizes.size(1) == positions && sizes.size(2) != positions;
    let axis = if heads_last { 2 } else { 1 };
    let open = |t: &Tensor| if t.shape.rank() == 3 { t.shape.inserted(axis, 1) } else { t.shape };
    let cosine = &torch.reshape(cosine, open(cosine));
    let sine = &torch.reshape(sine, open(sine));
    let wide = (style == Rotary::InterleavedFp32).then(|| [query, key].map(|x| torch.cast(x, DType::F32)));
    let mut one = |x: &Tensor| match style {
        Rotary::Half | Rotary::HalfPromoted => half(torch, x, cosine, sine),
        Rotary::Interleaved | Rotary::InterleavedFp32 => interleaved(torch, x, cosine, sine),
        Rotary::HalfFp32 | Rotary::InterleavedPromoted => widened(torch, style, x, cosine, sine),
        Rotary::Complex => complex(torch, x),
    };
    let (turned_query, turned_key) = match &wide {
        Some([query, key]) => (one(query), one(key)),
        None => (one(query), one(key)),
    };
    if matches!(style, Rotary::Half | Rotary::Interleaved | Rotary::Complex) {
        return (turned_query, turned_key);
    }
    // The results are in fp32; they are cast back once both exist.
    (torch.cast(&turned_query, query.dtype), torch.cast(&turned_key, key.dtype))
}

/// `x * cos + rotate_half(x) * sin`.
fn half(torch: &mut Torch, x: &Tensor, cosine: &Tensor, sine: &Tensor) -> Tensor {
    let straight = torch.binary(Binary::Mul, x, cosine);
    let turned = swap_halves(torch, x);
    let crossed = torch.binary(Binary::Mul, &turned, sine);
    drop(turned);
    torch.binary(Binary::Add, &straight, &crossed)
}

/// `x * cos + rotate_every_two(x) * sin`, neighbours being pairs.
fn interleaved(torch: &mut Torch, x: &Tensor, cosine: &Tensor, sine: &Tensor) -> Tensor {
    let straight = torch.binary(Binary::Mul, x, cosine);
    let turned = swap_pairs(torch, x);
    let crossed = torch.binary(Binary::Mul, &turned, sine);
    drop(turned);
    torch.binary(Binary::Add, &straight, &crossed)
}

/// The same with a cast to fp32 in each product, of which nothing keeps the name.
fn widened(torch: &mut Torch, style: Rotary, x: &Tensor, cosine: &Tensor, sine: &Tensor) -> Tensor {
    let straight = {
        let wide = torch.cast(x, DType::F32);
        torch.binary(Binary::Mul, &wide, cosine)
    };
    let crossed = {
        let turned = if style == Rotary::HalfFp32 {
            let wide = torch.cast(x, DType::F32);
            swap_halves(torch, &wide)
        } else {
            let pairs = swap_pairs(torch, x);
            torch.cast(&pairs, DType::F32)
        };
        torch.binary(Binary::Mul, &turned, sine)
    };
    torch.binary(Binary::Add, &straight, &crossed)
}

/// `rotate_half`.
fn swap_halves(torch: &mut Torch, x: &Tensor) -> Tensor {
    let (axis, width) = (x.shape.rank() as u8 - 1, x.shape.last() / 2);
    let first = torch.slice(x, axis, width, 1);
    let second = torch.slice(x, axis, x.shape.last() - width, 1);
    let negative = torch.unary(Unary::Neg, &second);
    torch.cat(&[&negative, &first], axis)
}

/// `rotate_every_two`.
fn swap_pairs(torch: &mut Torch, x: &Tensor) -> Tensor {
    let (axis, width) = (x.shape.rank() as u8 - 1, x.shape.last() / 2);
    let even = torch.slice(x, axis, width, 2);
    let odd = torch.slice(x, axis, width, 2);
    let negative = torch.unary(Unary::Neg, &odd);
    let pairs = torch.stack(&[&negative, &even], axis + 1);
    torch.reshape(&pairs, x.shape)
}

/// `view_as_complex(x.float()) * freqs`, back to the input's type.
fn complex(torch: &mut Torch, x: &Tensor) -> Tensor {
    let wide = torch.cast(x, DType::F32);
    let turned = torch.scalar(Binary::Mul, &wide);
    drop(wide);
    torch.cast(&turned, x.dtype)
}
