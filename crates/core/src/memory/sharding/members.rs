//! The parameters of a loaded model in the order of `model.parameters()`, wherever they are used: plain, packed in few
//! bits, in an adapter, or as a trained copy.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use crate::memory::adapters::Loaded;
use crate::memory::autograd::Leaf;
use crate::memory::log::Category;
use crate::memory::lower::LoraWeights;
use crate::memory::optimizer::Apart;
use crate::memory::tensor::Tensor;
use crate::model::Program;
use crate::model::op::{ModuleId, ParameterId};

/// A parameter of the model as it is wrapped.
pub(super) struct Member {
    /// Its dotted name without what PEFT puts in between: what decides the unit it is in.
    pub(super) name: String,
    /// As it was loaded.
    pub(super) tensor: Tensor,
    /// Where its gradient goes, when it is trained.
    pub(super) leaf: Option<Rc<Leaf>>,
    /// Whether the optimizer treats it apart.
    pub(super) apart: Apart,
    /// Whether it belongs to an adapter.
    pub(super) adapter: bool,
    place: Place,
}

/// Where a parameter is used.
#[derive(Debug, Clone, Copy)]
enum Place {
    Model(ParameterId),
    Packed(ParameterId),
    Copy(ParameterId),
    Lora(ModuleId, Part),
    LoraParameter(ParameterId, Part),
}

/// A tensor of an adapter.
#[derive(Debug, Clone, Copy)]
enum Part {
    First,
    Second,
    Bias,
    Magnitude,
}

const PARTS: [Part; 4] = [Part::First, Part::Second, Part::Bias, Part::Magnitude];

impl Member {
    /// A trained parameter by its place in the list of all.
    pub(super) fn plain(index: usize, tensor: Tensor, leaf: Rc<Leaf>) -> Self {
        let place = Place::Model(ParameterId(index as u32));
        Self { name: String::new(), tensor, leaf: Some(leaf), apart: Apart::default(), adapter: false, place }
    }

    /// Whether it is trained.
    pub(super) fn trains(&self) -> bool {
        self.leaf.is_some()
    }

    /// Whether its elements are packed in few bits.
    pub(super) fn is_packed(&self) -> bool {
        matches!(self.place, Place::Packed(_))
    }

    /// The parameter of the model that it is, where it is one.
    pub(super) fn id(&self) -> Option<ParameterId> {
        match self.place {
            Place::Model(id) | Place::Packed(id) => Some(id),
            _ => None,
        }
    }

    /// What its memory is for.
    pub(super) fn category(&self) -> Category {
        if self.adapter { Category::Adapters } else { Category::Weights }
    }

    /// Puts another tensor where it is used.
    pub(super) fn replace(&self, loaded: &mut Loaded, tensor: Tensor) {
        let wrapped = &mut loaded.wrapped;
        match self.place {
            Place::Model(id) => loaded.parameters[id.0 as usize] = tensor,
            Place::Packed(id) => {
                if let Some(part) = wrapped.quantised.get_mut(&id).and_then(|weight| weight.parts.first_mut()) {
                    *part = tensor;
                }
            }
            Place::Copy(id) => {
                let copies = wrapped.copies.iter_mut().filter(|((_, known), _)| *known == id);
                copies.for_each(|(_, copy)| *copy = tensor.clone());
            }
            Place::Lora(module, part) => put(wrapped.lora.get_mut(&module), part, tensor),
            Place::LoraParameter(id, part) => put(wrapped.lora_parameters.get_mut(&id), part, tensor),
        }
    }
}

fn put(weights: Option<&mut LoraWeights>, part: Part, tensor: Tensor) {
    let Some(weights) = weights else { return };
    match part {
        Part::First => weights.first = tensor,
        Part::Second => weights.second = tensor,
        Part::Bias => weights.bias = Some(tensor),
        Part::Magnitude => weights.magnitude = Some(tensor),
    }
}

fn get(weights: &LoraWeights, part: Part) -> Option<&Tensor> {
    match part {
        Part::First => Some(&weights.first),
        Part::Second => Some(&weights.second),
        Part::Bias => weights.bias.as_ref(),
        Part::Magnitude => weights.magnitude.as_ref(),
    }
}

/// Everything `model.parameters()` lists: a module's own parameters, then those of its adapter.
pub(super) fn of(program: &Program, loaded: &Loaded) -> Vec<Member> {
    let wrapped = &loaded.wrapped;
    let mut adapted: BTreeMap<&str, Vec<ModuleId>> = BTreeMap::new();
    for module in wrapped.lora.keys() {
        adapted.entry(program.modules[module.0 as usize].path.as_str()).or_default().push(*module);
    }
    let trained = crate::order::map(loaded.trained.iter().map(|trained| (trained.tensor.storage.id(), trained)));
    let mut members = Vec::new();
    let mut copied = BTreeSet::new();
    let owner = |id: ParameterId| {
        let name = program.parameters[id.0 as usize].name.as_str();
        name.rsplit_once('.').map_or("", |(owner, _)| owner)
    };
    let mut ids = program.registration.iter().copied().peekable();
    while let Some(id) = ids.next() {
        let name = program.parameters[id.0 as usize].name.as_str();
        let mut push = |tensor: &Tensor, place: Place| {
            let adapter = !matches!(place, Place::Model(_) | Place::Packed(_));
            let own = trained.get(&tensor.storage.id());
            members.push(Member {
                name: name.to_owned(),
                tensor: tensor.clone(),
                leaf: own.map(|own| Rc::clone(&own.leaf)),
                apart: own.map_or(Apart::default(), |own| own.apart),
                adapter,
                place,
            });
        };
        match wrapped.quantised.get(&id).and_then(|weight| weight.parts.first()) {
            Some(packed) => push(packed, Place::Packed(id)),
            None => push(&loaded.parameters[id.0 as usize], Place::Model(id)),
        }
        if let Some(weights) = wrapped.lora_parameters.get(&id) {
            for part in PARTS {
                get(weights, part).into_iter().for_each(|tensor| push(tensor, Place::LoraParameter(id, part)));
            }
        }
        if let Some((_, copy)) = wrapped.copies.iter().find(|((_, known), _)| *known == id)
            && copied.insert(id)
        {
            push(copy, Place::Copy(id));
        }
        // A module's adapter comes after all that the module has itself.
        if ids.peek().is_none_or(|next| owner(*next) != owner(id)) {
            for module in adapted.remove(owner(id)).into_iter().flatten() {
                for part in PARTS {
                    let tensor = wrapped.lora.get(&module).and_then(|weights| get(weights, part));
                    tensor.into_iter().for_each(|tensor| push(tensor, Place::Lora(module, part)));
                }
            }
        }
    }
    members
}
