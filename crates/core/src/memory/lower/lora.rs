//! LoRA as PEFT runs it: peft/tuners/lora/{layer,bnb,dora}.py of 0.21.

use super::hooks::Hooks;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::torch::quantised::QuantisedWeight;
use crate::memory::torch::stored::{StoredKernel, StoredWeight};
use crate::model::Shape;
use crate::model::op::{Binary, Reduction};
use crate::plan::{Quantization, QuantizationScheme};

/// The trained tensors beside one module.
#[derive(Debug, Clone)]
pub struct LoraWeights {
    /// `[rank, in]`, or `[rank, rows]` of an embedding.
    pub first: Tensor,
    /// `[out, rank]`.
    pub second: Tensor,
    /// The bias of the second.
    pub bias: Option<Tensor>,
    /// DoRA's magnitudes `[out]`.
    pub magnitude: Option<Tensor>,
    /// Whether there is dropout before the first.
    pub dropout: bool,
}

/// The linear under an adapter.
#[derive(Debug, Clone, Copy)]
pub(super) enum Base<'a> {
    /// A plain matrix `[out, in]` or, transposed, `[in, out]`.
    Plain {
        /// The matrix.
        weight: &'a Tensor,
        /// Its bias.
        bias: Option<&'a Tensor>,
        /// Whether it lies as `[in, out]`.
        transposed: bool,
    },
    /// A quantised one.
    Quantised(&'a QuantisedWeight),
    /// One as a quantised checkpoint holds it.
    Stored(&'a StoredWeight),
}

/// `lora.Linear.forward` after its base layer has run.
pub(super) fn linear(
    torch: &mut Torch,
    lora: &LoraWeights,
    base: Base<'_>,
    result: Tensor,
    x: &Tensor,
    hooks: Option<&dyn Hooks>,
) -> Tensor {
    match base {
        Base::Stored(StoredWeight { kernel: StoredKernel::AwqDense, .. }) => {
            // awq.py casts before it scales.
            let dtype = result.dtype;
            let converts = torch.autocast.is_none();
            let x = if converts { torch.cast(x, lora.first.dtype) } else { x.clone() };
            let output = {
                let outer = unscaled(torch, lora, &x, hooks);
                let outer = if converts { torch.cast(&outer, dtype) } else { outer };
                torch.scalar(Binary::Mul, &outer)
            };
            torch.binary(Binary::Add, &result, &output)
        }
        // torchtune's `LoRALinear` is the plain sum on NF4 too.
        Base::Quantised(QuantisedWeight { plan: Quantization { torchao: true, .. }, .. })
        | Base::Plain { .. }
        | Base::Stored(_) => {
            let dtype = result.dtype;
            let x = torch.cast(x, lora.first.dtype);
            let sum = match &lora.magnitude {
                None => {
                    let scaled = product(torch, lora, &x, hooks);
                    torch.binary(Binary::Add, &result, &scaled)
                }
                Some(magnitude) => dora(torch, lora, magnitude, base, &result, &x),
            };
            drop(result);
            torch.cast(&sum, dtype)
        }
        Base::Quantised(weight) => {
            let dtype = result.dtype;
            let converts = torch.autocast.is_none();
            // The 4-bit layer clones its base's result, to be safe.
            let result = match weight.plan.scheme {
                QuantizationScheme::Int8 => result,
                QuantizationScheme::Nf4 | QuantizationScheme::Fp4 => {
                    let copy = torch.unary(crate::model::op::Unary::Clone, &result);
                    drop(result);
                    copy
                }
            };
            let x = if converts { torch.cast(x, lora.first.dtype) } else { x.clone() };
            match &lora.magnitude {
                None => {
                    let mut output = product(torch, lora, &x, hooks);
                    if converts {
                        output = torch.cast(&output, dtype);
                    }
                    torch.binary(Binary::Add, &result, &output)
                }
                Some(magnitude) => {
                    let sum = dora(torch, lora, magnitude, base, &result, &x);
                    drop(result);
                    if converts { torch.cast(&sum, dtype) } else { sum }
                }
            }
        }
    }
}

/// `lora_B(lora_A(dropout(x))) * scaling`.
fn product(torch: &mut Torch, lora: &LoraWeights, x: &Tensor, hooks: Option<&dyn Hooks>) -> Tensor {
    let outer = unscaled(torch, lora, x, hooks);
    torch.scalar(Binary::Mul, &outer)
}

/// `lora_B(lora_A(dropout(x)))`.
fn unscaled(torch: &mut Torch, lora: &LoraWeights, x: &Tensor, hooks: Option<&dyn Hooks>) -> Tensor {
    let inner = {
        let dropped = if lora.dropout { torch.dropout(x) } else { x.clone() };
        watched(torch, hooks, &lora.first, None, dropped)
    };
    watched(torch, hooks, &lora.second, lora.bias.as_ref(), inner)
}

/// `lora_A` and `lora_B` are modules of their own, which hooks may be around of.
fn watched(
    torch: &mut Torch,
    hooks: Option<&dyn Hooks>,
    weight: &Tensor,
    bias: Option<&Tensor>,
    mut x: Tensor,
) -> Tensor {
    let Some(hooks) = hooks else { return torch.linear(&x, weight, bias) };
    hooks.before_adapter(torch, weight, &mut x);
    let output = torch.linear(&x, weight, bias);
    drop(x);
    hooks.after_adapter(torch, weight, &output);
    output
}

/// `result + DoraLinearLayer(x)`: the norm of the merged weight is made anew in every pass, in full.
fn dora(
    torch: &mut Torch,
    lora: &LoraWeights,
    magnitude: &Tensor,
    base: Base<'_>,
    result: &Tensor,
    x: &Tensor,
) -> Tensor {
    let x = if lora.dropout { torch.dropout(x) } else { x.clone() };
    let (inputs, outputs) = (lora.first.shape.size(1), lora.second.shape.size(0));
    let merged = {
        let eye = torch.fresh("eye", Shape::from([inputs, inputs]), lora.first.dtype);
        let inner = torch.linear(&eye, &lora.first, None);
        drop(eye);
        torch.linear(&inner, &lora.second, lora.bias.as_ref())
    };
    let merged = torch.transpose(&merged, 0, 1);
    let merged = torch.cast(&merged, x.dtype);
    let weight = dense_weight(torch, base, x.dtype);
    let norm = {
        let scaled = torch.scalar(Binary::Mul, &merged.detached());
        let sum = torch.pointwise("add", &[&scaled], x.dtype);
        drop(scaled);
        torch.reduce(Reduction::Norm, &sum, Some(1), false)
    };
    let ratio = torch.binary(Binary::Div, magnitude, &norm);
    let ratio = torch.reshape(&ratio, Shape::from([1, outputs]));
    let inner = torch.linear(&x, &lora.first, None);
    let adapted = torch.linear(&inner, &lora.second, lora.bias.as_ref());
    drop(inner);
    let base_result = match (lora.dropout, base) {
        (false, Base::Plain { bias: Some(bias), .. }) => torch.binary(Binary::Sub, result, bias),
        (false, _) => result.clone(),
        (true, _) => torch.linear(&x, &weight, None),
    };
    let shifted = torch.scalar(Binary::Sub, &ratio);
    let first = torch.binary(Binary::Mul, &shifted, &base_result);
    drop(shifted);
    let second = torch.binary(Binary::Mul, &ratio, &adapted);
    let second = torch.scalar(Binary::Mul, &second);
    let change = torch.binary(Binary::Add, &first, &second);
    drop((first, second, base_result, adapted, ratio, norm, weight, merged, x));
    torch.binary(Binary::Add, result, &change)
}

/// `dequantize_module_weight(base).to(dtype)`.
fn dense_weight(torch: &mut Torch, base: Base<'_>, dtype: crate::dtype::DType) -> Tensor {
    match base {
        Base::Plain { weight, transposed, .. } => {
            let wide = torch.cast(&weight.detached(), dtype);
            if transposed { torch.transpose(&wide, 0, 1) } else { wide }
        }
        Base::Quantised(weight) => {
            let dense = torch.fresh("dequantize", weight.shape, weight.original);
            torch.cast(&dense, dtype)
        }
        Base::Stored(weight) => torch.fresh("dequantize", weight.shape, dtype),
    }
}

/// `lora.Embedding.forward` after its base layer has run.
pub(super) fn embedding(torch: &mut Torch, lora: &LoraWeights, result: Tensor, ids: &Tensor) -> Tensor {
    let dtype = result.dtype;
    let table = torch.transpose(&lora.first, 0, 1);
    let second = torch.transpose(&lora.second, 0, 1);
    let scaled = {
        let rows = torch.embedding(&table, ids);
        let outer = torch.matmul(&rows, &second);
        drop(rows);
        torch.scalar(Binary::Mul, &outer)
    };
    let sum = torch.binary(Binary::Add, &result, &scaled);
    drop((result, scaled));
    torch.cast(&sum, dtype)
}
