//! `FullyShardedDataParallel`: one flat parameter per unit, sharded as a whole (`use_orig_params=True`).
//!
//! Follows torch/distributed/fsdp/{_flat_param,_runtime_utils}.py of torch 2.11.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use super::flat_parameter::{Handle, flatten};
use super::host::OnHost;
use super::members::{self, Member};
use super::units::Units;
use crate::dtype::DType;
use crate::memory::adapters::Loaded;
use crate::memory::autograd::{Edge, Node};
use crate::memory::engine::Engine;
use crate::memory::log::{Category, Stream};
use crate::memory::lower::hooks::Hooks;
use crate::memory::optimizer::{Apart, Trained};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::ModuleId;
use crate::model::{Program, Shape};
use crate::plan::parallel::{BackwardPrefetch, Fsdp1, Strategy};

/// The engine.
pub(super) struct FlatShards {
    trained: Vec<Trained>,
    handles: Vec<Handle>,
    modules: Units,
    world: u64,
    replicas: u64,
    options: Fsdp1,
    /// Whether this backward pass reduces gradients.
    reduces: Cell<bool>,
    order: RefCell<Vec<usize>>,
    /// The order of the forward pass before this one, and how far this one is.
    last_order: RefCell<Vec<usize>>,
    /// Reduced gradients, which the flat parameters hold beyond `zero_grad` until the next forward pass begins; those
    /// that go to the host stay on the card until backward is over.
    held: RefCell<Vec<Tensor>>,
    started: Cell<bool>,
    this: Weak<FlatShards>,
}

/// Flattens and shards a loaded model: the layers, then the root.
pub(super) fn wrap(
    torch: &mut Torch,
    program: &Program,
    mut loaded: Loaded,
    options: &Fsdp1,
    (world, replicas): (u64, u64),
) -> (Loaded, Rc<FlatShards>, Vec<OnHost>) {
    // NO_SHARD: every card has the whole of every flat parameter.
    let world = if options.strategy == Strategy::No { 1 } else { world };
    let members = members::of(program, &loaded);
    loaded.trained.clear();
    let modules = Units::of(program, options.wrap, &members, &options.ignored);
    let mut members: Vec<Option<Member>> = members.into_iter().map(Some).collect();
    let mut trained = Vec::new();
    let mut handles = Vec::new();
    for (place, own) in modules.parameters.iter().enumerate() {
        let unit: Vec<(usize, Member)> =
            own.iter().filter_map(|&index| Some((index, members[index].take()?))).collect();
        let root = place == modules.root();
        handles.push(flatten(torch, &mut loaded, unit, options, world, root, &mut trained));
    }
    for (index, member) in members.into_iter().enumerate() {
        let Some(member) = member else { continue };
        if let Some(leaf) = member.leaf {
            trained.push((index, Trained { tensor: member.tensor, leaf, apart: member.apart }));
        }
    }
    crate::order::sort_by_key(&mut trained, |(index, _)| *index);
    let engine = Rc::new_cyclic(|this| FlatShards {
        trained: trained.into_iter().map(|(_, trained)| trained).collect(),
        handles,
        modules,
        world,
        replicas,
        options: options.clone(),
        reduces: Cell::new(true),
        order: RefCell::default(),
        last_order: RefCell::default(),
        held: RefCell::default(),
        started: Cell::new(false),
        this: Weak::clone(this),
    });
    for &at in &engine.modules.weights {
        // A unit of one parameter is done when that one's gradient is.
        for leaf in &engine.handles[at].views {
            let this = Rc::downgrade(&engine);
            *leaf.after.0.borrow_mut() = Some(Rc::new(move |torch: &mut Torch| {
                if let Some(this) = this.upgrade() {
                    this.post_backward(torch, at);
                }
            }));
        }
    }
    let offloaded = engine.handles.iter().filter(|handle| options.offload && !handle.views.is_empty());
    let on_host = offloaded.map(|handle| (Shape::from([handle.shard]), handle.dtype, Apart::default())).collect();
    (loaded, engine, on_host)
}

impl FlatShards {
    /// Whether units are whole on every card.
    fn is_whole(&self) -> bool {
        self.options.strategy == Strategy::No
    }

    /// The gathered parameter goes; one that is the card's own stays.
    fn empty(&self, handle: &Handle) {
        if !self.is_whole() || self.gathered_type(handle) != handle.dtype {
            handle.full.storage.empty();
        }
    }

    fn gathered_type(&self, handle: &Handle) -> DType {
        self.options.mixed_precision.map_or(handle.dtype, |types| types.parameters)
    }

    /// The unit that a weight is by itself; the second run of a checkpointed layer is not a pass of its own.
    fn unit_of(&self, torch: &Torch, weight: &Tensor) -> Option<usize> {
        if torch.recomputing.is_some() {
            return None;
        }
        let is_it = |at: &&usize| Rc::ptr_eq(&self.handles[**at].full.storage, &weight.storage);
        self.modules.weights.iter().find(is_it).copied()
    }

    fn unshard(&self, torch: &mut Torch, at: usize) {
        let handle = &self.handles[at];
        if handle.shard == 0 {
            return;
        }
        let gathered = self.gathered_type(handle);
        let casts = gathered != handle.dtype;
        if self.options.offload && !casts && handle.copy.borrow().is_none() {
            let copy = torch.flat("_to_copy", handle.shard, handle.dtype, Stream::Cast);
            *handle.copy.borrow_mut() = Some(copy);
        }
        if !handle.full.storage.is_alive() {
            let narrow = (casts && !self.is_whole())
                .then(|| torch.flat("low precision shard", handle.shard, gathered, Stream::Cast));
            if casts && self.options.offload {
                // It goes as soon as it is cast.
                drop(torch.flat("_to_copy", handle.shard, handle.dtype, Stream::Cast));
            }
            // Without shards the cast parameter is the one that is used.
            let stream = if self.is_whole() { Stream::Cast } else { Stream::Gather };
            torch.on_stream(stream, |_| handle.full.storage.fill());
            drop(narrow);
        }
        if self.options.flat_params {
            drop(handle.copy.take());
        }
    }

    fn pre_forward(&self, torch: &mut Torch, at: usize) {
        self.unshard(torch, at);
        if self.options.forward_prefetch {
            let last = self.last_order.borrow();
            let next = last.iter().position(|known| *known == at).and_then(|place| last.get(place + 1)).copied();
            if let Some(next) = next {
                self.unshard(torch, next);
            }
        }
    }

    fn pre_backward(&self, torch: &mut Torch, at: usize) {
        let handle = &self.handles[at];
        if handle.ran_pre_backward.replace(true) {
            return;
        }
        self.unshard(torch, at);
        if self.options.backward_prefetch == BackwardPrefetch::Pre {
            self.prefetch(torch, at);
        }
    }

    /// The unit that ran before this one in forward comes next.
    fn prefetch(&self, torch: &mut Torch, at: usize) {
        let next = self.handles[at].place.get().and_then(|place| place.checked_sub(1));
        let next = next.and_then(|place| self.order.borrow().get(place).copied());
        if let Some(next) = next.filter(|next| !self.handles[*next].ran_pre_backward.get()) {
            self.unshard(torch, next);
        }
    }

    fn post_forward(&self, at: usize, outputs: &[Tensor]) {
        let handle = &self.handles[at];
        let mut order = self.order.borrow_mut();
        if handle.shard > 0 {
            handle.place.set(Some(order.len()));
            order.push(at);
        }
        drop(handle.copy.take());
        if self.is_whole() || (self.options.strategy == Strategy::Full && !handle.root) {
            self.empty(handle);
        }
        for edge in outputs.iter().filter_map(|output| output.edge.as_ref()) {
            let this = Weak::clone(&self.this);
            edge.node.run_before(Rc::new(move |torch: &mut Torch| {
                if let Some(this) = this.upgrade() {
                    this.pre_backward(torch, at);
                }
            }));
        }
    }

    /// The gradients of the views are joined, the flat parameter goes, the joined gradient is reduced.
    fn post_backward(&self, torch: &mut Torch, at: usize) {
        let handle = &self.handles[at];
        let gathered = self.gathered_type(handle);
        let reduces = self.reduces.get();
        let frees = reduces || self.options.strategy == Strategy::Full;
        drop(handle.copy.take());
        if handle.views.iter().all(|leaf| leaf.grad.borrow().is_none()) {
            if frees {
                self.empty(handle);
            }
            return;
        }
        // The views were split off on the stream that gathers, so autograd joins their gradients there. A view that was
        // not used has zeros for one (`split_with_sizes_backward` of torch/csrc/autograd/FunctionsManual.cpp).
        let unused = handle.views.iter().filter(|leaf| leaf.grad.borrow().is_none());
        let zeros: Vec<Tensor> =
            unused.map(|leaf| torch.flat("zeros", leaf.shape.elements(), gathered, Stream::Gather)).collect();
        let gradients: Vec<Tensor> = handle.views.iter().filter_map(|leaf| leaf.grad.take()).collect();
        let mut whole = torch.flat("cat", handle.shard * self.world, gathered, Stream::Gather);
        drop((gradients, zeros));
        if let Some(waiting) = handle.waiting.take() {
            whole = waiting;
        }
        if frees {
            self.empty(handle);
        }
        if self.options.backward_prefetch == BackwardPrefetch::Post {
            self.prefetch(torch, at);
        }
        if !reduces {
            torch.log.borrow_mut().reclassify(whole.storage.id(), Category::Gradients);
            *handle.waiting.borrow_mut() = Some(whole);
            return;
        }
        let reduce = self.options.mixed_precision.map_or(handle.dtype, |types| types.reduce);
        let wide =
            (reduce != gathered).then(|| torch.flat("_to_copy", handle.shard * self.world, reduce, Stream::Reduce));
        let mut reduced = match self.is_whole() {
            // Summed in place.
            true => wide.clone().unwrap_or_else(|| whole.clone()),
            false => torch.flat("reduce-scatter output", handle.shard, reduce, Stream::Reduce),
        };
        if reduce != handle.dtype {
            let stream = if self.replicas > 1 { Stream::AllReduce } else { Stream::Reduce };
            reduced = torch.flat("_to_copy", handle.shard, handle.dtype, stream);
        }
        torch.log.borrow_mut().reclassify(reduced.storage.id(), Category::Gradients);
        if handle.parts.iter().all(|part| part.grad.borrow().is_none()) {
            self.held.borrow_mut().push(reduced.clone());
        }
        for part in &handle.parts {
            let mut slot = part.grad.borrow_mut();
            if slot.is_none() {
                *slot = Some(reduced.clone().with_layout(part.shape, part.strides));
            }
        }
        drop((whole, wide));
    }

    /// Buffers are made and emptied once, to fix their sizes (`init_flat_param_attributes`).
    fn lazy_init(&self, torch: &mut Torch) {
        let root = self.modules.root();
        for at in std::iter::once(root).chain(0..root) {
            let handle = &self.handles[at];
            let (shard, gathered) = (handle.shard, self.gathered_type(handle));
            if gathered != handle.dtype {
                drop(torch.flat("low precision shard", shard, gathered, Stream::Default));
            }
            if self.is_whole() {
                continue;
            }
            drop(torch.flat("flat parameter", shard * self.world, gathered, Stream::Default));
            if gathered != handle.dtype {
                drop(torch.flat("flat parameter", shard * self.world, handle.dtype, Stream::Default));
            }
        }
    }
}

impl Hooks for FlatShards {
    fn watches(&self, module: ModuleId) -> bool {
        self.modules.of_module.contains_key(&module)
    }

    fn before(&self, torch: &mut Torch, module: ModuleId, inputs: &mut [Tensor]) {
        let Some(&at) = self.modules.of_module.get(&module) else { return };
        self.pre_forward(torch, at);
        if inputs.is_empty() || !torch.grad_enabled {
            return;
        }
        // The views come from one split of the flat parameter, made before the module runs: its turn in backward is when
        // all that the module did is done.
        let next = inputs.iter().map(|input| input.edge.clone()).collect();
        let this = Weak::clone(&self.this);
        let work = move |torch: &mut Torch, gradients| {
            if let Some(this) = this.upgrade() {
                this.post_backward(torch, at);
            }
            gradients
        };
        let node = Node::new(torch, inputs.len(), next, Box::new(work));
        for (slot, input) in inputs.iter_mut().enumerate() {
            input.edge = Some(Edge { node: Rc::clone(&node), slot: slot as u8 });
        }
    }

    fn after(&self, _torch: &mut Torch, module: ModuleId, outputs: &[Tensor]) {
        if let Some(&at) = self.modules.of_module.get(&module) {
            self.post_forward(at, outputs);
        }
    }

    fn before_adapter(&self, torch: &mut Torch, weight: &Tensor, _input: &mut Tensor) {
        if let Some(at) = self.unit_of(torch, weight) {
            self.pre_forward(torch, at);
        }
    }

    fn after_adapter(&self, torch: &mut Torch, weight: &Tensor, output: &Tensor) {
        if let Some(at) = self.unit_of(torch, weight) {
            self.post_forward(at, std::slice::from_ref(output));
        }
    }
}

impl Engine for FlatShards {
    fn gathers(&self) -> bool {
        true
    }

    fn trained(&self) -> &[Trained] {
        &self.trained
    }

    fn hooks(self: Rc<Self>) -> Option<Rc<dyn Hooks>> {
        Some(self)
    }

    fn before_forward(&self, torch: &mut Torch, syncs: bool) {
        if !self.started.replace(true) {
            self.lazy_init(torch);
        }
        self.reduces.set(syncs);
        self.held.borrow_mut().clear();
        self.pre_forward(torch, self.modules.root());
    }

    fn after_forward(&self, _torch: &mut Torch, outputs: &[Tensor]) {
        let outputs: Vec<Tensor> = outputs.iter().filter(|output| output.needs_grad()).cloned().collect();
        self.post_forward(self.modules.root(), &outputs);
    }

    /// `FULL_STATE_DICT` with `offload_to_cpu` and `rank0_only`: unit by unit, in the shard's own type.
    fn save(&self, torch: &mut Torch, full: bool) -> u64 {
        let mut bytes: u64 = 0;
        for handle in self.handles.iter().filter(|_| full && !self.is_whole()) {
            let elements = handle.shard.saturating_mul(self.world);
            drop(torch.flat("flat parameter", elements, handle.dtype, Stream::Gather));
            bytes = bytes.saturating_add(elements.saturating_mul(handle.dtype.size()));
        }
        bytes
    }

    fn after_backward(&self, torch: &mut Torch) {
        let root = self.modules.root();
        for at in std::iter::once(root).chain(0..root) {
            self.post_backward(torch, at);
            self.handles[at].ran_pre_backward.set(false);
            self.handles[at].place.set(None);
        }
        self.last_order.replace(self.order.take());
        if self.options.offload || self.options.flat_params {
            self.held.borrow_mut().clear();
        }
    }
}
