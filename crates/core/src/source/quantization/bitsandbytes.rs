//! bitsandbytes: 4-bit (nf4, fp4) and LLM.int8. Shapes from bitsandbytes 0.49 `functional.py` (`quantize_4bit`,
//! `quantize_blockwise`) and `nn/modules.py` (`Params4bit`, `Int8Params`).
//!
//! Only linear layers are replaced; experts fused into one parameter stay as they are
//! (transformers 5.22 `integrations/bitsandbytes.py`, `replace_with_bnb_linear`).

use super::keys::{Keys, bad};
use super::parts::{Matrix, Parts, packed};
use super::skip::Skip;
use super::{Method, Quantization, QuantizationError, Weight};
use crate::dtype::DType;

/// Elements that share one absmax; transformers never passes another.
const BLOCK: u64 = 64;
/// Absmax values that share one second-level absmax.
const NESTED_BLOCK: u64 = 256;

#[derive(Debug, Clone)]
pub(super) enum BitsAndBytes {
    FourBit { double: bool, storage: DType },
    EightBit,
}

pub(super) fn read(keys: &Keys<'_>) -> Result<Quantization, QuantizationError> {
    let four = keys.flag("load_in_4bit")?.or(keys.flag("_load_in_4bit")?).unwrap_or(false);
    let eight = keys.flag("load_in_8bit")?.or(keys.flag("_load_in_8bit")?).unwrap_or(false);
    let (method, description) = if four {
        let kind = keys.text("bnb_4bit_quant_type")?.unwrap_or("fp4");
        if !matches!(kind, "nf4" | "fp4") {
            return Err(bad("bnb_4bit_quant_type", format!("is `{kind}`, not nf4 or fp4")));
        }
        let double = keys.flag("bnb_4bit_use_double_quant")?.unwrap_or(false);
        let storage = keys.text("bnb_4bit_quant_storage")?.unwrap_or("uint8");
        let storage =
            DType::parse(storage).ok_or_else(|| bad("bnb_4bit_quant_storage", format!("is `{storage}`, no dtype")))?;
        let nested = if double { ", scales quantised again" } else { "" };
        (BitsAndBytes::FourBit { double, storage }, format!("bitsandbytes {kind}, blocks of {BLOCK}{nested}"))
    } else if eight {
        (BitsAndBytes::EightBit, "bitsandbytes int8, one scale per row".to_owned())
    } else {
        return Err(bad("load_in_4bit", "and `load_in_8bit` are both false".to_owned()));
    };
    let skip = Skip::transformers(keys.texts("llm_int8_skip_modules")?, false)?;
    Ok(Quantization { method: Method::BitsAndBytes(method), skip, description, kv_cache: None })
}

impl BitsAndBytes {
    pub(super) fn lay_out(&self, matrix: &Matrix, _weight: &Weight<'_>, parts: &mut Parts) -> Option<bool> {
        let Self::FourBit { double, storage } = self else {
            parts.add("weight", DType::I8, &[matrix.outputs, matrix.inputs])?;
            parts.add("SCB", DType::F32, &[matrix.outputs])?;
            return Some(true);
        };
        let elements = matrix.elements()?;
        let blocks = elements.div_ceil(BLOCK);
        parts.add("weight", *storage, &[packed(elements, 4, storage.size() * 8)?, 1])?;
        if *double {
            parts.add("weight.absmax", DType::U8, &[blocks])?;
            parts.add("weight.nested_absmax", DType::F32, &[blocks.div_ceil(NESTED_BLOCK)])?;
            parts.add("weight.nested_quant_map", DType::F32, &[256])?;
            // A tensor on the GPU; in a file it is a number inside `quant_state`.
            parts.add("weight.nested_offset", DType::F32, &[])?;
        } else {
            parts.add("weight.absmax", DType::F32, &[blocks])?;
        }
        parts.add("weight.quant_map", DType::F32, &[16])?;
        Some(true)
    }
}
