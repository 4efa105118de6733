//! Packed integers in groups along the input: GPTQ, AWQ, AutoRound (which writes either) and HQQ.

use regex_lite::Regex;
use serde_json::Value;

use super::keys::{Keys, bad};
use super::parts::{Matrix, Parts, packed};
use super::skip::{Skip, pattern};
use super::{Method, Quantization, QuantizationError, Role, Weight};
use crate::dtype::DType;

/// GPTQ: shapes from AutoGPTQ `nn_modules/qlinear/qlinear_cuda.py`, kept by GPTQModel and Optimum.
#[derive(Debug, Clone)]
pub(super) struct Gptq {
    bits: u64,
    group: Option<u64>,
    /// Only modules whose name starts with this, where it is given.
    block_name: Option<String>,
    /// Only modules whose name ends so, where any are given.
    only: Vec<String>,
    /// GPTQModel's `dynamic`: the first pattern that matches leaves a module alone or gives it other settings.
    dynamic: Dynamic,
}

/// Patterns, each with bits and group size of its own, or `None` to leave alone.
type Dynamic = Vec<(Regex, Option<(u64, Option<u64>)>)>;

const GPTQ_BITS: &[u64] = &[2, 3, 4, 8];

pub(super) fn read_gptq(keys: &Keys<'_>) -> Result<Quantization, QuantizationError> {
    let bits = keys.bits("bits", GPTQ_BITS)?.unwrap_or(4);
    let group = if keys.get("group_size").is_none() { Some(128) } else { keys.group_size("group_size")? };
    let only = match keys.get("modules_in_block_to_quantize").and_then(Value::as_array) {
        Some(lists) => lists
            .iter()
            .flat_map(|item| item.as_array().map_or_else(|| vec![item], |list| list.iter().collect()))
            .filter_map(|name| name.as_str().map(str::to_owned))
            .collect(),
        None => Vec::new(),
    };
    let method = Gptq {
        bits,
        group,
        block_name: keys.text("block_name_to_quantize")?.map(str::to_owned),
        only,
        dynamic: read_dynamic(keys, bits, group)?,
    };
    let skip = Skip::transformers(Some(keys.texts("modules_to_not_convert")?.unwrap_or_default()), false)?;
    let skip = if keys.flag("lm_head")?.unwrap_or(false) { skip } else { skip.and_head() };
    let description = format!("gptq {bits}-bit, {}", group_text(group));
    Ok(Quantization { method: Method::Gptq(method), skip, description, kv_cache: None })
}

fn read_dynamic(keys: &Keys<'_>, bits: u64, group: Option<u64>) -> Result<Dynamic, QuantizationError> {
    let Some(table) = keys.object("dynamic")? else { return Ok(Vec::new()) };
    let mut rules = Vec::new();
    for (name, settings) in table.0.iter().take(1000) {
        let (text, leave) = match name.strip_prefix("-:") {
            Some(text) => (text, true),
            None => (name.strip_prefix("+:").unwrap_or(name), false),
        };
        let compiled = pattern(&format!("^(?:{text})"));
        let compiled = compiled.ok_or_else(|| bad("dynamic", format!("has the bad pattern `{name}`")))?;
        let settings = match settings.as_object().map(Keys) {
            _ if leave => None,
            None => Some((bits, group)),
            Some(own) => {
                let own_group = if own.get("group_size").is_none() { group } else { own.group_size("group_size")? };
                Some((own.bits("bits", GPTQ_BITS)?.unwrap_or(bits), own_group))
            }
        };
        rules.push((compiled, settings));
    }
    Ok(rules)
}

impl Gptq {
    pub(super) fn bits(&self) -> u64 {
        self.bits
    }

    pub(super) fn lay_out(&self, matrix: &Matrix, weight: &Weight<'_>, parts: &mut Parts) -> Option<bool> {
        let module = weight.module();
        let (mut bits, mut group) = (self.bits, self.group);
        if let Some((_, settings)) = self.dynamic.iter().find(|(pattern, _)| pattern.is_match(module)) {
            match settings {
                None => return Some(false),
                Some((own_bits, own_group)) => (bits, group) = (*own_bits, *own_group),
            }
        }
        let in_scope = match (&self.block_name, weight.role) {
            (_, Role::Head) => true,
            (Some(block), _) => module.starts_with(block.as_str()),
            (None, _) => in_language_block(module),
        };
        let named = self.only.is_empty() || self.only.iter().any(|name| module.ends_with(name.as_str()));
        if !in_scope || !named {
            return Some(false);
        }
        let groups = matrix.inputs.div_ceil(group.unwrap_or(matrix.inputs).max(1));
        parts.add("qweight", DType::I32, &[packed(matrix.inputs, bits, 32)?, matrix.outputs])?;
        parts.add("qzeros", DType::I32, &[groups, packed(matrix.outputs, bits, 32)?])?;
        parts.add("scales", DType::F16, &[groups, matrix.outputs])?;
        parts.add("g_idx", DType::I32, &[matrix.inputs])?;
        Some(true)
    }
}

/// GPTQ works through the decoder's blocks, one after another: a numbered module that is not of a vision tower.
fn in_language_block(module: &str) -> bool {
    let vision = ["visual", "vision", "image"];
    module.split('.').any(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
        && !module.split('.').any(|part| vision.iter().any(|word| part.starts_with(word)))
}

/// AWQ: shapes from AutoAWQ `modules/linear/gemm.py` and `gemv.py`.
#[derive(Debug, Clone)]
pub(super) struct Awq {
    bits: u64,
    group: Option<u64>,
    gemv: bool,
}

pub(super) fn read_awq(keys: &Keys<'_>) -> Result<Quantization, QuantizationError> {
    let bits_key = if keys.get("w_bit").is_some() { "w_bit" } else { "bits" };
    let bits = keys.bits(bits_key, &[4, 8])?.unwrap_or(4);
    let group_key = if keys.get("q_group_size").is_some() { "q_group_size" } else { "group_size" };
    let group = if keys.get(group_key).is_none() { Some(128) } else { keys.group_size(group_key)? };
    let version = keys.text("version")?.unwrap_or("gemm").to_ascii_lowercase();
    let skip = Skip::transformers(keys.texts("modules_to_not_convert")?, true)?;
    let description = format!("awq {bits}-bit, {}", group_text(group));
    let method = Method::Awq(Awq { bits, group, gemv: version.starts_with("gemv") });
    Ok(Quantization { method, skip, description, kv_cache: None })
}

impl Awq {
    pub(super) fn lay_out(&self, matrix: &Matrix, weight: &Weight<'_>, parts: &mut Parts) -> Option<bool> {
        if !weight.module().split('.').any(|part| part.parse::<u32>().is_ok()) {
            return Some(false);
        }
        let group = self.group.unwrap_or(matrix.inputs).max(1);
        let groups = matrix.inputs.div_ceil(group);
        if self.gemv {
            // `calculate_zeros_width`: padded so that a row of zeros fills whole loads of the kernel.
            let per_word = 32 / self.bits;
            let multiplier = if group >= 128 { 1 } else { 128 / group.max(32) };
            let width = groups.div_ceil(per_word).div_ceil(multiplier).checked_mul(multiplier)?;
            parts.add("qweight", DType::I32, &[matrix.outputs, packed(matrix.inputs, self.bits, 32)?])?;
            parts.add("qzeros", DType::I32, &[matrix.outputs, width])?;
            parts.add("scales", DType::F16, &[matrix.outputs, width.checked_mul(per_word)?])?;
        } else {
            let words = packed(matrix.outputs, self.bits, 32)?;
            parts.add("qweight", DType::I32, &[matrix.inputs, words])?;
            parts.add("qzeros", DType::I32, &[groups, words])?;
            parts.add("scales", DType::F16, &[groups, matrix.outputs])?;
        }
        Some(true)
    }
}

/// AutoRound exports in GPTQ's or AWQ's layout and says which in `packing_format`.
pub(super) fn read_auto_round(keys: &Keys<'_>) -> Result<Quantization, QuantizationError> {
    let format = keys.text("packing_format")?.unwrap_or("auto_round:auto_gptq");
    let mut quantization = if format.contains("awq") { read_awq(keys)? } else { read_gptq(keys)? };
    quantization.description = format!("auto-round, as {}", quantization.description);
    Ok(quantization)
}

/// HQQ: shapes from hqq `core/quantize.py` (`Quantizer.quantize`, `bit_to_packing`).
#[derive(Debug, Clone)]
pub(super) struct Hqq {
    settings: HqqSettings,
    /// Settings by the last part of a module's name; what has none stays as it is.
    by_tag: Option<Vec<(String, HqqSettings)>>,
}

#[derive(Debug, Clone, Copy)]
struct HqqSettings {
    bits: u64,
    group: Option<u64>,
}

pub(super) fn read_hqq(keys: &Keys<'_>) -> Result<Quantization, QuantizationError> {
    let config = keys.object("quant_config")?.ok_or_else(|| bad("quant_config", "is missing".to_owned()))?;
    let (settings, by_tag) = match config.object("weight_quant_params")? {
        Some(_) => (hqq_settings(&config)?, None),
        None => {
            let tags = config.0.iter().filter_map(|(tag, value)| Some((tag, Keys(value.as_object()?))));
            let tags = tags.map(|(tag, own)| Ok((tag.clone(), hqq_settings(&own)?)));
            let tags = tags.collect::<Result<Vec<_>, QuantizationError>>()?;
            (HqqSettings { bits: 4, group: Some(64) }, Some(tags))
        }
    };
    let skip = Skip::transformers(Some(keys.texts("skip_modules")?.unwrap_or_else(|| vec!["lm_head"])), false)?;
    let description = format!("hqq {}-bit, {}", settings.bits, group_text(settings.group));
    Ok(Quantization { method: Method::Hqq(Hqq { settings, by_tag }), skip, description, kv_cache: None })
}

fn hqq_settings(config: &Keys<'_>) -> Result<HqqSettings, QuantizationError> {
    let Some(params) = config.object("weight_quant_params")? else {
        return Err(bad("weight_quant_params", "is missing".to_owned()));
    };
    Ok(HqqSettings {
        bits: params.bits("nbits", &[1, 2, 3, 4, 8])?.unwrap_or(4),
        group: params.group_size("group_size")?,
    })
}

impl Hqq {
    pub(super) fn bits(&self) -> u64 {
        self.settings.bits
    }

    pub(super) fn lay_out(&self, matrix: &Matrix, weight: &Weight<'_>, parts: &mut Parts) -> Option<bool> {
        let settings = match &self.by_tag {
            None => self.settings,
            Some(tags) => match tags.iter().find(|(tag, _)| weight.module().ends_with(tag.as_str())) {
                Some((_, settings)) => *settings,
                None => return Some(false),
            },
        };
        let elements = matrix.elements()?;
        let groups = elements.div_ceil(settings.group.unwrap_or(matrix.inputs).max(1));
        // Three bits go ten to a 32-bit word; the others fill bytes.
        match settings.bits {
            3 => parts.add("W_q", DType::I32, &[elements.div_ceil(10)])?,
            bits => parts.add("W_q", DType::U8, &[packed(elements, bits, 8)?])?,
        }
        parts.add("scale", DType::F16, &[groups, 1])?;
        parts.add("zero", DType::F16, &[groups, 1])?;
        Some(true)
    }
}

fn group_text(group: Option<u64>) -> String {
    match group {
        Some(size) => format!("groups of {size}"),
        None => "one group per row".to_owned(),
    }
}
