//! `fully_shard`: parameters in shards along their first dimension, gathered unit by unit.
//!
//! Follows torch/distributed/fsdp/_fully_shard/{_fsdp_state,_fsdp_param_group,_fsdp_collectives}.py of torch 2.11.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use super::shares;
use super::units::Units;
use super::{Wrapped, Wrapper};
use crate::dtype::DType;
use crate::memory::autograd::{Edge, Leaf, Node};
use crate::memory::log::{Category, Storage, Stream};
use crate::memory::lower::hooks::Hooks;
use crate::memory::optimizer::Trained;
use crate::memory::tensor::{Tensor, contiguous_strides};
use crate::memory::torch::Torch;
use crate::model::op::ModuleId;
use crate::model::{Program, Shape};
use crate::plan::parallel::Fsdp2;

/// Where a unit is in a step (`TrainingState`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Forward,
    PreBackward,
    PostBackward,
}

/// One parameter (`FSDPParam`).
struct Parameter {
    /// The whole of it: a storage that is filled while the unit is gathered.
    whole: Tensor,
    /// Where autograd puts the gradient of the whole.
    whole_leaf: Option<Rc<Leaf>>,
    /// Where the gradient of the shard is.
    shard_leaf: Option<Rc<Leaf>>,
    /// The shard's sizes, padded.
    shard: Shape,
}

/// Parameters that are gathered and reduced together (`FSDPParamGroup`).
struct Unit {
    parameters: Vec<Parameter>,
    state: Cell<State>,
    gathered: Cell<bool>,
    /// The flat buffer of a gather that was begun.
    flat: RefCell<Option<Tensor>>,
    /// Places in the order of forward passes.
    places: RefCell<Vec<usize>>,
    reshard_after_forward: bool,
    /// Elements of its shards.
    elements: u64,
}

/// The engine.
pub(super) struct FullyShard {
    units: Vec<Unit>,
    modules: Units,
    world: u64,
    /// The type of shards, of gathered parameters and of reductions.
    types: Types,
    /// The flat buffer that the next gather's copy-out releases.
    last_flat: RefCell<Option<Tensor>>,
    /// The input of the last reduction.
    last_reduction: RefCell<Option<Tensor>>,
    order: RefCell<Vec<usize>>,
    this: Weak<FullyShard>,
}

#[derive(Clone, Copy)]
struct Types {
    shard: DType,
    gathered: DType,
    reduce: DType,
}

/// Shards a loaded model, layer by layer and the root last.
pub(super) fn wrap(
    torch: &mut Torch,
    program: &Program,
    (mut parameters, trained): (Vec<Tensor>, Vec<Trained>),
    options: &Fsdp2,
    world: u64,
) -> Wrapped {
    drop(trained);
    let modules = Units::of(program, options.wrap);
    let shard = parameters.first().map_or(DType::F32, |first| first.dtype);
    let types = match options.mixed_precision {
        None => Types { shard, gathered: shard, reduce: shard },
        Some(types) => Types { shard, gathered: types.parameters, reduce: types.reduce },
    };
    let mut sharded = Vec::new();
    let mut units = Vec::new();
    for (place, members) in modules.parameters.iter().enumerate() {
        let mut unit = Vec::new();
        for &id in members {
            let whole = parameters[id.0 as usize].clone();
            let rows = whole.shape.sizes().first().copied().unwrap_or(1);
            let shape = if whole.shape.rank() == 0 {
                Shape::from([1])
            } else {
                whole.shape.with(0, shares::by_rows(rows, 1, world, 0).total())
            };
            let part = torch.in_category(Category::Weights, |torch| torch.fresh("shard", shape, types.shard));
            let gathered = torch.hollow("gathered parameter", whole.shape, shape.elements() * world, types.gathered);
            let (whole_leaf, shard_leaf, gathered) = if whole.needs_grad() {
                let (gathered, whole_leaf) = torch.leaf(gathered);
                let (part, shard_leaf) = torch.leaf(part.clone());
                sharded.push((id, Trained { tensor: part, leaf: Rc::clone(&shard_leaf) }));
                (Some(whole_leaf), Some(shard_leaf), gathered)
            } else {
                (None, None, gathered)
            };
            unit.push((id, part, Parameter { whole: gathered, whole_leaf, shard_leaf, shard: shape }));
        }
        // The whole parameters go when `fully_shard` returns.
        let mut kept = Vec::new();
        for (id, part, parameter) in unit {
            parameters[id.0 as usize] = parameter.whole.clone();
            kept.push((part, parameter));
        }
        let elements = kept.iter().map(|(_, parameter)| parameter.shard.elements()).sum();
        let root = place == modules.root();
        units.push((kept, elements, if root { options.reshard_root } else { options.reshard_after_forward }));
    }
    let mut shards = Vec::new();
    let units = units
        .into_iter()
        .map(|(kept, elements, reshard_after_forward)| {
            let mut members = Vec::new();
            for (part, parameter) in kept {
                shards.push(part);
                members.push(parameter);
            }
            Unit {
                parameters: members,
                state: Cell::new(State::Idle),
                gathered: Cell::new(false),
                flat: RefCell::default(),
                places: RefCell::default(),
                reshard_after_forward,
                elements,
            }
        })
        .collect();
    // Shards live as long as the run; the list of what the forward pass reads keeps them.
    parameters.extend(shards);
    sharded.sort_by_key(|(id, _)| *id);
    let engine = Rc::new_cyclic(|this| FullyShard {
        units,
        modules,
        world,
        types,
        last_flat: RefCell::default(),
        last_reduction: RefCell::default(),
        order: RefCell::default(),
        this: Weak::clone(this),
    });
    Wrapped { parameters, trained: sharded.into_iter().map(|(_, trained)| trained).collect(), engine }
}

impl Torch {
    /// A tensor whose storage is filled and emptied by hand; `elements` counts padding too.
    pub(super) fn hollow(&mut self, operation: &'static str, shape: Shape, elements: u64, dtype: DType) -> Tensor {
        let bytes = elements.saturating_mul(dtype.size());
        let make = |torch: &mut Self| Storage::hollow(&torch.log, operation, bytes, shape, dtype);
        let storage = self.in_category(Category::Communication, make);
        Tensor::new(storage, shape, contiguous_strides(&shape), dtype)
    }

    /// A flat buffer of a collective.
    pub(super) fn flat(&mut self, operation: &'static str, elements: u64, dtype: DType, stream: Stream) -> Tensor {
        self.on_stream(stream, |torch| {
            torch.in_category(Category::Communication, |torch| torch.fresh(operation, Shape::from([elements]), dtype))
        })
    }
}

impl FullyShard {
    /// Begins a gather (`unshard`).
    fn unshard(&self, torch: &mut Torch, unit: &Unit) {
        if unit.gathered.get() || unit.flat.borrow().is_some() || self.world == 1 {
            return;
        }
        let types = self.types;
        let narrow = (types.gathered != types.shard)
            .then(|| torch.flat("all-gather input", unit.elements, types.gathered, Stream::Gather));
        let flat = torch.flat("all-gather output", unit.elements * self.world, types.gathered, Stream::Gather);
        drop(narrow);
        *unit.flat.borrow_mut() = Some(flat);
    }

    /// Copies what was gathered out into the parameters (`wait_for_unshard`).
    fn wait_for_unshard(&self, torch: &mut Torch, unit: &Unit) {
        if unit.gathered.get() || (unit.flat.borrow().is_none() && self.world > 1) {
            return;
        }
        let forward = unit.state.get() == State::Forward;
        let previous = if forward { self.last_flat.take() } else { None };
        for parameter in &unit.parameters {
            let narrow = (self.world == 1 && self.types.gathered != self.types.shard)
                .then(|| torch.fresh("_to_copy", parameter.shard, self.types.gathered));
            parameter.whole.storage.fill();
            drop(narrow);
        }
        unit.gathered.set(true);
        let flat = unit.flat.take();
        if forward {
            *self.last_flat.borrow_mut() = flat;
        }
        drop(previous);
    }

    fn reshard(&self, unit: &Unit) {
        unit.parameters.iter().for_each(|parameter| parameter.whole.storage.empty());
        unit.gathered.set(false);
    }

    fn pre_forward(&self, torch: &mut Torch, at: usize) {
        let unit = &self.units[at];
        unit.state.set(State::Forward);
        self.unshard(torch, unit);
        self.wait_for_unshard(torch, unit);
    }

    fn post_forward(&self, at: usize, outputs: &[Tensor]) {
        let unit = &self.units[at];
        if unit.reshard_after_forward {
            self.reshard(unit);
        }
        let mut order = self.order.borrow_mut();
        unit.places.borrow_mut().push(order.len());
        order.push(at);
        unit.state.set(State::Idle);
        for edge in outputs.iter().filter_map(|output| output.edge.as_ref()) {
            let this = Weak::clone(&self.this);
            edge.node.run_before(Rc::new(move |torch: &mut Torch| {
                if let Some(this) = this.upgrade() {
                    this.pre_backward(torch, at);
                }
            }));
        }
    }

    fn pre_backward(&self, torch: &mut Torch, at: usize) {
        let unit = &self.units[at];
        if unit.state.get() == State::PreBackward {
            return;
        }
        unit.state.set(State::PreBackward);
        self.unshard(torch, unit);
        self.wait_for_unshard(torch, unit);
        // The unit that ran before this one comes next.
        let place = unit.places.borrow_mut().pop();
        let next =
            place.and_then(|place| place.checked_sub(1)).and_then(|place| self.order.borrow().get(place).copied());
        if let Some(next) = next {
            self.unshard(torch, &self.units[next]);
        }
    }

    fn post_backward(&self, torch: &mut Torch, at: usize) {
        let unit = &self.units[at];
        unit.state.set(State::PostBackward);
        let with_gradient: Vec<(&Parameter, Tensor)> =
            unit.parameters.iter().filter_map(|p| Some((p, p.whole_leaf.as_ref()?.grad.take()?))).collect();
        self.reshard(unit);
        if with_gradient.is_empty() {
            return;
        }
        drop(self.last_reduction.take());
        let elements: u64 = with_gradient.iter().map(|(p, _)| p.shard.elements()).sum();
        let Types { shard, reduce, .. } = self.types;
        let input = torch.flat("reduce-scatter input", elements * self.world, reduce, Stream::Default);
        let receivers: Vec<&Rc<Leaf>> = with_gradient.iter().filter_map(|(p, _)| p.shard_leaf.as_ref()).collect();
        drop(with_gradient);
        let mut output = torch.flat("reduce-scatter output", elements, reduce, Stream::Reduce);
        if reduce != shard {
            output = torch.flat("_to_copy", elements, shard, Stream::Reduce);
        }
        torch.log.borrow_mut().reclassify(output.storage.id(), Category::Gradients);
        for receiver in receivers {
            let mut slot = receiver.grad.borrow_mut();
            if slot.is_none() {
                let view = output.clone().with_layout(receiver.shape, receiver.strides);
                *slot = Some(view);
            }
        }
        *self.last_reduction.borrow_mut() = Some(input);
    }
}

impl Hooks for FullyShard {
    fn watches(&self, module: ModuleId) -> bool {
        self.modules.of_module.contains_key(&module)
    }

    fn before(&self, torch: &mut Torch, module: ModuleId, inputs: &mut [Tensor]) {
        let Some(&at) = self.modules.of_module.get(&module) else { return };
        self.pre_forward(torch, at);
        if inputs.is_empty() || !torch.grad_enabled {
            return;
        }
        // `RegisterPostBackwardFunction`: when the gradients of what came in are known, the unit is done.
        let next: Vec<Option<Edge>> = inputs.iter().map(|input| input.edge.clone()).collect();
        let this = Weak::clone(&self.this);
        let node = Node::new(
            torch,
            inputs.len(),
            next,
            Box::new(move |torch, gradients| {
                if let Some(this) = this.upgrade() {
                    this.post_backward(torch, at);
                }
                gradients
            }),
        );
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

impl Wrapper for FullyShard {
    fn before_forward(&self, torch: &mut Torch) {
        self.pre_forward(torch, self.modules.root());
    }

    fn after_forward(&self, _torch: &mut Torch, outputs: &[Tensor]) {
        let outputs: Vec<Tensor> = outputs.iter().filter(|output| output.needs_grad()).cloned().collect();
        self.post_forward(self.modules.root(), &outputs);
        drop(self.last_flat.take());
    }

    fn after_backward(&self, torch: &mut Torch) {
        let root = self.modules.root();
        for at in std::iter::once(root).chain(0..root) {
            if self.units[at].state.get() != State::PostBackward {
                self.post_backward(torch, at);
            }
            let unit = &self.units[at];
            unit.state.set(State::Idle);
            drop(unit.flat.take());
            unit.places.borrow_mut().clear();
        }
        self.order.borrow_mut().clear();
        drop(self.last_reduction.take());
    }

    fn hooks(self: Rc<Self>) -> Rc<dyn Hooks> {
        self
    }
}
