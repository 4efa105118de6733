//! Models whose checkpoint is quantised: what their config's `quantization_config` puts on the card, and which code runs.

use std::collections::BTreeMap;

use super::tensor::Tensor;
use super::torch::Torch;
use super::torch::stored::{StoredKernel, StoredWeight};
use crate::dtype::DType;
use crate::model::op::ParameterId;
use crate::model::{Model, Program, Shape};
use crate::plan::{AdapterPlan, Fault, Gpu, PlanError, Quantization, QuantizationScheme, Targets, TrainPlan};
use crate::source::quantization::{self as source, Scheme};

/// How a quantised checkpoint is held and run.
#[derive(Debug, Clone)]
pub(super) enum Base {
    /// As bitsandbytes holds it: a plan's quantisation, stored already.
    BitsAndBytes(Box<Quantization>),
    /// As another library holds it.
    Stored(Box<source::Quantization>, StoredKernel),
    /// In full, after loading.
    Dense,
}

/// The quantised base of a model, where its config has one, and what a report should say of it.
pub(super) struct Found {
    pub(super) base: Base,
    pub(super) notes: Vec<String>,
}

impl Found {
    fn dense(notes: Vec<String>) -> Self {
        Self { base: Base::Dense, notes }
    }

    /// The quantisation as a plan says it, where bitsandbytes holds it.
    pub(super) fn bitsandbytes(&self) -> Option<Quantization> {
        match &self.base {
            Base::BitsAndBytes(quantization) => Some((**quantization).clone()),
            _ => None,
        }
    }

    /// What is stored by other libraries.
    pub(super) fn stored(&self) -> Option<(&source::Quantization, StoredKernel)> {
        match &self.base {
            Base::Stored(quantization, kernel) => Some((quantization, *kernel)),
            _ => None,
        }
    }
}

fn read(model: &Model) -> Result<Option<source::Quantization>, PlanError> {
    source::Quantization::from_config(model.config())
        .map_err(|error| Fault::unsupported("model", format!("this checkpoint ({error})")).or(IN_FULL).into())
}

/// What mends most that a quantised checkpoint stands in the way of.
const IN_FULL: &str = "take the checkpoint's weights in full (dequantize)";

/// A checkpoint that is quantised is not quantised again.
fn twice(description: &str) -> PlanError {
    Fault::new("quantization", format!("the model is quantised already ({description})"))
        .or_drop("quantization")
        .or(IN_FULL)
        .into()
}

/// What training finds. Adapters go beside what PEFT can adapt; what transformers cannot train quantised is dense.
pub(super) fn in_training(model: &Model, plan: &TrainPlan) -> Result<Found, PlanError> {
    let Some(quantization) = read(model)? else { return Ok(Found::dense(Vec::new())) };
    let description = &quantization.description;
    if plan.quantization.is_some() {
        return Err(twice(description));
    }
    let kernel = match quantization.scheme() {
        Scheme::BitsAndBytes => None,
        Scheme::Gptq { .. } => Some(StoredKernel::GptqTorch),
        Scheme::Awq => Some(StoredKernel::AwqDense),
        Scheme::Hqq { bits } => Some(StoredKernel::Hqq { bits }),
        Scheme::Fp8 | Scheme::Compressed | Scheme::Mxfp4 | Scheme::Other => {
            return Ok(Found::dense(vec![format!(
                "the checkpoint is quantised ({description}), which transformers does not train: taken in full \
                 (dequantize=True)"
            )]));
        }
    };
    match &plan.adapter {
        Some(AdapterPlan::Lora(lora)) if lora.dora && kernel.is_some() => {
            let problem = format!("PEFT has no DoRA on this base ({description})");
            return Err(Fault::new("adapter.dora", problem).or_drop("adapter.dora").or(IN_FULL).into());
        }
        Some(AdapterPlan::Lora(lora)) if lora.targets == Targets::AllLinear && kernel.is_some() => {
            let problem = format!("PEFT finds no linears for all-linear on this base ({description})");
            return Err(Fault::new("adapter.targets", problem).or("name the target modules").into());
        }
        Some(AdapterPlan::Other(other)) => {
            let what = format!("{} beside a quantised base ({description})", other.name());
            return Err(Fault::unsupported("adapter", what).or("use LoRA").or(IN_FULL).into());
        }
        Some(_) => {}
        None => {
            let problem = format!("the model is quantised ({description}): its weights cannot be trained themselves");
            return Err(Fault::new("adapter", problem).or("train an {adapter} beside them").or(IN_FULL).into());
        }
    }
    if plan.parallel.as_ref().is_some_and(|parallel| parallel.mesh.world() > 1) {
        let what = format!("a quantised base ({description}) on several cards");
        return Err(Fault::unsupported("parallel", what).or_drop("parallel").or(IN_FULL).into());
    }
    match kernel {
        None => Ok(Found { base: Base::BitsAndBytes(Box::new(as_plan(model))), notes: Vec::new() }),
        Some(kernel) => {
            let whose = match kernel {
                StoredKernel::GptqTorch => "gptqmodel's trainable kernel keeps each dense matrix for backward",
                StoredKernel::AwqDense => "gptqmodel's trainable kernel makes each dense matrix twice",
                _ => "each dense matrix is made twice",
            };
            let notes = vec![format!("base: {description}; {whose}")];
            Ok(Found { base: Base::Stored(Box::new(quantization), kernel), notes })
        }
    }
}

/// What inference finds.
pub(super) fn in_inference(model: &Model, asked: Option<&Quantization>, gpu: &Gpu) -> Result<Found, PlanError> {
    let Some(quantization) = read(model)? else { return Ok(Found::dense(Vec::new())) };
    let description = quantization.description.clone();
    if asked.is_some() {
        return Err(twice(&description));
    }
    let capability = gpu.capability.unwrap_or(90);
    let symmetric = model.config()["quantization_config"]["sym"] != false;
    let (kernel, note) = match quantization.scheme() {
        Scheme::BitsAndBytes => {
            return Ok(Found { base: Base::BitsAndBytes(Box::new(as_plan(model))), notes: Vec::new() });
        }
        Scheme::Gptq { bits } if matches!(bits, 4 | 8) && symmetric && capability >= 75 => {
            (StoredKernel::Marlin, "gptqmodel's Marlin kernel")
        }
        Scheme::Gptq { .. } => (StoredKernel::GptqTorch, "gptqmodel's torch kernel"),
        Scheme::Awq if capability >= 75 => (StoredKernel::Marlin, "gptqmodel's Marlin kernel"),
        Scheme::Awq => (StoredKernel::AwqDense, "gptqmodel's AWQ kernel"),
        Scheme::Hqq { bits } => (StoredKernel::Hqq { bits }, "hqq's torch backend"),
        Scheme::Fp8 => (StoredKernel::Fp8, "kernels from the hub (without the `kernels` package it does not run)"),
        Scheme::Mxfp4 if capability >= 75 => {
            (StoredKernel::Mxfp4, "kernels from the hub (without the `kernels` package: dequantize)")
        }
        Scheme::Mxfp4 => return Ok(Found::dense(vec![format!("{description}: dequantised, the card has no kernel")])),
        Scheme::Compressed => {
            return Ok(Found::dense(vec![format!(
                "{description}: compressed-tensors takes the weights in full at the first pass"
            )]));
        }
        Scheme::Other => {
            return Err(Fault::unsupported("model", format!("running {description}")).or(IN_FULL).into());
        }
    };
    let notes = vec![format!("base: {description}; {note}")];
    Ok(Found { base: Base::Stored(Box::new(quantization), kernel), notes })
}

/// A config's `BitsAndBytesConfig` as a plan says it.
fn as_plan(model: &Model) -> Quantization {
    let section = &model.config()["quantization_config"];
    let text = |key: &str| section[key].as_str();
    let scheme = match (section["load_in_8bit"] == true, text("bnb_4bit_quant_type")) {
        (true, _) => QuantizationScheme::Int8,
        (_, Some("nf4")) => QuantizationScheme::Nf4,
        _ => QuantizationScheme::Fp4,
    };
    let skip = section["llm_int8_skip_modules"].as_array();
    let default = Quantization::default();
    Quantization {
        scheme,
        double: section["bnb_4bit_use_double_quant"] == true,
        compute: text("bnb_4bit_compute_dtype").and_then(DType::parse).unwrap_or(default.compute),
        threshold: section["llm_int8_threshold"].as_f64().unwrap_or(default.threshold),
        skip: skip.map(|list| list.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect()),
        stored: true,
        ..default
    }
}

/// What of a model is held by another library: the parts on the card, by parameter. `parameters` gets stand-ins that take
/// no memory.
pub(super) fn load(
    torch: &mut Torch,
    program: &Program,
    weights: DType,
    (quantization, kernel): (&source::Quantization, StoredKernel),
) -> (Vec<Tensor>, BTreeMap<ParameterId, StoredWeight>) {
    let mut parameters: Vec<Option<Tensor>> = vec![None; program.parameters.len()];
    let mut stored = BTreeMap::new();
    for &id in &program.registration {
        let parameter = &program.parameters[id.0 as usize];
        let held = quantization.stored(&parameter.weight(weights)).ok().filter(|held| held.quantized);
        parameters[id.0 as usize] = Some(match held {
            None => torch.fresh("parameter", parameter.shape, weights),
            Some(held) => {
                // Marlin lays zeros and the order of groups aside when it repacks a matrix.
                let kept = |suffix: &str| kernel != StoredKernel::Marlin || !matches!(suffix, "qzeros" | "g_idx");
                let parts = held.parts.iter().filter(|part| kept(&part.suffix));
                let parts = parts.map(|part| torch.fresh("stored", flat(&part.shape), part.dtype)).collect();
                stored.insert(id, StoredWeight { parts, shape: parameter.shape, kernel });
                torch.phantom(parameter.shape, weights)
            }
        });
    }
    let stand_in = |torch: &mut Torch, index: usize| torch.phantom(program.parameters[index].shape, weights);
    let parameters = parameters.into_iter().enumerate();
    let parameters = parameters.map(|(index, tensor)| tensor.unwrap_or_else(|| stand_in(torch, index))).collect();
    (parameters, stored)
}

/// A part's elements as one list: its shape decides nothing here.
fn flat(shape: &[u64]) -> Shape {
    Shape::from([shape.iter().fold(1u64, |product, size| product.saturating_mul(*size))])
}
