//! Layers that are written down, not run: what the engine holds of them is what it would hold.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use super::{FullyShard, Reshard, State, Unit};
use crate::memory::along::{Along, Copies};
use crate::memory::autograd::Leaf;
use crate::memory::log::StorageId;
use crate::memory::tensor::Tensor;
use crate::model::op::ModuleId;

impl FullyShard {
    /// Whether a layer leaves nothing to the next but a flat buffer and the input of a reduction.
    pub(super) fn goes_along(&self) -> bool {
        let lets_go = |reshard| match reshard {
            Reshard::Flag(lets_go) => lets_go,
            Reshard::To(ranks) => ranks >= self.world,
        };
        let is_plain = |unit: &Unit| unit.parameters.iter().all(|parameter| parameter.waiting.borrow().is_none());
        let mut layers = self.modules.of_module.values().map(|at| &self.units[*at]);
        self.reduces.get()
            && self.reshards.get()
            && !self.offload
            && self.modules.weights.is_empty()
            && !self.modules.of_module.is_empty()
            && layers.all(|unit| lets_go(unit.reshard) && is_plain(unit))
    }

    fn units_of(&self, modules: Range<u32>) -> impl DoubleEndedIterator<Item = usize> {
        self.modules.of_module.range(ModuleId(modules.start)..ModuleId(modules.end)).map(|(_, at)| *at)
    }
}

fn id(held: &RefCell<Option<Tensor>>) -> Option<StorageId> {
    held.borrow().as_ref().map(|tensor| tensor.storage.id())
}

impl Along for FullyShard {
    fn left(&self) -> Vec<Option<StorageId>> {
        let ahead = self.units.iter().find_map(|unit| id(&unit.flat));
        vec![ahead, id(&self.last_flat), id(&self.last_reduction)]
    }

    fn leaves(&self, modules: Range<u32>) -> Vec<Rc<Leaf>> {
        let parameters = self.units_of(modules).flat_map(|at| &self.units[at].parameters);
        parameters.filter_map(|parameter| parameter.shard_leaf.clone()).collect()
    }

    fn forward(&self, copies: &Copies) -> bool {
        copies.all().flat_map(|modules| self.units_of(modules)).for_each(|at| self.note_place(at));
        let Some(flat) = self.last_flat.take() else { return true };
        let renewed = copies.renew(flat);
        let follows = renewed.is_some();
        *self.last_flat.borrow_mut() = renewed;
        follows
    }

    fn back(&self, copies: &Copies) -> bool {
        // The unit behind the one that was run is gathered ahead: in its place the one behind the last copy.
        let ahead = self.units.iter().find(|unit| unit.flat.borrow().is_some());
        let place = ahead.and_then(|unit| unit.places.borrow().last().copied());
        let mut units = 0;
        for at in copies.all().flat_map(|modules| self.units_of(modules).rev()) {
            self.units[at].places.borrow_mut().pop();
            self.units[at].state.set(State::PostBackward);
            units += 1;
        }
        let mut follows = true;
        let mut renewed = |held: &RefCell<Option<Tensor>>| {
            let tensor = held.take()?;
            let renewed = copies.renew(tensor);
            follows &= renewed.is_some();
            renewed
        };
        let input = renewed(&self.last_reduction);
        let flat = ahead.and_then(|unit| renewed(&unit.flat));
        *self.last_reduction.borrow_mut() = input;
        if let Some(flat) = flat {
            let behind = place.and_then(|place| self.order.borrow().get(place.checked_sub(units)?).copied());
            match behind {
                Some(at) => *self.units[at].flat.borrow_mut() = Some(flat),
                None => follows = false,
            }
        }
        follows
    }

    fn keep(&self, own: Range<u32>, again: Range<u32>, name: &mut dyn FnMut(&Tensor) -> Option<Tensor>) {
        for (own, again) in self.units_of(own).zip(self.units_of(again)) {
            let kept = self.units[own].all_reduced.borrow().as_ref().and_then(&mut *name);
            *self.units[again].all_reduced.borrow_mut() = kept;
        }
    }
}
