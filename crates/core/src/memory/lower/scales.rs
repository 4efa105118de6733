//! IA³, VeRA, OFT and prompt tuning as PEFT runs them (peft 0.21: layer.py of tuners/ia3, vera and oft, peft_model.py).

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
    /// OFT: the input is rotated block by block.
    Rotated {
        /// Rows of a block.
        block: u64,
        /// `[blocks, above the diagonal]`; one for all where blocks share it.
        skew: Tensor,
        /// Rows and columns of these.
        places: [Tensor; 2],
    },
}

/// What the base layer gets in the place of its input, and what PEFT's own names hold while it runs.
pub(super) fn before(torch: &mut Torch, scales: &Scales, x: &Tensor) -> Option<[Tensor; 2]> {
    match scales {
        Scales::Before(scale) => {
            let factor = torch.scalar(Binary::Mul, scale);
            let wide = torch.cast(x, scale.dtype);
            let scaled = torch.binary(Binary::Mul, &wide, &factor);
            drop((wide, factor));
            let scaled = torch.cast(&scaled, x.dtype);
            Some([scaled.clone(), scaled])
        }
        Scales::Rotated { block, skew, places } => {
            let wide = torch.cast(x, skew.dtype);
            let turned = rotated(torch, &wide, *block, skew, places);
            drop(wide);
            Some([torch.cast(&turned, x.dtype), turned])
        }
        _ => None,
    }
}

/// `OFTRotationModule.forward`: every block of the input times its own matrix.
fn rotated(torch: &mut Torch, x: &Tensor, block: u64, skew: &Tensor, places: &[Tensor; 2]) -> Tensor {
    let (width, rows) = (x.shape.last(), x.elements() / x.shape.last().max(1));
    let blocks = width / block.max(1);
    let mut matrices = cayley(torch, block, skew, places);
    if skew.shape.size(0) < blocks {
        matrices = torch.repeated("repeat", &matrices, Shape::from([blocks, block, block]));
    }
    // `einsum("...rk,rkc->...rc")`: a stack of products, a block each.
    let parts = torch.reshape(x, Shape::from([rows, blocks, block]));
    let parts = torch.permute(&parts, &[1, 0, 2]);
    let turned = torch.matmul(&parts, &matrices);
    let turned = torch.permute(&turned, &[1, 0, 2]);
    torch.reshape(&turned, x.shape)
}

/// `_cayley_batch` with Neumann's series of five terms, PEFT's default.
fn cayley(torch: &mut Torch, block: u64, skew: &Tensor, places: &[Tensor; 2]) -> Tensor {
    let shape = Shape::from([skew.shape.size(0), block, block]);
    let upper = {
        let zeros = torch.fresh("zeros", shape, skew.dtype);
        torch.scattered("index_put_", &zeros, &places[0], Some(skew), true)
    };
    let lower = torch.transpose(&upper, -1, -2);
    let skewed = torch.binary(Binary::Sub, &upper, &lower);
    drop((upper, lower));
    let unit = torch.fresh("eye", Shape::from([block, block]), skew.dtype);
    let mut sum = torch.repeated("repeat", &unit, shape);
    drop(unit);
    sum = torch.in_place(Binary::Add, &sum, &skewed);
    let mut power = skewed.clone();
    for _ in 2..5 {
        power = torch.matmul(&power, &skewed);
        sum = torch.in_place(Binary::Add, &sum, &power);
    }
    sum
}

/// The result, once the base layer has run.
pub(super) fn after(torch: &mut Torch, scales: &Scales, result: Tensor, x: &Tensor) -> Tensor {
    let dtype = result.dtype;
    match scales {
        Scales::Before(_) | Scales::Rotated { .. } => result,
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
