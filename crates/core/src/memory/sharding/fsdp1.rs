//! `FullyShardedDataParallel`: one flat parameter per unit, sharded as a whole (`use_orig_params=True`).
//!
//! Follows torch/distributed/fsdp/{_flat_param,_runtime_utils}.py of torch 2.11.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use super::shares;
use super::units::Units;
use super::{Wrapped, Wrapper};
use crate::dtype::DType;
use crate::memory::autograd::{Edge, Leaf, Node};
use crate::memory::log::{Category, Stream};
use crate::memory::lower::hooks::Hooks;
use crate::memory::optimizer::Trained;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{ModuleId, ParameterId};
use crate::model::{Program, Shape};
use crate::plan::parallel::{Fsdp1, Strategy};

/// A wrapped module's parameters (`FlatParamHandle`).
struct Handle {
    /// The gathered flat parameter, which every parameter of the unit is a view of.
    full: Tensor,
    /// Where autograd puts the gradients of those views.
    views: Vec<Rc<Leaf>>,
    /// Where the gradients of the parts on this card are.
    parts: Vec<Rc<Leaf>>,
    /// Elements of the shard, padding included.
    shard: u64,
    ran_pre_backward: Cell<bool>,
    place: Cell<Option<usize>>,
    reshard_after_forward: bool,
}

/// The engine.
pub(super) struct FlatShards {
    handles: Vec<Handle>,
    modules: Units,
    world: u64,
    shard_type: DType,
    gathered: DType,
    reduce: DType,
    order: RefCell<Vec<usize>>,
    /// Reduced gradients, which the flat parameters hold beyond `zero_grad` until the next forward pass begins.
    held: RefCell<Vec<Tensor>>,
    started: Cell<bool>,
    this: Weak<FlatShards>,
}

/// Flattens and shards a loaded model: the layers, then the root.
pub(super) fn wrap(
    torch: &mut Torch,
    program: &Program,
    (mut parameters, trained): (Vec<Tensor>, Vec<Trained>),
    options: &Fsdp1,
    world: u64,
) -> Wrapped {
    drop(trained);
    let modules = Units::of(program, options.wrap);
    let shard_type = parameters.first().map_or(DType::F32, |first| first.dtype);
    let types = options.mixed_precision.map_or((shard_type, shard_type), |types| (types.parameters, types.reduce));
    let mut on_card: Vec<(ParameterId, Trained)> = Vec::new();
    let mut handles = Vec::new();
    for (place, members) in modules.parameters.iter().enumerate() {
        let layout = flat_layout(members.iter().map(|id| parameters[id.0 as usize].elements()), shard_type, world);
        let flat = torch.fresh("cat", Shape::from([layout.elements]), shard_type);
        let full = torch.hollow("flat parameter", Shape::from([layout.elements]), layout.elements, types.0);
        let shard_size = layout.elements / world;
        let mut views = Vec::new();
        for &id in members {
            let (shape, trains) = (parameters[id.0 as usize].shape, parameters[id.0 as usize].needs_grad());
            let mut view = full.clone().with_shape(shape);
            if trains {
                let leaf: Rc<Leaf>;
                (view, leaf) = torch.leaf(view);
                leaf.stream.set(Stream::Gather);
                views.push(leaf);
            }
            parameters[id.0 as usize] = view;
        }
        let shard = torch
            .in_category(Category::Weights, |torch| torch.fresh("flat shard", Shape::from([shard_size]), shard_type));
        drop(flat);
        // Rank 0 has the first elements: whole parameters, and the first part of one more.
        let mut parts = Vec::new();
        for (&id, &start) in members.iter().zip(&layout.starts) {
            let here = shard_size.saturating_sub(start).min(program.parameters[id.0 as usize].shape.elements());
            if here > 0 && parameters[id.0 as usize].needs_grad() {
                let shape = Shape::from([here]);
                let (tensor, leaf) = torch.leaf(shard.clone().with_shape(shape));
                parts.push(Rc::clone(&leaf));
                on_card.push((id, Trained { tensor, leaf }));
            }
        }
        parameters.push(shard);
        handles.push(Handle {
            full,
            views,
            parts,
            shard: shard_size,
            ran_pre_backward: Cell::new(false),
            place: Cell::new(None),
            reshard_after_forward: options.strategy == Strategy::Full && place != modules.root(),
        });
    }
    let order_of = |id: &ParameterId| program.registration.iter().position(|known| known == id);
    on_card.sort_by_key(|(id, _)| order_of(id));
    let engine = Rc::new_cyclic(|this| FlatShards {
        handles,
        modules,
        world,
        shard_type,
        gathered: types.0,
        reduce: types.1,
        order: RefCell::default(),
        held: RefCell::default(),
        started: Cell::new(false),
        this: Weak::clone(this),
    });
    Wrapped { parameters, trained: on_card.into_iter().map(|(_, trained)| trained).collect(), engine }
}

/// Where parameters lie in a flat one.
struct FlatLayout {
    starts: Vec<u64>,
    elements: u64,
}

/// Every parameter begins at 16 bytes, and the whole divides by the world.
fn flat_layout(sizes: impl Iterator<Item = u64>, dtype: DType, world: u64) -> FlatLayout {
    let align = (16 / dtype.size()).max(1);
    let mut starts = Vec::new();
    let mut elements: u64 = 0;
    for size in sizes {
        elements = elements.next_multiple_of(align);
        starts.push(elements);
        elements = elements.saturating_add(size);
    }
    FlatLayout { starts, elements: shares::of_flat(elements, 1, world, 0).total() * world.max(1) }
}

impl FlatShards {
    fn unshard(&self, torch: &mut Torch, at: usize) {
        let handle = &self.handles[at];
        if handle.full.storage.is_alive() {
            return;
        }
        let narrow = (self.gathered != self.shard_type)
            .then(|| torch.flat("low precision shard", handle.shard, self.gathered, Stream::Cast));
        torch.on_stream(Stream::Gather, |_| handle.full.storage.fill());
        drop(narrow);
    }

    fn pre_backward(&self, torch: &mut Torch, at: usize) {
        let handle = &self.handles[at];
        if handle.ran_pre_backward.replace(true) {
            return;
        }
        self.unshard(torch, at);
        let next = handle.place.get().and_then(|place| place.checked_sub(1));
        let next = next.and_then(|place| self.order.borrow().get(place).copied());
        if let Some(next) = next.filter(|next| !self.handles[*next].ran_pre_backward.get()) {
            self.unshard(torch, next);
        }
    }

    fn post_forward(&self, at: usize, outputs: &[Tensor]) {
        let handle = &self.handles[at];
        let mut order = self.order.borrow_mut();
        handle.place.set(Some(order.len()));
        order.push(at);
        if handle.reshard_after_forward {
            handle.full.storage.empty();
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
        let gradients: Vec<Tensor> = handle.views.iter().filter_map(|leaf| leaf.grad.take()).collect();
        if gradients.is_empty() {
            handle.full.storage.empty();
            return;
        }
        // The views were split off on the stream that gathers, so autograd joins their gradients there.
        let whole = torch.flat("cat", handle.shard * self.world, self.gathered, Stream::Gather);
        drop(gradients);
        handle.full.storage.empty();
        let wide = (self.reduce != self.gathered)
            .then(|| torch.flat("_to_copy", handle.shard * self.world, self.reduce, Stream::Reduce));
        let mut reduced = torch.flat("reduce-scatter output", handle.shard, self.reduce, Stream::Reduce);
        if self.reduce != self.shard_type {
            reduced = torch.flat("_to_copy", handle.shard, self.shard_type, Stream::Reduce);
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
            let shard = self.handles[at].shard;
            if self.gathered != self.shard_type {
                drop(torch.flat("low precision shard", shard, self.gathered, Stream::Default));
            }
            drop(torch.flat("flat parameter", shard * self.world, self.gathered, Stream::Default));
            if self.gathered != self.shard_type {
                drop(torch.flat("flat parameter", shard * self.world, self.shard_type, Stream::Default));
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
        self.unshard(torch, at);
        if inputs.is_empty() || !torch.grad_enabled {
            return;
        }
        // The views come from one split of the flat parameter, made before the module runs: its turn in backward is when
        // all that the module did is done.
        let next: Vec<Option<Edge>> = inputs.iter().map(|input| input.edge.clone()).collect();
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
}

impl Wrapper for FlatShards {
    fn before_forward(&self, torch: &mut Torch) {
        if !self.started.replace(true) {
            self.lazy_init(torch);
        }
        self.held.borrow_mut().clear();
        self.unshard(torch, self.modules.root());
    }

    fn after_forward(&self, _torch: &mut Torch, outputs: &[Tensor]) {
        let outputs: Vec<Tensor> = outputs.iter().filter(|output| output.needs_grad()).cloned().collect();
        self.post_forward(self.modules.root(), &outputs);
    }

    fn after_backward(&self, torch: &mut Torch) {
        let root = self.modules.root();
        for at in std::iter::once(root).chain(0..root) {
            self.post_backward(torch, at);
            self.handles[at].ran_pre_backward.set(false);
            self.handles[at].place.set(None);
        }
        self.order.borrow_mut().clear();
    }

    fn hooks(self: Rc<Self>) -> Rc<dyn Hooks> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_parameters_are_aligned_and_divide_by_the_world() {
        let layout = flat_layout([3, 8, 5].into_iter(), DType::BF16, 4);
        assert_eq!(layout.starts, [0, 8, 16]);
        assert_eq!(layout.elements, 24);
    }
}
