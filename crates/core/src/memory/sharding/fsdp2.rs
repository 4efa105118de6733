//! `fully_shard`: parameters in shards along their first dimension, gathered unit by unit.
//!
//! Follows torch/distributed/fsdp/_fully_shard/{_fsdp_state,_fsdp_param_group,_fsdp_collectives}.py of torch 2.11, and for what a
//! reduction reads torch/distributed/_composable/fsdp of torch 2.3 and 2.4.

mod folded;
mod hooks;
mod parameter;
mod staged;

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use super::host::OnHost;
use super::members::{self, Member};
use super::units::Units;
use crate::dtype::DType;
use crate::memory::adapters::Loaded;
use crate::memory::autograd::{Edge, Leaf, Node};
use crate::memory::log::{Category, Stream};
use crate::memory::optimizer::Trained;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Program;
use crate::plan::parallel::{Fsdp2, MixedPrecision, Reshard};
use crate::plan::{Package, Stack};
use parameter::{Parameter, shard};

/// Where a unit is in a step (`TrainingState`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Forward,
    PreBackward,
    PostBackward,
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
    reshard: Reshard,
    /// Parts on fewer cards that hold between forward and backward.
    kept: RefCell<Vec<Tensor>>,
    /// What is reduced over copies of the model.
    all_reduced: RefCell<Option<Tensor>>,
}

/// The engine.
pub(super) struct FullyShard {
    trained: Vec<Trained>,
    units: Vec<Unit>,
    modules: Units,
    world: u64,
    replicas: u64,
    offload: bool,
    /// The types of gathered parameters and of reductions, where they differ from the shards' and from each other.
    types: Option<MixedPrecision>,
    /// Whether this backward pass reduces gradients.
    reduces: Cell<bool>,
    /// Whether parameters go back to shards after it (`set_reshard_after_backward`).
    reshards: Cell<bool>,
    /// Whether what a reduction reads is made on its stream and freed when it has begun (before torch 2.5), or on the default stream
    /// and kept until the next one.
    reads_apart: bool,
    /// Whether what a pipeline's last reduction reads stays until the next step's first (before torch 2.7, whose
    /// `backward_maybe_with_nosync` ends a stage's backward pass as any other ends).
    lingers: bool,
    /// What gathers, reductions and reductions over copies run on.
    streams: Cell<[Stream; 3]>,
    /// The flat buffer that the next gather's copy-out releases.
    last_flat: RefCell<Option<Tensor>>,
    /// The input of the last reduction.
    last_reduction: RefCell<Option<Tensor>>,
    order: RefCell<Vec<usize>>,
    this: Weak<FullyShard>,
}

/// Shards a loaded model, layer by layer and the root last.
pub(super) fn wrap(
    torch: &mut Torch,
    program: &Program,
    mut loaded: Loaded,
    (options, stack): (&Fsdp2, &Stack),
    (world, replicas): (u64, u64),
) -> (Loaded, Rc<FullyShard>, Vec<OnHost>) {
    let members = members::of(program, &loaded);
    loaded.trained.clear();
    let modules = Units::of(program, options.wrap, &members, &options.ignored);
    let mut sharded = Vec::new();
    let mut shards = Vec::new();
    let mut on_host = Vec::new();
    let mut units = Vec::new();
    let mut members: Vec<Option<Member>> = members.into_iter().map(Some).collect();
    for (place, own) in modules.parameters.iter().enumerate() {
        let mut unit = Vec::new();
        // The whole parameters go when `fully_shard` returns.
        let mut wholes = Vec::new();
        for &index in own {
            let Some(member) = members[index].take() else { continue };
            // What is a matrix in a layer is one of a linear's.
            let bytes = options.float8_gather && place != modules.root() && member.tensor.shape.rank() == 2;
            let (parameter, part) = shard(torch, &member, (options, bytes), world);
            if let Some(part) = part {
                if let Some(leaf) = &parameter.shard_leaf {
                    sharded.push((index, Trained { tensor: part.clone(), leaf: Rc::clone(leaf), apart: member.apart }));
                }
                shards.push(part);
            } else if member.trains() {
                on_host.push((parameter.shard, parameter.dtype, member.apart));
            }
            member.replace(&mut loaded, parameter.whole.clone());
            unit.push(parameter);
            wholes.push(member);
        }
        units.push(Unit {
            parameters: unit,
            state: Cell::new(State::Idle),
            gathered: Cell::new(false),
            flat: RefCell::default(),
            places: RefCell::default(),
            reshard: match place {
                _ if place == modules.root() => options.reshard_root,
                // Backward begins where forward ends.
                _ if modules.ends.values().any(|end| end.is_tail && end.unit == place) => Reshard::Flag(false),
                _ => options.reshard_after_forward,
            },
            kept: RefCell::default(),
            all_reduced: RefCell::default(),
        });
    }
    // What the engine is to leave alone is trained as it is.
    for (index, member) in members.into_iter().enumerate() {
        let Some(member) = member else { continue };
        if let Some(leaf) = member.leaf {
            sharded.push((index, Trained { tensor: member.tensor, leaf, apart: member.apart }));
        }
    }
    // Shards live as long as the run; the list of what the forward pass reads keeps them.
    loaded.parameters.extend(shards);
    crate::order::sort_by_key(&mut sharded, |(index, _)| *index);
    let engine = Rc::new_cyclic(|this| FullyShard {
        trained: sharded.into_iter().map(|(_, trained)| trained).collect(),
        units,
        modules,
        world,
        replicas,
        offload: options.offload,
        types: options.mixed_precision,
        reduces: Cell::new(true),
        reshards: Cell::new(true),
        reads_apart: stack.before(Package::Torch, 2, 5, 0),
        lingers: stack.before(Package::Torch, 2, 7, 0),
        streams: Cell::new([Stream::Gather, Stream::Reduce, Stream::AllReduce]),
        last_flat: RefCell::default(),
        last_reduction: RefCell::default(),
        order: RefCell::default(),
        this: Weak::clone(this),
    });
    (loaded, engine, on_host)
}

impl FullyShard {
    fn gathered_type(&self, parameter: &Parameter) -> DType {
        if parameter.bytes { DType::F8E4M3 } else { self.computed_type(parameter) }
    }

    /// The type that gradients come in.
    fn computed_type(&self, parameter: &Parameter) -> DType {
        self.types.map_or(parameter.dtype, |types| types.parameters)
    }

    /// A shard as bytes (`fsdp_pre_all_gather`): its largest element, then its elements scaled and clamped.
    fn shard_as_bytes(torch: &mut Torch, elements: u64, dtype: DType, stream: Stream) -> Tensor {
        drop(torch.flat("abs", elements, dtype, stream));
        let _wide = ["mul", "clamp"].map(|name| torch.flat(name, elements, DType::F32, stream));
        torch.flat("_to_copy", elements, DType::F8E4M3, stream)
    }

    /// Begins a gather (`unshard`).
    fn unshard(&self, torch: &mut Torch, unit: &Unit) {
        self.unshard_on(torch, unit, self.streams.get()[0]);
    }

    fn unshard_on(&self, torch: &mut Torch, unit: &Unit, stream: Stream) {
        if unit.gathered.get() || unit.flat.borrow().is_some() || self.world == 1 || unit.parameters.is_empty() {
            return;
        }
        let kept = !unit.kept.borrow().is_empty();
        let ranks = match unit.reshard {
            Reshard::To(ranks) if kept => ranks,
            _ => self.world,
        };
        let part = |p: &Parameter| p.shard.elements().saturating_mul(self.world / ranks.max(1));
        // Shards come up from the host one by one and are cast; those on the card are cast together.
        let mut staged = Vec::new();
        let mut cast: u64 = 0;
        for parameter in &unit.parameters {
            let dtype = self.gathered_type(parameter);
            if parameter.bytes && !kept {
                staged.push(Self::shard_as_bytes(torch, part(parameter), parameter.dtype, stream));
            } else if self.offload && !kept {
                let mut copy = torch.flat("_to_copy", part(parameter), parameter.dtype, stream);
                if dtype != parameter.dtype {
                    copy = torch.flat("_to_copy", part(parameter), dtype, stream);
                }
                staged.push(copy);
            } else if dtype != parameter.dtype {
                cast = cast.saturating_add(part(parameter));
            }
        }
        if let (Some(types), true) = (self.types, cast > 0) {
            staged.push(torch.flat("all-gather input", cast, types.parameters, stream));
        }
        let first = self.gathered_type(&unit.parameters[0]);
        let uniform = unit.parameters.iter().all(|parameter| self.gathered_type(parameter) == first);
        // Parameters of several types are gathered as bytes.
        let (dtype, size) = if uniform { (first, first.size()) } else { (DType::U8, 1) };
        let bytes: u64 = unit.parameters.iter().map(|p| part(p).saturating_mul(self.gathered_type(p).size())).sum();
        let flat = torch.flat("all-gather output", (bytes / size).saturating_mul(ranks), dtype, stream);
        drop(staged);
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
            let dtype = self.gathered_type(parameter);
            let narrow =
                (self.world == 1 && dtype != parameter.dtype).then(|| torch.fresh("_to_copy", parameter.shard, dtype));
            parameter.whole.storage.fill();
            drop(narrow);
        }
        unit.gathered.set(true);
        unit.kept.borrow_mut().clear();
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

    /// After forward: all, a part on fewer cards, or nothing is let go.
    fn reshard_after_forward(&self, torch: &mut Torch, unit: &Unit) {
        match unit.reshard {
            Reshard::Flag(false) => {}
            Reshard::To(ranks) if ranks < self.world => {
                for parameter in &unit.parameters {
                    let elements = parameter.shard.elements().saturating_mul(self.world / ranks.max(1));
                    let dtype = self.gathered_type(parameter);
                    unit.kept.borrow_mut().push(torch.flat("clone", elements, dtype, Stream::Default));
                    parameter.whole.storage.empty();
                }
                unit.gathered.set(false);
            }
            Reshard::Flag(true) | Reshard::To(_) => self.reshard(unit),
        }
    }

    fn pre_forward(&self, torch: &mut Torch, at: usize) {
        let unit = &self.units[at];
        unit.state.set(State::Forward);
        self.unshard(torch, unit);
        self.wait_for_unshard(torch, unit);
    }

    fn post_forward(&self, torch: &mut Torch, at: usize, outputs: &[Tensor]) {
        let unit = &self.units[at];
        self.reshard_after_forward(torch, unit);
        self.note_place(at);
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

    fn note_place(&self, at: usize) {
        if !self.units[at].parameters.is_empty() {
            let mut order = self.order.borrow_mut();
            self.units[at].places.borrow_mut().push(order.len());
            order.push(at);
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

    /// `RegisterPostBackwardFunction`: when the gradients of what came in are known, the unit is done.
    fn end_with(&self, torch: &mut Torch, at: usize, edges: &mut [&mut Option<Edge>]) {
        if edges.is_empty() || !torch.grad_enabled {
            return;
        }
        let next = edges.iter().map(|edge| (**edge).clone()).collect();
        let this = Weak::clone(&self.this);
        let done = move |torch: &mut Torch, gradients| {
            if let Some(this) = this.upgrade() {
                this.post_backward(torch, at);
            }
            gradients
        };
        let node = Node::new(torch, edges.len(), next, Box::new(done));
        for (slot, edge) in edges.iter_mut().enumerate() {
            **edge = Some(Edge { node: Rc::clone(&node), slot: slot as u8 });
        }
    }

    fn post_backward(&self, torch: &mut Torch, at: usize) {
        let unit = &self.units[at];
        unit.state.set(State::PostBackward);
        let trained = || unit.parameters.iter().filter_map(|p| Some((p, p.whole_leaf.as_ref()?)));
        for (parameter, leaf) in trained() {
            // It is added to what waits, in place.
            if parameter.waiting.borrow().is_some() {
                drop(leaf.grad.take());
            }
        }
        // Reductions in the type of gathered parameters need no cast.
        let reduce = self.types.map(|types| types.reduce);
        if !self.reduces.get() {
            if self.reshards.get() {
                self.reshard(unit);
            }
            for (parameter, leaf) in trained() {
                let Some(dtype) = reduce.filter(|dtype| *dtype != self.computed_type(parameter)) else { continue };
                let gradient = leaf.grad.take();
                if let Some(gradient) = gradient {
                    let wide = torch.in_category(Category::Gradients, |torch| torch.cast(&gradient, dtype));
                    *parameter.waiting.borrow_mut() = Some(wide);
                }
            }
            return;
        }
        let with_gradient: Vec<(&Parameter, Tensor)> =
            unit.parameters.iter().filter_map(|p| Some((p, p.take_gradient(torch)?))).collect();
        self.reshard(unit);
        let Some((first, _)) = with_gradient.first() else { return };
        let (original, reduce) = (first.dtype, reduce.unwrap_or_else(|| self.computed_type(first)));
        drop(self.last_reduction.take());
        drop(unit.all_reduced.take());
        let elements: u64 = with_gradient.iter().map(|(p, _)| p.shard.elements()).sum();
        let [_, mut last, over_copies] = self.streams.get();
        let on = if self.reads_apart { last } else { Stream::Default };
        let input = torch.flat("reduce-scatter input", elements * self.world, reduce, on);
        let receivers: Vec<&Rc<Leaf>> = with_gradient.iter().filter_map(|(p, _)| p.shard_leaf.as_ref()).collect();
        // The name of a loop over the gradients (`foreach_reduce`) stays bound to the last until the reduction returns.
        let last_of_loop = with_gradient.into_iter().next_back().filter(|_| self.world > 1);
        let mut output = torch.flat("reduce-scatter output", elements, reduce, last);
        if self.replicas > 1 {
            *unit.all_reduced.borrow_mut() = Some(output.clone());
            last = over_copies;
        }
        if reduce != original {
            output = torch.flat("_to_copy", elements, original, last);
        }
        torch.log.borrow_mut().reclassify(output.storage.id(), Category::Gradients);
        for receiver in receivers {
            let mut slot = receiver.grad.borrow_mut();
            if slot.is_none() {
                let view = output.clone().with_layout(receiver.shape, receiver.strides);
                *slot = Some(view);
            }
        }
        drop(last_of_loop);
        *self.last_reduction.borrow_mut() = Some(input).filter(|_| !self.reads_apart);
    }
}
