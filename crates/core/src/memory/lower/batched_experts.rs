//! Routed experts while decoding: `generate` switches from grouped to batched products, which copies the weights of
//! every chosen expert once per token (`_optimize_model_for_decode`).

use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, ExpertStyle, Experts, Reduction};

/// Whether the family's experts go through transformers' interface, which is what is switched.
pub(super) fn applies(spec: &Experts) -> bool {
    !matches!(spec.style, ExpertStyle::Dense | ExpertStyle::Loop)
}

/// `batched_mm_experts_forward` of transformers/integrations/moe.py.
pub(super) fn run(
    torch: &mut Torch,
    spec: &Experts,
    [gate_up, down]: [&Tensor; 2],
    biases: Option<[&Tensor; 2]>,
    hidden: &Tensor,
    weights: &Tensor,
) -> Tensor {
    let (tokens, size) = (hidden.shape.size(0), hidden.shape.last());
    let pairs = tokens.saturating_mul(spec.top_k);
    let list = Shape::from([pairs]);
    let selected = torch.repeated("repeat_interleave", hidden, Shape::from([pairs, size]));
    let sample_weights = torch.reshape(weights, list);
    let experts = torch.fresh("clamp", list, DType::I64);
    let chosen = |torch: &mut Torch, table: &Tensor| torch.index(table, &experts, table.shape.with(0, pairs));
    let up_weights = chosen(torch, gate_up);
    let up_bias = biases.map(|[up, _]| chosen(torch, up));
    let width = if spec.gated { 2 * spec.width } else { spec.width };
    let mut wide = product(torch, pairs, width, hidden.dtype, up_bias.as_ref());
    wide = super::experts::gated(torch, spec, &wide);
    // `selected_weights` is assigned anew: the first copy dies when the second is whole.
    let down_weights = chosen(torch, down);
    drop((up_weights, up_bias));
    let down_bias = biases.map(|[_, down]| chosen(torch, down));
    let narrow = product(torch, pairs, size, hidden.dtype, down_bias.as_ref());
    drop(wide);
    let column = torch.reshape(&sample_weights, Shape::from([pairs, 1]));
    let weighted = torch.binary(Binary::Mul, &narrow, &column);
    let stacked = torch.reshape(&weighted, Shape::from([tokens, spec.top_k, size]));
    let summed = torch.reduce(Reduction::Sum, &stacked, Some(1), false);
    drop((selected, down_weights, down_bias, narrow, weighted, stacked));
    torch.cast(&summed, hidden.dtype)
}

/// `torch.bmm` of each row with its own matrix, and the bias.
fn product(torch: &mut Torch, rows: u64, width: u64, dtype: DType, bias: Option<&Tensor>) -> Tensor {
    torch.use_blas();
    let output = torch.fresh("bmm", Shape::from([rows, width]), dtype);
    match bias {
        Some(bias) => torch.binary(Binary::Add, &output, bias),
        None => output,
    }
}
