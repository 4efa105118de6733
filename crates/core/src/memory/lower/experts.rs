//! Routed experts as transformers runs them: sorted by expert, one grouped matrix product up, one down.

use super::lora_parameter::Matrix;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, ExpertStyle, Experts, Reduction, Unary};
use smallvec::smallvec;

/// `grouped_mm_experts_forward` of transformers/integrations/moe.py.
pub(super) fn run(
    torch: &mut Torch,
    spec: &Experts,
    [gate_up, down]: [Matrix<'_>; 2],
    biases: Option<[&Tensor; 2]>,
    hidden: &Tensor,
    indices: &Tensor,
    weights: &Tensor,
) -> Tensor {
    let (tokens, size) = (hidden.shape.size(0), hidden.shape.last());
    let pairs = tokens.saturating_mul(spec.top_k);
    let list = Shape::from([pairs]);
    let sample_weights = torch.reshape(weights, list);
    let expert_ids = torch.reshape(indices, list);
    let sorted_ids = torch.fresh("sort", list, DType::I64);
    let permutation = torch.fresh("sort", list, DType::I64);
    torch.sort_scratch(pairs);
    drop(expert_ids);
    let token_ids = torch.fresh("floor_divide", list, DType::I64);
    let selected = torch.index(hidden, &token_ids, Shape::from([pairs, size]));
    drop(token_ids);
    let sample_weights = torch.index(&sample_weights, &permutation, list);
    // Expert ids as `int32`, under a name that stays.
    let narrow_ids = torch.fresh("_to_copy", list, DType::I32);
    let counts = torch.fresh("histc", Shape::from([spec.count]), DType::I32);
    let offsets = torch.fresh("cumsum", Shape::from([spec.count]), DType::I32);
    drop(counts);
    let sentinel = torch.fresh("ge", Shape::from([pairs, 1]), DType::Bool);
    let bias_rows = |torch: &mut Torch, bias: &Tensor| {
        let width = bias.shape.last();
        torch.index(bias, &sorted_ids, Shape::from([pairs, width]))
    };
    let up_bias = biases.map(|[up, _]| bias_rows(torch, up));
    let selected = torch.masked_fill(&selected, &sentinel, true);
    let up_matrix = gate_up.get(torch);
    let wide = grouped(torch, &selected, &up_matrix, &offsets, up_bias.as_ref(), spec.transposed);
    let wide = {
        let raw = wide;
        torch.masked_fill(&raw, &sentinel, false)
    };
    let narrow = gated(torch, spec, &wide);
    drop(wide);
    let down_bias = biases.map(|[_, down]| bias_rows(torch, down));
    let down_matrix = down.get(torch);
    let output = grouped(torch, &narrow, &down_matrix, &offsets, down_bias.as_ref(), spec.transposed);
    drop(narrow);
    let output = {
        let raw = output;
        torch.masked_fill(&raw, &sentinel, false)
    };
    let column = torch.reshape(&sample_weights, Shape::from([pairs, 1]));
    let weighted = torch.binary(Binary::Mul, &output, &column);
    let inverse = torch.fresh("empty_like", list, DType::I64);
    drop(torch.scratch("arange", pairs * 8));
    let restored = torch.index(&weighted, &inverse, Shape::from([pairs, size]));
    drop(weighted);
    let stacked = torch.reshape(&restored, Shape::from([tokens, spec.top_k, size]));
    drop(restored);
    let summed = torch.reduce(Reduction::Sum, &stacked, Some(1), false);
    let output = torch.cast(&summed, hidden.dtype);
    drop(narrow_ids);
    output
}

/// Every expert on the rows that are its own (Llama 4): two batched products with `up * activation(gate)` between.
pub(super) fn run_dense(torch: &mut Torch, spec: &Experts, [gate_up, down]: [Matrix<'_>; 2], rows: &Tensor) -> Tensor {
    let per_expert = rows.shape.size(0) / spec.count.max(1);
    let by_expert = torch.reshape(rows, Shape::from([spec.count, per_expert, rows.shape.last()]));
    let up_matrix = gate_up.get(torch);
    let wide = torch.matmul(&by_expert, &up_matrix);
    let parts = torch.split(&wide, 2, &[spec.width, spec.width]);
    let output = {
        let narrow = {
            let gate = torch.activation(spec.activation, &parts[0]);
            torch.binary(Binary::Mul, &parts[1], &gate)
        };
        let down_matrix = down.get(torch);
        torch.matmul(&narrow, &down_matrix)
    };
    torch.reshape(&output, rows.shape)
}

/// `_apply_gate`: what an expert does between its two products.
pub(super) fn gated(torch: &mut Torch, spec: &Experts, wide: &Tensor) -> Tensor {
    if !spec.gated {
        return torch.activation(spec.activation, wide);
    }
    if spec.style == ExpertStyle::InterfaceClamped {
        let gate = torch.slice(wide, 1, spec.width, 2);
        let up = torch.slice(wide, 1, spec.width, 2);
        let gate = torch.unary(Unary::Clamp, &gate);
        let up = torch.unary(Unary::Clamp, &up);
        let opened = {
            let sharp = {
                let scaled = torch.scalar(Binary::Mul, &gate);
                torch.unary(Unary::Sigmoid, &scaled)
            };
            torch.binary(Binary::Mul, &gate, &sharp)
        };
        let shifted = torch.scalar(Binary::Add, &up);
        return torch.binary(Binary::Mul, &shifted, &opened);
    }
    let mut parts = torch.split(wide, 1, &[spec.width, spec.width]);
    if spec.style == ExpertStyle::InterfaceClampedHalves {
        parts = parts.iter().map(|part| torch.unary(Unary::Clamp, part)).collect();
    }
    let gate = torch.activation(spec.activation, &parts[0]);
    torch.binary(Binary::Mul, &gate, &parts[1])
}

/// `torch._grouped_mm`, with the bias added in place.
fn grouped(
    torch: &mut Torch,
    x: &Tensor,
    weight: &Tensor,
    offsets: &Tensor,
    bias: Option<&Tensor>,
    transposed: bool,
) -> Tensor {
    // Autocast does not know it; the code casts the input to the weight's type.
    let x = &torch.cast(x, weight.dtype);
    let width = if transposed { weight.shape.size(2) } else { weight.shape.size(1) };
    let records = torch.records(&[x, weight]);
    let saved = records.then(|| {
        let kept_x = weight.needs_grad().then(|| Saved::new(torch, x));
        let kept_weight = x.needs_grad().then(|| Saved::new(torch, weight));
        [kept_x, kept_weight, Some(Saved::new(torch, offsets))]
    });
    let sizes = [x.shape.size(0), x.shape.last(), width];
    let output = grouped_kernel(torch, Shape::from([x.shape.size(0), width]), x.dtype, sizes);
    let mut output = match saved {
        None => output,
        Some(saved) => {
            let (need_x, need_weight) = (x.needs_grad(), weight.needs_grad());
            let (shape_x, shape_weight) = (x.shape, weight.shape);
            torch.attach(output, &[x, weight], move |torch, gradient| {
                let kept: Vec<Tensor> = saved.into_iter().flatten().map(|saved| saved.get(torch)).collect();
                let for_weight = need_weight.then(|| grouped_kernel(torch, shape_weight, gradient.dtype, sizes));
                let for_x = need_x.then(|| grouped_kernel(torch, shape_x, gradient.dtype, sizes));
                drop(kept);
                smallvec![for_x, for_weight]
            })
        }
    };
    if let Some(bias) = bias {
        output = torch.in_place(Binary::Add, &output, bias);
    }
    output
}

/// The kernel's output and, on Hopper, its descriptors: 512 bytes for each multiprocessor.
fn grouped_kernel(torch: &mut Torch, shape: Shape, dtype: DType, sizes: [u64; 3]) -> Tensor {
    let output = torch.fresh("_grouped_mm", shape, dtype);
    torch.multiply(dtype, 1, sizes);
    if torch.device.capability == 90 {
        drop(torch.scratch("_grouped_mm", 512 * torch.device.multiprocessors));
    }
    output
}
