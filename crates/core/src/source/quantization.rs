//! `quantization_config`: what every weight weighs as stored, scales and zeros included, and which are left alone.
//!
//! [`Quantization::from_config`] reads a `config.json`; [`Quantization::stored`] answers for one weight at a time. The
//! shapes are those the library's own layer allocates, so that a checkpoint's header has the same tensors. Where
//! there is a header, it wins; this is for when there is none, and for quantising while loading.
//!
//! | file | methods |
//! |---|---|
//! | `bitsandbytes` | nf4 and fp4, with and without double quantisation; LLM.int8 |
//! | `grouped` | GPTQ, AWQ, AutoRound, HQQ |
//! | `float8` | fp8 by block, tensor and row; BitNet, EETQ |
//! | `compressed` | compressed-tensors, ModelOpt |
//! | `microscaling` | MXFP4 experts, NVFP4 and MX layouts |
//! | `skip` | the rules that leave modules alone |

mod bitsandbytes;
mod compressed;
mod float8;
mod grouped;
mod keys;
mod microscaling;
mod parts;
mod skip;

pub use parts::{Stored, StoredPart};

use serde_json::{Map, Value};

use crate::dtype::DType;
use keys::Keys;
use parts::{Matrix, Parts};
use skip::Skip;

/// Why a quantisation was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantizationError {
    /// The method is not one we know the layout of.
    #[error("quantization method `{0}` is not supported")]
    Unsupported(String),
    /// There is a `quantization_config` but nothing in it says which method it is.
    #[error("quantization_config does not say its `quant_method`")]
    NoMethod,
    /// A value is missing or makes no sense.
    #[error("quantization_config: `{key}` {problem}")]
    BadValue {
        /// Its key.
        key: String,
        /// What is wrong.
        problem: String,
    },
    /// A weight so large that its bytes do not fit in 64 bits.
    #[error("weight `{0}` is too large")]
    TooLarge(String),
}

/// What a weight is in its model, which decides whether a method touches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The matrix of a linear layer (or GPT-2's Conv1D).
    Linear,
    /// The matrices of several experts in one tensor of three dimensions.
    Experts,
    /// An embedding table.
    Embedding,
    /// The output head.
    Head,
    /// Norms, biases, convolutions, routers that are bare parameters, and everything else.
    Other,
}

/// A weight as the model declares it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weight<'a> {
    /// Its full name, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: &'a str,
    /// Outermost dimension first.
    pub shape: &'a [u64],
    /// What it is when nothing quantises it.
    pub dtype: DType,
    /// What it is in the model.
    pub role: Role,
    /// Whether it is stored [in, out] (GPT-2, gpt-oss and Llama-4 experts) rather than [out, in].
    pub transposed: bool,
}

impl Weight<'_> {
    /// The module that owns it: the name without its last part.
    fn module(&self) -> &str {
        self.name.rsplit_once('.').map_or("", |(module, _)| module)
    }

    /// The last part of its name.
    fn leaf(&self) -> &str {
        self.name.rsplit_once('.').map_or(self.name, |(_, leaf)| leaf)
    }
}

/// How a model's weights are quantised.
#[derive(Debug, Clone)]
pub struct Quantization {
    method: Method,
    skip: Skip,
    /// The method and its main settings, for people: `gptq 4-bit, groups of 128`.
    pub description: String,
    /// The dtype the checkpoint asks the KV cache to be in.
    pub kv_cache: Option<DType>,
}

/// Whose code runs a quantised model, as far as its memory differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// bitsandbytes.
    BitsAndBytes,
    /// GPTQ, and what writes its layout.
    Gptq {
        /// Bits of an element.
        bits: u64,
    },
    /// AWQ, and what writes its layout.
    Awq,
    /// HQQ.
    Hqq {
        /// Bits of an element.
        bits: u64,
    },
    /// fp8 as transformers runs it.
    Fp8,
    /// compressed-tensors.
    Compressed,
    /// Experts in MXFP4.
    Mxfp4,
    /// Known by its layout alone.
    Other,
}

#[derive(Debug, Clone)]
enum Method {
    BitsAndBytes(bitsandbytes::BitsAndBytes),
    Gptq(grouped::Gptq),
    Awq(grouped::Awq),
    Hqq(grouped::Hqq),
    Fp8(float8::Fp8),
    RowwiseFp8,
    Eetq,
    BitNet,
    Compressed(compressed::Groups),
    ModelOpt(compressed::Layout),
    Mixed(compressed::Mixed),
    Mxfp4,
}

impl Quantization {
    /// Reads the quantisation of a `config.json`, or a `quantization_config` by itself. `None`: it has none.
    pub fn from_config(config: &Value) -> Result<Option<Self>, QuantizationError> {
        let Some(section) = section(config) else { return Ok(None) };
        // DeepSeek-V4 says beside the section what its experts are (configuration_deepseek_v4.py).
        let expert_dtype = section.get("expert_dtype").or_else(|| config.get("expert_dtype"));
        Self::from_section(&Keys(section), expert_dtype.and_then(Value::as_str)).map(Some)
    }

    fn from_section(keys: &Keys<'_>, expert_dtype: Option<&str>) -> Result<Self, QuantizationError> {
        let method = method_name(keys)?;
        match method.as_str() {
            "bitsandbytes" => bitsandbytes::read(keys),
            "gptq" => grouped::read_gptq(keys),
            "awq" => grouped::read_awq(keys),
            "auto-round" | "intel/auto-round" => grouped::read_auto_round(keys),
            "hqq" => grouped::read_hqq(keys),
            "fp8" => float8::read(keys, expert_dtype),
            "fbgemm-fp8" => float8::read_rowwise(keys),
            "eetq" => float8::read_eetq(keys),
            "bitnet" => float8::read_bitnet(keys),
            "compressed-tensors" => compressed::read(keys),
            "modelopt" | "modelopt-fp4" | "modelopt-fp8" | "modelopt-mixed" => compressed::read_modelopt(keys),
            "mxfp4" => Ok(Self {
                method: Method::Mxfp4,
                skip: Skip::transformers(keys.texts("modules_to_not_convert")?, false)?,
                description: "mxfp4 experts, one scale per 32".to_owned(),
                kv_cache: None,
            }),
            _ => Err(QuantizationError::Unsupported(method)),
        }
    }

    /// Whose code runs it.
    pub fn scheme(&self) -> Scheme {
        match &self.method {
            Method::BitsAndBytes(_) => Scheme::BitsAndBytes,
            Method::Gptq(method) => Scheme::Gptq { bits: method.bits() },
            Method::Awq(_) => Scheme::Awq,
            Method::Hqq(method) => Scheme::Hqq { bits: method.bits() },
            Method::Fp8(_) => Scheme::Fp8,
            Method::Compressed(_) => Scheme::Compressed,
            Method::Mxfp4 => Scheme::Mxfp4,
            Method::RowwiseFp8 | Method::Eetq | Method::BitNet | Method::ModelOpt(_) | Method::Mixed(_) => {
                Scheme::Other
            }
        }
    }

    /// Whether a module is one that it leaves alone by name.
    pub fn leaves(&self, module: &str) -> bool {
        self.skip.leaves(module)
    }

    /// The tensors that hold a weight, and their bytes. Bytes are exact; a weight left alone is one part.
    pub fn stored(&self, weight: &Weight<'_>) -> Result<Stored, QuantizationError> {
        let too_large = || QuantizationError::TooLarge(weight.name.to_owned());
        if let Some(matrix) = self.converts(weight) {
            let mut parts = Parts::new(&matrix, weight);
            if self.lay_out(&matrix, weight, &mut parts).ok_or_else(too_large)? {
                return parts.finish(true).ok_or_else(too_large);
            }
        }
        Stored::untouched(weight).ok_or_else(too_large)
    }

    /// The weight as a matrix, if the method touches it.
    fn converts(&self, weight: &Weight<'_>) -> Option<Matrix> {
        let wanted = match weight.role {
            Role::Linear => !matches!(self.method, Method::Mxfp4),
            Role::Experts => {
                !matches!(self.method, Method::BitsAndBytes(_) | Method::Eetq | Method::BitNet | Method::Hqq(_))
            }
            Role::Head => !matches!(self.method, Method::Mxfp4 | Method::Awq(_)) && !self.skip.leaves_head(),
            Role::Embedding | Role::Other => false,
        };
        if !wanted || self.skip.leaves(weight.module()) {
            return None;
        }
        Matrix::of(weight)
    }

    /// Writes the parts. `Some(false)`: the method leaves this weight alone after all; `None`: it is too large.
    fn lay_out(&self, matrix: &Matrix, weight: &Weight<'_>, parts: &mut Parts) -> Option<bool> {
        match &self.method {
            Method::BitsAndBytes(method) => method.lay_out(matrix, weight, parts),
            Method::Gptq(method) => method.lay_out(matrix, weight, parts),
            Method::Awq(method) => method.lay_out(matrix, weight, parts),
            Method::Hqq(method) => method.lay_out(matrix, weight, parts),
            Method::Fp8(method) => method.lay_out(matrix, weight, parts),
            Method::RowwiseFp8 => float8::lay_out_rowwise(matrix, parts),
            Method::Eetq => float8::lay_out_eetq(matrix, parts),
            Method::BitNet => float8::lay_out_bitnet(matrix, weight, parts),
            Method::Compressed(groups) => groups.lay_out(matrix, weight, parts),
            Method::ModelOpt(layout) => layout.lay_out(matrix, weight, parts),
            Method::Mixed(layouts) => layouts.lay_out(matrix, weight, parts),
            Method::Mxfp4 => microscaling::lay_out_experts(matrix, parts),
        }
    }
}

/// The `quantization_config` of a config, wherever it is kept.
fn section(config: &Value) -> Option<&Map<String, Value>> {
    let object = config.as_object()?;
    if object.contains_key("quant_method") {
        return Some(object);
    }
    let nested = || object.get("text_config").and_then(|text| text.get("quantization_config"));
    let found = object.get("quantization_config").filter(|section| !section.is_null());
    found.or_else(nested).or_else(|| object.get("compression_config"))?.as_object()
}

/// The method, in lower case with dashes. Old configs leave it out and are told by their flags.
fn method_name(keys: &Keys<'_>) -> Result<String, QuantizationError> {
    if let Some(method) = keys.text("quant_method")? {
        return Ok(method.to_ascii_lowercase().replace('_', "-"));
    }
    if keys.flag("load_in_4bit")?.unwrap_or(false) || keys.flag("load_in_8bit")?.unwrap_or(false) {
        return Ok("bitsandbytes".to_owned());
    }
    if keys.get("config_groups").is_some() {
        return Ok("compressed-tensors".to_owned());
    }
    Err(QuantizationError::NoMethod)
}

#[cfg(test)]
mod tests;
