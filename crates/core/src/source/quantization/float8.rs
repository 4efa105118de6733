//! Eight-bit weights with few scales: fp8 by block or tensor (transformers' `fp8`, DeepSeek), by row (FBGEMM), and the
//! two small int formats that look alike, EETQ and BitNet.
//!
//! Shapes from transformers 5.22 `integrations/{finegrained_fp8,fbgemm_fp8,eetq,bitnet}.py`.

use serde_json::Value;

use super::keys::{Keys, bad};
use super::parts::{Matrix, Parts};
use super::skip::Skip;
use super::{Method, Quantization, QuantizationError, Role, Weight};
use crate::dtype::DType;

#[derive(Debug, Clone)]
pub(super) struct Fp8 {
    /// Rows and columns that share a scale; `None` is the whole tensor.
    block: Option<(u64, u64)>,
    scale: DType,
    /// Activations have a scale of their own, stored beside.
    static_activations: bool,
    /// Experts are nibbles with a scale per 32 inputs (DeepSeek-V4).
    fp4_experts: bool,
}

pub(super) fn read(keys: &Keys<'_>, expert_dtype: Option<&str>) -> Result<Quantization, QuantizationError> {
    let block = match keys.get("weight_block_size") {
        None => None,
        Some(value) => match value.as_array().map(Vec::as_slice) {
            Some([rows, columns]) => match (positive(rows), positive(columns)) {
                (Some(rows), Some(columns)) => Some((rows, columns)),
                _ => return Err(bad("weight_block_size", "should be two whole numbers above zero".to_owned())),
            },
            _ => return Err(bad("weight_block_size", "should be two whole numbers above zero".to_owned())),
        },
    };
    let scale = match keys.text("scale_fmt")? {
        Some("ue8m0") if block.is_some() => DType::F8E8M0,
        _ => DType::F32,
    };
    let method = Fp8 {
        block,
        scale,
        static_activations: keys.text("activation_scheme")? == Some("static"),
        fp4_experts: expert_dtype == Some("fp4"),
    };
    let description = match block {
        Some((rows, columns)) => format!("fp8, one {scale} scale per {rows} x {columns} block"),
        None => "fp8, one scale per tensor".to_owned(),
    };
    // vLLM and some exporters write `ignored_layers` for the same thing.
    let names = keys.texts("modules_to_not_convert")?.or(keys.texts("ignored_layers")?);
    Ok(Quantization {
        method: Method::Fp8(method),
        skip: Skip::transformers(names, false)?,
        description,
        kv_cache: None,
    })
}

fn positive(value: &Value) -> Option<u64> {
    value.as_u64().filter(|number| *number > 0)
}

impl Fp8 {
    pub(super) fn lay_out(&self, matrix: &Matrix, weight: &Weight<'_>, parts: &mut Parts) -> Option<bool> {
        let Matrix { outputs, inputs, .. } = *matrix;
        if self.fp4_experts && folds(weight) {
            return Some(false);
        }
        if self.fp4_experts && is_routed_expert(weight) {
            parts.add("weight", DType::I8, &[outputs, inputs.div_ceil(2)])?;
            parts.add("weight_scale_inv", self.scale, &[outputs, inputs.div_ceil(32)])?;
        } else {
            parts.add("weight", DType::F8E4M3, &[outputs, inputs])?;
            match self.block {
                Some((rows, columns)) => {
                    parts.add("weight_scale_inv", self.scale, &[outputs.div_ceil(rows), inputs.div_ceil(columns)])?;
                }
                None => parts.add("weight_scale_inv", DType::F32, &[])?,
            }
        }
        if self.static_activations {
            parts.add("activation_scale", DType::F32, &[])?;
        }
        Some(true)
    }
}

/// What folds keys and what weighs the choice of them, which DeepSeek-V4's checkpoints hold in 16 bits (148.66 GiB of Flash;
/// `quant_config=None` in vllm/models/deepseek_v4/compressor.py).
fn folds(weight: &Weight<'_>) -> bool {
    let module = weight.module();
    module.contains(".compressor.")
        && [".kv_proj", ".gate_proj", ".weights_proj"].iter().any(|end| module.ends_with(end))
}

/// An expert of its own (`mlp.experts.7.up_proj`) or several in one tensor; shared experts are neither.
fn is_routed_expert(weight: &Weight<'_>) -> bool {
    weight.role == Role::Experts || weight.module().contains(".experts.")
}

pub(super) fn read_rowwise(keys: &Keys<'_>) -> Result<Quantization, QuantizationError> {
    simple(keys, Method::RowwiseFp8, "fp8, one scale per row")
}

pub(super) fn read_eetq(keys: &Keys<'_>) -> Result<Quantization, QuantizationError> {
    simple(keys, Method::Eetq, "eetq int8, one scale per row")
}

pub(super) fn read_bitnet(keys: &Keys<'_>) -> Result<Quantization, QuantizationError> {
    let online =
        keys.text("quantization_mode")? == Some("online") || keys.text("linear_class")? == Some("autobitlinear");
    if online {
        return Err(QuantizationError::Unsupported("bitnet, online".to_owned()));
    }
    simple(keys, Method::BitNet, "bitnet, four weights to a byte")
}

fn simple(keys: &Keys<'_>, method: Method, description: &str) -> Result<Quantization, QuantizationError> {
    let skip = Skip::transformers(keys.texts("modules_to_not_convert")?, false)?;
    Ok(Quantization { method, skip, description: description.to_owned(), kv_cache: None })
}

pub(super) fn lay_out_rowwise(matrix: &Matrix, parts: &mut Parts) -> Option<bool> {
    parts.add("weight", DType::F8E4M3, &[matrix.outputs, matrix.inputs])?;
    parts.add("weight_scale", DType::F32, &[matrix.outputs, 1])?;
    Some(true)
}

pub(super) fn lay_out_eetq(matrix: &Matrix, parts: &mut Parts) -> Option<bool> {
    parts.add("weight", DType::I8, &[matrix.inputs, matrix.outputs])?;
    parts.add("weight_scales", DType::F16, &[matrix.outputs])?;
    Some(true)
}

pub(super) fn lay_out_bitnet(matrix: &Matrix, weight: &Weight<'_>, parts: &mut Parts) -> Option<bool> {
    parts.add("weight", DType::U8, &[matrix.outputs / 4, matrix.inputs])?;
    parts.add("weight_scale", weight.dtype, &[1])?;
    Some(true)
}
