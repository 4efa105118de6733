//! The caches of `generate` (transformers/cache_utils.py), and the masks that a pass over a cache needs.
//!
//! A dynamic layer joins old and new keys by `cat`, so both live for a moment; a static one is allocated whole at its
//! first use. A sliding layer of a dynamic cache keeps a *view* of the last positions: the whole prompt stays alive
//! until the next token makes a new tensor. An offloaded layer is on the card from the moment the layer before it is
//! updated until its own attention has run.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::Settings;
use crate::dtype::DType;
use crate::memory::log::{Category, Stream};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{CacheKind, CacheUpdate, Mask};
use crate::plan::{AttentionKind, CacheImplementation};

/// The cache of a run: one slot per layer that has one, in the order in which they are first used.
#[derive(Debug)]
pub struct Store {
    implementation: CacheImplementation,
    pub(super) slots: RefCell<Vec<Vec<Tensor>>>,
    /// Layers of a quantised cache: keys and values, each in parts.
    pub(super) packed: RefCell<Vec<Vec<Vec<Tensor>>>>,
    states: RefCell<Vec<Tensor>>,
    cursor: Cell<usize>,
    past: Cell<u64>,
    room: u64,
    layers: usize,
    /// Whether the loop that decodes has switched experts to batched products.
    batched_experts: Cell<bool>,
}

impl Store {
    /// An empty cache of so many layers that grow; a static one has room for `room` positions.
    pub fn new(implementation: CacheImplementation, room: u64, layers: usize) -> Rc<Self> {
        Rc::new(Self {
            implementation,
            slots: RefCell::default(),
            packed: RefCell::default(),
            states: RefCell::default(),
            cursor: Cell::new(0),
            past: Cell::new(0),
            room,
            layers,
            batched_experts: Cell::new(true),
        })
    }

    /// A pass begins, with so many positions cached.
    pub fn begin(&self, past: u64) {
        self.cursor.set(0);
        self.past.set(past);
    }

    /// Whether anything is kept from one pass to the next.
    pub fn keeps(&self) -> bool {
        self.implementation != CacheImplementation::None
    }

    /// Whether a pass goes on from earlier ones.
    pub fn decodes(&self) -> bool {
        self.past.get() > 0
    }

    /// Whether experts run as batched products: in the passes of `_sample` after the first, and only there
    /// (`_optimize_model_for_decode` of transformers/generation/utils.py).
    pub(super) fn batches_experts(&self) -> bool {
        self.decodes() && self.batched_experts.get()
    }

    /// Says whether later passes are those of `_sample` after its first.
    pub fn batch_experts(&self, batched: bool) {
        self.batched_experts.set(batched);
    }

    /// Every tensor is copied in a new order of sequences (`reorder_cache`, after each step of beam search).
    pub fn reorder(&self, torch: &mut Torch) {
        for tensor in self.slots.borrow_mut().iter_mut().flatten() {
            let chosen =
                torch.in_category(Category::Cache, |torch| torch.fresh("index_select", tensor.shape, tensor.dtype));
            *tensor = chosen;
        }
    }

    /// One [`crate::model::op::Op::Cache`]: what the layer gets back, of the sizes the program expects.
    pub(super) fn update(
        &self,
        torch: &mut Torch,
        update: &CacheUpdate,
        inputs: &[Option<Tensor>],
        shapes: &[Shape],
    ) -> Vec<Option<Tensor>> {
        let static_cache = self.implementation == CacheImplementation::Static;
        if let CacheImplementation::Quantized(how) = self.implementation {
            return self.update_quantised(torch, how, inputs, shapes);
        }
        match update.kind {
            CacheKind::State { elements } => self.keep_state(torch, elements, inputs),
            _ if self.implementation == CacheImplementation::None => inputs.to_vec(),
            CacheKind::Cross if inputs.is_empty() => {
                let slot = self.next_slot();
                self.slots.borrow()[slot].iter().cloned().map(Some).collect()
            }
            _ if self.implementation == CacheImplementation::Offloaded => self.update_offloaded(torch, inputs, shapes),
            CacheKind::Sliding(window) if static_cache => self.update_static_window(torch, window, inputs, shapes),
            _ if static_cache => self.update_static(torch, inputs, shapes),
            CacheKind::Sliding(_) => self.update_window(torch, inputs, shapes),
            _ => self.update_dynamic(torch, inputs, shapes),
        }
    }

    pub(super) fn next_slot(&self) -> usize {
        let slot = self.cursor.get();
        self.cursor.set(slot + 1);
        let mut slots = self.slots.borrow_mut();
        if slots.len() <= slot {
            slots.resize(slot + 1, Vec::new());
        }
        slot
    }

    /// A state of constant size is allocated at its first use and overwritten from then on.
    fn keep_state(&self, torch: &mut Torch, elements: u64, inputs: &[Option<Tensor>]) -> Vec<Option<Tensor>> {
        if let (false, Some(Some(x))) = (self.decodes(), inputs.first()) {
            let shape = Shape::from([x.shape.size(0), elements]);
            let state = torch.in_category(Category::Cache, |torch| torch.fresh("state", shape, x.dtype));
            self.states.borrow_mut().push(state);
        }
        inputs.to_vec()
    }

    /// `self.keys = cat([self.keys, keys])`, then the same for values.
    fn update_dynamic(&self, torch: &mut Torch, inputs: &[Option<Tensor>], shapes: &[Shape]) -> Vec<Option<Tensor>> {
        let slot = self.next_slot();
        self.joined(torch, slot, inputs, shapes)
    }

    fn joined(
        &self,
        torch: &mut Torch,
        slot: usize,
        inputs: &[Option<Tensor>],
        shapes: &[Shape],
    ) -> Vec<Option<Tensor>> {
        let mut made = Vec::new();
        for (index, (input, shape)) in inputs.iter().zip(shapes).enumerate() {
            let Some(input) = input else { continue };
            let joined = fresh(torch, "cat", *shape, input.dtype);
            let old = replace(&mut self.slots.borrow_mut()[slot], index, joined.clone());
            drop(old);
            made.push(Some(joined));
        }
        made
    }

    /// The next layer's keys and values come over on a stream of their own, this layer's grow and go to the host: what
    /// is left of them are sizes, and the tensors that attention still reads.
    fn update_offloaded(&self, torch: &mut Torch, inputs: &[Option<Tensor>], shapes: &[Shape]) -> Vec<Option<Tensor>> {
        let slot = self.next_slot();
        let next = (slot + 1) % self.layers.max(1);
        let host: Vec<Tensor> = self.slots.borrow().get(next).filter(|_| next != slot).cloned().unwrap_or_default();
        if !host.is_empty() {
            let over = torch.on_stream(Stream::Gather, |torch| {
                host.iter().map(|tensor| fresh(torch, "_to_copy", tensor.shape, tensor.dtype)).collect()
            });
            self.slots.borrow_mut()[next] = over;
        }
        let made = self.joined(torch, slot, inputs, shapes);
        let on_host = made.iter().flatten().map(|tensor| torch.phantom(tensor.shape, tensor.dtype)).collect();
        self.slots.borrow_mut()[slot] = on_host;
        made
    }

    /// Keys and values are both joined before either replaces what was there.
    fn update_window(&self, torch: &mut Torch, inputs: &[Option<Tensor>], shapes: &[Shape]) -> Vec<Option<Tensor>> {
        let slot = self.next_slot();
        let whole: Vec<Tensor> = inputs
            .iter()
            .flatten()
            .zip(shapes)
            .map(|(input, shape)| fresh(torch, "cat", *shape, input.dtype))
            .collect();
        let old = std::mem::replace(&mut self.slots.borrow_mut()[slot], whole.clone());
        drop(old);
        whole.into_iter().map(Some).collect()
    }

    /// Zeros for the whole length at the first use; then positions are copied in.
    fn update_static(&self, torch: &mut Torch, inputs: &[Option<Tensor>], shapes: &[Shape]) -> Vec<Option<Tensor>> {
        let slot = self.next_slot();
        if self.slots.borrow()[slot].is_empty() {
            let made =
                inputs.iter().flatten().zip(shapes).map(|(input, shape)| fresh(torch, "zeros", *shape, input.dtype));
            let made: Vec<Tensor> = made.collect();
            self.slots.borrow_mut()[slot] = made;
        }
        let length = inputs.iter().flatten().next().map_or(1, |x| x.shape.size(-2));
        let positions = torch.scratch("arange", length.saturating_mul(16));
        drop(positions);
        self.slots.borrow()[slot].iter().cloned().map(Some).collect()
    }

    /// A window of zeros at the first use. A prompt longer than it comes back as it is; a full window is rolled by one.
    fn update_static_window(
        &self,
        torch: &mut Torch,
        window: u64,
        inputs: &[Option<Tensor>],
        shapes: &[Shape],
    ) -> Vec<Option<Tensor>> {
        let slot = self.next_slot();
        let held = window.min(self.room);
        if self.slots.borrow()[slot].is_empty() {
            let made: Vec<Tensor> = inputs
                .iter()
                .flatten()
                .zip(shapes)
                .map(|(input, shape)| fresh(torch, "zeros", shape.with(-2, held), input.dtype))
                .collect();
            self.slots.borrow_mut()[slot] = made;
        }
        let new = inputs.iter().flatten().next().map_or(1, |x| x.shape.size(-2));
        if self.past.get() == 0 && new > held {
            return inputs.to_vec();
        }
        let slots: Vec<Tensor> = self.slots.borrow()[slot].clone();
        if self.past.get() >= held {
            let rolled: Vec<Tensor> = slots.iter().map(|t| torch.fresh("roll", t.shape, t.dtype)).collect();
            drop(rolled);
        }
        slots.into_iter().map(Some).collect()
    }

    /// The mask of a pass over this cache; `None` where SDPA does without (`_ignore_causal_mask_sdpa`).
    pub(super) fn mask(&self, torch: &mut Torch, kind: Mask, shape: Shape, settings: &Settings) -> Option<Tensor> {
        let [batch, queries, keys] = [0, 2, 3].map(|axis| shape.size(axis));
        let eager = settings.attention == AttentionKind::Eager;
        let (window, eager, kept) = match kind {
            Mask::Causal => (None, eager, false),
            Mask::CausalEager => (None, true, false),
            Mask::CausalKept => (None, eager, true),
            Mask::Sliding(window) | Mask::Chunked(window) => (Some(window), eager, false),
            Mask::SlidingEager(window) => (Some(window), true, false),
            Mask::Images(window) => (window, eager, true),
            Mask::Full | Mask::FullSliding(_) if !settings.padded => return None,
            Mask::Full => (None, eager, true),
            Mask::FullSliding(window) => (Some(window), eager, true),
        };
        let past = self.past.get();
        // A static cache has positions that hold nothing yet: the padded mask says so.
        let all_ones = !settings.padded && past.saturating_add(queries) >= keys;
        let aligned = (queries == 1 || queries == keys) && all_ones || past == 0 && !settings.padded;
        if !eager && !kept && aligned && window.is_none_or(|window| keys < window) {
            return None;
        }
        let square = Shape::from([1, 1, queries, keys]);
        let padding = torch.fresh("mask", Shape::from([batch, keys]), DType::Bool);
        let mut pattern = torch.fresh("le", square, DType::Bool);
        for _ in 0..if window.is_some() { 3 } else { 1 } {
            pattern = torch.fresh("__and__", square, DType::Bool);
        }
        let indices = torch.scratch("index", batch.saturating_mul(keys).saturating_mul(16));
        let picked = torch.fresh("index", Shape::from([batch, 1, 1, keys]), DType::Bool);
        drop(indices);
        let boolean = torch.fresh("mask", shape, DType::Bool);
        drop((padding, pattern, picked));
        if !eager {
            return Some(boolean);
        }
        let zero = torch.fresh("scalar_tensor", Shape::new(&[]), settings.weights);
        let float = torch.fresh("mask", shape, settings.weights);
        drop((zero, boolean));
        Some(float)
    }
}

fn fresh(torch: &mut Torch, operation: &'static str, shape: Shape, dtype: DType) -> Tensor {
    torch.in_category(Category::Cache, |torch| torch.fresh(operation, shape, dtype))
}

pub(super) fn replace(slot: &mut Vec<Tensor>, index: usize, tensor: Tensor) -> Option<Tensor> {
    match slot.get_mut(index) {
        Some(old) => Some(std::mem::replace(old, tensor)),
        None => {
            slot.push(tensor);
            None
        }
    }
}
