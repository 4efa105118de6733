//! Engines that go along where layers are written down, not run (see [`super::fold`]).

use std::ops::Range;
use std::rc::Rc;

use super::autograd::Leaf;
use super::log::{SharedLog, Storage, StorageId};
use super::tensor::Tensor;

/// An engine whose hooks do in every layer what they did in the one before it.
pub trait Along {
    /// What one layer leaves to the next.
    fn left(&self) -> Vec<Option<StorageId>>;

    /// What collects gradients of the layers among some modules.
    fn leaves(&self, modules: Range<u32>) -> Vec<Rc<Leaf>>;

    /// Layers went forward as others before them; whether it could follow.
    fn forward(&self, copies: &Copies) -> bool;

    /// Layers went back as others before them; whether it could follow.
    fn back(&self, copies: &Copies) -> bool;

    /// What a layer that went back keeps besides gradients until the pass is over, and what such a one of another layer is.
    fn keep(&self, _modules: Range<u32>, _again: Range<u32>, _name: &mut dyn FnMut(&Tensor) -> Option<Tensor>) {}
}

/// Units of layers that were written down as one that was run.
pub struct Copies<'a> {
    pub log: &'a SharedLog,
    /// The modules of the unit that was run.
    pub modules: Range<u32>,
    /// How modules are named one unit on.
    pub by: i64,
    /// The storages that it made.
    pub made: Range<u32>,
    pub count: u32,
}

impl Copies<'_> {
    /// The modules of every copy, in order.
    pub fn all(&self) -> impl Iterator<Item = Range<u32>> {
        let named = |module: u32, copy: u32| (i64::from(module) + self.by * i64::from(copy)) as u32;
        (1..=self.count).map(move |copy| named(self.modules.start, copy)..named(self.modules.end, copy))
    }

    /// What the unit left to the next is left by the last copy instead: that one's own the copies free.
    pub fn renew(&self, tensor: Tensor) -> Option<Tensor> {
        let id = tensor.storage.id();
        if !self.made.contains(&id.0) || Rc::strong_count(&tensor.storage) > 1 {
            return None;
        }
        tensor.storage.forget();
        let storage = Storage::known(self.log, StorageId(id.0 + self.count * (self.made.end - self.made.start)));
        Some(Tensor { storage, ..tensor })
    }
}
