//! `from_pretrained` straight onto the card (`device_map`), as transformers 5 does it (core_model_loading.py).
//!
//! First one block of the size of all weights is taken and given back, so that the driver is asked once
//! (`caching_allocator_warmup`). Then tensors come by name, digits counted as numbers; one that is quantised on the way is on
//! the card in full until its packed form is there. Threads bring all of them, ahead of the one that sets them in place: experts
//! that a checkpoint holds one by one are all there when the first are joined.

use std::collections::BTreeMap;

use super::adapters;
use super::log::Category;
use super::outliers;
use super::tensor::Tensor;
use super::torch::Torch;
use super::torch::quantised::QuantisedWeight;
use crate::dtype::DType;
use crate::model::facts::ExpertNames;
use crate::model::op::ParameterId;
use crate::model::{Module, Program, Shape};
use crate::plan::{Quantization, QuantizationScheme};

/// What a checkpoint calls otherwise.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Names {
    /// A beginning of the model's names, and its own.
    pub(super) beginnings: &'static [(&'static str, &'static str)],
    /// Those of experts that it holds one by one.
    pub(super) experts: Option<ExpertNames>,
}

/// A tensor of a checkpoint: a parameter, or a part of an expert.
struct Part {
    parameter: ParameterId,
    /// Which of the lists that are stacked and then joined.
    list: usize,
    shape: Shape,
}

/// Parameters by id, and those that are held in few bits.
pub(super) fn from_pretrained(
    torch: &mut Torch,
    program: &Program,
    weights: DType,
    scheme: Option<&Quantization>,
    names: Names,
) -> (Vec<Tensor>, BTreeMap<ParameterId, QuantisedWeight>) {
    let mut modules: BTreeMap<ParameterId, &Module> = BTreeMap::new();
    if let Some(scheme) = scheme {
        for module in program.modules.iter().filter(|module| adapters::is_quantised(module, scheme)) {
            module.parameters.first().map(|id| modules.insert(*id, module));
        }
    }
    let probabilities = scheme.map(|scheme| outliers::probabilities(program, scheme)).unwrap_or_default();
    let mut parts: Vec<(String, Part)> = program.registration.iter().flat_map(|id| held(program, *id, names)).collect();
    parts.sort_by_cached_key(|(name, _)| natural(name));
    let mut order: Vec<ParameterId> = Vec::new();
    let mut lists: BTreeMap<ParameterId, Vec<&Part>> = BTreeMap::new();
    for (_, part) in &parts {
        let all = lists.entry(part.parameter).or_default();
        if all.is_empty() {
            order.push(part.parameter);
        }
        all.push(part);
    }
    warm_up(torch, program, (weights, scheme), &modules);
    let mut parameters: Vec<Option<Tensor>> = vec![None; program.parameters.len()];
    let mut quantised = BTreeMap::new();
    let owners = program.owners();
    // One thread alone quantises on the way.
    let mut brought: BTreeMap<ParameterId, Vec<Tensor>> = BTreeMap::new();
    for (_, part) in parts.iter().filter(|_| scheme.is_none()) {
        torch.set_module(owners[part.parameter.0 as usize]);
        let tensor = torch.fresh("parameter", part.shape, weights);
        brought.entry(part.parameter).or_default().push(tensor);
    }
    for id in order {
        let shape = program.parameters[id.0 as usize].shape;
        torch.set_module(owners[id.0 as usize]);
        let parts = &lists[&id];
        let tensors = brought
            .remove(&id)
            .unwrap_or_else(|| parts.iter().map(|part| torch.fresh("parameter", part.shape, weights)).collect());
        let whole = joined(torch, parts, tensors, shape);
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

/// What a checkpoint holds for a parameter.
fn held(program: &Program, id: ParameterId, names: Names) -> Vec<(String, Part)> {
    let parameter = &program.parameters[id.0 as usize];
    let name = stored_name(&parameter.name, names);
    let whole = |name: String| vec![(name, Part { parameter: id, list: 0, shape: parameter.shape })];
    let Some((experts, (block, own))) = names.experts.zip(name.rsplit_once('.')) else { return whole(name) };
    let lists: Vec<&str> = experts.mapping.iter().filter(|(_, new)| *new == own).map(|(old, _)| *old).collect();
    if lists.is_empty() || !block.ends_with("experts") || parameter.shape.rank() != 3 {
        return whole(name);
    }
    let shape = Shape::from([parameter.shape.size(1) / lists.len() as u64, parameter.shape.size(2)]);
    let of_expert = |expert: u64| {
        let part = move |(list, old): (usize, &&str)| {
            (format!("{block}.{expert}.{old}.weight"), Part { parameter: id, list, shape })
        };
        lists.iter().enumerate().map(part).collect::<Vec<_>>()
    };
    (0..parameter.shape.size(0)).flat_map(of_expert).collect()
}

/// `MergeModulelist` and `Concatenate`: lists are stacked one after the other, each let go when the next is taken up, then joined.
fn joined(torch: &mut Torch, parts: &[&Part], mut tensors: Vec<Tensor>, shape: Shape) -> Tensor {
    if let (1, Some(only)) = (parts.len(), tensors.pop_if(|tensor| tensor.shape == shape)) {
        return only;
    }
    let count = parts.iter().map(|part| part.list).max().unwrap_or(0) + 1;
    let mut lists: Vec<Vec<Tensor>> = (0..count).map(|_| Vec::new()).collect();
    parts.iter().zip(tensors).for_each(|(part, tensor)| lists[part.list].push(tensor));
    let mut taken = Vec::new();
    let mut stacks: Vec<Tensor> = Vec::new();
    for list in lists {
        drop(std::mem::replace(&mut taken, list));
        let one = shape.with(1, shape.size(1) / count as u64);
        stacks.push(torch.fresh("stack", one, taken.first().map_or(DType::BF16, |first| first.dtype)));
    }
    drop(taken);
    match stacks.len() {
        1 => stacks.remove(0),
        _ => torch.fresh("cat", shape, stacks[0].dtype),
    }
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
fn stored_name(name: &str, names: Names) -> String {
    let other = names.beginnings.iter().find_map(|(own, stored)| Some(format!("{stored}{}", name.strip_prefix(own)?)));
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
