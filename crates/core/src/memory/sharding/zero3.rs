//! DeepSpeed ZeRO 3: parameters, gradients and states in partitions; parameters are gathered module by module.
//!
//! Follows deepspeed/runtime/zero/{stage3,parameter_offload}.py of DeepSpeed 0.19 in bf16.

mod hooks;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use super::coordinator::{Coordinator, Sharded};
use super::leaf_modules::{LeafModules, Part};
use super::members::Member;
use super::{host, shares};
use crate::dtype::DType;
use crate::memory::adapters::Loaded;
use crate::memory::autograd::{Edge, Leaf, Node};
use crate::memory::engine::Engine;
use crate::memory::log::{Category, Event, StorageId, Stream};
use crate::memory::lower::hooks::Hooks;
use crate::memory::optimizer::{Optimizer, Trained};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::ModuleId;
use crate::model::{Program, Shape};
use crate::plan::parallel::{DeepSpeed, Offload, ZeroConfig};
use crate::plan::{self, TrainPlan};

/// A trainable parameter's gradient.
struct Reduced {
    leaf: Rc<Leaf>,
    elements: u64,
}

/// An optimizer sub-group: the fp32 weights of some partitions.
struct SubGroup {
    master: Vec<Trained>,
    /// Elements of every partition in it.
    partitions: Vec<u64>,
    optimizer: RefCell<Option<Optimizer>>,
}

/// The engine (`DeepSpeedZeroOptimizer_Stage3`).
pub(super) struct Stage3 {
    coordinator: Coordinator,
    /// Parameters that a module owns.
    of_module: BTreeMap<ModuleId, Rc<[usize]>>,
    /// Weights of adapters, which are modules of their own, by the storage they are gathered in.
    adapters: BTreeMap<StorageId, Rc<[usize]>>,
    /// Whether a step follows this micro-batch.
    boundary: Cell<bool>,
    /// Whether the optimizer is on the host.
    offload: bool,
    /// Gradients too small for the disk, which stay on the card until the step; absent where nothing goes to a disk.
    unswapped: Option<RefCell<Vec<Tensor>>>,
    none: Rc<[usize]>,
    gradients: Vec<Reduced>,
    sub_groups: Vec<SubGroup>,
    config: ZeroConfig,
    world: u64,
    /// The type gradients are accumulated in.
    accumulated: DType,
    bucket: Option<Tensor>,
    in_bucket: RefCell<Vec<usize>>,
    bucket_elements: Cell<u64>,
    /// Shards, and the buffer that gradients are reduced into.
    _resident: Vec<Tensor>,
    this: Weak<Stage3>,
}

/// Shards a loaded model.
pub(super) fn wrap(
    torch: &mut Torch,
    program: &Program,
    loaded: &mut Loaded,
    members: Vec<Member>,
    (plan, options): (&TrainPlan, &DeepSpeed),
    world: u64,
) -> Rc<dyn Engine> {
    let config = &options.zero;
    let accumulated = if options.accumulates_wide(plan.weights) { DType::F32 } else { DType::BF16 };
    torch.linears_are_functions = true;
    loaded.trained.clear();
    let mut sharded = Vec::new();
    let mut partitions = Vec::new();
    let mut resident = Vec::new();
    let mut gradients = Vec::new();
    // Only what is trained has a gradient, fp32 weights and states.
    let mut sizes = Vec::new();
    let mut adapters = Vec::new();
    let leaf_modules = LeafModules::of(program, &members);
    let mut of_module = owners(program, &members);
    of_module.retain(|module, _| !leaf_modules.hides(*module));
    of_module.extend(leaf_modules.blocks());
    let mut shards_on_host: u64 = 0;
    let params_on_host = config.offload_param.as_ref().filter(|offload| offload.is_on());
    for (index, member) in members.into_iter().enumerate() {
        let (shape, elements) = (member.tensor.shape, member.tensor.elements());
        let share = shares::of_parameter(elements, world, 0).total();
        let part = torch.fresh("partition", Shape::from([share]), DType::BF16);
        let mut hollow = torch.hollow("gathered parameter", shape, elements, DType::BF16);
        let persistent = elements <= config.stage3_param_persistence_threshold;
        let trains = member.trains();
        if member.trains() {
            let leaf: Rc<Leaf>;
            (hollow, leaf) = torch.leaf(hollow);
            gradients.push(Reduced { leaf, elements });
            sizes.push(share);
        }
        if member.adapter {
            adapters.push((hollow.storage.id(), index));
        }
        member.replace(loaded, hollow.clone());
        sharded.push(Sharded::new(hollow, persistent, trains));
        match params_on_host {
            Some(_) => shards_on_host += share,
            // What is trained is joined; the rest stays as it is.
            None if member.trains() => partitions.push(part),
            None => resident.push(part),
        }
    }
    let flat = |torch: &mut Torch, category: Category, name: &'static str, dtype: DType, elements: u64| {
        torch.in_category(category, |torch| torch.fresh(name, Shape::from([elements]), dtype))
    };
    // The partitions leave by way of the host, and come back as one.
    let total = partitions.iter().map(Tensor::elements).sum();
    drop(partitions);
    torch.log.borrow_mut().events.push(Event::EmptyCache);
    match params_on_host {
        Some(offload) => host::parameters(torch, offload, shards_on_host),
        None => resident.push(flat(torch, Category::Weights, "partitions", DType::BF16, total)),
    }
    let optimizer_on_host = config.offload_optimizer.as_ref().filter(|offload| offload.is_on());
    let mut sub_groups = Vec::new();
    // What a partition is cast to is copied once more; it goes when the next one is cast.
    let mut converted = None;
    for partitions in group(&sizes, config.sub_group_size) {
        let mut master = Vec::new();
        if optimizer_on_host.is_none() {
            let elements = partitions.iter().sum();
            converted = Some(torch.flat("_to_copy", elements, DType::F32, Stream::Default));
            let wide = flat(torch, Category::Weights, "fp32 partition", DType::F32, elements);
            let (tensor, leaf) = torch.leaf(wide);
            master.push(Trained::new(tensor, leaf));
        }
        sub_groups.push(SubGroup { master, partitions, optimizer: RefCell::default() });
    }
    drop(converted);
    let largest = sub_groups.iter().map(|group| group.partitions.iter().sum()).max().unwrap_or(0);
    if optimizer_on_host.is_none() {
        drop(torch.flat("zeros", largest, DType::F32, Stream::Default));
    }
    let trains = !sizes.is_empty();
    let bucket = (config.contiguous_gradients && trains)
        .then(|| flat(torch, Category::Communication, "gradient bucket", DType::BF16, config.reduce_bucket_size));
    match optimizer_on_host {
        None => {
            resident.push(flat(torch, Category::Gradients, "gradient partitions", accumulated, sizes.iter().sum()));
        }
        Some(offload) => {
            let total = sizes.iter().sum();
            if offload.is_to_disk() {
                host::swaps_of_states(torch, offload, largest);
            } else {
                host::partition(torch, plan, offload, total);
            }
            torch.log.borrow_mut().on_host("gradient shards", total.saturating_mul(2), offload.pin_memory);
        }
    }
    let coordinator = Coordinator::new(sharded, leaf_modules, config, world);
    coordinator.partition(torch);
    let engine = Rc::new_cyclic(|this| Stage3 {
        coordinator,
        of_module,
        adapters: crate::order::map(adapters.into_iter().map(|(id, index)| (id, Rc::from([index])))),
        boundary: Cell::new(true),
        offload: optimizer_on_host.is_some(),
        unswapped: optimizer_on_host.is_some_and(Offload::is_to_disk).then(RefCell::default),
        none: Rc::from([]),
        gradients,
        sub_groups,
        config: config.clone(),
        world,
        accumulated,
        bucket,
        in_bucket: RefCell::default(),
        bucket_elements: Cell::new(0),
        _resident: resident,
        this: Weak::clone(this),
    });
    let alone = |(index, _): &(usize, &Reduced)| !engine.coordinator.leaf_modules.holds_back(*index);
    for (index, gradient) in engine.gradients.iter().enumerate().filter(alone) {
        let this = Rc::downgrade(&engine);
        *gradient.leaf.after.0.borrow_mut() = Some(Rc::new(move |torch: &mut Torch| {
            if let Some(this) = this.upgrade() {
                this.gradient(torch, index);
            }
        }));
    }
    engine
}

/// Partitions in optimizer sub-groups, each closed once it is large enough (`_create_fp16_sub_groups`).
fn group(sizes: &[u64], limit: u64) -> Vec<Vec<u64>> {
    let mut groups: Vec<Vec<u64>> = vec![Vec::new()];
    let whole = sizes.iter().sum::<u64>() <= limit;
    for (index, &size) in sizes.iter().enumerate() {
        if let Some(last) = groups.last_mut() {
            last.push(size);
            if !whole && last.iter().sum::<u64>() >= limit && index + 1 < sizes.len() {
                groups.push(Vec::new());
            }
        }
    }
    groups
}

/// The parameters every module owns itself, in order of creation.
fn owners(program: &Program, members: &[Member]) -> BTreeMap<ModuleId, Rc<[usize]>> {
    let place = crate::order::map(members.iter().enumerate().filter_map(|(at, member)| Some((member.id()?.0, at))));
    let mut owners = BTreeMap::new();
    for (index, module) in program.modules.iter().enumerate() {
        let direct =
            program.parameters.iter().enumerate().filter(|(_, parameter)| {
                parameter.name.rsplit_once('.').is_some_and(|(owner, _)| owner == module.path)
            });
        let mut own: Vec<usize> = direct.filter_map(|(at, _)| place.get(&(at as u32)).copied()).collect();
        own.extend(module.parameters.iter().filter_map(|id| place.get(&id.0).copied()));
        own.sort_unstable();
        own.dedup();
        if !own.is_empty() {
            owners.insert(ModuleId(index as u32), Rc::from(own));
        }
    }
    owners
}

/// Bytes from which a gradient is written to a disk (`MIN_AIO_BYTES`).
const SWAPPED: u64 = 1 << 20;

impl Stage3 {
    fn owned(&self, part: Part) -> &Rc<[usize]> {
        let own = match part {
            Part::Root | Part::Nameless => None,
            Part::Module(module) => self.of_module.get(&module),
            Part::Adapter(index) => self.adapters.values().find(|own| own[0] == index),
        };
        own.unwrap_or(&self.none)
    }

    fn adapter(&self, weight: &Tensor) -> Option<Part> {
        Some(Part::Adapter(self.adapters.get(&weight.storage.id())?[0]))
    }

    /// A module begins: its parameters are fetched, and released again when the gradients of its inputs are known.
    fn begin_module(&self, torch: &mut Torch, module: Part, edges: &mut [&mut Option<Edge>]) {
        self.coordinator.fetch(torch, module, self.owned(module));
        if self.owned(module).is_empty() || edges.is_empty() || torch.recomputing.is_some() || !torch.grad_enabled {
            return;
        }
        let next = edges.iter().map(|edge| (*edge).clone()).collect();
        let this = Weak::clone(&self.this);
        let work = move |torch: &mut Torch, gradients| {
            if let Some(this) = this.upgrade() {
                this.coordinator.leaf_modules.gradients(module).iter().for_each(|&index| this.gradient(torch, index));
                this.coordinator.release(torch, module, this.owned(module));
            }
            gradients
        };
        let node = Node::new(torch, edges.len(), next, Box::new(work));
        for (slot, edge) in edges.iter_mut().enumerate() {
            **edge = Some(Edge { node: Rc::clone(&node), slot: slot as u8 });
        }
    }

    /// A module ends: what it does not need soon is released; its backward pass begins with fetching again.
    fn end<'a>(&self, torch: &mut Torch, module: Part, outputs: impl Iterator<Item = &'a Tensor>) {
        if torch.stopped {
            return;
        }
        self.coordinator.release(torch, module, self.owned(module));
        if torch.recomputing.is_some() {
            return;
        }
        let edge = outputs.filter_map(|output| output.edge.as_ref()).find(|edge| !edge.node.is_leaf());
        if let Some(edge) = edge {
            let this = Weak::clone(&self.this);
            edge.node.run_before(Rc::new(move |torch: &mut Torch| {
                if let Some(this) = this.upgrade() {
                    this.coordinator.fetch(torch, module, this.owned(module));
                }
            }));
        }
    }

    /// A gradient is complete: it goes into the bucket, which is reduced when the next one does not fit.
    fn gradient(&self, torch: &mut Torch, index: usize) {
        let Reduced { leaf, elements } = &self.gradients[index];
        let filled = self.bucket_elements.get();
        if filled > 0 && filled + elements > self.config.reduce_bucket_size {
            self.reduce(torch);
        }
        let filled = self.bucket_elements.get();
        if let Some(bucket) = self.bucket.as_ref().filter(|_| filled + elements <= self.config.reduce_bucket_size) {
            let view = bucket.clone().with_layout(leaf.shape, leaf.strides);
            *leaf.grad.borrow_mut() = Some(view);
        }
        self.bucket_elements.set(filled + elements);
        self.in_bucket.borrow_mut().push(index);
    }

    /// `reduce_scatter_coalesced`: gradients are joined, padded so that every card gets an equal part of each.
    fn reduce(&self, torch: &mut Torch) {
        let members = self.in_bucket.take();
        self.bucket_elements.set(0);
        let stream = if self.config.overlap_comm.unwrap_or(true) { Stream::Reduce } else { Stream::Default };
        let even =
            members.len() == 1 && members.iter().all(|&at| self.gradients[at].elements.is_multiple_of(self.world));
        let padded = members.iter().map(|&at| self.gradients[at].elements.div_ceil(self.world) * self.world).sum();
        let joined = (!members.is_empty() && !even).then(|| torch.flat("cat", padded, DType::BF16, stream));
        let widened = members.iter().filter(|_| self.accumulated == DType::F32).map(|&at| {
            let share = self.gradients[at].elements.div_ceil(self.world);
            torch.flat("_to_copy", share, DType::F32, stream)
        });
        let widened: Vec<Tensor> = widened.collect();
        let joined = joined.filter(|_| widened.is_empty());
        // What goes to a disk leaves together.
        let mut leaving = Vec::new();
        for &at in members.iter().filter(|_| self.offload) {
            // Every partition goes to the host by way of a copy on the card, its norm and its fp32 form.
            let share = self.gradients[at].elements.div_ceil(self.world);
            let copy = torch.flat("_to_copy", share, DType::BF16, stream);
            if self.boundary.get() {
                drop(torch.flat("_to_copy", share, DType::F64, stream));
                let wide = torch.flat("_to_copy", share, DType::F32, stream);
                if self.unswapped.is_some() {
                    leaving.push(wide);
                }
            }
            drop(copy);
        }
        if let Some(unswapped) = &self.unswapped {
            leaving.retain(|tensor| tensor.elements() * 4 < SWAPPED);
            unswapped.borrow_mut().append(&mut leaving);
        }
        members.iter().for_each(|&at| drop(self.gradients[at].leaf.grad.take()));
        drop((joined, widened));
    }
}

impl Engine for Stage3 {
    fn gathers(&self) -> bool {
        true
    }

    /// `GatheredParameters` around all of them, without hooks (trl 1.16: models/utils.py, `ds3_gather_for_generation`).
    fn before_generation(&self, torch: &mut Torch) -> bool {
        self.coordinator.reset(torch);
        self.coordinator.gather_all();
        true
    }

    fn after_generation(&self, torch: &mut Torch) {
        self.coordinator.release_leftovers(torch);
        self.coordinator.forget();
    }

    fn begin(&self, last: bool) {
        self.boundary.set(last);
    }

    fn steps_alone(&self) -> bool {
        true
    }

    fn trained(&self) -> &[Trained] {
        &[]
    }

    fn prepare(&self, torch: &mut Torch, _optimizer: &mut Optimizer, plan: plan::Optimizer) {
        for group in &self.sub_groups {
            *group.optimizer.borrow_mut() = Some(Optimizer::new(torch, plan, &group.master));
        }
    }

    fn before_forward(&self, torch: &mut Torch, _syncs: bool) {
        self.coordinator.reset(torch);
        self.coordinator.fetch(torch, Part::Root, &self.none);
    }

    fn after_forward(&self, torch: &mut Torch, outputs: &[Tensor]) {
        self.end(torch, Part::Root, outputs.iter());
    }

    /// `_zero3_consolidated_16bit_state_dict`: module by module. One parameter alone is gathered flat and then copied into its shape
    /// (`_allgather_params`); several are views of what is gathered (`_allgather_params_coalesced`).
    fn save(&self, torch: &mut Torch, full: bool) -> u64 {
        for owned in self.of_module.values().chain(self.adapters.values()).filter(|_| full) {
            let gathered: Vec<&Sharded> =
                owned.iter().map(|at| &self.coordinator.parameters[*at]).filter(|one| !one.persistent).collect();
            let copies = if gathered.len() == 1 { 2 } else { 1 };
            let one =
                |torch: &mut Torch, one: &Sharded| torch.flat("all_gather", one.elements, DType::BF16, Stream::Default);
            let held: Vec<Tensor> =
                gathered.iter().flat_map(|sharded| vec![*sharded; copies]).map(|sharded| one(torch, sharded)).collect();
            drop(held);
        }
        let elements = self.coordinator.parameters.iter().filter(|_| full).map(|one| one.elements).sum::<u64>();
        elements.saturating_mul(DType::BF16.size())
    }

    fn after_backward(&self, torch: &mut Torch) {
        self.reduce(torch);
        self.coordinator.release_leftovers(torch);
        self.coordinator.reset(torch);
    }

    fn step(&self, torch: &mut Torch, _optimizer: &mut Optimizer) {
        self.coordinator.release_everything(torch);
        if self.offload {
            self.unswapped.iter().for_each(|unswapped| unswapped.borrow_mut().clear());
            return self.coordinator.stepped();
        }
        // Norms are taken in fp64, one partition at a time.
        for &elements in self.sub_groups.iter().flat_map(|group| &group.partitions) {
            drop(torch.scratch("_to_copy", elements * 8));
        }
        for group in &self.sub_groups {
            let total: u64 = group.partitions.iter().sum();
            let many = group.partitions.len() > 1;
            let joined = (many && self.accumulated != DType::F32).then(|| torch.scratch("cat", total * 2));
            let shape = Shape::from([total]);
            // A single partition that is fp32 already is used as it is.
            let elements = if many || self.accumulated != DType::F32 { total } else { 0 };
            let gradient = torch.in_category(Category::Gradients, |torch| {
                torch.fresh("_to_copy", Shape::from([elements]), DType::F32).with_shape(shape)
            });
            drop(joined);
            let Some(master) = group.master.first() else { continue };
            *master.leaf.grad.borrow_mut() = Some(gradient);
            if let Some(optimizer) = group.optimizer.borrow_mut().as_mut() {
                optimizer.step(torch, &group.master);
            }
            drop(master.leaf.grad.take());
        }
        self.coordinator.stepped();
    }

    fn hooks(self: Rc<Self>) -> Option<Rc<dyn Hooks>> {
        Some(self)
    }
}
