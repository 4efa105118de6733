//! `merge_and_unload` of PEFT: linear by linear the product of its adapter is added, then the adapter goes.

use super::adapters::Loaded;
use super::log::Category;
use super::lower::LoraWeights;
use super::tensor::Tensor;
use super::torch::Torch;
use super::torch::quantised::QuantisedWeight;
use crate::dtype::DType;
use crate::model::op::ModuleId;
use crate::model::{Program, Shape};
use crate::plan::{Fault, PlanError, QuantizationScheme};

/// Refuses adapters whose merging is not simulated.
pub(super) fn check(loaded: &Loaded) -> Result<(), PlanError> {
    let what = match &loaded.wrapped {
        wrapped if !wrapped.lora_parameters.is_empty() => "merging adapters of parameters",
        wrapped if wrapped.lora.values().any(|weights| weights.magnitude.is_some()) => "merging DoRA",
        _ => return Ok(()),
    };
    Err(Fault::unsupported("job.merge", what).or_drop("job.merge").into())
}

/// Merges all adapters of a model that was loaded.
pub(super) fn run(torch: &mut Torch, program: &Program, loaded: &mut Loaded) {
    // What trains the adapters is not there when they are merged.
    loaded.trained.clear();
    let adapted: Vec<ModuleId> = loaded.wrapped.lora.keys().copied().collect();
    torch.grad_enabled = false;
    torch.in_category(Category::Temporaries, |torch| {
        // The loop's name holds an adapter until the next module has its turn.
        let mut last: Option<LoraWeights> = None;
        for module in adapted {
            drop(last.take());
            let Some(weights) = loaded.wrapped.lora.remove(&module) else { continue };
            let id = program.modules.get(module.0 as usize).and_then(|module| module.parameters.first().copied());
            let old = id.and_then(|id| Some((id, loaded.wrapped.quantised.remove(&id)?)));
            match old {
                Some((id, old)) => {
                    let merged = merge_quantised(torch, &weights, old);
                    loaded.wrapped.quantised.insert(id, merged);
                }
                None => drop(delta(torch, &weights)),
            }
            last = Some(weights);
        }
    });
    torch.grad_enabled = true;
}

/// `get_delta_weight`: the product, then scaled out of place.
fn delta(torch: &mut Torch, weights: &LoraWeights) -> Tensor {
    let (first, second) = (&weights.first, &weights.second);
    torch.use_blas();
    let product = torch.fresh("mm", Shape::from([second.shape.size(0), first.shape.size(1)]), first.dtype);
    torch.fresh_like("mul", &product, first.dtype)
}

/// In full, with the product added, to the host, and quantised on its way back.
fn merge_quantised(torch: &mut Torch, weights: &LoraWeights, old: QuantisedWeight) -> QuantisedWeight {
    let whole = match old.plan.scheme {
        QuantizationScheme::Int8 => {
            // `int8_vectorwise_dequant`: two products in fp32.
            let scaled = torch.fresh("mul", old.shape, DType::F32);
            let whole = torch.fresh("mul", old.shape, DType::F32);
            drop(scaled);
            whole
        }
        QuantizationScheme::Nf4 | QuantizationScheme::Fp4 => torch.in_full(&old),
    };
    let delta = delta(torch, weights);
    let sum =
        torch.fresh("add", old.shape, if delta.dtype.size() > whole.dtype.size() { delta.dtype } else { whole.dtype });
    // A 4-bit matrix goes back as it is and is packed on the card; an 8-bit one goes back in fp16.
    let back = (old.plan.scheme != QuantizationScheme::Int8).then(|| torch.fresh_like("_to_copy", &sum, sum.dtype));
    let merged = torch.quantise(old.shape, sum.dtype, &old.plan);
    drop((back, sum, delta, whole));
    QuantisedWeight { outlier_probability: old.outlier_probability, ..merged }
}
