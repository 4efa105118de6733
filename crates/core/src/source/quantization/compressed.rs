//! compressed-tensors (llm-compressor, vLLM) and NVIDIA ModelOpt, which writes much the same.
//!
//! Shapes from compressed-tensors 0.20 `compressors/*/base.py` and `quantization/lifecycle/initialize.py`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::keys::{Keys, bad};
use super::microscaling::{Names, lay_out_mx, lay_out_nvfp4};
use super::parts::{Matrix, Parts, packed};
use super::skip::{Skip, pattern};
use super::{Method, Quantization, QuantizationError, Weight};
use crate::dtype::DType;

/// The groups of a config; the first whose targets match a module is its layout.
#[derive(Debug, Clone)]
pub(super) struct Groups(Vec<(Vec<Target>, Layout)>);

#[derive(Debug, Clone)]
enum Target {
    /// All linear layers.
    Linear,
    /// One module.
    Exact(String),
    /// Modules a pattern matches.
    Pattern(regex_lite::Regex),
}

/// How a weight is stored.
#[derive(Debug, Clone)]
pub(super) enum Layout {
    /// Integers packed into 32-bit words.
    Packed { bits: u64, scale: Scale, symmetric: bool, group_index: bool },
    /// One byte an element, integer or float.
    Byte { dtype: DType, scale: Scale, symmetric: bool, input_scale: bool, single_scale: Option<DType> },
    /// NVFP4.
    Nvfp4 { modelopt: bool, input_scale: bool },
    /// MXFP4 or MXFP8.
    Mx { bits: u64 },
    /// As the model declares it.
    Dense,
}

/// What shares a scale.
#[derive(Debug, Clone, Copy)]
pub(super) enum Scale {
    Tensor,
    Channel,
    Group(u64),
    Block(u64, u64),
}

impl Scale {
    fn shape(self, matrix: &Matrix) -> [u64; 2] {
        match self {
            Self::Tensor => [1, 1],
            Self::Channel => [matrix.outputs, 1],
            Self::Group(size) => [matrix.outputs, matrix.inputs.div_ceil(size)],
            Self::Block(rows, columns) => [matrix.outputs.div_ceil(rows), matrix.inputs.div_ceil(columns)],
        }
    }
}

pub(super) fn read(keys: &Keys<'_>) -> Result<Quantization, QuantizationError> {
    let format = keys.text("format")?;
    let table = keys.object("config_groups")?.ok_or_else(|| bad("config_groups", "is missing".to_owned()))?;
    let mut groups = Vec::new();
    for (name, group) in table.0.iter().take(1000) {
        let group = Keys(group.as_object().ok_or_else(|| bad(name, "should be an object".to_owned()))?);
        let targets = group.texts("targets")?.unwrap_or_else(|| vec!["Linear"]);
        let targets = targets.into_iter().map(target).collect::<Result<Vec<_>, _>>()?;
        groups.push((targets, layout(&group, group.text("format")?.or(format))?));
    }
    let skip = Skip::compressed_tensors(keys.texts("ignore")?.unwrap_or_default())?;
    let description = match groups.as_slice() {
        [(_, layout)] => format!("compressed-tensors {}", layout.describe()),
        many => format!("compressed-tensors, {} groups", many.len()),
    };
    let kv_cache = match keys.object("kv_cache_scheme")? {
        Some(scheme) => element(&scheme)?,
        None => None,
    };
    Ok(Quantization { method: Method::Compressed(Groups(groups)), skip, description, kv_cache })
}

fn target(text: &str) -> Result<Target, QuantizationError> {
    if text == "Linear" {
        return Ok(Target::Linear);
    }
    match text.strip_prefix("re:") {
        None => Ok(Target::Exact(text.to_owned())),
        Some(expression) => pattern(&format!("^(?:{expression})"))
            .map(Target::Pattern)
            .ok_or_else(|| bad("targets", format!("has the bad pattern `{text}`"))),
    }
}

/// The one-byte type of a scheme, if it has one.
fn element(args: &Keys<'_>) -> Result<Option<DType>, QuantizationError> {
    let float = args.text("type")? == Some("float");
    Ok(match (args.positive("num_bits")?.unwrap_or(8), float) {
        (8, true) => Some(DType::F8E4M3),
        (8, false) => Some(DType::I8),
        _ => None,
    })
}

fn layout(group: &Keys<'_>, format: Option<&str>) -> Result<Layout, QuantizationError> {
    let Some(weights) = group.object("weights")? else { return Ok(Layout::Dense) };
    let bits = weights.positive("num_bits")?.unwrap_or(8);
    if bits > 16 {
        return Err(bad("num_bits", format!("is {bits}")));
    }
    let float = weights.text("type")? == Some("float");
    let symmetric = weights.flag("symmetric")?.unwrap_or(true);
    let scale = scale(&weights)?;
    let inputs = group.object("input_activations")?;
    // `dynamic` is true, false or "local": only true keeps nothing.
    let static_inputs = inputs.is_some_and(|args| args.get("dynamic").is_none_or(|value| value != &Value::Bool(true)));
    let format = match format {
        None | Some("mixed-precision") => match (bits, float, scale) {
            (4, true, Scale::Group(32)) => "mxfp4-pack-quantized",
            (4, true, _) => "nvfp4-pack-quantized",
            (8, true, _) => "float-quantized",
            (8, false, _) if group.get("input_activations").is_some() => "int-quantized",
            _ => "pack-quantized",
        },
        Some(given) => given,
    };
    Ok(match format {
        "dense" => Layout::Dense,
        "pack-quantized" => {
            let order = weights.get("actorder");
            let group_index = order.is_some_and(|value| value == "group" || value == &Value::Bool(true));
            Layout::Packed { bits, scale, symmetric, group_index }
        }
        "nvfp4-pack-quantized" => Layout::Nvfp4 { modelopt: false, input_scale: static_inputs },
        "mxfp4-pack-quantized" => Layout::Mx { bits: 4 },
        "mxfp8-quantized" => Layout::Mx { bits: 8 },
        "int-quantized" | "float-quantized" | "naive-quantized" => {
            let dtype = element(&weights)?.ok_or_else(|| bad("num_bits", format!("is {bits} in format `{format}`")))?;
            Layout::Byte { dtype, scale, symmetric, input_scale: static_inputs, single_scale: None }
        }
        other => return Err(QuantizationError::Unsupported(format!("compressed-tensors {other}"))),
    })
}

fn scale(weights: &Keys<'_>) -> Result<Scale, QuantizationError> {
    let group = weights.group_size("group_size")?;
    Ok(match weights.text("strategy")? {
        Some("tensor") => Scale::Tensor,
        Some("channel") => Scale::Channel,
        Some("group" | "tensor_group") => Scale::Group(group.unwrap_or(128)),
        Some("block") => match weights.get("block_structure").and_then(Value::as_array).map(Vec::as_slice) {
            Some([rows, columns]) => match (rows.as_u64(), columns.as_u64()) {
                (Some(rows @ 1..), Some(columns @ 1..)) => Scale::Block(rows, columns),
                _ => return Err(bad("block_structure", "should be two whole numbers above zero".to_owned())),
            },
            _ => return Err(bad("block_structure", "should be two whole numbers above zero".to_owned())),
        },
        Some(other) => return Err(bad("strategy", format!("is `{other}`"))),
        None => group.map_or(Scale::Tensor, Scale::Group),
    })
}

impl Groups {
    pub(super) fn lay_out(&self, matrix: &Matrix, weight: &Weight<'_>, parts: &mut Parts) -> Option<bool> {
        let module = weight.module();
        let hit = |target: &Target| match target {
            Target::Linear => true,
            Target::Exact(name) => name == module,
            Target::Pattern(pattern) => pattern.is_match(module),
        };
        // A module named outright beats the class it is of.
        let named = |targets: &[Target]| targets.iter().any(|target| !matches!(target, Target::Linear) && hit(target));
        let found = self.0.iter().find(|(targets, _)| named(targets));
        match found.or_else(|| self.0.iter().find(|(targets, _)| targets.iter().any(hit))) {
            Some((_, layout)) => layout.lay_out(matrix, weight, parts),
            None => Some(false),
        }
    }
}

impl Layout {
    fn describe(&self) -> String {
        match self {
            Self::Packed { bits, .. } => format!("{bits}-bit packed"),
            Self::Byte { dtype, .. } => dtype.to_string(),
            Self::Nvfp4 { .. } => "nvfp4".to_owned(),
            Self::Mx { bits } => format!("mxfp{bits}"),
            Self::Dense => "dense".to_owned(),
        }
    }

    pub(super) fn lay_out(&self, matrix: &Matrix, weight: &Weight<'_>, parts: &mut Parts) -> Option<bool> {
        let Matrix { outputs, inputs, .. } = *matrix;
        // Scales take the model's dtype where that is a usual float.
        let model = if weight.dtype.size() >= 2 && weight.dtype.is_floating() { weight.dtype } else { DType::F16 };
        match *self {
            Self::Dense => return Some(false),
            Self::Packed { bits, scale, symmetric, group_index } => {
                let [rows, columns] = scale.shape(matrix);
                parts.add("weight_packed", DType::I32, &[outputs, packed(inputs, bits, 32)?])?;
                parts.add("weight_scale", model, &[rows, columns])?;
                if !symmetric {
                    parts.add("weight_zero_point", DType::I32, &[packed(rows, bits, 32)?, columns])?;
                }
                parts.add("weight_shape", DType::I64, &[2])?;
                if group_index {
                    parts.add("weight_g_idx", DType::I32, &[inputs])?;
                }
            }
            Self::Byte { dtype, scale, symmetric, input_scale, single_scale } => {
                let shape = scale.shape(matrix);
                parts.add("weight", dtype, &[outputs, inputs])?;
                match scale {
                    Scale::Tensor => parts.add("weight_scale", single_scale.unwrap_or(model), &[1])?,
                    _ => parts.add("weight_scale", model, &shape)?,
                }
                if !symmetric {
                    parts.add("weight_zero_point", DType::I8, &shape)?;
                }
                if input_scale {
                    parts.add("input_scale", single_scale.unwrap_or(model), &[1])?;
                }
            }
            Self::Nvfp4 { modelopt, input_scale } => {
                let names = if modelopt {
                    Names { weight: "weight", tensor_scale: "weight_scale_2", input_scale: Some("input_scale") }
                } else {
                    let input_scale = input_scale.then_some("input_global_scale");
                    Names { weight: "weight_packed", tensor_scale: "weight_global_scale", input_scale }
                };
                lay_out_nvfp4(matrix, &names, parts)?;
            }
            Self::Mx { bits } => lay_out_mx(matrix, bits, parts)?,
        }
        Some(true)
    }
}

/// ModelOpt: `quant_algo` in `config.json`, or the section `quantization` of its own `hf_quant_config.json`.
pub(super) fn read_modelopt(keys: &Keys<'_>) -> Result<Quantization, QuantizationError> {
    let nested = keys.object("quantization")?;
    let keys = Keys(nested.as_ref().map_or(keys.0, |nested| nested.0));
    let algorithm = keys.text("quant_algo")?.ok_or_else(|| bad("quant_algo", "is missing".to_owned()))?;
    let byte = |scale| Layout::Byte {
        dtype: DType::F8E4M3,
        scale,
        symmetric: true,
        input_scale: true,
        single_scale: Some(DType::F32),
    };
    let layout = |algorithm: &str| match algorithm.to_ascii_uppercase().as_str() {
        "FP8" => Ok(byte(Scale::Tensor)),
        "FP8_PER_CHANNEL_PER_TOKEN" => Ok(byte(Scale::Channel)),
        "NVFP4" | "W4A16_NVFP4" => Ok(Layout::Nvfp4 { modelopt: true, input_scale: true }),
        "MXFP8" => Ok(Layout::Mx { bits: 8 }),
        other => Err(QuantizationError::Unsupported(format!("modelopt {other}"))),
    };
    let method = match algorithm.to_ascii_uppercase().as_str() {
        "MIXED_PRECISION" => Method::Mixed(mixed(&keys, layout)?),
        _ => Method::ModelOpt(layout(algorithm)?),
    };
    let names = keys.texts("exclude_modules")?.or(keys.texts("ignore")?).unwrap_or_default();
    let kv_cache = match (keys.get("kv_cache_scheme"), keys.text("kv_cache_quant_algo")?) {
        (Some(Value::Object(scheme)), _) => element(&Keys(scheme))?,
        (Some(Value::String(name)), _) if name.eq_ignore_ascii_case("fp8") => Some(DType::F8E4M3),
        (_, Some("FP8")) => Some(DType::F8E4M3),
        _ => None,
    };
    let description = format!("modelopt {}", algorithm.to_ascii_lowercase());
    Ok(Quantization { method, skip: Skip::wildcards(names)?, description, kv_cache })
}

/// ModelOpt with a layout for every module: `quantized_layers` names them, what it does not name is left alone.
#[derive(Debug, Clone)]
pub(super) struct Mixed(Vec<(Skip, Layout)>);

fn mixed(
    keys: &Keys<'_>,
    layout: impl Fn(&str) -> Result<Layout, QuantizationError>,
) -> Result<Mixed, QuantizationError> {
    let missing = || bad("quantized_layers", "is missing".to_owned());
    let table = keys.object("quantized_layers")?.ok_or_else(missing)?;
    let mut modules: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (module, how) in table.0 {
        let algorithm = how.get("quant_algo").and_then(Value::as_str);
        let algorithm =
            algorithm.ok_or_else(|| bad("quantized_layers", format!("does not say the `quant_algo` of `{module}`")))?;
        // Experts are quantised alike, one by one or all in one tensor (`_resolve_quant_algo` of vLLM's modelopt.py).
        let end = module.find(".experts.").map_or(module.len(), |at| at + ".experts".len());
        modules.entry(algorithm).or_default().insert(&module[..end]);
    }
    let layouts = modules
        .into_iter()
        .map(|(algorithm, names)| Ok((Skip::wildcards(names.into_iter().collect())?, layout(algorithm)?)));
    Ok(Mixed(layouts.collect::<Result<_, _>>()?))
}

impl Mixed {
    pub(super) fn lay_out(&self, matrix: &Matrix, weight: &Weight<'_>, parts: &mut Parts) -> Option<bool> {
        match self.0.iter().find(|(named, _)| named.leaves(weight.module())) {
            Some((_, layout)) => layout.lay_out(matrix, weight, parts),
            None => Some(false),
        }
    }
}
