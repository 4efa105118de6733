//! `from_pretrained` straight onto the card (`device_map`), as transformers 5 does it (core_model_loading.py).
//!
//! First one block of the size of all weights is taken and given back, so that the driver is asked once
//! (`caching_allocator_warmup`). Then tensors come by name, digits counted as numbers; one that is quantised on the way is on
//! the card in full until its packed form is there.

use std::collections::BTreeMap;

use super::adapters;
use super::log::Category;
use super::outliers;
use super::tensor::Tensor;
use super::torch::Torch;
use super::torch::quantised::QuantisedWeight;
use crate::dtype::DType;
use crate::model::op::ParameterId;
use crate::model::{Module, Program, Shape};
use crate::plan::{Quantization, QuantizationScheme};

/// What a checkpoint calls otherwise: a beginning of the model's names, and its own.
pub(super) type Names<'a> = &'a [(&'a str, &'a str)];

/// Parameters by id, and those that are held in few bits.
pub(super) fn from_pretrained(
    torch: &mut Torch,
    program: &Program,
    weights: DType,
    scheme: Option<&Quantization>,
    names: Names<'_>,
) -> (Vec<Tensor>, BTreeMap<ParameterId, QuantisedWeight>) {
    let mut modules: BTreeMap<ParameterId, &Module> = BTreeMap::new();
    if let Some(scheme) = scheme {
        for module in program.modules.iter().filter(|module| adapters::is_quantised(module, scheme)) {
            module.parameters.first().map(|id| modules.insert(*id, module));
        }
    }
    let probabilities = scheme.map(|scheme| outliers::probabilities(program, scheme)).unwrap_or_default();
    let mut order: Vec<ParameterId> = program.registration.clone();
    order.sort_by_cached_key(|id| natural(&stored_name(&program.parameters[id.0 as usize].name, names)));
    warm_up(torch, program, (weights, scheme), &modules);
    let mut parameters: Vec<Option<Tensor>> = vec![None; program.parameters.len()];
    let mut quantised = BTreeMap::new();
    let owners = program.owners();
    for id in order {
        let shape = program.parameters[id.0 as usize].shape;
        torch.set_module(owners[id.0 as usize]);
        let whole = torch.fresh("parameter", shape, weights);
        let (Some(module), Some(scheme)) = (modules.get(&id), scheme) else {
            parameters[id.0 as usize] = Some(whole);
            continue;
        };
        let mut weight = torch.quantise(adapters::linear_shape(module, shape), weights, scheme);
        weight.outlier_probability = probabilities.get(&id).copied().unwrap_or(0.0);
        quantised.insert(id, weight);
        drop(whole);
    }
    torch.set_module(0);
    let stand_in = |torch: &mut Torch, at: usize| torch.phantom(program.parameters[at].shape, weights);
    let parameters = parameters.into_iter().enumerate();
    (parameters.map(|(at, one)| one.unwrap_or_else(|| stand_in(torch, at))).collect(), quantised)
}

/// One block for all, and gone again.
fn warm_up(
    torch: &mut Torch,
    program: &Program,
    (weights, scheme): (DType, Option<&Quantization>),
    quantised: &BTreeMap<ParameterId, &Module>,
) {
    let bytes = program.registration.iter().map(|id| {
        let elements = program.parameters[id.0 as usize].shape.elements();
        match scheme.filter(|_| quantised.contains_key(id)).map(|scheme| scheme.scheme) {
            Some(QuantizationScheme::Int8) => elements,
            Some(_) => elements / 2,
            None => elements.saturating_mul(weights.size()),
        }
    });
    let bytes: u64 = bytes.sum();
    let block =
        torch.in_category(Category::Temporaries, |torch| torch.fresh("warm-up", Shape::from([bytes / 2]), DType::F16));
    drop(block);
}

/// The name that a checkpoint has for a parameter.
fn stored_name(name: &str, names: Names<'_>) -> String {
    let other = names.iter().find_map(|(own, stored)| Some(format!("{stored}{}", name.strip_prefix(own)?)));
    other.unwrap_or_else(|| name.to_owned())
}

/// `dot_natural_key`: numbers by their size, before words.
fn natural(name: &str) -> Vec<(bool, u64, String)> {
    let part = |part: &str| match part.parse::<u64>() {
        Ok(number) => (false, number, String::new()),
        Err(_) => (true, 0, part.to_owned()),
    };
    name.split('.').map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::natural;

    #[test]
    fn numbers_are_counted() {
        let mut names = ["model.layers.10.a", "lm_head.weight", "model.layers.9.b", "model.embed_tokens.weight"];
        names.sort_by_cached_key(|name| natural(name));
        assert_eq!(names, ["lm_head.weight", "model.embed_tokens.weight", "model.layers.9.b", "model.layers.10.a"]);
    }
}
