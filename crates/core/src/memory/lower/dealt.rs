//! Modules on several cards, on the host or on disk: what the hooks of accelerate's `dispatch_model` do (hooks.py,
//! `AlignDevicesHook`). What a module reads is copied to its card; weights that are elsewhere come over for its forward pass, and
//! every one that comes empties torch's cache (`set_module_tensor_to_device`).

use std::collections::BTreeMap;
use std::rc::Rc;

use super::Runner;
use super::variables::Frames;
use crate::memory::log::{Category, Event};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{ModuleId, ValueId};
use crate::plan::device_map::Holder;

/// The card of what is on none.
pub const NOWHERE: u8 = u8::MAX;

/// Where modules are.
#[derive(Debug)]
pub struct Dealt {
    /// By their names, or those of modules around them.
    pub map: BTreeMap<String, Holder>,
    /// The card that runs what is on none, and that inputs are on.
    pub main: u8,
}

impl Dealt {
    /// The longest name of the map that leads to a name says where it is.
    pub fn holder(&self, name: &str) -> Holder {
        let mut part = name;
        loop {
            match (self.map.get(part), part.rsplit_once('.')) {
                (Some(found), _) => return *found,
                (None, Some((parent, _))) => part = parent,
                (None, None) if part.is_empty() => return Holder::Card(self.main),
                (None, None) => part = "",
            }
        }
    }

    fn card(&self, holder: Holder) -> u8 {
        match holder {
            Holder::Card(card) => card,
            Holder::Host | Holder::Disk => self.main,
        }
    }
}

/// A module under way.
pub(in crate::memory) struct Arrived {
    module: ModuleId,
    before: u8,
    /// What its caller has in place of the copies.
    values: Vec<(ValueId, Tensor)>,
    _weights: Vec<Tensor>,
}

/// An operation of a module that is one by itself.
pub(super) struct Visit {
    before: Option<u8>,
    weights: Vec<Tensor>,
}

impl Visit {
    pub(super) fn end(self, torch: &mut Torch) {
        drop(self.weights);
        if let Some(before) = self.before {
            torch.log.borrow_mut().set_card(before);
        }
    }
}

impl Runner {
    /// The same with modules where a map has them.
    pub fn dealt(self, dealt: Option<Rc<Dealt>>) -> Self {
        Self { dealt, ..self }
    }

    /// A module begins at step `at`.
    pub(super) fn arrive(&self, torch: &mut Torch, frames: &mut Frames, module: ModuleId, at: usize) {
        let Some(dealt) = &self.dealt else { return };
        let (card, weights) = self.come(torch, dealt, module);
        let before = torch.log.borrow_mut().set_card(card);
        // Code around the modules of a map runs where they are, whoever calls them.
        let mut values = Vec::new();
        if dealt.map.contains_key(&self.program.modules[module.0 as usize].path) {
            for (value, tensor) in self.captured(frames, &(at + 1..self.exits[at])) {
                if let Some(copy) = copied(torch, &tensor, card) {
                    frames.values[value] = Some(copy);
                    values.push((value, tensor));
                }
            }
        }
        frames.arrived.push(Arrived { module, before, values, _weights: weights });
    }

    /// A module ends.
    pub(super) fn depart(&self, torch: &mut Torch, frames: &mut Frames, module: ModuleId) {
        if self.dealt.is_none() || frames.arrived.last().is_none_or(|arrived| arrived.module != module) {
            return;
        }
        let Some(arrived) = frames.arrived.pop() else { return };
        torch.log.borrow_mut().set_card(arrived.before);
        for (value, tensor) in arrived.values {
            if let Some(now) = frames.values[value].as_mut() {
                *now = tensor;
            }
        }
    }

    /// An operation begins: a leaf's own, or one of the module that is under way.
    pub(super) fn visit(
        &self,
        torch: &mut Torch,
        frames: &Frames,
        module: ModuleId,
        taken: &mut [Option<Tensor>],
    ) -> Visit {
        let Some(dealt) = &self.dealt else { return Visit { before: None, weights: Vec::new() } };
        if frames.arrived.iter().any(|arrived| arrived.module == module) {
            return Visit { before: None, weights: Vec::new() };
        }
        let (card, weights) = self.come(torch, dealt, module);
        let before = torch.log.borrow_mut().set_card(card);
        for tensor in taken.iter_mut().flatten() {
            if let Some(copy) = copied(torch, tensor, card) {
                *tensor = copy;
            }
        }
        Visit { before: Some(before), weights }
    }

    /// What a model returns goes to the card that its inputs are on.
    pub(super) fn bring_back(&self, torch: &mut Torch, tensor: Tensor) -> Tensor {
        match &self.dealt {
            Some(dealt) => copied(torch, &tensor, dealt.main).unwrap_or(tensor),
            None => tensor,
        }
    }

    /// The card that a module runs on, and its own weights, brought there where they are on none.
    fn come(&self, torch: &mut Torch, dealt: &Dealt, module: ModuleId) -> (u8, Vec<Tensor>) {
        let module = &self.program.modules[module.0 as usize];
        let holder = dealt.holder(&module.path);
        let card = dealt.card(holder);
        let mut weights = Vec::new();
        if !matches!(holder, Holder::Card(_)) {
            let before = torch.log.borrow_mut().set_card(card);
            torch.in_category(Category::Weights, |torch| {
                for id in &module.parameters {
                    let own = self.parameter(*id);
                    let (shape, dtype) = (own.shape, own.dtype);
                    weights.push(torch.fresh("brought over", shape, dtype));
                    torch.log.borrow_mut().events.push(Event::EmptyCache);
                }
            });
            torch.log.borrow_mut().set_card(before);
        }
        (card, weights)
    }
}

/// A copy on another card, where a tensor is not there already.
fn copied(torch: &mut Torch, tensor: &Tensor, card: u8) -> Option<Tensor> {
    if !tensor.storage.is_in(&torch.log) {
        return None;
    }
    let here = torch.log.borrow().storages.get(tensor.storage.id().0 as usize)?.card;
    if here == card || here == NOWHERE {
        return None;
    }
    let before = torch.log.borrow_mut().set_card(card);
    let copy = torch.fresh_like("to another card", tensor, tensor.dtype);
    torch.log.borrow_mut().set_card(before);
    Some(copy)
}
