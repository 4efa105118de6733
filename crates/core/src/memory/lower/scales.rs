//! IA³, VeRA and prompt tuning as PEFT runs them (peft 0.21: tuners/ia3/layer.py, tuners/vera/layer.py, peft_model.py).

use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::Binary;

/// What is trained beside one linear.
#[derive(Debug, Clone)]
pub enum Scales {
    /// IA³ on the input of a feed-forward layer.
    Before(Tensor),
    /// IA³ on the output.
    After(Tensor),
    /// VeRA: two scales around frozen matrices that all layers share.
    Vera {
        /// `[rank]`.
        inner: Tensor,
        /// `[out]`.
        outer: Tensor,
        /// `[rank, widest in]`.
        first: Tensor,
        /// `[widest out, rank]`.
        second: Tensor,
    },
}

/// The input of the base layer, where it is scaled.
pub(super) fn before(torch: &mut Torch, scales: &Scales, x: &Tensor) -> Option<Tensor> {
    let Scales::Before(scale) = scales else { return None };
    let factor = torch.scalar(Binary::Mul, scale);
    let wide = torch.cast(x, scale.dtype);
    let scaled = torch.binary(Binary::Mul, &wide, &factor);
    drop((wide, factor));
    Some(torch.cast(&scaled, x.dtype))
}

/// The result, once the base layer has run.
pub(super) fn after(torch: &mut Torch, scales: &Scales, result: Tensor, x: &Tensor) -> Tensor {
    let dtype = result.dtype;
    match scales {
        Scales::Before(_) => result,
        Scales::After(scale) => {
            let factor = torch.scalar(Binary::Mul, scale);
            let scaled = torch.binary(Binary::Mul, &result, &factor);
            drop((result, factor));
            torch.cast(&scaled, dtype)
        }
        Scales::Vera { inner, outer, first, second } => {
            let (inputs, outputs) = (x.shape.last(), outer.shape.size(0));
            let first = torch.slice(first, 1, inputs, 1);
            let second = torch.slice(second, 0, outputs, 1);
            let wide = torch.cast(x, inner.dtype);
            let sum = {
                let low = torch.linear(&wide, &first, None);
                let low = torch.binary(Binary::Mul, inner, &low);
                let high = torch.linear(&low, &second, None);
                let high = torch.binary(Binary::Mul, outer, &high);
                torch.binary(Binary::Add, &result, &high)
            };
            drop((result, wide));
            torch.cast(&sum, dtype)
        }
    }
}

/// Virtual tokens, then what the table gives for the others and its hook makes of it; `ids` counts both.
pub(super) fn prompted(
    torch: &mut Torch,
    prompt: &Tensor,
    table: &Tensor,
    ids: &Tensor,
    hooked: impl FnOnce(&mut Torch, Tensor) -> Tensor,
) -> Tensor {
    let (batch, virtual_tokens) = (ids.shape.size(0), prompt.shape.size(0));
    let rest = ids.shape.with(1, ids.shape.size(1).saturating_sub(virtual_tokens));
    let rest = torch.phantom(rest, ids.dtype);
    let words = torch.embedding(table, &rest);
    let words = hooked(torch, words);
    let labels = torch.fresh("cat", ids.shape, ids.dtype);
    let places = torch.phantom(Shape::from([batch, virtual_tokens]), ids.dtype);
    let tokens = torch.embedding(prompt, &places);
    let tokens = torch.cast(&tokens, words.dtype);
    let joined = torch.cat(&[&tokens, &words], 1);
    torch.keep_with_graph(labels);
    joined
}
