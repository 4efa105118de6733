//! Norms, spelled as each model's code spells them.

use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, Norm, Reduction, Unary};

/// One norm.
pub(super) fn lower(
    torch: &mut Torch,
    kind: Norm,
    x: &Tensor,
    gate: Option<&Tensor>,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> Tensor {
    let mut names = Vec::new();
    match kind {
        Norm::Layer => torch.layer_norm(x, weight, bias, 2),
        Norm::RmsFused => torch.layer_norm(x, weight, None, 1),
        Norm::Rms | Norm::RmsBare => {
            let normal = normalised(torch, x, &mut names);
            let narrow = torch.cast(&normal, x.dtype);
            scaled(torch, narrow, weight)
        }
        Norm::RmsWeightFirst => {
            let normal = normalised(torch, x, &mut names);
            // The normalised input keeps its name until the product is cast.
            let wide = scaled(torch, normal.clone(), weight);
            torch.cast(&wide, x.dtype)
        }
        Norm::RmsGemma => {
            let normal = normalised(torch, x, &mut names);
            let wide = match weight {
                Some(weight) => {
                    let weight = torch.cast(weight, DType::F32);
                    let shifted = torch.scalar(Binary::Add, &weight);
                    let product = torch.binary(Binary::Mul, &normal, &shifted);
                    drop(normal);
                    product
                }
                None => normal,
            };
            torch.cast(&wide, x.dtype)
        }
        Norm::RmsT5 => t5(torch, x, weight),
        Norm::RmsGated | Norm::RmsGatedGroups(_) => {
            let wide = torch.cast(x, DType::F32);
            let gated = match gate {
                Some(gate) => {
                    let gate = torch.cast(gate, DType::F32);
                    let gate = torch.unary(Unary::Silu, &gate);
                    torch.binary(Binary::Mul, &wide, &gate)
                }
                None => wide,
            };
            let normal = match kind {
                Norm::RmsGatedGroups(groups) => normalised_by_group(torch, &gated, u64::from(groups), &mut names),
                _ => normalised(torch, &gated, &mut names),
            };
            let narrow = torch.cast(&normal, x.dtype);
            scaled(torch, narrow, weight)
        }
        Norm::RmsThenGate => {
            // Every line takes the name of the one before over.
            let own = {
                let normal = normalised(torch, x, &mut names);
                let narrow = torch.cast(&normal, x.dtype);
                scaled(torch, narrow, weight)
            };
            let Some(gate) = gate else { return own };
            let product = {
                let gate = {
                    let gate = torch.cast(gate, DType::F32);
                    torch.unary(Unary::Silu, &gate)
                };
                torch.binary(Binary::Mul, &own, &gate)
            };
            drop(own);
            torch.cast(&product, x.dtype)
        }
        Norm::LayerCohere => cohere(torch, x, weight),
        Norm::LayerBare => {
            let wide = torch.cast(x, DType::F32);
            let normal = torch.layer_norm(&wide, None, None, 2);
            drop(wide);
            torch.cast(&normal, x.dtype)
        }
        Norm::LayerPlusOne => {
            let shifted = weight.map(|weight| torch.scalar(Binary::Add, weight));
            // Under autocast it casts its arguments itself and runs without (`_cast_if_autocast_enabled`).
            let autocast = torch.autocast.take();
            let dtype = autocast.unwrap_or(x.dtype);
            let x = torch.cast(x, dtype);
            let [shifted, bias] =
                [shifted.as_ref(), bias].map(|own| own.map(|own| torch.cast(own, autocast.unwrap_or(own.dtype))));
            let result = torch.layer_norm(&x, shifted.as_ref(), bias.as_ref(), 2);
            torch.autocast = autocast;
            result
        }
        Norm::L2 => {
            let square = torch.scalar(Binary::Pow, x);
            let sum = torch.reduce(Reduction::Sum, &square, last(x), true);
            drop(square);
            let shifted = torch.scalar(Binary::Add, &sum);
            let inverse = torch.unary(Unary::Rsqrt, &shifted);
            torch.binary(Binary::Mul, x, &inverse)
        }
        Norm::Group(groups) => torch.channel_norm(x, weight, bias, Some(u64::from(groups))),
        Norm::Batch => torch.channel_norm(x, weight, bias, None),
        Norm::LayerPlain => torch.layer_norm(x, weight, bias, 2),
    }
}

fn last(x: &Tensor) -> Option<u8> {
    Some(x.shape.rank().saturating_sub(1) as u8)
}

/// `x.float() * rsqrt(mean(x²) + eps)`, in fp32.
fn normalised(torch: &mut Torch, x: &Tensor, names: &mut Vec<Tensor>) -> Tensor {
    let wide = torch.cast(x, DType::F32);
    let inverse = inverse_deviation(torch, &wide, names);
    torch.binary(Binary::Mul, &wide, &inverse)
}

/// The same with one variance for each of several groups of channels.
fn normalised_by_group(torch: &mut Torch, x: &Tensor, groups: u64, names: &mut Vec<Tensor>) -> Tensor {
    let mut sizes = x.shape.sizes().to_vec();
    let width = sizes.pop().unwrap_or(1);
    sizes.extend([groups, width / groups.max(1)]);
    let grouped = torch.reshape(x, Shape::new(&sizes));
    let inverse = inverse_deviation(torch, &grouped, names);
    let normal = torch.binary(Binary::Mul, &grouped, &inverse);
    torch.reshape(&normal, x.shape)
}

/// The variance has a name of its own, which lives until the norm returns.
fn inverse_deviation(torch: &mut Torch, x: &Tensor, names: &mut Vec<Tensor>) -> Tensor {
    let square = torch.scalar(Binary::Pow, x);
    let mean = torch.reduce(Reduction::Mean, &square, last(x), true);
    drop(square);
    let shifted = torch.scalar(Binary::Add, &mean);
    names.push(mean);
    torch.unary(Unary::Rsqrt, &shifted)
}

fn scaled(torch: &mut Torch, x: Tensor, weight: Option<&Tensor>) -> Tensor {
    match weight {
        Some(weight) => torch.binary(Binary::Mul, weight, &x),
        None => x,
    }
}

/// The variance in fp32; the product in the type that the input promotes to; cast to the weight's narrow type.
fn t5(torch: &mut Torch, x: &Tensor, weight: Option<&Tensor>) -> Tensor {
    let names = &mut Vec::new();
    let wide = torch.cast(x, DType::F32);
    let inverse = inverse_deviation(torch, &wide, names);
    drop(wide);
    let mut normal = torch.binary(Binary::Mul, x, &inverse);
    if let Some(weight) = weight.filter(|weight| weight.dtype.size() == 2) {
        normal = torch.cast(&normal, weight.dtype);
    }
    scaled(torch, normal, weight)
}

/// `weight.float() * (x - mean) * rsqrt(var + eps)`, all in fp32, cast back.
fn cohere(torch: &mut Torch, x: &Tensor, weight: Option<&Tensor>) -> Tensor {
    let wide = torch.cast(x, DType::F32);
    let mean = torch.reduce(Reduction::Mean, &wide, last(x), true);
    let centred = torch.binary(Binary::Sub, &wide, &mean);
    let square = torch.scalar(Binary::Pow, &centred);
    drop(centred);
    let variance = torch.reduce(Reduction::Mean, &square, last(x), true);
    drop(square);
    let centred = torch.binary(Binary::Sub, &wide, &mean);
    let shifted = torch.scalar(Binary::Add, &variance);
    let inverse = torch.unary(Unary::Rsqrt, &shifted);
    let normal = torch.binary(Binary::Mul, &centred, &inverse);
    drop((centred, wide));
    let weight = weight.map(|weight| torch.cast(weight, DType::F32));
    let wide = scaled(torch, normal, weight.as_ref());
    torch.cast(&wide, x.dtype)
}
