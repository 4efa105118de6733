//! Nibbles with a small scale per few inputs: MXFP4 as gpt-oss stores it, and the packed NVFP4 and MX layouts that
//! compressed-tensors and ModelOpt share.

use super::parts::{Matrix, Parts};
use crate::dtype::DType;

/// Elements that share an e8m0 scale (OCP Microscaling Formats v1.0).
const MX_BLOCK: u64 = 32;
/// Elements that share an e4m3 scale in NVFP4.
const NV_BLOCK: u64 = 16;

/// gpt-oss: `*_blocks` of 16 bytes and `*_scales` (transformers 5.22 `integrations/mxfp4.py`).
pub(super) fn lay_out_experts(matrix: &Matrix, parts: &mut Parts) -> Option<bool> {
    let blocks = matrix.inputs.div_ceil(MX_BLOCK);
    parts.add("weight_blocks", DType::U8, &[matrix.outputs, blocks, MX_BLOCK / 2])?;
    parts.add("weight_scales", DType::U8, &[matrix.outputs, blocks])?;
    Some(true)
}

/// What the parts are called and which single scales come with them.
pub(super) struct Names {
    pub(super) weight: &'static str,
    pub(super) tensor_scale: &'static str,
    pub(super) input_scale: Option<&'static str>,
}

/// NVFP4: two weights to a byte, an e4m3 scale per 16, an fp32 scale per tensor.
pub(super) fn lay_out_nvfp4(matrix: &Matrix, names: &Names, parts: &mut Parts) -> Option<()> {
    parts.add(names.weight, DType::U8, &[matrix.outputs, matrix.inputs.div_ceil(2)])?;
    parts.add("weight_scale", DType::F8E4M3, &[matrix.outputs, matrix.inputs.div_ceil(NV_BLOCK)])?;
    parts.add(names.tensor_scale, DType::F32, &[1])?;
    if let Some(input_scale) = names.input_scale {
        parts.add(input_scale, DType::F32, &[1])?;
    }
    Some(())
}

/// MXFP4 and MXFP8 of a linear layer.
pub(super) fn lay_out_mx(matrix: &Matrix, bits: u64, parts: &mut Parts) -> Option<()> {
    if bits == 4 {
        parts.add("weight_packed", DType::U8, &[matrix.outputs, matrix.inputs.div_ceil(2)])?;
    } else {
        parts.add("weight", DType::F8E4M3, &[matrix.outputs, matrix.inputs])?;
    }
    parts.add("weight_scale", DType::U8, &[matrix.outputs, matrix.inputs.div_ceil(MX_BLOCK)])
}
